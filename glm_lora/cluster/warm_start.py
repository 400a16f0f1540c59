"""The adapter that a run starts from, when it does not start from nothing."""

from __future__ import annotations

from dataclasses import replace

from glm_lora.cluster.plan import Plan
from glm_lora.errors import ConfigError
from glm_lora.protocols import AdapterState


def starting_adapter(plan: Plan) -> AdapterState | None:
    """The adapter of ``--lora-adapter-path``, which must cover exactly the selection.

    Raises:
        CheckpointError: It cannot be read exactly.
        ConfigError: It was made for other projections, ranks or scaling.
    """
    path = plan.config.lora_adapter_path
    if path is None:
        return None
    from glm_lora.export.load import load_adapter

    state = load_adapter(path, plan.spec, plan.config.model_name)
    wanted, found = plan.selection.tensor_shapes(), state.selection.tensor_shapes()
    differences = [f"missing {key}" for key in wanted if key not in found]
    differences += [f"not selected {key}" for key in found if key not in wanted]
    differences += [
        f"{key} is {found[key]}, not {wanted[key]}"
        for key in wanted
        if key in found and found[key] != wanted[key]
    ]
    scalings = {a.a_key: a.alpha / a.rank for a in state.selection.adapters}
    differences += [
        f"{a.a_key} is scaled by {scalings[a.a_key]:g}, not {a.alpha / a.rank:g}"
        for a in plan.selection.adapters
        if a.a_key in scalings and scalings[a.a_key] != a.alpha / a.rank
    ]
    if differences:
        more = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
        raise ConfigError(
            f"--lora-adapter-path {path} does not fit the selection: "
            + "; ".join(differences[:4])
            + more,
            "the projections, ranks and alpha of this run",
        )
    return replace(state, selection=plan.selection)
