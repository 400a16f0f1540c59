"""Run micro-batches forward and backward through the pipeline.

One stage runs them one after the other. Several stages use megatron-core's 1F1B schedule with a
communicator of our own, because the stock one allocates on the current CUDA device and exchanges
one fixed shape, while our micro-batches differ in length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from glm_lora.model.batch import ModelBatch
from glm_lora.model.parallel import Group
from glm_lora.model.stage import Stage

LossFn = Callable[[int, Tensor, Tensor | None], Tensor]
"""(index of the micro-batch, log-probabilities [B, L-1], entropies or None) -> scalar loss."""


@dataclass(frozen=True)
class MicrobatchOutput:
    """What the last stage computed for one micro-batch, without gradient."""

    logprobs: Tensor
    """fp32 ``[B, L - 1]``."""
    entropy: Tensor | None
    """fp32 ``[B, L - 1]``, nats."""
    loss: Tensor | None
    """Scalar; None when only run forward."""


def run_microbatches(
    stage: Stage,
    batches: Sequence[ModelBatch],
    loss_fn: LossFn | None,
    forward_only: bool = False,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_gradient: bool = True,
) -> list[MicrobatchOutput]:
    """Run every micro-batch and accumulate adapter gradients.

    All ranks of the pipeline pass the same batches; ranks that share experts or tensors pass the
    same number of them (``collate([])`` fills up).

    Args:
        stage: This rank's stage.
        batches: Micro-batches in order.
        loss_fn: Called on the last stage. Losses are summed as they are: divide by the global
            token count inside. Not called when ``forward_only``.
        forward_only: No loss and no gradient.
        temperature: Divides the logits.
        with_entropy: Pass entropies to ``loss_fn``.
        entropy_gradient: Those entropies have a gradient.

    Returns:
        One output per micro-batch on the last stage; an empty list elsewhere.
    """

    def score(i: int, hidden: Tensor) -> tuple[Tensor, MicrobatchOutput]:
        logprobs, entropy = stage.token_logprobs(
            hidden, batches[i], temperature, with_entropy, entropy_gradient
        )
        if forward_only:
            loss = logprobs.new_zeros(())
        else:
            assert loss_fn is not None
            loss = loss_fn(i, logprobs, entropy)
        output = MicrobatchOutput(
            logprobs.detach(),
            None if entropy is None else entropy.detach(),
            None if forward_only else loss.detach().clone(),
        )
        return loss, output

    with torch.set_grad_enabled(not forward_only):
        if stage.ctx.pp_group is not None:
            return _pipelined(stage, batches, score, forward_only)
        outputs: list[MicrobatchOutput] = []
        for i, batch in enumerate(batches):
            loss, output = score(i, stage(batch))
            if loss.requires_grad:
                loss.backward()
            outputs.append(output)
        return outputs


def _pipelined(
    stage: Stage,
    batches: Sequence[ModelBatch],
    score: Callable[[int, Tensor], tuple[Tensor, MicrobatchOutput]],
    forward_only: bool,
) -> list[MicrobatchOutput]:
    # Imported here: megatron's schedules take seconds to import and one stage needs none of them.
    from megatron.core.pipeline_parallel.schedules import (
        forward_backward_pipelining_without_interleaving,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection

    model = _pipeline_model(stage)
    nothing = torch.zeros((), dtype=torch.int)

    def forward_step(items: Iterator[int], _model: Any) -> tuple[Tensor, Any]:
        i = next(items)
        out, output = stage(batches[i], model.streams), None
        if stage.is_last:
            out, output = score(i, out)
        # Three values: the schedule then neither divides nor scales the loss.
        return out, lambda loss: (loss, nothing, output)

    pp_group = stage.ctx.pp_group
    assert pp_group is not None
    groups = ProcessGroupCollection(
        tp=stage.ctx.tp_group, cp=_OneRank(), embd=None, pos_embd=None, pp=pp_group, dp_cp=None
    )
    on_cuda = stage.ctx.device.type == "cuda"
    redirect: AbstractContextManager[Any] = nullcontext() if on_cuda else _NoCuda()
    with redirect:
        return forward_backward_pipelining_without_interleaving(
            forward_step_func=forward_step,
            data_iterator=iter(range(len(batches))),
            model=model,
            num_microbatches=len(batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            p2p_communicator=_Neighbours(stage, batches, model.config),  # pyright: ignore
            pg_collection=groups,  # pyright: ignore
        )


class _OneRank:
    """Stands for the context-parallel group that this model does not have."""

    @staticmethod
    def size() -> int:
        return 1


class _NoCuda(TorchFunctionMode):
    """The schedule counts tokens in ``torch.zeros(..., device="cuda")``; keep that on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def _pipeline_model(stage: Stage) -> Any:
    """What the schedule expects of a model: a configuration, a type and an input slot."""
    from megatron.core.enums import ModelType
    from megatron.core.model_parallel_config import ModelParallelConfig

    config = ModelParallelConfig(
        pipeline_model_parallel_size=stage.ctx.pp_size,
        pipeline_dtype=stage.dtype,
        deallocate_pipeline_outputs=True,
        variable_seq_lengths=True,
    )
    extra = {
        "hidden_size": stage.spec.hc_mult * stage.spec.hidden_size,
        "calculate_per_token_loss": True,
        "fine_grained_activation_offloading": False,
    }
    for name, value in extra.items():  # fields of megatron's larger TransformerConfig
        setattr(config, name, value)
    model = SimpleNamespace(config=config, model_type=ModelType.encoder_or_decoder, streams=None)

    def set_input_tensor(tensors: Sequence[Tensor | None]) -> None:
        model.streams = tensors[0]

    model.set_input_tensor = set_input_tensor
    return model


