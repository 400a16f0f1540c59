"""The Triton kernels on CPU tensors, in Triton's interpreter: ``make test-kernels``."""

from __future__ import annotations

import pytest
import torch

from tests.model.interpreter import needs_interpreter
from tests.model.kernel_checks import FP32, Bench, KernelChecks

needs_interpreter()

# The interpreter cuts fp32 down to bfloat16 instead of rounding it: 2^-8 instead of 2^-9.
CUT_BF16 = 8e-3


@pytest.mark.usefixtures("guarded_memory", "unwritten_is_nan")
class TestInterpreted(KernelChecks):
    @pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def bench(self, request):
        return Bench("cpu", request.param, FP32 if request.param is torch.float32 else CUT_BF16)

    @pytest.fixture
    def dots(self):
        """The interpreter's ``dot`` takes the bits of a bfloat16 for an integer: fp32 only."""
        return Bench("cpu", torch.float32, FP32)


@pytest.mark.usefixtures("guarded_memory", "unwritten_is_nan")
class TestTheGuard:
    x = torch.arange(16.0)[4:9]

    def test_what_lies_inside_is_allowed(self):
        from tests.model.faulty_kernels import copy

        assert copy(self.x, 5, 5).tolist() == [4, 5, 6, 7, 8]

    @pytest.mark.parametrize(("reads", "writes", "what"), [(6, 5, "read"), (5, 6, "write")])
    def test_one_element_too_many(self, reads, writes, what):
        from tests.model.faulty_kernels import copy

        with pytest.raises(Exception, match=f"{what} outside of the kernel's tensors"):
            copy(self.x, reads, writes)

    def test_what_is_not_written_is_nan(self):
        from tests.model.faulty_kernels import copy

        assert copy(self.x, 5, 4).isnan().tolist() == [False] * 4 + [True]


def huge(*shape, dtype=torch.bfloat16):
    """More elements than int32 counts. No memory is used before something is written."""
    found = torch.empty(shape, dtype=dtype)
    assert found.numel() > 2**31
    return found


def backward(outputs, inputs):
    """Gradients of ``inputs`` for any upstream."""
    torch.autograd.grad(outputs, inputs, [torch.empty_like(x) for x in outputs])


@pytest.mark.usefixtures("guarded_memory", "last_program")
class TestOffsetsBeyondInt32:
    """At the widths of GLM-5.3-Flash."""

    def test_convolution(self):
        from glm_lora.model.kernels.kda import conv_silu

        tokens, width = 2**18 + 1, 8192
        mixed, weight = huge(tokens, 3 * width).requires_grad_(), torch.randn(3 * width, 4)
        place = torch.arange(tokens, dtype=torch.int32)
        backward(conv_silu(mixed, weight, place)[:3], [mixed])

    def test_norms(self):
        from glm_lora.model.kernels.kda import gated_norm, unit

        x = huge(2**18 + 1, 64, 128).requires_grad_()
        backward([gated_norm(x, torch.empty_like(x), torch.ones(128), 1e-5)], [x])
        backward([unit(x)], [x])

    def test_swiglu(self):
        from glm_lora.model.kernels.moe import swiglu

        x, scale = huge(2**20 + 1, 2 * 2048).requires_grad_(), torch.ones(2**20 + 1)
        backward([swiglu(x, 7.0, scale.requires_grad_())], [x, scale])

    def test_rows_of_a_token(self):
        from glm_lora.model.kernels.moe import sum_rows

        many = 2**19 + 1
        sum_rows(huge(many, 4096), torch.full((1, 8), many - 1))
        sum_rows(torch.empty(1, 4096), torch.zeros(many, 8, dtype=torch.int64))

    def test_hyper_connection(self):
        from glm_lora.model.kernels import mhc

        tokens, hidden = 2**17 + 1, 4096
        streams = huge(tokens, 4, hidden, dtype=torch.float32).requires_grad_()
        y = torch.empty(tokens, hidden, requires_grad=True)
        fn, base, scale = torch.randn(24, 4 * hidden), torch.randn(24), torch.ones(3)
        x, post, comb, kept = mhc.read(
            streams, fn, base, scale, iterations=20, eps=1e-6, norm_eps=1e-5
        )
        backward([x, mhc.write(kept, y, post, comb)], [streams, y])

    def test_head(self):
        from glm_lora.model.kernels.head import factors_, statistics

        rows, vocabulary = 2**14, 154_880
        logits, per_row = huge(rows, vocabulary), torch.zeros(rows)
        targets = torch.full((rows,), vocabulary - 1)
        statistics(logits, targets, 0, 1.0)
        factors_(logits, targets, 0, per_row, per_row, 1.0)

    @pytest.mark.parametrize(("rows", "pools"), [(2**19 + 1, 8), (2**16 + 1, 2**15)])
    def test_indexer(self, rows, pools):
        from glm_lora.model.kernels.indexer import scores

        query = torch.empty(rows, 32, 128)
        assert max(query.numel(), rows * pools) > 2**31
        scores(query, torch.ones(rows, 32), torch.empty(pools, 128), 0, 4)
