"""One rank of the trainer: model, adapters, optimizer, and the methods of ``protocols.Trainer``.

Every method is called on all ranks with the same arguments (a Ray actor, torchrun's command loop or
the one process of ``--launcher inline`` does that); results are complete on rank 0.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from glm_lora.arch.spec import ModelSpec
from glm_lora.checkpoint.random_init import init_random
from glm_lora.checkpoint.torch_dist import load_base
from glm_lora.checkpoint.train_state import LocalTensor, load_train_state, save_train_state
from glm_lora.config import TrainConfig
from glm_lora.errors import CheckpointError, TrainingError
from glm_lora.fingerprint import fingerprint, fingerprint_tensors, record_of
from glm_lora.lora.attach import attach_adapters
from glm_lora.lora.state import AdapterSet
from glm_lora.model.parallel import ParallelContext, init_parallel
from glm_lora.model.stage import Stage, build_stage
from glm_lora.protocols import AdapterState, StepStats, TrainBatch
from glm_lora.settings import spec_of
from glm_lora.targets.selection import Selection
from glm_lora.train.offload import DeviceMemory, peak_memory
from glm_lora.train.optimizer import AdapterOptimizer
from glm_lora.train.share import sequence_logprobs
from glm_lora.train.step import Updater

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""A silent rank lets the others wait no longer than this; the first step may compile for minutes.

One that dies or fails is noticed at once: its connections break and its actor or agent says so.
"""


def device_of(config: TrainConfig, local_rank: int) -> torch.device:
    """The device this rank computes on."""
    cuda = torch.cuda.is_available() if config.device == "auto" else config.device == "cuda"
    if not cuda:
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def init_process_group(
    config: TrainConfig,
    rank: int,
    world_size: int,
    address: tuple[str, int] | None,
    store: Any = None,
) -> None:
    """Join the trainer's process group (NCCL for CUDA beside gloo for the CPU).

    Args:
        config: Says which device is used.
        rank: This rank.
        world_size: Number of trainer ranks.
        address: Host and port of the rendezvous store; None for a single process, or where
            torchrun's environment says how to meet.
        store: The store itself on the rank that serves it.
    """
    device = device_of(config, rank % config.num_gpus_per_node)
    if device.type == "cpu":
        # The projections of the sizes that run on a CPU are too small to share between threads.
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return
    if address is not None and store is None:
        store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)
    elif world_size == 1:
        store = dist.HashStore()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def build_worker(config: TrainConfig, selection: Selection) -> TrainWorker:
    """Build this rank's worker; torch.distributed must be up (``init_process_group``)."""
    spec = spec_of(config.model_name, config.hf_checkpoint)
    device = device_of(config, dist.get_rank() % config.num_gpus_per_node)
    context = init_parallel(config.parallel, device)
    dtype = getattr(torch, config.dtype)
    stage = build_stage(
        spec,
        context,
        dtype=dtype,
        recompute=config.parallel.recompute,
        dsa_backend=config.parallel.dsa_backend,
    )
    if config.init == "random":
        init_random(stage, config.seed)
    else:
        load_base(stage, config.ref_load)
    return TrainWorker(config, selection, spec, stage, context)


