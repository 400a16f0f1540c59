"""`train` with SGLang as the rollout engine, end to end on a GPU: does the reward rise?

A toy glm5_next with sizes that SGLang's kernels accept is pre-trained here as `prepare` does for
tiny, converted, and trained for 20 rollouts by the command line under torchrun; a second run with
the embedded engine on the same device is the comparison. Keys: ``reward_first``, ``reward_last``
(mean of five rollouts), ``logprob_diff_mean``, ``logprob_diff_max``, ``sync_ms_median`` of the
SGLang run, ``embedded_reward_last`` of the other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.json_output import add_json, print_json, save_json
from glm_lora.report.run_data import METRICS, read_lines

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = str(ROOT / "launchers" / "run_glm5_3_flash_lora.py")
NAME = "toy-gpu"


def prepare(work: Path, hidden: int, learning_rate: float) -> dict[str, float]:
    """Pre-train and convert the toy; returns its accuracies and seconds."""
    from dataclasses import replace

    import torch

    from benchmarks.sglang_h200 import SPEC
    from glm_lora.checkpoint import tiny
    from glm_lora.checkpoint.base_build import build_base, plan_base
    from glm_lora.checkpoint.convert import open_source, wanted_names
    from glm_lora.checkpoint.hf_reader import HfReader
    from glm_lora.checkpoint.released import describe
    from glm_lora.checkpoint.tiny_folder import write_folder

    spec = replace(SPEC, hidden_size=hidden)
    start = time.monotonic()
    # Wide models want a lower rate than tiny: halve it until the clear marks are learned.
    for _ in range(3):
        model = tiny.build_model(spec)
        if torch.cuda.is_available():
            model.cuda()
        loss = tiny.pretrain(model, 0, learning_rate=learning_rate)
        accuracies = {f"pretrained_{mark}": tiny.accuracy(model, mark) for mark in "+-=?"}
        if min(accuracies[f"pretrained_{mark}"] for mark in "+-=") > 0.7:
            break
        print(f"pre-training at {learning_rate:g}: {accuracies}", flush=True)
        learning_rate /= 3
    seconds = time.monotonic() - start
    folder = work / "models" / NAME
    folder.mkdir(parents=True)
    write_folder(folder, model, 0, spec)
    source = open_source(HfReader.open(folder, wanted_names(spec)), spec)
    base = work / "ckpt" / f"{NAME}_torch_dist"
    build_base(plan_base(base, spec, source, describe(source)))
    tiny.write_prompts(work / "data" / "tiny")
    return {"pretrain_loss": loss, "pretrain_seconds": seconds, **accuracies}


def train(work: Path, run: str, options: list[str]) -> list[dict[str, Any]]:
    """One run of the command line under torchrun; its metric records."""
    # Standalone: a port of its own, so that two of them can run on one machine.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", LAUNCHER]
    command += ["train", "--model-name", NAME, "--run-dir", str(work / run)]
    for name, folder in (("model", "models"), ("ckpt", "ckpt"), ("data", "data")):
        command += [f"--{name}-dir", str(work / folder)]
    command += ["--prompt-data", str(work / "data" / "tiny" / "prompts.jsonl"), "--reward", "exact"]
    command += ["--rollout-max-response-len", "2", "--lora-rank", "8", "--lora-alpha", "16"]
    command += ["--save-interval", "0", *options]
    subprocess.run(command, check=True)
    return read_lines(work / run / METRICS)


def interpreter(work: Path, site: Path | None) -> str:
    """The server's interpreter: a script that sets up the packages in ``site``, or this one."""
    if site is None:
        return sys.executable
    from benchmarks.gpu_site import site_env

    script = work / "sglang-python"
    exports = "".join(f"export {k}='{v}'\n" for k, v in site_env(site, ROOT).items())
    exports += "export SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD=0\n"
    script.write_text(f'#!/bin/bash\n{exports}exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


def server_options(work: Path, site: Path | None, tp: int, mem_fraction: float) -> list[str]:
    """Options of the SGLang run, with the flags of ``sglang_h200.py``."""
    from benchmarks.sglang_h200 import FLAGS

    options = ["--rollout-engine", "sglang", "--sglang-python", interpreter(work, site)]
    options += ["--rollout-num-gpus-per-engine", str(tp)]
    options += ["--sglang-mem-fraction", str(mem_fraction)]
    for flag in FLAGS:
        options.append(f"--sglang-{flag[2:]}" if flag.startswith("--") else flag)
    return options


def summary(
    prefix: str, records: list[dict[str, Any]], seconds: float, rate: float
) -> dict[str, float]:
    """The figures of one run."""
    rewards = [r["rollout/raw_reward"] for r in records]
    gaps = [r["train/train_rollout_logprob_abs_diff"] for r in records]
    return {
        f"{prefix}lr": rate,
        f"{prefix}reward_first": statistics.mean(rewards[:5]),
        f"{prefix}reward_last": statistics.mean(rewards[-5:]),
        f"{prefix}logprob_diff_mean": statistics.mean(gaps),
        f"{prefix}logprob_diff_max": max(gaps),
        f"{prefix}sync_ms_median": 1e3 * statistics.median(r["time/sync"] for r in records),
        f"{prefix}seconds": seconds,
    }


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a new folder")
    parser.add_argument("--site", type=Path, help="folder with SGLang's packages")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of the server")
    parser.add_argument("--mem-fraction", type=float, default=0.4, help="of a GPU, others included")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--pretrain-lr", type=float, default=3e-4)
    parser.add_argument("--lr", default="4e-4,2e-4", help="rates; the first that learns is used")
    parser.add_argument("--rollouts", default="20")
    parser.add_argument("--engines", default="embedded,sglang")
    parser.add_argument("--dtype", default="bfloat16")
    add_json(parser)
    args = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    args.work.mkdir(parents=True)
    result: dict[str, Any] = prepare(args.work, args.hidden, args.pretrain_lr)
    print(result, flush=True)
    common = ["--num-rollout", args.rollouts, "--dtype", args.dtype]
    rates = args.lr.split(",")
    for engine in args.engines.split(","):
        extra = ["--rollout-engine", "embedded"]
        if engine == "sglang":
            extra = server_options(args.work, args.site, args.tp, args.mem_fraction)
        prefix = "" if engine == "sglang" else "embedded_"
        for rate in list(rates):
            start = time.monotonic()
            try:
                records = train(args.work, f"{engine}-{rate}", [*common, "--lr", rate, *extra])
            except (subprocess.CalledProcessError, OSError) as error:
                result[f"{engine}_error"] = f"lr {rate}: {error}"
                continue
            result |= summary(prefix, records, time.monotonic() - start, float(rate))
            print(result, flush=True)
            save_json(args.json, result)
            if result[f"{prefix}reward_last"] > result[f"{prefix}reward_first"] + 0.15:
                rates = [rate]
                break
    for key, value in result.items():
        print(f"{key:<24} {value}")
    print_json(args.json, result)


if __name__ == "__main__":
    main()
