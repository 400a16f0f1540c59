"""An adapter between processes: one block of bytes, whatever its tensors share."""

from __future__ import annotations

import pickle

import pytest
import torch

from glm_lora.arch.spec import TINY
from glm_lora.protocols import AdapterState
from tests.model.weights import everything

NAN = 0x7FC1  # a NaN with a payload, which arithmetic would lose
TENSORS = {
    "b": torch.tensor([[1.0, -0.0], [float("inf"), 1e-40]]),
    "a": torch.tensor([3.0, -2.0, 0.5]).bfloat16(),
    "none": torch.empty(0, 4),
    "odd": torch.tensor([NAN], dtype=torch.int16).view(torch.bfloat16),
    "turned": torch.arange(6.0).view(2, 3).t(),
}


def state(tensors: dict[str, torch.Tensor]) -> AdapterState:
    return AdapterState(everything(TINY), tensors, 3, "digest")


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def copied(value: AdapterState, out_of_band: bool) -> tuple[AdapterState, int, list]:
    buffers: list = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append if out_of_band else None)
    # What shared memory gives may not be written to.
    frozen = [memoryview(bytes(buffer.raw())) for buffer in buffers]
    return pickle.loads(data, buffers=frozen), len(data), frozen


@pytest.mark.parametrize("out_of_band", [True, False])
def test_a_state_arrives_bit_for_bit_and_can_be_written_to(out_of_band):
    sent = state(TENSORS)
    got, _, _ = copied(sent, out_of_band)
    assert got.selection == sent.selection and (got.version, got.digest) == (3, "digest")
    assert list(got.tensors) == list(TENSORS)
    for key, tensor in TENSORS.items():
        assert got.tensors[key].dtype is tensor.dtype and got.tensors[key].shape == tensor.shape
        assert bits(got.tensors[key]) == bits(tensor), key
    got.tensors["b"].zero_()
    assert got.tensors["a"].tolist() == [3.0, -2.0, 0.5]


def test_views_of_one_buffer_are_sent_once():
    whole = torch.arange(40_000.0)
    views = {str(i): part for i, part in enumerate(whole.split(100))}
    got, size, buffers = copied(state(views), out_of_band=True)
    assert torch.equal(torch.cat(list(got.tensors.values())), whole)
    assert len(buffers) == 1 and buffers[0].nbytes <= whole.nbytes + 16 * len(views)
    _, alone, _ = copied(state({}), out_of_band=True)
    assert size - alone < 100 * len(views)


def test_older_protocols_work_too():
    data = pickle.dumps(state(TENSORS), protocol=2)
    assert bits(pickle.loads(data).tensors["odd"]) == bits(TENSORS["odd"])


def test_what_arrives_shares_no_memory():
    got, _, _ = copied(state(TENSORS), out_of_band=True)
    for tensor in got.tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
