"""From what the user typed to one resolved ``TrainConfig``: model defaults, paths, shapes.

No torch. Options that were not given take the model's defaults (``config.TINY_DEFAULTS`` for the
embedded tiny model, the recipe's otherwise), paths follow ``--model-dir``, ``--ckpt-dir`` and
``--data-dir``, and the parallel shape follows the number of GPUs.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm_lora.arch.agreement import first_layers_as
from glm_lora.arch.spec import BUILTIN, ModelSpec, builtin, spec_from_dir
from glm_lora.config import TINY_DEFAULTS, TrainConfig, build
from glm_lora.errors import ConfigError
from glm_lora.options import home, merge

CACHE = Path("~/.cache/glm-lora")
TINY = "tiny"
RECIPE_GPUS_PER_NODE = 8


def model_dir(given: Path | None) -> Path:
    """Folder of Hugging Face checkpoints."""
    return home(given or CACHE / "models")


def ckpt_dir(given: Path | None) -> Path:
    """Folder of torch_dist bases."""
    return home(given or CACHE / "ckpt")


def data_dir(given: Path | None) -> Path:
    """Folder of datasets."""
    return home(given or CACHE / "data")


def hf_path(name: str, models: Path) -> Path:
    """Default folder of a model's Hugging Face checkpoint."""
    return models / name


def base_path(name: str, ckpts: Path) -> Path:
    """Default folder of a model's torch_dist base."""
    return ckpts / f"{name}_torch_dist"


def spec_of(model_name: str, hf_checkpoint: Path) -> ModelSpec:
    """The model's shape: its own config.json where there is one, else the built-in description.

    Raises:
        ModelError: The name is unknown and the folder holds no usable config.json, or the folder's
            config.json describes another model than the built-in one of that name.
    """
    path = hf_checkpoint / "config.json"
    if not path.exists():
        return builtin(model_name)
    spec = spec_from_dir(hf_checkpoint)
    if model_name not in BUILTIN:
        return spec
    return first_layers_as(BUILTIN[model_name], spec, model_name, str(path))


def default_run_dir(model_name: str) -> Path:
    """``runs/<model>-<time>-<random>`` in the working directory.

    The run makes its folder seconds later, and others may start in the same second.
    """
    name = f"{model_name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    return Path("runs") / name