class TrainWorker:
    """One rank of the trainer.

    Args:
        config: The run's configuration.
        selection: What is trained.
        spec: The model's shape.
        stage: This rank's part of the model, base loaded, no adapters yet.
        context: This rank's place in the process groups.
    """

    def __init__(
        self,
        config: TrainConfig,
        selection: Selection,
        spec: ModelSpec,
        stage: Stage,
        context: ParallelContext,
    ) -> None:
        self.config = config
        self.selection = selection
        self.spec = spec
        self.stage = stage
        self.context = context
        self.version = 0
        self._base_digest = self._digest_base()
        self.adapters: AdapterSet = attach_adapters(stage, selection, config.seed)
        self.optimizer = AdapterOptimizer(
            self.adapters.parameters(),
            config.optimizer,
            config.rollout.num_rollout * config.algorithm.updates_per_rollout,
        )
        self._saver = ThreadPoolExecutor(1)
        self._copied: tuple[Path, Mapping[str, LocalTensor], Mapping[str, Any]] | None = None
        self._saving: Future[dict[str, float]] | None = None
        self._save_group = dist.new_group(backend="gloo")
        self._updater = Updater(config, stage, self.adapters, self.optimizer, context)
        on_disk = config.offload_train_target == "disk"
        folder = config.run_dir / "logs" if on_disk else None
        self._memory = DeviceMemory(stage, self.adapters, self.optimizer, folder)

    def step(self, batch: TrainBatch) -> StepStats:
        """One update (or ``updates_per_rollout``) from a scored batch."""
        stats = self._updater.step(batch)
        self.version = batch.step + 1
        peak = {"memory/trainer_peak_bytes": float(peak_memory(self.context.device))}
        return replace(stats, metrics={**stats.metrics, **peak})

    def logprobs(
        self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0, adapter: bool = True
    ) -> list[np.ndarray]:
        """Log-probability of tokens 1.. of each sequence given those before; no gradient."""
        with self.adapters.enabled(adapter), self.adapters.evaluation():
            return sequence_logprobs(
                self.stage,
                self.context,
                sequences,
                temperature=temperature,
                max_tokens=self.config.parallel.max_tokens_per_gpu,
            )

    def adapter(self, dtype: str = "float32") -> AdapterState:
        """The adapter as it is now, gathered from all ranks, on the CPU."""
        tensors = self.adapters.gather(self.context, getattr(torch, dtype))
        return AdapterState(self.selection, tensors, self.version, fingerprint_tensors(tensors))

    def set_adapter(self, state: AdapterState) -> None:
        """Start from ``state``; CheckpointError when its tensors are not the selection's."""
        self.adapters.load_full({k: t.float() for k, t in state.tensors.items()})

    def verify_base(self) -> str:
        """A digest of the base as it lies in memory; TrainingError when it is not as loaded."""
        now = self._digest_base()
        if now != self._base_digest:
            raise TrainingError(
                f"the frozen base changed while training (digest {self._base_digest[:16]} when "
                f"loaded, {now[:16]} now, rank {self.context.rank})",
                "a base that is bit-equal",
                "Please report this: nothing may write to the base",
            )
        return self._combine(now)

    def _digest_base(self) -> str:
        # Of copies: a tensor that numpy has seen can no longer give its memory away.
        base = self.stage.base_parameters()
        return fingerprint(record_of(k, _host_copy(t)) for k, t in base.items())

    def _combine(self, digest: str) -> str:
        if self.context.world_size == 1:
            return digest
        digests: list[str] = [""] * self.context.world_size
        dist.all_gather_object(digests, digest)
        return hashlib.sha256("".join(digests).encode()).hexdigest()

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write adapter masters, Adam moments, step, generators, and the driver's ``extra``."""
        self.begin_save(folder, extra)
        self.write_save()
        self.finish_save()

    def begin_save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Copy to the host what a checkpoint made now holds; ``write_save`` writes it."""
        self.finish_save()
        local = {
            key: LocalTensor(_host_copy(value), self.adapters.tp_axis(_parameter_key(key)))
            for key, value in self._memory.state().items()
        }
        state = {
            "driver": dict(extra or {}),
            "version": self.version,
            "applied_steps": self.optimizer.applied_steps,
            "torch_rng": torch.get_rng_state().tolist(),
            "selection": self.selection.hash,
        }
        self._copied = (folder, local, state)

    def write_save(self) -> None:
        """Write what ``begin_save`` copied, in a thread; nothing when there is nothing."""
        copied, self._copied = self._copied, None
        if copied is not None:
            self._saving = self._saver.submit(self._write, *copied)

    def _write(
        self, folder: Path, local: Mapping[str, LocalTensor], state: Mapping[str, Any]
    ) -> dict[str, float]:
        start = time.perf_counter()
        save_train_state(folder, local, state, self.context, self._save_group)
        return {
            "save/seconds": time.perf_counter() - start,
            "save/bytes": float(sum(piece.tensor.nbytes for piece in local.values())),
        }

    def finish_save(self) -> Mapping[str, float]:
        """Wait for ``write_save``; its seconds and this rank's bytes.

        Raises:
            CheckpointError: It could not be written.
        """
        saving, self._saving = self._saving, None
        return saving.result() if saving is not None else {}

    def load(self, folder: Path) -> Mapping[str, Any]:
        """Continue from what ``save`` wrote, at any topology; returns the driver's ``extra``.

        Raises:
            CheckpointError: It was written for another selection, or is not whole.
        """
        parameters = self.adapters.parameters()
        wanted = {**{k: p.detach() for k, p in parameters.items()}, **self.optimizer.moments()}
        local = {
            key: LocalTensor(torch.empty_like(value), self.adapters.tp_axis(_parameter_key(key)))
            for key, value in wanted.items()
        }
        state = load_train_state(folder, local, self.context)
        if state["selection"] != self.selection.hash:
            raise CheckpointError(
                f"{folder} was written for another selection", "the selection of this run"
            )
        with torch.no_grad():
            for key, parameter in parameters.items():
                parameter.copy_(local[key].tensor)
        moments = {k: v.tensor for k, v in local.items() if k not in parameters}
        self.optimizer.load_moments(moments, int(state["applied_steps"]))
        self.version = int(state["version"])
        torch.set_rng_state(torch.tensor(state["torch_rng"], dtype=torch.uint8))
        return state["driver"]

    def offload(self) -> Mapping[str, float]:
        """Free the device memory of base, adapters and moments."""
        return self._memory.offload()

    def onload(self) -> Mapping[str, float]:
        """Take the device memory again."""
        return self._memory.onload()

    def host_copy_summary(self) -> str:
        """One line on how the machine's ranks hold the base on the host, for the user."""
        return self._memory.host_copy_summary()

    def close(self) -> None:
        """Finish what is being saved and leave the process group."""
        self._saver.shutdown()
        self._memory.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _parameter_key(key: str) -> str:
    """The adapter tensor a state key belongs to: moments carry a suffix."""
    return key.removesuffix(".exp_avg_sq").removesuffix(".exp_avg")
