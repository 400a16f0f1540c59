"""What must hold before an adapter is sent, and what must hold after it arrived.

Engines accept a great deal and then serve something else: a tensor under an unknown name or of a
wrong shape may be taken with success and end the server at the first request, an adapter that was
never loaded is answered by the base. Everything here is a pure function of the records of
``protocols`` and raises ``SyncError`` with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from glm_lora.arch.projections import Site
from glm_lora.errors import SyncError
from glm_lora.fingerprint import fingerprint_tensors
from glm_lora.protocols import AdapterRef, AdapterState, Capabilities, Receipt
from glm_lora.targets.selection import Selection
from glm_lora.targets.support import PROJECTION_ROWS, fused_rows

if TYPE_CHECKING:
    import torch

_FUSED_ENGINES = frozenset({"sglang"})
"""Engines that hold fused projections and need every part of one adapted together."""
_SHOWN = 5


def some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    rest = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + rest


def fused_partners(site: Site) -> tuple[str, ...]:
    """Disk names of all projections that SGLang fuses with ``site`` (itself included)."""
    own = PROJECTION_ROWS.get((site.group, site.leaf))
    if own is None:  # a site of another model
        return (site.disk_name,)
    prefix = site.disk_name.removesuffix(own.path)
    return tuple(prefix + row.path for row in fused_rows(own))


def check_fused(selection: Selection, engine: str = "sglang") -> None:
    """Refuse a selection that adapts only a part of a fused projection.

    Raises:
        SyncError: For example q_proj without k_proj and v_proj.
    """
    chosen = {a.site.disk_name for a in selection.adapters}
    for adapter in selection.adapters:
        missing = [n for n in fused_partners(adapter.site) if n not in chosen]
        if missing:
            leaf = adapter.site.sglang_name.rsplit(".", 1)[-1]
            raise SyncError(
                f"{adapter.site.disk_name} is adapted without {some(missing)}, which {engine} "
                f"holds in one projection ({leaf})",
                "all parts of a fused projection or none",
                "Add them to --target-modules, or take the part out",
            )


def check_selection(selection: Selection, capabilities: Capabilities) -> None:
    """Check at start that the engine can serve every adapter of ``selection``.

    Raises:
        SyncError: The rank is above the engine's, the engine cannot adapt a projection, or only a
            part of a fused projection is adapted where the engine needs the whole.
    """
    if selection.rank > capabilities.max_rank:
        raise SyncError(
            f"the adapter has rank {selection.rank}",
            f"at most {capabilities.max_rank}, the limit of {capabilities.engine}",
            "Start the engine with a higher --max-lora-rank, or lower --lora-rank",
        )
    leaves = dict.fromkeys(a.site.leaf for a in selection.adapters)
    unknown = [leaf for leaf in leaves if leaf not in capabilities.target_leaves]
    if unknown:
        raise SyncError(
            f"{capabilities.engine} {capabilities.version} does not adapt {some(unknown)}",
            "some of " + ", ".join(sorted(capabilities.target_leaves)),
            "Start the engine with --lora-target-modules that include them",
        )
    if capabilities.engine in _FUSED_ENGINES:
        check_fused(selection, capabilities.engine)


def check_state(state: AdapterState) -> None:
    """Check that ``state`` holds exactly the tensors of its selection, finite, as its digest says.

    Raises:
        SyncError: Missing, unknown or misshapen tensors, mixed or unknown dtypes, a value that is
            not finite, or a digest of other values.
    """
    check_names_and_shapes(state.selection, state.tensors)
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in state.tensors.values()})
    if len(dtypes) != 1 or dtypes[0] not in ("float32", "bfloat16"):
        raise SyncError(
            f"the adapter's tensors have dtypes {some(dtypes)}", "all float32 or all bfloat16"
        )
    broken = [name for name, tensor in state.tensors.items() if not is_finite(tensor)]
    if broken:
        raise SyncError(
            f"the adapter has values that are not finite in {some(broken)}",
            "finite numbers",
            "Training diverged: resume from the last checkpoint with a lower --lr",
        )
    actual = fingerprint_tensors(state.tensors)
    if actual != state.digest:
        raise SyncError(
            f"the adapter's tensors have digest {actual[:16]}, the state says {state.digest[:16]}",
            "a digest of the tensors that are sent",
        )


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every value is finite; one pass, no copy (minimum and maximum propagate NaN)."""
    if tensor.numel() == 0:
        return True
    low, high = tensor.aminmax()
    return bool(low.isfinite()) and bool(high.isfinite())


