"""The recipe's shapes: what a user types, by the name of the snapshot under ``shapes/``.

``python -m tests.cluster.shapes`` writes the snapshots anew; read the difference before committing.
"""

from __future__ import annotations

from pathlib import Path

from glm_lora.cluster.dry_run import describe
from glm_lora.cluster.plan import Outline
from glm_lora.config import TrainConfig
from glm_lora.settings import resolve_train, spec_of
from glm_lora.targets.resolve import resolve

FOLDER = Path(__file__).parent / "shapes"
SLICE, FULL, TINY = "GLM-5.3-Flash-4layer", "GLM-5.3-Flash", "tiny"

SHAPES: dict[str, dict[str, object]] = {
    "slice_1x8": {"model_name": SLICE, "num_nodes": 1, "num_gpus_per_node": 8},
    "slice_2x4": {"model_name": SLICE, "num_nodes": 2, "num_gpus_per_node": 4},
    "full_3x8": {"model_name": FULL, "num_nodes": 3, "num_gpus_per_node": 8},
    "full_8x4": {"model_name": FULL, "num_nodes": 8, "num_gpus_per_node": 4},
    "full_16x4": {"model_name": FULL, "num_nodes": 16, "num_gpus_per_node": 4},
    "slice_1x4_separate": {
        "model_name": SLICE, "num_gpus_per_node": 4, "sglang": {"rollout_num_gpus": 4},
    },
    "full_3x8_separate": {
        "model_name": FULL, "num_nodes": 3, "num_gpus_per_node": 8,
        "sglang": {"rollout_num_gpus": 16},
    },
    "full_8x4_separate": {
        "model_name": FULL, "num_nodes": 8, "num_gpus_per_node": 4,
        "sglang": {"rollout_num_gpus": 16},
    },
    "tiny": {"model_name": TINY},
    "tiny_2_ranks": {
        "model_name": TINY, "num_gpus_per_node": 2, "parallel": {"tensor_model_parallel_size": 2},
    },
}  # fmt: skip
PARALLEL = {
    "full_8x4": {"pipeline_model_parallel_size": 4, "expert_model_parallel_size": 8},
    "full_16x4": {"pipeline_model_parallel_size": 4, "expert_model_parallel_size": 16},
}


def config_of(name: str) -> TrainConfig:
    """The resolved configuration of one shape; nothing is read from disk."""
    given = dict(SHAPES[name])
    given["launcher"] = "ray"
    given["run_dir"] = "RUN"
    if given["model_name"] != TINY:
        given["sglang"] = {"sglang_python": "PYTHON", **given.get("sglang", {})}  # type: ignore[dict-item]
    if int(given.get("num_nodes", 1)) > 1:  # type: ignore[call-overload]
        given["ray_address"] = "auto"
    if name in PARALLEL:
        given["parallel"] = {"tensor_model_parallel_size": 8, **PARALLEL[name]}
    return resolve_train(given, models=Path("/MODELS"), ckpts=Path("/CKPT"), data=Path("/DATA"))


def lines_of(name: str) -> list[str]:
    """What ``--dry-run`` prints for one shape."""
    config = config_of(name)
    spec = spec_of(config.model_name, config.hf_checkpoint)
    return describe(Outline(config, spec, resolve(spec, config.model_name, config.selection)))


if __name__ == "__main__":
    for shape in SHAPES:
        (FOLDER / f"{shape}.txt").write_text("".join(line + "\n" for line in lines_of(shape)))
