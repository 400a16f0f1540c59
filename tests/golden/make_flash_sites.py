"""Write the golden list of the full model's LoRA sites, from transformers on the meta device.

    python tests/golden/make_flash_sites.py [OUTPUT]

The model is transformers' own class at its own default size, so neither names nor shapes come from
this project's table. Which modules count is decided here on what they are: ``nn.Linear`` in a text
layer, outside the indexer, and not ``kv_b_proj``. Routed experts are no modules there, so they
drop out by themselves. One line per module: name, out features, in features.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

FILE = Path(__file__).with_name("glm5_3_flash_sites.tsv")


def model_on_meta(**text) -> torch.nn.Module:
    """GLM-5.3-Flash as transformers builds it, without storage; ``text`` changes its dimensions."""
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    config = Glm5NextConfig(text_config={"index_kpool": 4, **text})
    with torch.device("meta"):
        return Glm5NextForConditionalGeneration(config)


def site_lines(model: torch.nn.Module) -> list[str]:
    """The golden lines of ``model``."""
    lines = []
    for name, module in model.named_modules():
        if (
            isinstance(module, torch.nn.Linear)
            and ".language_model.layers." in name
            and ".indexer." not in name
            and not name.endswith(".kv_b_proj")
        ):
            lines.append(f"{name}\t{module.out_features}\t{module.in_features}")
    return lines


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    output.write_text("\n".join(site_lines(model_on_meta())) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