def selection_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Selection options as given; targets of one's own do not inherit the recipe's excludes."""
    if "target_modules" in given and "exclude_modules" not in given:
        return {**given, "exclude_modules": ""}
    return dict(given)


def resolve_train(
    values: Mapping[str, Any],
    *,
    stored: Mapping[str, Any] | None = None,
    models: Path,
    ckpts: Path,
    data: Path,
    world_size: int | None = None,
) -> TrainConfig:
    """Lay the given options over the model's defaults.

    Args:
        values: Nested options that were given (``options.collect``).
        stored: Nested options of a run that is to continue, for those that were not.
        models: Folder of Hugging Face checkpoints.
        ckpts: Folder of torch_dist bases.
        data: Folder of datasets.
        world_size: Number of ranks when torchrun has started them already.

    Raises:
        ConfigError: A value out of range, or a shape that cannot work.
    """
    stored = stored or {}
    known = merge(stored, values)
    name = known.get("model_name", TrainConfig.model_fields["model_name"].default)
    given = home(Path(known.get("hf_checkpoint", hf_path(name, models))))
    if not (given / "config.json").exists():
        builtin(name)
    tiny = name == TINY
    nodes = known.get("num_nodes", 1)
    gpus = known.get("num_gpus_per_node", 1 if tiny else RECIPE_GPUS_PER_NODE)
    if world_size is not None:
        gpus = world_size // max(1, nodes)
    defaults: dict[str, Any] = {
        "model_name": name,
        "hf_checkpoint": str(hf_path(name, models)),
        "ref_load": str(base_path(name, ckpts)),
        "run_dir": str(default_run_dir(name)),
        "num_nodes": nodes,
        "num_gpus_per_node": gpus,
        "rollout": {"prompt_data": _default_prompts(name, data)},
    }
    if not tiny:
        stages = max(1, known.get("parallel", {}).get("pipeline_model_parallel_size", 1))
        defaults["parallel"] = {
            "tensor_model_parallel_size": min(8, gpus),
            "expert_model_parallel_size": _most_expert_ranks(name, nodes * gpus // stages),
        }
        defaults["sglang"] = _recipe_engines(name, known, nodes * gpus)
    values = {**values, "selection": selection_values(values.get("selection", {}))}
    config = _absolute(build(TrainConfig, merge(defaults, _tiny(tiny), stored, values)))
    _check_shape(config)
    _check_unused(config)
    return config


def _absolute(config: TrainConfig) -> TrainConfig:
    """``config`` with paths that mean the same in every process of a cluster.

    Processes of a cluster that is joined run in the folder where it was started.
    """

    def whole(path: Path | None) -> Path | None:
        return None if path is None else Path(os.path.abspath(home(path)))

    names = ("hf_checkpoint", "ref_load", "run_dir", "lora_adapter_path")
    paths = {name: whole(getattr(config, name)) for name in names}
    engine_paths = {
        "rollout_engine_key_file": whole(config.sglang.rollout_engine_key_file),
        "sglang_python": _whole_program(config.sglang.sglang_python),
    }
    sglang = config.sglang.model_copy(update=engine_paths)
    rollout = config.rollout
    files = {
        "prompt_data": tuple(map(_whole_source, rollout.prompt_data)),
        "eval_prompt_data": tuple(map(_whole_source, rollout.eval_prompt_data)),
        "reward": _whole_file(rollout.reward),
    }
    return config.model_copy(
        update={**paths, "sglang": sglang, "rollout": rollout.model_copy(update=files)}
    )


def _whole_program(name: str) -> str:
    """The whole path of a program; a mere name is looked for in PATH where it is started."""
    return os.path.abspath(home(Path(name))) if os.sep in name else name


def _whole_file(name: str) -> str:
    """The whole path of a file; what names no file (a built-in reward, a URL) as it is."""
    path = home(Path(name))
    return os.path.abspath(path) if path.is_file() else name


def _whole_source(source: str) -> str:
    """As ``_whole_file`` for ``FILE`` or ``FILE@WEIGHT``."""
    whole = _whole_file(source)
    head, at, tail = source.rpartition("@")
    return f"{_whole_file(head)}@{tail}" if at and whole == source else whole


def _recipe_engines(name: str, values: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    """Engines of 4 GPUs for the slice, of 8 for the model; on the trainer's GPUs unless told."""
    rollout, sglang = values.get("rollout", {}), values.get("sglang", {})
    apart = (
        rollout.get("rollout_engine", "sglang") != "sglang"
        or sglang.get("rollout_engine_urls")
        or sglang.get("rollout_num_gpus")
        or rollout.get("async_level")
        or values.get("device") == "cpu"
    )
    size = 4 if name == "GLM-5.3-Flash-4layer" else 8
    own = int(sglang.get("rollout_num_gpus") or gpus)
    return {"rollout_num_gpus_per_engine": min(size, own), "sglang_colocated": not apart}


def _most_expert_ranks(name: str, ranks: int) -> int:
    """As many of a stage's ranks as can share the routed experts evenly."""
    experts = BUILTIN[name].n_routed_experts if name in BUILTIN else ModelSpec.n_routed_experts
    return math.gcd(max(1, ranks), experts)


def _tiny(tiny: bool) -> dict[str, Any]:
    if not tiny:
        return {}
    return merge(TINY_DEFAULTS[""], {k: v for k, v in TINY_DEFAULTS.items() if k})


def _default_prompts(name: str, data: Path) -> tuple[str, ...]:
    if name == TINY:
        return (str(data / TINY / "prompts.jsonl"),)
    return (str(data / "dapo-math-17k" / "dapo-math-17k.jsonl"),)


def _check_shape(config: TrainConfig) -> None:
    if config.launcher == "inline" and config.world_size != 1:
        raise ConfigError(
            f"--launcher inline with {config.world_size} ranks",
            "one rank",
            "Use --launcher ray, or torchrun",
        )


def _check_unused(config: TrainConfig) -> None:
    """Refuse options that would do nothing: whoever gave them believes that they work."""
    if config.ray_address and config.launcher != "ray":
        raise ConfigError(
            f"--ray-address {config.ray_address} with --launcher {config.launcher}, which starts "
            "its processes without Ray",
            "--launcher ray",
        )
    engines = config.sglang.rollout_num_engines
    if engines > 1 and config.launcher != "ray" and config.rollout.rollout_engine == "embedded":
        raise ConfigError(
            f"--rollout-num-engines {engines} with --launcher {config.launcher}: an embedded "
            "engine lives in the first rank's process",
            "--launcher ray",
        )
    if config.offload_train_target == "disk" and not config.sglang.sglang_colocated:
        raise ConfigError(
            "--offload-train-target disk with engines that do not share the trainer's GPUs: the "
            "base stays there",
            "--sglang-colocated with it",
        )


def torchrun_world() -> tuple[int, int] | None:
    """(rank, world size) when torchrun started this process, else None."""
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
