"""Sparse attention by chosen pools: what the indexer chooses, who computes it, what the GPU needs.

The kernels themselves run in ``test_sparse_interpreted.py`` and ``tests/gpu/test_sparse.py``.
"""

from __future__ import annotations

import logging

import pytest
import torch

from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.spec import DSA, TINY
from glm_lora.cli import main
from glm_lora.config import ParallelConfig, TrainConfig, build
from glm_lora.doctor.self_test import one_step
from glm_lora.model import dsa, fast
from glm_lora.model.batch import collate
from glm_lora.model.parallel import ParallelContext
from glm_lora.model.stage import build_stage
from glm_lora.targets.selection import make_selection
from glm_lora.train.worker import build_worker, init_process_group
from tests.model.sparse_checks import definition, seen_tokens
from tests.model.specs import ODD, SHORT_INDEX
from tests.model.weights import load, random_base, random_sequences
from tests.support import close, words

CHOOSING = {"short_index": SHORT_INDEX, "odd": ODD}


def dsa_block(spec, **kwargs):
    """The first sparse attention of a loaded model."""
    stage = build_stage(spec, ParallelContext(), dtype=torch.float32, **kwargs)
    load(stage, random_base(spec))
    return stage.layers[spec.layer_types.index(DSA)].attention.block


def indexed(block, spec, rows, length):
    """What the indexer needs of random tokens."""
    x, low = (
        torch.randn(rows * length, spec.hidden_size),
        torch.randn(rows * length, spec.q_lora_rank),
    )
    batch = collate(random_sequences([length] * rows, spec.vocab_size))
    return [part.unflatten(0, (rows, length)) for part in block.indexer.project(x, low, batch)]


@pytest.mark.parametrize("first", ["limit", 0, 3])
@pytest.mark.parametrize("name", CHOOSING)
def test_the_chosen_pools_are_those_of_the_mask(name, first):
    spec, length = CHOOSING[name], 47
    block = dsa_block(spec)
    first = spec.index_topk if first == "limit" else first
    index = indexed(block, spec, 2, length)
    (mask,) = block.indexer.visible(*index, first)
    (best,) = block.indexer.chosen(*index, first)
    assert best.dtype is torch.int32 and best.shape == (
        2,
        length - first,
        spec.index_topk // spec.index_kpool,
    )
    for row in range(2):
        assert torch.equal(seen_tokens(best[row], length, spec.index_kpool), mask[row])
    # From index_topk on there are always enough complete pools.
    assert bool((best >= 0).all()) == (first == spec.index_topk)


@pytest.mark.parametrize("name", CHOOSING)
def test_attending_to_latents_is_the_masked_attention(name):
    """The definition of the kernels against the path that every other test knows, in fp64."""
    spec, length = CHOOSING[name], 47
    block = dsa_block(spec).double()
    index = indexed(block.float(), spec, 1, length)
    block.double()
    heads, width = spec.num_attention_heads, spec.qk_head_dim
    q = torch.randn(1, length, heads, width, dtype=torch.float64, requires_grad=True)
    latents = torch.randn(1, length, spec.kv_lora_rank, dtype=torch.float64, requires_grad=True)
    weight = block.kv_b.weight.view(heads, width + spec.v_head_dim, -1)
    want = block._attend(q, block._keys_and_values(latents), *index, steady=True)
    (best,) = block.indexer.chosen(*index, spec.index_topk)
    late = q[0, spec.index_topk :]
    got = definition(late, latents[0], weight, best[0], spec.index_kpool, width**-0.5)
    close(got, want[0, spec.index_topk :], "fp64", atol=1e-12)
    up = torch.randn_like(got)
    wants = torch.autograd.grad(want[0, spec.index_topk :], (q, latents), up)
    for actual, expected in zip(torch.autograd.grad(got, (q, latents), up), wants, strict=True):
        close(actual, expected, "fp64", atol=1e-11)


@pytest.fixture
def said(caplog):
    """Log lines of a process in which nothing was said yet."""
    fast._say_no_sparse.cache_clear()
    caplog.set_level(logging.WARNING, logger=fast.__name__)
    yield lambda: [r.getMessage() for r in caplog.records]
    fast._say_no_sparse.cache_clear()