def check_names_and_shapes(selection: Selection, tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that ``tensors`` are exactly those of ``selection``, each of its full shape.

    Raises:
        SyncError: Lists what is missing, unknown, or misshapen (A without B is a missing B).
    """
    shapes = selection.tensor_shapes()
    missing = [name for name in shapes if name not in tensors]
    unknown = [name for name in tensors if name not in shapes]
    wrong = [
        f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    found = [
        f"{len(names)} {kind} ({some(names)})"
        for kind, names in (("missing", missing), ("unknown", unknown), ("misshapen", wrong))
        if names
    ]
    if found:
        raise SyncError(
            f"the adapter's tensors do not match its selection: {'; '.join(found)}",
            f"the {len(shapes)} tensors of {selection.num_sites} sites",
        )


def check_receipt(state: AdapterState, ref: AdapterRef, receipt: Receipt) -> None:
    """Check that the receiver took in what was sent, under the name and version it was sent as.

    Raises:
        SyncError: Another name, version, number of tensors or digest.
    """
    for what, actual, expected in (
        ("name and version", receipt.ref, ref),
        ("number of tensors", receipt.num_tensors, len(state.tensors)),
        ("digest", receipt.digest, state.digest),
    ):
        if actual != expected:
            raise SyncError(
                f"the engine reports {what} {actual} of the adapter it received", str(expected)
            )
    if receipt.bytes <= 0:
        raise SyncError(f"the engine reports {receipt.bytes} bytes received", "more than 0")


ONE_TOKEN = 0.5
"""Nats that a single token of the probe counts at most."""


def check_probe(
    state: AdapterState,
    *,
    trainer: np.ndarray,
    engine: np.ndarray,
    engine_base: np.ndarray,
    limit: float,
    rounding: float,
) -> tuple[float, float]:
    """Compare one prompt's log-probabilities under the adapter: trainer, engine, engine's base.

    Args:
        state: The adapter that was sent.
        trainer: The trainer's log-probabilities, one per predicted token.
        engine: The engine's, asked for under the adapter's name.
        engine_base: The engine's without an adapter.
        limit: Largest mean absolute difference, beside what ``rounding`` explains.
        rounding: Relative error of one logit in the compute dtype. A log-probability of -16 comes
            from logits of that size, which bf16 holds in steps of 0.06 to 0.12: the limit grows by
            this share of the mean size of the log-probabilities.

    Returns:
        Mean and largest absolute difference between trainer and engine, in nats.

    Raises:
        SyncError: The engine differs from the trainer, or answers exactly as its base although B
            is not zero.
    """
    for who, values in (("trainer", trainer), ("engine", engine), ("engine's base", engine_base)):
        if values.shape != trainer.shape or values.size == 0:
            raise SyncError(
                f"the {who} returned {values.shape} log-probabilities for the probe prompt",
                f"{trainer.shape}, at least one",
            )
        if not np.isfinite(values).all():
            bad = int((~np.isfinite(values)).sum())
            raise SyncError(
                f"the {who} returned {bad} of {values.size} log-probabilities that are not finite"
            )
    difference = np.abs(trainer.astype(np.float64) - engine.astype(np.float64))
    mean, largest = float(difference.mean()), float(difference.max())
    limit += rounding * float(np.abs(trainer).mean())
    # A token whose router is undecided may take other experts on the two sides and be nats away;
    # an adapter that is not served as it should be shows in more than one token.
    if float(difference.clip(max=ONE_TOKEN).mean()) > limit:
        raise SyncError(
            f"trainer and engine differ by {mean:.4g} (largest {largest:.4g}) in the "
            "log-probabilities of the probe prompt under the new adapter",
            f"at most {limit:.4g}",
            _hint(state, trainer, engine, engine_base),
        )
    if any_nonzero_b(state) and np.array_equal(engine, engine_base):
        raise SyncError(
            "the engine answers the probe prompt exactly as its base model does, although the "
            "adapter's B is not zero",
            "log-probabilities under the adapter",
            "The engine accepted the adapter without applying it; see its log",
        )
    return mean, largest


def any_nonzero_b(state: AdapterState) -> bool:
    """Whether any B differs from zero, that is whether the adapter does anything."""
    names: Sequence[str] = [a.b_key for a in state.selection.adapters]
    return any(bool(state.tensors[name].any()) for name in names)


def _hint(
    state: AdapterState, trainer: np.ndarray, engine: np.ndarray, engine_base: np.ndarray
) -> str:
    applied, wanted = np.abs(engine - engine_base).mean(), np.abs(trainer - engine_base).mean()
    if not any_nonzero_b(state):
        if applied < wanted:
            return "The adapter is zero, so the bases differ: serve the checkpoint that is trained"
        return "The adapter is zero, yet the engine's answer is not its base's: it serves another"
    if np.array_equal(engine, engine_base):
        return "The engine answers exactly as its base: it does not apply the adapter"
    if applied < 0.1 * wanted:
        return "The engine is close to its base: it applies only a part of the adapter"
    return "Compare the base first (an adapter with B = 0): see docs/when-it-breaks.md"
