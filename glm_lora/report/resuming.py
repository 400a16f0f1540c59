"""Continuing a run: the options it had, and what may differ from them.

An option that is not given again is as the run had it. What decides the numbers cannot be changed;
files that decide them (prompts, a reward) are compared by content, so they may have moved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from glm_lora.checkpoint.train_state import iteration_of, latest_checkpoint
from glm_lora.config import TrainConfig, from_toml
from glm_lora.errors import ConfigError
from glm_lora.report.run_folder import (
    BASE_FILE,
    CONFIG,
    INPUTS,
    SELECTION,
    RunFolder,
    read_object,
)
from glm_lora.targets.selection import Selection

_MAY_CHANGE = frozenset(
    {
        "run_dir", "hf_checkpoint", "ref_load", "launcher", "ray_address", "num_nodes",
        "num_gpus_per_node", "save_interval", "keep_last", "keep_every", "tensorboard", "wandb",
        "device", "offload_train_target", "max_restarts", "step_timeout", "parallel", "selection",
        "sglang",
    }
)  # fmt: skip
_MAY_CHANGE_IN_ROLLOUT = frozenset(
    {
        "num_rollout", "rollout_engine", "rollout_timeout", "eval_interval", "eval_prompt_data",
        "logprob_diff_limit",
    }
)  # fmt: skip
_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "pipeline_layers",
)  # fmt: skip
_ENGINE_SIZES = (
    "rollout_num_gpus", "rollout_num_gpus_per_engine", "rollout_num_engines", "sglang_colocated",
)  # fmt: skip


def stored_options(
    run: Path,
    given: Mapping[str, Any],
    *,
    launcher: str = "",
    world_size: int | None = None,
    models: Path | None = None,
    ckpts: Path | None = None,
) -> dict[str, Any]:
    """The options of the run in ``run``, for those that are not given; empty where there is none.

    The shape (machines, GPUs, parallel sizes, engines) is one thing: on another number of ranks it
    is that of the command. Folders that are gone, and a cluster's address, are left out.

    Args:
        run: The run folder.
        given: Nested options of the command.
        launcher: The launcher that was given; empty for none.
        world_size: Number of ranks when torchrun has started them already.
        models: Folder of checkpoints that was given; then the run's checkpoint is not taken.
        ckpts: Folder of bases that was given; then the run's base is not taken.

    Raises:
        ConfigError: The run's configuration is damaged.
    """
    if not (run / CONFIG).exists():
        return {}
    config = from_toml(TrainConfig, run / CONFIG)
    stored = config.model_dump(mode="json", exclude_none=True)
    for name in ("run_dir", "ray_address"):
        stored.pop(name, None)
    for name, folder in (("hf_checkpoint", models), ("ref_load", ckpts)):
        if folder is not None or not Path(stored[name]).exists():
            del stored[name]
    if stored["launcher"] == "torchrun":
        del stored["launcher"]  # it starts this process, or does not
    ranks = world_size
    if ranks is None:
        nodes = given.get("num_nodes", config.num_nodes)
        ranks = nodes * given.get("num_gpus_per_node", config.num_gpus_per_node)
    alone = launcher == "inline" and ranks != 1
    if ranks != config.world_size or alone:
        for section, names in (("parallel", _SIZES), ("sglang", _ENGINE_SIZES)):
            for name in names:
                stored[section].pop(name, None)
    if alone or world_size is not None:
        del stored["num_nodes"], stored["num_gpus_per_node"]
    if given.get("rollout", {}).get("rollout_engine", config.rollout.rollout_engine) != (
        config.rollout.rollout_engine
    ):
        del stored["sglang"]
    return stored


def resume_run(
    config: TrainConfig,
    selection: Selection,
    base: Mapping[str, Any],
    inputs: Mapping[str, str],
) -> RunFolder:
    """Open the folder of a run that is to continue; its files stay as they are.

    Raises:
        ConfigError: No run there, or it was made with another base, selection or configuration
            (the differences are listed), it saved nothing, or the folder cannot be written.
    """
    check_resume(config, selection, base, inputs)
    return RunFolder.open(config.run_dir)


def check_resume(
    config: TrainConfig,
    selection: Selection,
    base: Mapping[str, Any],
    inputs: Mapping[str, str],
) -> None:
    """Check that the run in ``config.run_dir`` can continue with these settings; changes nothing.

    Raises:
        ConfigError: As ``resume_run``.
    """
    path = config.run_dir
    if not (path / CONFIG).exists():
        raise ConfigError(f"--resume: {path} holds no run", "the --run-dir of an earlier run")
    then = from_toml(TrainConfig, path / CONFIG)
    differences = [
        f"{name}: {old!r} then, {new!r} now"
        for name, old, new in _changed(then, config)
        if not _may_change(name, then)
    ]
    if read_object(path / SELECTION).get("hash") != selection.hash:
        differences.append("selection: other sites, ranks, alpha or dropout")
    stored_base = read_object(path / BASE_FILE)
    if stored_base.get("fingerprint") != base.get("fingerprint"):
        differences.append(
            f"base: {stored_base.get('fingerprint')} then, {base.get('fingerprint')} now"
        )
    stored = read_object(path / INPUTS) if (path / INPUTS).exists() else dict(inputs)
    differences += [
        f"{name}: another content (sha256 {stored.get(name, 'none')[:12]} then, "
        f"{inputs.get(name, 'none')[:12]} now)"
        for name in sorted({*inputs, *stored})
        if stored.get(name) != inputs.get(name)
    ]
    if differences:
        raise ConfigError(
            f"--resume: {path} was made with other settings: " + "; ".join(differences),
            "the settings it was started with",
            "Leave an option out to take the run's own",
        )
    done = latest_checkpoint(path)
    if done is None:
        raise ConfigError(
            f"--resume: {path} holds no finished checkpoint",
            "a run that saved at least once",
            "Start it anew with --force",
        )
    wanted = config.rollout.num_rollout
    if iteration_of(done) > wanted:
        raise ConfigError(
            f"--resume: {path} has done more rollouts than --num-rollout {wanted}",
            f"at least {iteration_of(done)}",
        )


def changes(config: TrainConfig) -> Iterator[str]:
    """What a resumed run does otherwise than before, a line each."""
    then = from_toml(TrainConfig, config.run_dir / CONFIG)
    for name, old, new in _changed(then, config):
        if name != "run_dir":
            yield f"{name}: {old!r} before, {new!r} from now on"


def inputs_of(config: TrainConfig, prompts: str) -> dict[str, str]:
    """sha256 of what lies in files and decides what a run learns.

    Args:
        config: The resolved configuration.
        prompts: Fingerprint of the prompt data.
    """
    inputs = {"rollout.prompt_data": prompts}
    reward = Path(config.rollout.reward)
    if reward.suffix == ".py" and reward.is_file():
        inputs["rollout.reward"] = hashlib.sha256(reward.read_bytes()).hexdigest()
    return inputs


def _may_change(name: str, then: TrainConfig) -> bool:
    section, _, option = name.partition(".")
    if option == "num_rollout":
        # A schedule that falls to the last rollout would bend in the middle.
        return then.optimizer.lr_schedule == "constant"
    return section in _MAY_CHANGE or (section == "rollout" and option in _MAY_CHANGE_IN_ROLLOUT)


def _changed(then: TrainConfig, now: TrainConfig) -> Iterator[tuple[str, Any, Any]]:
    """Options with other values: name, old, new. Files compared by content are not among them."""
    old, new = then.model_dump(mode="json"), now.model_dump(mode="json")
    for key, value in old.items():
        if not isinstance(value, dict):
            if value != new[key]:
                yield key, value, new[key]
            continue
        for name, inner in value.items():
            other = new[key][name]
            if inner != other and not _by_content(name, inner, other):
                yield f"{key}.{name}", inner, other


def _by_content(name: str, old: Any, new: Any) -> bool:
    """Whether an option names files, whose contents are among the ``inputs_of`` a run."""
    files_of_rewards = name == "reward" and old.endswith(".py") and new.endswith(".py")
    return name == "prompt_data" or files_of_rewards
