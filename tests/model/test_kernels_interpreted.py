"""The Triton kernels on CPU tensors, in Triton's interpreter: ``make test-kernels``."""

from __future__ import annotations

import pytest
import torch

from tests.model.interpreter import needs_interpreter
from tests.model.kernel_checks import FP32, Bench, KernelChecks

needs_interpreter()

# The interpreter cuts fp32 down to bfloat16 instead of rounding it: 2^-8 instead of 2^-9.
CUT_BF16 = 8e-3


@pytest.mark.usefixtures("guarded_memory")
class TestInterpreted(KernelChecks):
    @pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def bench(self, request):
        return Bench("cpu", request.param, FP32 if request.param is torch.float32 else CUT_BF16)

    @pytest.fixture
    def dots(self):
        """The interpreter's ``dot`` takes the bits of a bfloat16 for an integer: fp32 only."""
        return Bench("cpu", torch.float32, FP32)


@pytest.mark.usefixtures("guarded_memory")
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
