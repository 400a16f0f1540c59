"""Sharded tensors and megatron-core ``torch_dist`` folders: describe, load, save.

Layout of a root folder: ``latest_checkpointed_iteration.txt`` holds ``release`` (a base) or a
number; the data lies in ``release/`` or ``iter_0000012/``: ``.metadata``, ``__R_B.distcp``,
``metadata.json`` and ``common.pt``. Keys carry the global layer index, experts are stacked
``[E, ...]``, so any (tp, pp, ep) reads any checkpoint.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from glm_lora.arch.projections import Param, all_params
from glm_lora.arch.spec import ModelSpec
from glm_lora.errors import MAKE_AGAIN, CheckpointError, first_line
from glm_lora.model.parallel import ParallelContext, init_single_process

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
METADATA = ".metadata"
INDEX_FILES = (METADATA, "metadata.json", "common.pt")
"""What a torch_dist folder holds beside its data files."""
_DAMAGED = (
    OSError, EOFError, RuntimeError, ValueError, TypeError, AttributeError, ImportError,
    LookupError, ArithmeticError, MemoryError, pickle.UnpicklingError,
)  # fmt: skip
"""All that reading a pickle or JSON of any bytes can raise."""


class BaseHolder(Protocol):
    """The part of a trainer's stage that loading needs."""

    spec: ModelSpec
    ctx: ParallelContext

    def base_parameters(self) -> Mapping[str, torch.Tensor]:
        """This rank's shard of every base parameter, by canonical key."""
        ...


def sharded_tensor(
    key: str,
    tensor: torch.Tensor,
    axis: int | None,
    rank: int,
    size: int,
    replica: tuple[int, ...] = (0,),
) -> ShardedTensor:
    """Describe one rank's shard: ``tensor`` is piece ``rank`` of ``size`` along ``axis``.

    Args:
        key: Key in the checkpoint.
        tensor: The local piece (the whole when ``axis`` is None).
        axis: The axis that is cut, or None.
        rank: Which piece this is.
        size: Number of equal pieces.
        replica: All zeros on exactly one of the ranks that hold this piece: that one writes it.
    """
    from megatron.core.dist_checkpointing import ShardedTensor

    cuts = () if axis is None or size == 1 else ((axis, rank, size),)
    return ShardedTensor.from_rank_offsets(key, tensor, *cuts, replica_id=replica)


def sharded_state_dict(
    local: Mapping[str, torch.Tensor],
    params: Mapping[str, Param],
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    ep_rank: int = 0,
    ep_size: int = 1,
    dp_rank: int = 0,
) -> dict[str, Any]:
    """Describe one rank's shards of base parameters, by canonical key.

    A pure function of names, shapes and ranks. Tensor parallelism cuts ``Param.tp_axis``, expert
    parallelism ``Param.ep_axis``; pipeline parallelism only decides which keys are in ``local``.

    Raises:
        AssertionError: A local shape is not the share that the facts table gives this rank.
    """
    result: dict[str, Any] = {}
    for key, tensor in local.items():
        param = params[key]
        axis, rank, size = param.tp_axis, tp_rank, tp_size
        if param.ep_axis is not None:
            axis, rank, size = param.ep_axis, ep_rank, ep_size
        replicated_over_tp = axis is None or param.ep_axis is not None
        replica = (tp_rank if replicated_over_tp else 0, dp_rank)
        share = list(param.shape)
        if axis is not None:
            share[axis] //= size
        assert list(tensor.shape) == share, f"{key}: {tuple(tensor.shape)} instead of {share}"
        result[key] = sharded_tensor(key, tensor, axis, rank, size, replica)
    return result


def read_metadata(folder: Path, keys: Iterable[str]) -> Metadata:
    """Where the tensors ``keys`` lie in a torch_dist folder's data files.

    Raises:
        CheckpointError: ``.metadata`` is damaged, or lacks one of them.
    """
    path = folder / METADATA
    try:
        metadata = pickle.loads(path.read_bytes())
        assert isinstance(metadata, Metadata), f"it holds a {type(metadata).__name__}"
        absent = [key for key in keys if key not in metadata.state_dict_metadata]
    except (*_DAMAGED, AssertionError) as error:
        raise CheckpointError(
            f"{path} is damaged: {first_line(error)}", "the file as it was written", MAKE_AGAIN
        ) from error
    if absent:
        raise CheckpointError(f"{path} lacks {absent[0]}", "every tensor of the base", MAKE_AGAIN)
    return metadata


