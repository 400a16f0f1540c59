"""The sparse attention kernels beside masked attention: from what length on which is faster.

    python benchmarks/sparse_kernel.py --json benchmarks/results/sparse_h200.json

One block of 1,024 queries at the end of a sequence of 32,768 tokens, the model's sizes, random
pools. The sparse kernels take the same time at every length; masked attention grows with the keys
that a block sees. ``--tiles`` measures every tile (tokens, warps, stages) rather than the ones in
use. Times are medians in milliseconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.json_output import add_json, print_json
from glm_lora.model.kernels import sparse

LATENT, POOL, POOLS, QUERIES, LENGTH, HEAD = 512, 4, 512, 1024, 32768, 256
SCALE = HEAD**-0.5
TILES = [*product((32, 64), (4, 8), (1, 2, 3))]


def milliseconds(work: Callable[[], object]) -> float:
    """Median time of ``work`` on the device."""
    import triton  # pyright: ignore[reportMissingImports]

    return triton.testing.do_bench(work, warmup=20, rep=100, return_mode="median")


class Block:
    """Random inputs of one block of queries."""

    def __init__(self, heads: int) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

        self.query, self.up = noise(heads, QUERIES, LATENT), noise(heads, QUERIES, LATENT)
        self.latents = noise(LENGTH, LATENT) * 0.1
        self.first = LENGTH - QUERIES
        complete = (self.first + 1) // POOL
        drawn = torch.rand(QUERIES, complete, generator=generator, device="cuda")
        self.chosen = drawn.topk(POOLS).indices.int().contiguous()

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Results and logarithms of sums."""
        return sparse.attend(self.query, self.latents, self.chosen, self.first, POOL, SCALE)

    def backward(self) -> Callable[[], object]:
        """The backward pass on the results of one forward pass."""
        out, log_sum = self.forward()
        delta = (self.up.float() * out.float()).sum(-1)
        total = torch.zeros(LENGTH, LATENT, device="cuda")
        return lambda: sparse.gradients(
            self.query, self.latents, self.chosen, self.up, log_sum, delta, self.first, POOL,
            SCALE, total,
        )  # fmt: skip


def masked(heads: int, keys: int) -> dict[str, Any]:
    """The masked path of as many queries, about 2,048 of the keys visible to each."""
    q, k, v = (
        torch.randn(1, heads, n, HEAD, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (QUERIES, keys, keys)
    )
    seen = torch.rand(1, 1, QUERIES, keys, device="cuda") < POOLS * POOL / keys

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=SCALE)

    out = forward()
    up = torch.randn_like(out)
    backward = milliseconds(lambda: torch.autograd.grad(out, (q, k, v), up, retain_graph=True))
    return {"keys": keys, "forward_ms": milliseconds(forward), "backward_ms": backward}


def tiles(heads: int, every: bool) -> list[dict[str, Any]]:
    """Times of the sparse kernels by tile."""
    block, rows = Block(heads), []
    size = sparse.heads_of_a_program(heads)
    for kind, table in (("forward", sparse.FORWARD_TILES), ("backward", sparse.BACKWARD_TILES)):
        used = table[size]
        for tile in TILES if every else [used]:
            row: dict[str, Any] = {"kind": kind, "tile": tile, "used": tile == used}
            try:
                table[size] = used
                work = block.forward if kind == "forward" else block.backward()
                table[size] = tile
                row["ms"] = milliseconds(work)
            except Exception as error:  # too much shared memory, for one; the others go on
                row["error"] = f"{type(error).__name__}: {error}"[:200]
            rows.append(row)
            print(heads, row, flush=True)
        table[size] = used
    return rows


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", default="64,32,16,8", help="heads on a rank")
    parser.add_argument("--keys", default="8192,16384,32768", help="keys of the masked path")
    parser.add_argument("--tiles", action="store_true", help="measure every tile")
    add_json(parser)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "heads": {},
    }
    for heads in (int(n) for n in args.heads.split(",")):
        result["heads"][heads] = {
            "sparse": tiles(heads, args.tiles),
            "masked": [masked(heads, int(keys)) for keys in args.keys.split(",")],
        }
    print_json(args.json, result)


if __name__ == "__main__":
    main()
