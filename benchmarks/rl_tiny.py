"""Ablations of the learning half on the tiny model: what must learn learns, what must not does not.

Each variant is one whole training run in this process. Figures per variant:

* ``reward_first``, ``reward_last``: mean reward of the first and last five rollouts.
* ``open_base``, ``open_adapter``: pass@1 on the trained prompts (``?``), base and adapter.
* ``clear_base``, ``clear_adapter``: pass@1 on the other marks, which no reward speaks of.
* ``clear_kept``: the share of the other marks' accuracy that the adapter keeps.

Variants: ``grpo``, ``grpo_no_std``, ``rloo``, ``dr_grpo`` (constant aggregation), ``flipped`` (the
reward's sign turned, which turns every advantage: it must unlearn), ``slow`` (GRPO at a third of
the rate), ``kl`` (the same with a KL term to the base) and ``two_updates`` (optimizer steps per
rollout).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.json_output import add_json, print_json

FLIPPED = """
def reward(prompt, response, label, metadata):
    return -float(response.strip() == label)
"""
SAMPLES = 16
"""Samples per prompt of an evaluation."""


def variants(folder: Path) -> dict[str, dict[str, Any]]:
    """Configuration changes by variant."""
    flipped = folder / "flipped.py"
    flipped.write_text(FLIPPED)
    return {
        "grpo": {},
        "grpo_no_std": {"algorithm": {"advantage": "grpo_no_std"}},
        "rloo": {"algorithm": {"advantage": "rloo"}},
        "dr_grpo": {"algorithm": {"advantage": "dr_grpo", "loss_aggregation": "constant"}},
        "flipped": {"rollout": {"reward": str(flipped)}},
        "slow": {"optimizer": {"lr": 1e-3}},
        "kl": {"optimizer": {"lr": 1e-3}, "algorithm": {"kl_coef": 0.2}},
        "two_updates": {"algorithm": {"updates_per_rollout": 2}},
    }


def prepare(home: Path) -> None:
    """Build the tiny model below ``home`` unless it is there."""
    from glm_lora.cli import main

    folders = [("--model-dir", "models"), ("--ckpt-dir", "ckpt"), ("--data-dir", "data")]
    options = [part for flag, name in folders for part in (flag, str(home / name))]
    code = main(["prepare", "--model-name", "tiny", *options])
    if code:
        raise SystemExit(code)


def run(home: Path, name: str, changes: dict[str, Any], seed: int) -> dict[str, float]:
    """Train one variant and evaluate base and adapter."""
    from glm_lora import settings
    from glm_lora.cluster.driver import train
    from glm_lora.cluster.plan import plan
    from glm_lora.report.console import SilentListener
    from glm_lora.report.run_data import METRICS, read_lines

    folder = home / "runs" / f"{name}-{seed}"
    values = {
        "model_name": "tiny",
        "launcher": "inline",
        "run_dir": str(folder),
        "save_interval": 0,
        "seed": seed,
        **changes,
    }
    config = settings.resolve_train(
        values, models=home / "models", ckpts=home / "ckpt", data=home / "data"
    )
    ready = plan(config)
    train(ready, SilentListener(), force=True)
    raw = [r["rollout/raw_reward"] for r in read_lines(folder / METRICS)]
    result = {
        "reward_first": statistics.mean(raw[:5]),
        "reward_last": statistics.mean(raw[-5:]),
    }
    return result | accuracies(config, ready, folder / "adapter")


def accuracies(config: Any, ready: Any, adapter: Path) -> dict[str, float]:
    """pass@1 of base and exported adapter on the open and on the clear prompts."""
    import torch

    from glm_lora.export.load import load_adapter
    from glm_lora.protocols import SamplingParams
    from glm_lora.rl.chat import ChatFormat
    from glm_lora.rl.data import load_prompts
    from glm_lora.rl.evaluate import compare
    from glm_lora.rl.rewards import make_reward
    from glm_lora.rollout.embedded import EmbeddedEngine

    chat = ChatFormat.load(config.hf_checkpoint, ready.spec.eos_token_ids)
    state = load_adapter(adapter, ready.spec)
    engine = EmbeddedEngine(config.hf_checkpoint, state.selection, dtype=torch.float32)
    engine.push(state)
    prompts = Path(config.rollout.prompt_data[0])
    result: dict[str, float] = {}
    for name, path in (("open", prompts), ("clear", prompts.with_name("eval.jsonl"))):
        both = compare(
            engine,
            state.ref(),
            load_prompts([str(path)], chat.encode).files[0].prompts,
            make_reward("exact"),
            chat.decode,
            sampling=SamplingParams(2, 1.0, chat.stop_token_ids),
            samples_per_prompt=SAMPLES,
        )
        for side, figures in both.items():
            result[f"{name}_{side}"] = figures["eval/pass@1"]
    result["clear_kept"] = result["clear_adapter"] / result["clear_base"]
    return result


def environment() -> dict[str, Any]:
    """When and on what the figures were measured."""
    import torch
    import transformers

    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_json(parser)
    parser.add_argument("--seeds", default="0", help="seeds, comma-separated")
    parser.add_argument("--variants", default="", help="variants, comma-separated; default all")
    parser.add_argument("--home", type=Path, help="folder to keep everything in")
    options = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    result: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        home = options.home or Path(temporary)
        prepare(home)
        known = variants(home)
        for name in options.variants.split(",") if options.variants else known:
            for seed in map(int, options.seeds.split(",")):
                figures = run(home, name, known[name], seed)
                result[f"{name}/{seed}"] = figures
                line = "  ".join(f"{key} {value:.3f}" for key, value in figures.items())
                print(f"{name:<12} seed {seed}  {line}", flush=True)
    print_json(options.json, {**environment(), "variants": result})


if __name__ == "__main__":
    main()