def load_tensors(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Fill the tensors of ``wanted`` (sharded tensors) in place from one torch_dist folder.

    Every rank of the default process group calls this (a process alone gets a group of one). The
    values are cast to each target's dtype.

    Raises:
        CheckpointError: A key is missing, has another shape, or a data file cannot be read.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException

    init_single_process()
    try:
        # Replicas read the same pieces on purpose, so the check for a single reader is off.
        dist_checkpointing.load(dict(wanted), str(folder), validate_access_integrity=False)
    except CheckpointException as error:
        # One entry per rank that failed, each with its exception.
        raise _load_error(folder, min(error.failures.items())[1][0]) from error
    except (CheckpointingException, *_DAMAGED) as error:
        raise _load_error(folder, error) from error


def _load_error(folder: Path, cause: BaseException) -> CheckpointError:
    expected = "a complete checkpoint of this model"
    key, separator, _ = str(cause).strip("'\"").partition(" from model not in state dict")
    if separator:
        return CheckpointError(f"{folder} does not hold {key}", expected)
    return CheckpointError(f"{folder} cannot be loaded: {first_line(cause)}", expected)


_OTHER_BASE = f"Name a base with --ref-load. If this is a damaged one: {MAKE_AGAIN}"


def load_base(stage: BaseHolder, ref_load: Path) -> None:
    """Fill a stage's base parameters from the ``release`` of ``ref_load``, at any (tp, pp, ep).

    Raises:
        CheckpointError: No finished base there, or one of another model.
    """
    release = release_folder(ref_load)
    ctx = stage.ctx
    wanted = sharded_state_dict(
        stage.base_parameters(),
        all_params(stage.spec),
        tp_rank=ctx.tp_rank,
        tp_size=ctx.tp_size,
        ep_rank=ctx.ep_rank,
        ep_size=ctx.ep_size,
        dp_rank=ctx.dp_rank,
    )
    try:
        load_tensors(release, wanted)
    except CheckpointError as error:
        raise CheckpointError(error.what, error.expected, MAKE_AGAIN) from error


def release_folder(ref_load: Path) -> Path:
    """The finished ``release`` folder of a base.

    Raises:
        CheckpointError: Nothing there, or a conversion that did not finish.
    """
    tracker = ref_load / TRACKER
    try:
        value = tracker.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        started = any(ref_load.glob(f"{RELEASE}*"))
        what = "holds an unfinished base" if started else "holds no base"
        raise CheckpointError(
            f"{ref_load} {what} ({TRACKER} is missing)",
            "a torch_dist base",
            "Run glm-lora prepare with its --model-name and --ref-load",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{tracker} cannot be read: {error}", f"{RELEASE!r} in it", _OTHER_BASE
        ) from error
    if value != RELEASE:
        raise CheckpointError(
            f"{tracker} says {value!r}",
            f"{RELEASE!r} (a base, not a training checkpoint)",
            _OTHER_BASE,
        )
    release = ref_load / RELEASE
    if not (release / METADATA).exists():
        raise CheckpointError(f"{release} has no .metadata", "a complete base", MAKE_AGAIN)
    return release


def save_tensors(folder: Path, tensors: Mapping[str, Any], common: Mapping[str, Any]) -> None:
    """Write sharded tensors and a small common dictionary as one torch_dist folder.

    Every rank of the default process group calls this with its own shards. ``folder`` must exist
    and be empty. ``common`` may hold plain numbers, strings, lists and dictionaries only.
    """
    from megatron.core import dist_checkpointing

    init_single_process()
    dist_checkpointing.save({**common, **tensors}, str(folder), sharded_strategy=_save_strategy())


def save_state_tensors(folder: Path, tensors: Mapping[str, Any], group: Any) -> None:
    """Write sharded tensors as one torch_dist folder, talking over ``group`` only.

    So a thread can save while the ranks compute: nothing here uses the default process group.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    strategy = _save_strategy(group)
    strategy.save(dict(tensors), folder)
    if torch.distributed.get_rank() == 0:
        torch.save({}, folder / "common.pt")
        save_config(CheckpointingConfig(strategy.backend, strategy.version), str(folder))


def _save_strategy(group: Any = None) -> Any:
    """A torch_dist save strategy that works on any device.

    The stock one needs CUDA (it synchronises) and forks writer processes; this one writes with
    torch's own file writer from the calling process.
    """
    from megatron.core.dist_checkpointing.strategies import torch as mcore

    class AnyDeviceSave(mcore.TorchDistSaveShardedStrategy):
        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            keyed, _, _ = mcore._replace_state_dict_keys_with_sharded_keys(
                sharded_state_dict, self.keep_only_main_replica
            )
            dcp_save(
                mcore.mcore_to_pyt_state_dict(keyed, False),
                storage_writer=FileSystemWriter(checkpoint_dir, sync_files=True),
                planner=mcore.MCoreSavePlanner(
                    dedup_replicated_tensors=False, flatten_state_dict=False
                ),
                process_group=group,
            )

    return AnyDeviceSave("torch_dist", 1)
