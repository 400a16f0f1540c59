"""The data files are what torch.save and torch.distributed.checkpoint write."""

import io
import zipfile

import pytest
import torch

from glm_lora.arch.projections import all_params
from glm_lora.arch.spec import FULL
from glm_lora.checkpoint.base_writer import plan_parts, record_frame
from glm_lora.checkpoint.random_init import RandomSource
from glm_lora.fingerprint import tensor_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 70, 33)])
def test_a_framed_record_is_a_saved_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape).to(dtype)
    before, behind = record_frame(dtype, shape)
    record = before + bytes(tensor_bytes(value)) + behind
    loaded = torch.load(io.BytesIO(record), weights_only=True)
    assert loaded.dtype is dtype and torch.equal(loaded, value)
    torch.save(value, saved := io.BytesIO())
    ours, theirs = (zipfile.ZipFile(io.BytesIO(b)) for b in (record, saved.getvalue()))
    sizes = [
        {i.filename.split("/", 1)[1]: (i.header_offset, i.file_size) for i in z.infolist()}
        for z in (ours, theirs)
    ]
    assert sizes[0] == sizes[1]
    assert torch.serialization.get_crc32_options(), "the process-wide option is as it was"


def test_parts_cover_everything_once_in_order() -> None:
    params = all_params(FULL)
    source = RandomSource(0)
    parts = plan_parts(params, source)
    assert [key for part in parts for key in part.keys] == list(params)
    assert [part.index for part in parts] == list(range(len(parts)))
    total = sum(p.numel * source.dtype(p).itemsize for p in params.values())
    assert sum(part.nbytes for part in parts) == total
    assert all(part.nbytes <= 2**29 or len(part.keys) == 1 for part in parts)