class _Neighbours:
    """Sends streams to the next stage and their gradients to the one before.

    Micro-batches travel in order in both directions, so each receive knows its shape from the
    batch it is for. Tensors come and go in lists of one, as the schedule handles them.
    """

    def __init__(self, stage: Stage, batches: Sequence[ModelBatch], config: Any) -> None:
        assert stage.ctx.pp_group is not None
        self.config, self.pp_group = config, stage.ctx.pp_group
        self.stage, self.batches = stage, batches
        self.before = _peer(self.pp_group, -1)
        self.after = _peer(self.pp_group, 1)
        self.forwards, self.backwards = iter(batches), iter(batches)
        # What megatron-core 0.19 asks the communicator for; 0.16 asks the group.
        self.total_stages, self.current_stage = stage.ctx.pp_size, stage.ctx.pp_rank
        self.is_pp_first_stage, self.is_pp_last_stage = stage.is_first, stage.is_last

    def _empty(self, batches: Iterator[ModelBatch], requires_grad: bool) -> Tensor:
        return torch.empty(
            self.stage.streams_shape(next(batches)),
            dtype=self.stage.dtype,
            device=self.stage.ctx.device,
            requires_grad=requires_grad,
        )

    def _exchange(
        self, sent: Tensor | None, to: int | None, received: Tensor | None, source: int | None
    ) -> None:
        ops: list[dist.P2POp] = []
        if sent is not None:
            sent = sent.detach().contiguous()
            ops.append(dist.P2POp(dist.isend, sent, to, self.pp_group))
        if received is not None:
            ops.append(dist.P2POp(dist.irecv, received.detach(), source, self.pp_group))
        if ops:
            for work in dist.batch_isend_irecv(ops):
                work.wait()

    def recv_forward(self, _shapes: Any, is_first_stage: bool) -> list[Tensor | None]:
        if is_first_stage:
            return [None]
        x = self._empty(self.forwards, torch.is_grad_enabled())
        self._exchange(None, None, x, self.before)
        return [x]

    def recv_backward(self, _shapes: Any, is_last_stage: bool) -> list[Tensor | None]:
        if is_last_stage:
            return [None]
        grad = self._empty(self.backwards, False)
        self._exchange(None, None, grad, self.after)
        return [grad]

    def send_forward(self, tensors: list[Tensor], is_last_stage: bool) -> None:
        if not is_last_stage:
            self._exchange(tensors[0], self.after, None, None)

    def send_backward(self, grads: list[Tensor], is_first_stage: bool) -> None:
        if not is_first_stage:
            self._exchange(grads[0], self.before, None, None)

    def send_forward_recv_backward(
        self, tensors: list[Tensor], _shapes: Any, is_last_stage: bool
    ) -> list[Tensor | None]:
        if is_last_stage:
            return [None]
        grad = self._empty(self.backwards, False)
        self._exchange(tensors[0], self.after, grad, self.after)
        return [grad]

    def send_backward_recv_forward(
        self, grads: list[Tensor], _shapes: Any, is_first_stage: bool
    ) -> list[Tensor | None]:
        if is_first_stage:
            return [None]
        x = self._empty(self.forwards, torch.is_grad_enabled())
        self._exchange(grads[0], self.before, x, self.before)
        return [x]


def _peer(group: Group, offset: int) -> int | None:
    """Global rank of a neighbouring stage; None past either end."""
    place = dist.get_rank(group) + offset
    inside = 0 <= place < dist.get_world_size(group)
    return dist.get_global_rank(group, place) if inside else None
