"""The chunk hook: same numbers, fewer rows, one instance only, idempotent."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.models.glm5_next import modeling_glm5_next as hf
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

from glm_lora.model.hf_hooks import fitted_chunk, mend_kda

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = Glm5NextTextConfig(
        num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        mlp_layer_types=["dense"] * 3,
        hidden_size=32,
        intermediate_size=32,
        vocab_size=32,
        linear_num_heads=2,
        linear_head_dim=16,
        hc_sinkhorn_iters=4,
        pad_token_id=0,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        index_n_heads=8,
        index_head_dim=16,
        index_topk=256,
        index_kpool=4,
    )
    return hf.Glm5NextTextModel(config).eval()


def run(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).last_hidden_state


@pytest.mark.parametrize("length", [1, 5, 64, 70])
def test_same_outputs_and_gradients(model: torch.nn.Module, length: int) -> None:
    ids = torch.randint(0, 32, (2, length), generator=torch.Generator().manual_seed(length))
    fitted = copy.deepcopy(model)
    assert mend_kda(fitted) == 2
    plain, quick = run(model, ids), run(fitted, ids)
    # fp32 sums in another order over two layers; values are of order 1 after the final norm.
    torch.testing.assert_close(quick, plain, atol=3e-6, rtol=0)
    probe = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1))
    name = "layers.0.self_attn.q_proj.weight"
    gradients = []
    for m, out in ((model, plain), (fitted, quick)):
        gradients.append(torch.autograd.grad((out * probe).sum(), m.get_parameter(name))[0])
    scale = gradients[0].abs().max()
    assert (gradients[1] - gradients[0]).abs().max() <= 1e-5 * max(float(scale), 1e-3)


def test_with_a_cache(model: torch.nn.Module) -> None:
    fitted = copy.deepcopy(model)
    mend_kda(fitted)
    ids = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        full = run(model, ids)
        start = fitted(input_ids=ids[:, :6], use_cache=True)
        outs = [start.last_hidden_state]
        for t in range(6, 9):
            step = fitted(
                input_ids=ids[:, t : t + 1],
                past_key_values=start.past_key_values,
                use_cache=True,
            )
            outs.append(step.last_hidden_state)
    torch.testing.assert_close(torch.cat(outs, 1), full, atol=3e-6, rtol=0)


def test_idempotent_and_local(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = hf.chunk_kimi_delta_attention

    def spy(*args: object, **kwargs: object) -> object:
        sizes.append(kwargs.get("chunk_size", 64))  # type: ignore[arg-type]
        return real(*args, **kwargs)

    monkeypatch.setattr(hf, "chunk_kimi_delta_attention", spy)
    fitted = copy.deepcopy(model)
    assert mend_kda(fitted) == mend_kda(fitted) == 2
    assert all(
        len(m._forward_pre_hooks) == 1
        for m in fitted.modules()
        if isinstance(m, hf.Glm5NextTextLinearAttention)
    )
    ids = torch.ones(1, 5, dtype=torch.long)
    run(fitted, ids)
    run(model, ids)
    assert sizes == [5, 5, 64, 64]


@pytest.mark.parametrize(
    ("length", "chunk"), [(1, 1), (5, 5), (64, 64), (65, 33), (70, 35), (128, 64), (129, 43)]
)
def test_fitted_chunk(length: int, chunk: int) -> None:
    assert fitted_chunk(length) == chunk


KERNELS_FOR_A_GPU_ONLY = """
def _refuse(*args, chunk_size=None, **kwargs):
    raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

chunk_kda = fused_recurrent_kda = _refuse
"""


def test_a_machine_with_gpu_kernels_computes_on_the_cpu_too(tmp_path: Path) -> None:
    """Seen on an H200 with flash-linear-attention: `prepare --model-name tiny` ended in Triton."""
    package = tmp_path / "fla" / "ops" / "kda"
    package.mkdir(parents=True)
    (tmp_path / "fla" / "__init__.py").write_text("from . import ops")
    (tmp_path / "fla" / "ops" / "__init__.py").write_text("from . import kda")
    (package / "__init__.py").write_text(KERNELS_FOR_A_GPU_ONLY)
    code = """
import sys, torch
from transformers.models.glm5_next import modeling_glm5_next as hf
from glm_lora.checkpoint.tiny import build_model
ids = torch.tensor([[2, 15, 17]])
if "mended" not in sys.argv:
    try:
        hf.chunk_kimi_delta_attention(torch.ones(1))
    except ValueError:
        print("taken")
model = build_model()
out = model(input_ids=ids, use_cache=True)  # the chunked rule, then the recurrent one
more = model(input_ids=ids[:, :1], past_key_values=out.past_key_values, use_cache=True)
print(float(out.logits.double().sum() + more.logits.double().sum()))
"""
    lines = []
    for path in (f"{tmp_path}:{ROOT}", str(ROOT)):
        done = subprocess.run(
            [sys.executable, "-c", code, *(["mended"] if lines else [])],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        lines.append(done.stdout.split())
    assert lines[0] == ["taken", *lines[1]], "the kernels were found, and the numbers are the same"