def test_where_it_cannot_run_one_line_says_so_and_the_masks_compute(said):
    spec = SHORT_INDEX
    batch = collate(random_sequences([30], spec.vocab_size))
    results = []
    for backend in ("auto", "sdpa", "triton"):
        stage = build_stage(spec, ParallelContext(), dtype=torch.float32, dsa_backend=backend)
        load(stage, random_base(spec))
        results.append(stage(batch))
        if backend != "triton":
            assert not said()
    assert all(torch.equal(r, results[0]) for r in results)
    assert said() == [
        "--dsa-backend triton: DSA runs as SDPA with masks: it needs a CUDA device, not cpu"
    ]


@pytest.mark.parametrize(
    ("kind", "dtype", "latent", "reason"),
    [
        ("cpu", torch.bfloat16, 512, "needs a CUDA device, not cpu"),
        ("cuda", torch.float32, 512, "needs bfloat16, not float32"),
        ("cuda", torch.bfloat16, 96, "kv_lora_rank is 96, not a power of two from 32 on"),
        ("cuda", torch.bfloat16, 16, "kv_lora_rank is 16, not a power of two from 32 on"),
        ("cuda", torch.bfloat16, 512, "no triton here"),
    ],
)
def test_each_reason_is_given(said, monkeypatch, kind, dtype, latent, reason):
    monkeypatch.setattr(fast, "missing", lambda path: "no triton here")
    for _ in range(2):
        assert fast.sparse_from("triton", torch.device(kind), dtype, latent, 64) is None
    assert len(said()) == 1 and reason in said()[0]
    assert fast.sparse_from("auto", torch.device(kind), dtype, latent, 64) is None
    assert len(said()) == 1, "nobody asked for it"


def test_auto_takes_it_from_the_length_at_which_it_is_faster(monkeypatch):
    monkeypatch.setattr(fast, "missing", lambda path: None)

    def start(backend, heads):
        return fast.sparse_from(backend, torch.device("cuda"), torch.bfloat16, 512, heads)

    assert [start(b, 64) for b in ("sdpa", "triton", "auto")] == [None, 0, 8192]
    # Fewer heads share the gathers and additions of a query.
    assert [start("auto", heads) for heads in (128, 32, 16, 8, 1)] == [
        8192, 16384, 20480, 32768, 32768,
    ]  # fmt: skip


def test_doctor_and_benchmarks_name_what_computes_it(monkeypatch):
    part = "DSA above index_topk"
    assert fast.active_paths()[part] == "torch (no CUDA device)"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fast, "missing", lambda path: None)
    assert fast.active_paths("sdpa")[part] == "SDPA with masks"
    auto = "masks below 8,192 tokens (64 heads), triton from there on"
    assert fast.active_paths()[part] == auto
    assert fast.active_paths("triton")[part] == "triton, chosen tokens only"
    monkeypatch.setattr(fast, "missing", lambda path: "no triton here")
    assert fast.active_paths("triton")[part] == "torch (no triton here)"


def test_the_option_takes_three_words(tmp_path, capsys):
    for word in ("auto", "sdpa", "triton"):
        assert build(ParallelConfig, {"dsa_backend": word}).dsa_backend == word
    assert build(ParallelConfig, {}).dsa_backend == "auto"
    options = ["--model-name", "tiny", "--run-dir", str(tmp_path / "run"), "--dsa-backend", "cudnn"]
    assert main(["train", *options]) == 2
    said = words(capsys.readouterr().err)
    assert "parallel.dsa_backend is 'cudnn'" in said and "'auto', 'sdpa' or 'triton'" in said


@pytest.mark.parametrize("build_with", ["worker", "self test"])
def test_the_option_reaches_the_layers(build_with, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(dsa, "sparse_from", lambda backend, *_: asked.append(backend))
    if build_with == "self test":
        one_step("cpu")
        assert asked == ["auto"]
        return
    config = TrainConfig(
        model_name="tiny",
        hf_checkpoint=tmp_path,
        ref_load=tmp_path,
        run_dir=tmp_path,
        dtype="float32",
        device="cpu",
        init="random",
        parallel=ParallelConfig(dsa_backend="triton"),
    )
    init_process_group(config, 0, 1, None)
    build_worker(config, make_selection("tiny", TINY, trainable_sites(TINY), rank=4, alpha=8.0))
    assert asked == ["triton"]
