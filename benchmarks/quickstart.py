"""The embedded quickstart: a tour for a new user, and the figures of the whole job on two cores.

``--tour`` runs prepare, train and export as a user would, reloads the export with stock PEFT and
prints what happened. Without it the script measures, each in processes of their own:

* ``prepare_seconds``, ``train_seconds`` (60 rollouts, Ray's start included, median of the seeds),
  ``help_seconds`` and ``targets_seconds``: wall time of the commands.
* ``reward_first`` and ``reward_last``: mean reward of the first and last five rollouts, by seed.
* ``logprob_diff_max``: the largest train_rollout_logprob_abs_diff of any rollout of any seed.
* ``base_accuracy`` and ``adapter_off_accuracy``: chance of the label under the base, and under the
  exported adapter switched off; ``base_bit_equal``: the base's checksums after training.
* ``cpu_ms_per_step``: median CPU time of one rollout of 128 samples (sample, score, train, sync,
  probe; one process, one thread), and with ``--peer trl`` that of TRL + PEFT and the ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.json_output import add_json, print_json
from glm_lora.report.run_data import METRICS, read_lines

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = str(ROOT / "launchers" / "run_glm5_3_flash_lora.py")


def command(*arguments: str, quiet: bool = True) -> float:
    """Run one command of the launcher; returns its wall seconds."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, LAUNCHER, *arguments],
        check=True,
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.DEVNULL if quiet else None,
    )
    return time.perf_counter() - start


def folders(home: Path) -> list[str]:
    """Options that keep everything below ``home``."""
    names = (("model", "models"), ("ckpt", "ckpt"), ("data", "data"))
    return [part for a, b in names for part in (f"--{a}-dir", str(home / b))]


