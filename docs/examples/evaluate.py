"""Base against adapter on a prompt file, with the same prompts and seeds."""

import sys
from pathlib import Path

import glm_lora

root = Path(sys.argv[1] if len(sys.argv) > 1 else "example")

scores = glm_lora.evaluate(
    root / "run", [root / "data" / "tiny" / "prompts.jsonl"], n_samples_per_prompt=4
)
for name, values in scores.items():
    print(name, f"{values['eval/raw_reward']:.3f}")
