"""Where an export takes its adapter from: a run, a training checkpoint, or an adapter folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from glm_lora.arch.spec import ModelSpec
from glm_lora.checkpoint.train_state import LocalTensor, latest_checkpoint, load_train_state
from glm_lora.config import TrainConfig, from_toml
from glm_lora.errors import CheckpointError, ConfigError
from glm_lora.export.card import CardFacts
from glm_lora.export.load import load_adapter
from glm_lora.fingerprint import fingerprint_tensors
from glm_lora.lora.serving import CONFIG_FILE
from glm_lora.protocols import LOGPROB_DIFF, AdapterState
from glm_lora.report.run_folder import (
    BASE_FILE,
    CONFIG,
    METRICS,
    SELECTION,
    last_metrics,
    read_object,
)
from glm_lora.settings import spec_of
from glm_lora.targets.selection import Selection


@dataclass(frozen=True)
class Source:
    """An adapter and what is known about where it comes from."""

    state: AdapterState
    spec: ModelSpec
    facts: CardFacts
    hf_checkpoint: Path | None


def from_run(run: Path) -> Source:
    """The newest checkpoint of a run.

    Raises:
        ConfigError: ``run`` is no run folder.
        CheckpointError: It has no finished checkpoint.
    """
    if not (run / CONFIG).exists():
        raise ConfigError(f"--run {run} is not a run folder", f"a folder with {CONFIG}")
    while folder := latest_checkpoint(run):
        try:
            return _from_checkpoint(run, folder)
        except CheckpointError:
            # A run that goes on has newer ones, and has removed this one meanwhile.
            if folder.exists():
                raise
    raise CheckpointError(f"{run} holds no finished checkpoint", "a run that saved at least once")


def from_checkpoint(folder: Path, hf_checkpoint: Path | None, model_name: str) -> Source:
    """A training checkpoint inside a run folder, or an adapter folder (PEFT or SGLang names).

    Raises:
        CheckpointError: It is neither, or cannot be read exactly.
    """
    run = folder.parent.parent
    if (run / CONFIG).exists() and not (folder / CONFIG_FILE).exists():
        return _from_checkpoint(run, folder)
    spec = spec_of(model_name, hf_checkpoint or Path())
    state = load_adapter(folder, spec, model=model_name)
    base = str(hf_checkpoint or model_name)
    return Source(state, spec, CardFacts(base), hf_checkpoint)


def _from_checkpoint(run: Path, folder: Path) -> Source:
    import torch

    from glm_lora.model.parallel import init_single_process

    config = from_toml(TrainConfig, run / CONFIG)
    spec = spec_of(config.model_name, config.hf_checkpoint)
    selection = Selection.from_json(_text(run / SELECTION), spec)
    init_single_process()
    local = {k: LocalTensor(torch.empty(s)) for k, s in selection.tensor_shapes().items()}
    extra = load_train_state(folder, local)
    if extra["selection"] != selection.hash:
        raise CheckpointError(f"{folder} was written for another selection than {run / SELECTION}")
    tensors = {key: value.tensor for key, value in local.items()}
    digest = fingerprint_tensors(tensors)
    state = AdapterState(selection, tensors, int(extra["version"]), digest)
    base = read_object(run / BASE_FILE)
    if "fingerprint" not in base:
        raise ConfigError(f"{run / BASE_FILE} has no fingerprint", "the file as the run wrote it")
    facts = CardFacts(
        base_model=str(config.hf_checkpoint),
        base_fingerprint=base["fingerprint"],
        metrics=_last_metrics(run),
    )
    return Source(state, spec, facts, config.hf_checkpoint)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}",
            "the file as the run wrote it",
        ) from error


def _last_metrics(run: Path) -> dict[str, float]:
    record = last_metrics(run / METRICS)
    wanted = (
        "rollout/raw_reward", LOGPROB_DIFF, "train/ppo_kl",
        "train/grad_norm",
    )  # fmt: skip
    return {k: record[k] for k in wanted if isinstance(record.get(k), float)}
