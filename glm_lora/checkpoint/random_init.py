"""Random weights without a checkpoint: any slice of any parameter from its key and a seed.

The value at a position is a hash of (seed, key, position), so it does not matter which rank makes
which slice, in what order or in what block sizes. Only 32-bit integer arithmetic and single
roundings are used, so every device makes the same bits.

The hash is the two-round 32-bit mixer ``x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15;
x *= 0x846ca68b; x ^= x >> 16`` ("lowbias32", C. Wellons, "Prospecting for Hash Functions", 2018).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from glm_lora.arch.projections import Param, all_params
from glm_lora.checkpoint.torch_dist import BaseHolder

STD = 0.02
"""Standard deviation of projections, embeddings and routers, as in transformers."""
_SQRT3 = 3**0.5
_DT_BIAS = (-6.9, -2.25)
"""Inverse softplus of decays from 0.001 to 0.1, the range flash-linear-attention starts from."""
_GOLDEN = 0x9E3779B9
_CPU_BLOCK = 2**19
_GPU_BLOCK = 2**25


def _signed(value: int) -> int:
    """A 32-bit pattern as the int32 with the same bits."""
    value &= 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value


def value_range(param: Param) -> tuple[float, float]:
    """The interval that the values of ``param`` are drawn from uniformly (one point: constant)."""
    leaf, path = param.row.leaf, param.row.path
    if leaf == "k_norm" and param.row.suffix == ".bias":
        return (0.0, 0.0)
    if leaf.endswith("norm") or path.endswith(("_scale", "index_kpool_compress_gate")):
        return (1.0, 1.0)
    if leaf in ("A_log", "e_score_correction_bias", "index_kpool_compress_ape"):
        return (0.0, 0.0)
    if path.startswith("hc_") and leaf.endswith("_base"):
        return (0.0, 0.0)
    if leaf == "dt_bias":
        return _DT_BIAS
    if leaf.endswith("conv1d"):
        bound = param.shape[-1] ** -0.5  # fan-in of a depthwise convolution is its kernel
        return (-bound, bound)
    return (-STD * _SQRT3, STD * _SQRT3)


def fill_random(
    param: Param, seed: int, out: torch.Tensor, first: int = 0, first_column: int = 0
) -> None:
    """Fill ``out`` with the slice of ``param`` that starts at row ``first``.

    Args:
        param: The parameter.
        seed: Of the whole base.
        out: On any device, in any dtype; ``[rows, ...]``. Two-dimensional parameters may be cut
            along both axes, others along axis 0 only.
        first: Index of the first row (axis 0) of the slice.
        first_column: Index of its first column (axis 1 of a matrix).
    """
    low, high = value_range(param)
    if low == high:
        out.fill_(low)
        return
    assert out.ndim == 2 or out.shape[1:] == param.shape[1:], "only matrices are cut on axis 1"
    row_size = param.numel // param.shape[0]
    columns = out.numel() // out.shape[0]
    block = _CPU_BLOCK if out.device.type == "cpu" else _GPU_BLOCK
    key = hashlib.sha256(f"{seed}\0{param.key}".encode()).digest()
    key_a, key_b = (_signed(int.from_bytes(key[i : i + 4], "little")) for i in (0, 4))
    assert row_size < 2**31 and param.shape[0] < 2**31

    rows = torch.arange(first, first + out.shape[0], dtype=torch.int32, device=out.device)
    seeds_R = _mix(rows.mul_(_signed(_GOLDEN)).bitwise_xor_(key_a)).bitwise_xor_(key_b)
    width = min(columns, block)
    height = max(1, block // columns)
    counter_C = torch.arange(width, dtype=torch.int32, device=out.device).mul_(_signed(_GOLDEN))
    for r in range(0, out.shape[0], height):
        target = out[r : r + height]
        if target.ndim != 2:
            target = target.view(target.shape[0], columns)
        for c in range(0, columns, width):
            stop = min(columns, c + width)
            offset = _signed((first_column + c) * _GOLDEN)
            positions = (counter_C[: stop - c] + offset).unsqueeze(0)
            bits = _mix(positions ^ seeds_R[r : r + height].unsqueeze(1))
            # The upper 24 bits are exact in fp32; they lie in [-2**23, 2**23).
            values = bits.bitwise_right_shift_(8).float()
            values.mul_((high - low) / 2**24)
            if low + high:
                values.add_((high + low) / 2)
            target[:, c:stop].copy_(values)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Hash int32 values in place; shifts are made logical by masking the sign's copies."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None)):
        shifted = x.bitwise_right_shift(shift).bitwise_and_((1 << (32 - shift)) - 1)
        x.bitwise_xor_(shifted)
        if factor is not None:
            x.mul_(_signed(factor))
    return x


@dataclass(frozen=True)
class RandomSource:
    """Random values as the source of a base: fp32 where the model keeps fp32, else bfloat16."""

    seed: int

    def dtype(self, param: Param) -> torch.dtype:
        """How the parameter is stored."""
        return torch.float32 if param.fp32 else torch.bfloat16

    def fill(self, param: Param, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` with rows from ``start`` on."""
        fill_random(param, self.seed, out, start)

    def describe(self) -> dict[str, object]:
        """What the manifest says about this source."""
        return {"kind": "random", "seed": self.seed, "skipped": {}}


@torch.no_grad()
def init_random(stage: BaseHolder, seed: int) -> None:
    """Fill a stage's base in place, each rank its own shard; equal at every (tp, pp, ep).

    Weights are rounded to bfloat16 first where a base on disk would hold bfloat16, so that a stage
    in fp32 gets the same numbers as one that loads the random base from disk.
    """
    params, ctx = all_params(stage.spec), stage.ctx
    for key, tensor in stage.base_parameters().items():
        param = params[key]
        first = [0, 0]
        if param.ep_axis is not None:
            first[param.ep_axis] = ctx.ep_rank * tensor.shape[param.ep_axis]
        elif param.tp_axis is not None:
            first[param.tp_axis] = ctx.tp_rank * tensor.shape[param.tp_axis]
        fill_random(param, seed, tensor, *first)
        if not param.fp32 and tensor.dtype is torch.float32:
            tensor.copy_(tensor.bfloat16())
