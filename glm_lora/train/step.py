"""The training step: micro-batches forward and backward, one reduction, one AdamW step.

Every rank computes its share of the same batch; whatever depends on the whole batch (who computes
what, the loss denominator) is derived from it on every rank without communication.

Legend: B sequences, T positions that predict a next token (L - 1).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from glm_lora.config import TrainConfig
from glm_lora.errors import TrainingError
from glm_lora.lora.state import AdapterSet
from glm_lora.model.batch import ModelBatch, distinct
from glm_lora.model.parallel import ParallelContext
from glm_lora.model.schedule import run_microbatches
from glm_lora.model.stage import Stage
from glm_lora.protocols import StepStats, TrainBatch, TrainSample
from glm_lora.rl.batch import has_signal
from glm_lora.rl.loss import LossSums, loss_denominator, policy_loss
from glm_lora.train.optimizer import AdapterOptimizer
from glm_lora.train.share import gather_by_index, model_batch, plan_for, sequence_logprobs

UPDATES_UNTIL_ALIVE = 2
"""B is zero at first, so A gets a gradient from the second update on; then all must have one."""


class ResponseTensors:
    """What the loss needs of one micro-batch, laid out as the log-probabilities are ``[B, T]``."""

    def __init__(self, samples: Sequence[TrainSample], shape: tuple[int, int]) -> None:
        mask = np.zeros(shape, dtype=bool)
        rollout = np.zeros(shape, dtype=np.float32)
        advantage = np.zeros(shape[0], dtype=np.float32)
        for row, sample in enumerate(samples):
            span = response_span(sample)
            mask[row, span] = sample.loss_mask
            rollout[row, span] = sample.rollout_logprobs
            advantage[row] = sample.advantage
        self.mask_BT = torch.from_numpy(mask)
        self.rollout_BT = torch.from_numpy(rollout)
        self.advantage_B = torch.from_numpy(advantage)


def response_span(sample: TrainSample) -> slice:
    """Where the response's tokens are predicted: from the last prompt token on."""
    start = len(sample.prompt_ids) - 1
    return slice(start, start + len(sample.response_ids))


def spread(values: Sequence[np.ndarray], samples: Sequence[TrainSample], like: Tensor) -> Tensor:
    """Per-sample response values at their positions in a ``[B, T]`` tensor like ``like``."""
    out = np.zeros(tuple(like.shape), dtype=np.float32)
    for row, (sample, value) in enumerate(zip(samples, values, strict=True)):
        out[row, response_span(sample)] = value
    return torch.from_numpy(out).to(like.device)


