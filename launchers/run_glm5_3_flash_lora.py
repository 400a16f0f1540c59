"""The recipe's entry point: ``python launchers/run_glm5_3_flash_lora.py COMMAND ...``.

The same application as ``glm-lora``, with the recipe's one environment variable:
``MILES_SCRIPT_EXTERNAL_RAY=1`` means that a Ray cluster is already up and ``train`` joins it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# The launcher works from a checkout that was not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from glm_lora.__main__ import main


def arguments(argv: list[str], environment: dict[str, str]) -> list[str]:
    """The command line with ``--ray-address auto`` added where the environment asks to join.

    Not where the command names its address, or a launcher that needs no cluster.
    """
    join = environment.get("MILES_SCRIPT_EXTERNAL_RAY", "0") not in ("", "0")
    words = " ".join(argv).replace("=", " ").split(" ")
    given = "--ray-address" in words
    apart = "--launcher" in words and words[words.index("--launcher") + 1 :][:1] != ["ray"]
    if join and argv[:1] == ["train"] and not (given or apart):
        return [*argv, "--ray-address", "auto"]
    return argv


if __name__ == "__main__":
    sys.exit(main(arguments(sys.argv[1:], dict(os.environ))))
