"""One trainer over many ranks without Ray: rank 0 drives, the others follow its commands.

Started by torchrun. Rank 0 wraps its worker in ``LeadingTrainer``, which announces each call to all
ranks and then makes it on its own worker; every other rank sits in ``follow``. After each call the
ranks tell their outcome through a store, not through a collective: a rank that waits inside the
model for one that has failed would never come to a collective. The failed rank ends, its
connections break, and the others find its error in the store.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from glm_lora.cluster.connections import is_broken_connection
from glm_lora.cluster.every_rank import EveryRankTrainer
from glm_lora.errors import CheckpointError, GlmLoraError, ProcessLost, TrainingError

if TYPE_CHECKING:
    from glm_lora.train.worker import TrainWorker

_STOP = "stop"
CONTROL_TIMEOUT = timedelta(days=1)
"""Followers wait this long for the next command: sampling and scoring happen in between."""
LAST_WORDS = 10.0
"""Seconds in which the rank that caused a broken connection must have said why."""
_POLL = 0.002
_POLL_LIMIT = 0.1


@dataclass
class Control:
    """How the ranks talk about calls: commands by broadcast, outcomes through the store."""

    group: Any
    store: Any
    world: int
    rank: int
    call: int = field(default=0, init=False)

    def outcome(self, failure: bytes | None, seconds: float) -> None:
        """Tell this rank's outcome of the present call and learn about the others'.

        Args:
            failure: This rank's error, pickled, or None.
            seconds: How long to wait for the others.

        Raises:
            GlmLoraError: The first error that any rank told.
            ProcessLost: The others neither finished nor failed in time.
        """
        done, failed = f"done/{self.call}", f"failed/{self.call}"
        self.call += 1
        if failure is not None:
            # Only the first one counts; what follows from it comes later.
            self.store.compare_set(failed, "", failure.hex())
        else:
            self.store.add(done, 1)
        end, pause = time.monotonic() + seconds, _POLL
        while True:
            if self.store.check([failed]):
                raise pickle.loads(bytes.fromhex(self.store.get(failed).decode()))
            if self.store.add(done, 0) == self.world:
                return
            if time.monotonic() > end:
                raise ProcessLost(f"a rank did not answer within {seconds:g} s")
            time.sleep(pause)
            pause = min(_POLL_LIMIT, pause * 2)


def open_control() -> Control:
    """Set up the ranks' talk; every rank of the default process group calls this."""
    group = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    store = dist.distributed_c10d._get_default_store()
    return Control(
        group,
        dist.PrefixStore("glm_lora_calls", store),
        dist.get_world_size(),
        dist.get_rank(),
    )


def _call(worker: TrainWorker, control: Control, name: str, args: Any, kwargs: Any) -> Any:
    """Run one method on this rank's worker and learn how the other ranks fared.

    Raises:
        GlmLoraError: The first error of any rank, as it was raised there when it is ours, else a
            TrainingError that carries that rank's traceback.
    """
    result, failure = None, None
    try:
        result = getattr(worker, name)(*args, **kwargs)
    except Exception as error:  # the border between processes: every error is carried over
        failure = pickle.dumps(_own(error, control, name))
    control.outcome(failure, CONTROL_TIMEOUT.total_seconds())
    return result


def _own(error: Exception, control: Control, name: str) -> GlmLoraError:
    if isinstance(error, GlmLoraError):
        return error
    text = "".join(traceback.format_exception(error))
    if is_broken_connection(error):
        # Another rank has failed or died; its own error comes first if it could say why.
        _wait_for_words(control)
        return ProcessLost(f"rank {control.rank} lost another rank in {name}:\n{text}")
    return TrainingError(f"rank {control.rank} failed in {name}:\n{text}")


def _wait_for_words(control: Control) -> None:
    end = time.monotonic() + LAST_WORDS
    while time.monotonic() < end and not control.store.check([f"failed/{control.call}"]):
        time.sleep(_POLL_LIMIT)


def follow(worker: TrainWorker, control: Control) -> None:
    """Serve rank 0's calls until it says stop; the first error of any rank is raised here too."""
    while True:
        command: list[Any] = [None]
        dist.broadcast_object_list(command, src=0, group=control.group)
        name, args, kwargs = command[0]
        if name == _STOP:
            return
        # A checkpoint that cannot be written fails on all ranks, and the run may go on.
        with contextlib.suppress(CheckpointError):
            _call(worker, control, name, args, kwargs)


class LeadingTrainer(EveryRankTrainer):
    """The ``Trainer`` of rank 0: every call is made on all ranks at once."""

    def __init__(self, worker: TrainWorker, control: Control) -> None:
        self._worker = worker
        self._control = control
        self._broken = False

    def call_all(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """See ``EveryRankTrainer``."""
        if self._broken:
            raise TrainingError(f"trainer.{name}: the other ranks have ended")
        dist.broadcast_object_list([(name, args, kwargs)], src=0, group=self._control.group)
        try:
            return _call(self._worker, self._control, name, args, kwargs)
        except CheckpointError:
            raise  # all ranks have it and wait for the next call
        except BaseException:
            self._broken = True  # the followers have left their loop
            raise

    def close(self) -> None:
        """Release the other ranks."""
        if not self._broken:
            dist.broadcast_object_list([(_STOP, (), {})], src=0, group=self._control.group)
            self._broken = True
        self._worker.close()
