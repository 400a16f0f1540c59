"""A few rollouts on the tiny model (docs/examples/prepare.py makes it)."""

import sys
from pathlib import Path

import glm_lora

root = Path(sys.argv[1] if len(sys.argv) > 1 else "example")

run = glm_lora.train(
    "tiny",
    run_dir=root / "run",
    model_dir=root / "models",
    ckpt_dir=root / "ckpt",
    data_dir=root / "data",
    num_rollout=6,
    lora_rank=4,
    force=True,
)
print((run / "metrics.jsonl").read_text().splitlines()[-1])