class BatchLoss:
    """The loss of each micro-batch, and what it leaves behind: log-probabilities and sums.

    Args:
        config: Algorithm and length limit.
        samples: The whole batch.
        groups: Per micro-batch and per sequence of it, the samples with these tokens.
        denominator: Of the whole batch.
        old: Response log-probabilities before the first update, by sample, or None.
        reference: Those of the base, by sample, or None.
    """

    def __init__(
        self,
        config: TrainConfig,
        samples: Sequence[TrainSample],
        groups: Sequence[Sequence[Sequence[int]]],
        denominator: int,
        old: list[np.ndarray] | None,
        reference: list[np.ndarray] | None,
    ) -> None:
        self._config, self._samples, self._groups = config, samples, groups
        self._denominator, self._old, self._reference = denominator, old, reference
        self._computed: list[tuple[list[int], Tensor]] = []
        self.totals: dict[str, Tensor] = {}

    def __call__(self, number: int, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        """The loss of micro-batch ``number``, divided by the batch's denominator."""
        groups = self._groups[number]
        indices = [i for group in groups for i in group]
        if not indices:
            return logprobs.sum() * 0.0
        samples = [self._samples[i] for i in indices]
        if len(indices) > len(groups):
            row_of = [row for row, group in enumerate(groups) for _ in group]
            logprobs = logprobs[row_of]
            entropy = None if entropy is None else entropy[row_of]
        tensors = ResponseTensors(samples, (logprobs.shape[0], logprobs.shape[1]))
        # Reading them here would wait for the device in the middle of the step.
        self._computed.append((indices, logprobs.detach()))

        def rows(source: list[np.ndarray] | None) -> Tensor | None:
            if source is None:
                return None
            return spread([source[i] for i in indices], samples, logprobs)

        sums = policy_loss(
            logprobs,
            tensors.advantage_B.to(logprobs.device),
            tensors.mask_BT.to(logprobs.device),
            self._config.algorithm,
            old_logprobs_BT=rows(self._old),
            rollout_logprobs_BT=tensors.rollout_BT.to(logprobs.device),
            reference_logprobs_BT=rows(self._reference),
            entropy_BT=entropy,
            length_limit=self._config.rollout.rollout_max_response_len,
        )
        _add_sums(self.totals, sums)
        return sums.loss / self._denominator

    def found(self) -> dict[int, np.ndarray]:
        """Response log-probabilities by sample, on the ranks that computed them."""
        return {
            index: values[response_span(self._samples[index])]
            for indices, logprobs in self._computed
            for index, values in zip(indices, logprobs.float().cpu().numpy(), strict=True)
        }


class Updater:
    """Turns scored batches into optimizer steps on one rank.

    Args:
        config: The run's configuration.
        stage: This rank's part of the model, adapters attached.
        adapters: The trainable tensors.
        optimizer: AdamW over them.
        context: This rank's place in the process groups.
    """

    def __init__(
        self,
        config: TrainConfig,
        stage: Stage,
        adapters: AdapterSet,
        optimizer: AdapterOptimizer,
        context: ParallelContext,
    ) -> None:
        self.config = config
        self.stage = stage
        self.adapters = adapters
        self.optimizer = optimizer
        self.context = context

    def step(self, batch: TrainBatch) -> StepStats:
        """Update from ``batch``; without any learning signal nothing moves and nothing counts.

        Raises:
            TrainingError: A loss or gradient is not finite (the step is not applied), an adapter
                got no gradient by the second update, or a replicated factor drifted.
        """
        if not batch.samples:
            return StepStats(applied=False)
        if not has_signal(batch):
            return StepStats(applied=False, logprobs=self._response_logprobs(batch))
        algorithm = self.config.algorithm
        reference = None
        if algorithm.kl_coef > 0:
            with self.adapters.enabled(False):
                reference = self._response_logprobs(batch)
        # The ratio is taken to the policy that made the samples: this one, unless they are stale.
        old = [np.asarray(s.rollout_logprobs) for s in batch.samples] if batch.stale else None
        first: list[np.ndarray] | None = None
        metrics: dict[str, float] = {}
        start = time.perf_counter()
        for _ in range(algorithm.updates_per_rollout):
            logprobs, metrics = self._update(batch, old=old, reference=reference)
            first = logprobs if first is None else first
            old = first if old is None else old
        tokens = algorithm.updates_per_rollout * sum(s.num_tokens for s in batch.samples)
        metrics["train/tokens_per_second"] = tokens / (time.perf_counter() - start)
        return StepStats(applied=True, metrics=metrics, logprobs=first or [])

    def _response_logprobs(self, batch: TrainBatch) -> list[np.ndarray]:
        with self.adapters.evaluation():
            found = sequence_logprobs(
                self.stage,
                self.context,
                [(*s.prompt_ids, *s.response_ids) for s in batch.samples],
                temperature=batch.temperature,
                max_tokens=self.config.parallel.max_tokens_per_gpu,
                routed_experts=_routed(batch.samples),
            )
        return [v[response_span(s)] for v, s in zip(found, batch.samples, strict=True)]

    def _update(
        self,
        batch: TrainBatch,
        *,
        old: list[np.ndarray] | None,
        reference: list[np.ndarray] | None,
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """One forward, backward and AdamW step; the log-probabilities are those before it."""
        algorithm = self.config.algorithm
        denominator = loss_denominator(batch.samples, algorithm.loss_aggregation)
        equal = self._equal_samples(batch.samples)
        plan = plan_for(
            [batch.samples[group[0]].num_tokens for group in equal],
            self.context,
            self.config.parallel.max_tokens_per_gpu,
        )
        batches = [
            self._batch([batch.samples[equal[g][0]] for g in chosen])
            for chosen in plan.micro_batches
        ]
        groups = [[equal[g] for g in chosen] for chosen in plan.micro_batches]
        loss = BatchLoss(self.config, batch.samples, groups, denominator, old, reference)
        self.optimizer.zero_grad()
        run_microbatches(
            self.stage,
            batches,
            loss,
            temperature=batch.temperature,
            with_entropy=True,
            entropy_gradient=algorithm.entropy_coef > 0,
        )
        self.adapters.sync_gradients(self.context)
        reduced = self._reduce(loss.totals)
        metrics = self._metrics(reduced, denominator)
        metrics["train/grad_norm"] = self._apply(metrics)
        return gather_by_index(loss.found(), len(batch.samples), self.context), metrics

    def _equal_samples(self, samples: Sequence[TrainSample]) -> list[list[int]]:
        """Indices of samples by equal tokens: short answers repeat, and each is run once.

        With dropout or replayed experts equal tokens do not mean equal results.
        """
        routed = any(s.routed_experts is not None for s in samples)
        if routed or self.adapters.selection.dropout > 0:
            return [[i] for i in range(len(samples))]
        # The split between prompt and response counts too: it decides which tokens are wanted.
        _, places = distinct([(len(s.prompt_ids), *s.prompt_ids, *s.response_ids) for s in samples])
        groups: list[list[int]] = [[] for _ in range(max(places) + 1)]
        for index, place in enumerate(places):
            groups[place].append(index)
        return groups

    def _batch(self, samples: Sequence[TrainSample]) -> ModelBatch:
        return model_batch(
            self.context,
            [(*s.prompt_ids, *s.response_ids) for s in samples],
            _routed(samples),
            [[False] * len(s.prompt_ids) + [True] * len(s.response_ids) for s in samples],
        )

    def _reduce(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        """Sums over all data-parallel ranks (the last stage of one tensor-parallel rank counts)."""
        names = _SUM_NAMES
        zero = torch.zeros((), dtype=torch.float64)
        values = torch.stack([totals.get(n, zero).double().cpu() for n in names])
        if self.context.world_size > 1:
            if not (self.context.is_last_stage and self.context.tp_rank == 0):
                values.zero_()
            dist.all_reduce(values)
        return dict(zip(names, values.tolist(), strict=True))

    def _metrics(self, sums: Mapping[str, float], denominator: int) -> dict[str, float]:
        tokens = max(1.0, sums["tokens"])
        metrics = {
            "train/loss": sums["loss"] / denominator,
            "train/lr": self.optimizer.lr,
            "train/tokens": sums["tokens"],
        }
        for name in ("ppo_kl", "clip_fraction", "importance_weight", "entropy"):
            metrics[f"train/{name}"] = sums[name] / tokens
        if self.config.algorithm.kl_coef > 0:
            metrics["train/kl"] = sums["kl"] / tokens
        if self.config.algorithm.importance_cap > 0:
            metrics["train/importance_capped"] = sums["importance_capped"] / tokens
        return metrics

    def _apply(self, metrics: Mapping[str, float]) -> float:
        """Clip, check and step; returns the gradient norm before clipping."""
        norm = self.adapters.grad_norm(self.context)
        if not (math.isfinite(norm) and math.isfinite(metrics["train/loss"])):
            self.optimizer.zero_grad()
            raise TrainingError(
                f"loss {metrics['train/loss']} with gradient norm {norm} at update "
                f"{self.optimizer.applied_steps}",
                "finite numbers; the update was not applied",
                "Continue from the last checkpoint with --resume and a lower --lr",
            )
        self._check_alive()
        limit = self.config.optimizer.clip_grad
        self.optimizer.step(limit / norm if limit and norm > limit else 1.0)
        interval = self.config.parallel.drift_check_interval
        if interval and self.optimizer.applied_steps % interval == 0:
            self.adapters.check_drift(self.context)
        return norm

    def _check_alive(self) -> None:
        """Every A and B has had a gradient by the second update, or the run stops."""
        if self.optimizer.applied_steps >= UPDATES_UNTIL_ALIVE:
            return
        self.adapters.record_gradients()
        if self.optimizer.applied_steps != UPDATES_UNTIL_ALIVE - 1:
            return
        dead = self.adapters.dead_sites(self.context)
        if dead:
            self.optimizer.zero_grad()
            raise TrainingError(
                f"{len(dead)} adapters got no gradient by update {UPDATES_UNTIL_ALIVE}: "
                + ", ".join(dead[:4])
                + (" ..." if len(dead) > 4 else ""),
                "a non-zero gradient of A and B on every selected projection",
                "Take the projections out of the selection, or report this",
            )


_SUM_NAMES = (
    "loss", "tokens", "ppo_kl", "clip_fraction", "importance_weight", "importance_capped", "kl",
    "entropy",
)  # fmt: skip


def _add_sums(totals: dict[str, Tensor], sums: LossSums) -> None:
    for name, value in (("loss", sums.loss.detach()), ("tokens", sums.tokens), *sums.sums.items()):
        totals[name] = totals[name] + value if name in totals else value


def _routed(samples: Sequence[TrainSample]) -> list[np.ndarray | None] | None:
    return (
        [s.routed_experts for s in samples]
        if any(s.routed_experts is not None for s in samples)
        else None
    )
