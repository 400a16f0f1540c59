"""Make the tiny model, its torch_dist base and its prompts; the second time all is there."""

import sys
from pathlib import Path

import glm_lora

root = Path(sys.argv[1] if len(sys.argv) > 1 else "example")

result = glm_lora.prepare(
    "tiny", model_dir=root / "models", ckpt_dir=root / "ckpt", data_dir=root / "data"
)
print("made", result.made or "nothing, all was there")
print("base", result.ref_load, result.fingerprint[:16])