def label_chance(hf_checkpoint: Path, adapter: Path) -> dict[str, float]:
    """Chance of the label on the open mark with the stock PEFT model, adapter on and off."""
    import torch
    from peft import PeftModel
    from transformers import AutoTokenizer, Glm5NextForConditionalGeneration

    model = Glm5NextForConditionalGeneration.from_pretrained(hf_checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(hf_checkpoint)
    prompts = torch.tensor([tokenizer.encode(f"{d}?>") for d in range(10)])
    labels = torch.tensor([tokenizer.encode(str(d))[0] for d in range(10)])

    def chance(policy: Any) -> float:
        with torch.no_grad():
            probabilities = policy(prompts).logits[:, -1].softmax(-1)
        return float(probabilities[torch.arange(10), labels].mean())

    base = chance(model.eval())
    policy = PeftModel.from_pretrained(model, adapter).eval()
    on = chance(policy)
    with policy.disable_adapter():
        off = chance(policy)
    return {"base": base, "on": on, "off": off}


def cpu_ms_per_step(home: Path, rollouts: int = 30, skip: int = 5) -> float:
    """Median CPU milliseconds between the ends of two rollouts, in this process."""
    from glm_lora import settings
    from glm_lora.cluster.driver import train
    from glm_lora.cluster.plan import plan
    from glm_lora.report.console import SilentListener

    marks: list[float] = []

    class Clock(SilentListener):
        def rollout(self, step: int, metrics: Mapping[str, float]) -> None:
            marks.append(time.process_time())

    values = {
        "model_name": "tiny",
        "launcher": "inline",
        "run_dir": str(home / "cpu"),
        "save_interval": 0,
        "rollout": {"num_rollout": rollouts},
    }
    config = settings.resolve_train(
        values, models=home / "models", ckpts=home / "ckpt", data=home / "data"
    )
    train(plan(config), Clock(), force=True)
    return 1e3 * statistics.median(
        b - a for a, b in zip(marks[skip:], marks[skip + 1 :], strict=False)
    )


def measure(home: Path, seeds: list[int], peer: str) -> dict[str, Any]:
    """All figures as one mapping."""
    result: dict[str, Any] = {"cores": os.cpu_count()}
    result["help_seconds"] = statistics.median(command("--help") for _ in range(3))
    result["targets_seconds"] = statistics.median(
        command("targets", "--model-name", "GLM-5.3-Flash") for _ in range(3)
    )
    result["prepare_seconds"] = command("prepare", "--model-name", "tiny", *folders(home))
    seconds, first, last, differences = [], [], [], []
    for seed in seeds:
        run = home / f"seed{seed}"
        arguments = ["--model-name", "tiny", "--seed", str(seed), "--run-dir", str(run)]
        seconds.append(command("train", *arguments, *folders(home)))
        records = read_lines(run / METRICS)
        raw = [r["rollout/raw_reward"] for r in records]
        first.append(statistics.mean(raw[:5]))
        last.append(statistics.mean(raw[-5:]))
        differences += [r["train/train_rollout_logprob_abs_diff"] for r in records]
    result |= {
        "train_seconds": statistics.median(seconds),
        "train_seconds_all": seconds,
        "reward_first": first,
        "reward_last": last,
        "logprob_diff_max": max(differences),
    }
    chances = label_chance(home / "models" / "tiny", home / f"seed{seeds[0]}" / "adapter")
    result |= {
        "base_accuracy": chances["base"],
        "adapter_on_accuracy": chances["on"],
        "adapter_off_accuracy": chances["off"],
    }
    command("prepare", "--model-name", "tiny", "--verify", *folders(home))
    result["base_bit_equal"] = True  # --verify exits 2 when a checksum differs
    result["cpu_ms_per_step"] = cpu_ms_per_step(home)
    if peer == "trl":
        from benchmarks.peer_trl import cpu_seconds_per_step

        result["peer_cpu_ms_per_step"] = 1e3 * cpu_seconds_per_step(home / "models" / "tiny")
        result["peer_ratio"] = result["peer_cpu_ms_per_step"] / result["cpu_ms_per_step"]
    return result


def tour(home: Path, run: Path) -> None:
    """The three commands, one after the other, and a look at the result."""
    adapter = run.with_name(run.name + "-peft")
    for arguments in (
        ["prepare", "--model-name", "tiny", *folders(home)],
        ["train", "--model-name", "tiny", "--run-dir", str(run), *folders(home)],
        ["export", "--run", str(run), "--format", "peft", "--output", str(adapter)],
    ):
        print(f"\n$ glm-lora {' '.join(arguments)}", flush=True)
        command(*arguments, quiet=False)
    records = read_lines(run / METRICS)
    chances = label_chance(home / "models" / "tiny", adapter)
    raw = [r["rollout/raw_reward"] for r in records]
    print(
        f"\nreward of the first five rollouts {statistics.mean(raw[:5]):.2f}"
        f", of the last five {statistics.mean(raw[-5:]):.2f}\n"
        f"stock PEFT with the exported adapter: {chances['on']:.2f} of the probability on the "
        f"label; switched off: {chances['off']:.2f}, the base alone: {chances['base']:.2f}"
    )


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tour", action="store_true", help="the three commands, shown")
    add_json(parser)
    parser.add_argument("--seeds", default="0,1,2,3", help="seeds to train, comma-separated")
    parser.add_argument("--peer", choices=("none", "trl"), default="none")
    parser.add_argument("--home", type=Path, help="folder to keep everything in")
    options = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    if options.tour:
        home = options.home or Path("~/.cache/glm-lora").expanduser()
        tour(home, Path("runs") / f"quickstart-{time.strftime('%Y%m%d-%H%M%S')}")
        return
    with tempfile.TemporaryDirectory() as temporary:
        home = options.home or Path(temporary)
        result = measure(home, [int(s) for s in options.seeds.split(",")], options.peer)
    for key, value in result.items():
        print(f"{key:<24} {value}")
    print_json(options.json, result)


if __name__ == "__main__":
    main()
