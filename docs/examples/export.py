"""The adapter of docs/examples/train.py, for PEFT and for SGLang."""

import sys
from pathlib import Path

import glm_lora

root = Path(sys.argv[1] if len(sys.argv) > 1 else "example")

for format in ("peft", "sglang"):
    state = glm_lora.export(root / "run", root / f"adapter-{format}", format)
    print(format, "version", state.version, "digest", state.digest[:16])
