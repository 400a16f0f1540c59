"""Run folders with known numbers, written by the parts that write real ones."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.spec import TINY
from glm_lora.config import TrainConfig
from glm_lora.report.history import RunHistory, Scored
from glm_lora.report.run_folder import RunFolder
from glm_lora.report.sinks import JsonlSink
from glm_lora.rl.metrics import HEALTH_BANDS
from glm_lora.targets.selection import make_selection

NASTY = "</script><script>document.title = 'owned'</script><b>&amp;"


def metrics(step: int, shift: float = 0.0) -> dict[str, float]:
    """What one rollout records: every chart has data, and rollout 3 has a NaN and a high norm."""
    return {
        "rollout/raw_reward": math.nan if step == 3 else 0.3 + shift + 0.05 * step,
        "rollout/reward_std": 0.2,
        "rollout/response_length": 100.5 + step,
        "rollout/response_length_max": 200.0 + step,
        "rollout/truncated_ratio": 0.125,
        "rollout/groups": 16.0,
        "rollout/zero_std_groups": float(step),
        "rollout/tokens_per_second": 1234.5678 + step,
        "train/train_rollout_logprob_abs_diff": 1.5e-7 * (step + 1),
        "train/train_rollout_logprob_abs_diff_max": 1e-5,
        "train/ppo_kl": 2.6e-4,
        "train/grad_norm": 55.0 if step == 3 else 0.31,
        "train/entropy": 1.0 / (step + 1),
        "train/tokens": 2048.0,
        "time/rollout": 0.5,
        "time/train": 1.25 + step,
        "time/sync": 0.25,
        "memory/driver_peak_bytes": 2.0**30,
        "memory/trainer_peak_bytes": 1.5 * 2.0**30,
        "sync/bytes": 164224.0,
        "sync/seconds": 0.02,
        "sync/push_seconds": 0.01,
    } | ({"eval/raw_reward": 0.4, "eval/truncated_ratio": 0.0} if step % 2 else {})


def write_run(path: Path, rollouts: int = 6, shift: float = 0.0, lr: float = 3e-3) -> Path:
    """A finished run of ``rollouts`` rollouts."""
    config = TrainConfig.model_validate(
        {
            "model_name": "tiny",
            "hf_checkpoint": "nowhere",
            "ref_load": "nowhere",
            "run_dir": str(path),
            "optimizer": {"lr": lr},
        }
    )
    selection = make_selection("tiny", TINY, trainable_sites(TINY), rank=8, alpha=16.0)
    RunFolder.create(config, selection, {"fingerprint": "f" * 64}, {}, force=False).close()
    history = RunHistory(path)
    history.started(
        0, bands=[asdict(band) for band in HEALTH_BANDS], engine="embedded 1", device="cpu"
    )
    sink = JsonlSink(path / "metrics.jsonl")
    for step in range(rollouts):
        sink.log(step, metrics(step, shift))
        history.samples(step, [group(step), group(step, spread=0.0)])
    history.ended(None)
    return path


def group(step: int, spread: float = 1.0) -> list[Scored]:
    """Three responses to one prompt."""
    return [
        Scored("2 + 2?", "4", f"answer {step} {NASTY}", reward * spread, 7, "stop")
        for reward in (0.5, 1.0, 0.0)
    ]
