"""A trainer gives its memory away, takes it back and saves meanwhile: bit-equal, tiny model."""

from __future__ import annotations

import weakref

import pytest
import torch

from glm_lora.model.linear import ProjectionGroup
from glm_lora.settings import resolve_train, spec_of
from glm_lora.targets.resolve import resolve
from glm_lora.train.worker import build_worker, init_process_group


@pytest.fixture
def worker_of(tiny, tiny_root, tmp_path):
    made = []

    def make(**values):
        given = {"model_name": "tiny", "launcher": "inline", "run_dir": str(tmp_path), **values}
        names = ("models", "ckpt", "data")
        models, ckpts, data = (tiny_root / name for name in names)
        config = resolve_train(given, models=models, ckpts=ckpts, data=data)
        spec = spec_of("tiny", config.hf_checkpoint)
        init_process_group(config, 0, 1, None)
        worker = build_worker(config, resolve(spec, "tiny", config.selection).selection)
        made.append(worker)
        return worker

    yield make
    if made:
        made[-1].close()


def storage_bytes(worker) -> int:
    return sum(t.untyped_storage().nbytes() for t in worker.stage.parameters())


@pytest.mark.parametrize("target", ["cpu", "disk"])
def test_everything_comes_back_bit_equal(worker_of, target):
    worker = worker_of(offload_train_target=target, sglang={"sglang_colocated": True})
    prompt = [[2, 15, 17, 5, 3]]
    before, digest, held = worker.logprobs(prompt)[0], worker.verify_base(), storage_bytes(worker)
    assert held > 0
    for cycle in range(3):
        out = worker.offload()
        assert storage_bytes(worker) == 0
        assert out["offload/bytes_freed"] >= held
        # The base is frozen: it is copied once, never again.
        assert (out["offload/bytes_to_host"] >= held) == (cycle == 0)
        back = worker.onload()
        assert back["offload/bytes_to_device"] == out["offload/bytes_freed"]
    assert ("in files without a name in" in worker.host_copy_summary()) == (target == "disk")
    assert storage_bytes(worker) == held
    assert (worker.logprobs(prompt)[0] == before).all()
    assert worker.verify_base() == digest


def test_the_copies_of_the_adapters_leave_too(worker_of):
    worker = worker_of()
    groups = [m for m in worker.stage.modules() if isinstance(m, ProjectionGroup)]
    worker.logprobs([[2, 15, 17, 5, 3]])
    made = [weakref.ref(g._latest.b) for g in groups if g._latest is not None]
    assert len(made) > 20
    worker.offload()
    assert [copy() for copy in made if copy() is not None] == []


def test_taking_the_memory_when_it_is_held_does_nothing(worker_of):
    worker = worker_of()
    digest = worker.verify_base()
    assert worker.onload()["offload/bytes_to_device"] == 0
    worker.offload()
    assert worker.offload()["offload/bytes_freed"] == 0
    worker.onload()
    assert worker.verify_base() == digest


def test_a_tensor_that_numpy_has_looked_at_comes_back_too(worker_of):
    """Its CPU storage can never be resized again; the drift check looks at adapters so."""
    worker = worker_of()
    adapter = next(iter(worker.adapters.parameters().values()))
    before = adapter.detach().numpy().copy()
    worker.offload()
    with torch.no_grad():
        adapter.fill_(7)  # whatever happens to the device's memory meanwhile
    worker.onload()
    assert (adapter.detach().numpy() == before).all()


def test_a_checkpoint_saved_while_the_memory_is_away_is_whole(worker_of, tmp_path):
    worker = worker_of()
    generator = torch.Generator().manual_seed(1)
    for parameter in worker.adapters.parameters().values():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    digest = worker.adapter().digest
    worker.offload()
    worker.save(tmp_path / "checkpoints" / "iter_0000001")
    worker.onload()
    assert worker.adapter().digest == digest
    for parameter in worker.adapters.parameters().values():
        parameter.data.zero_()
    worker.load(tmp_path / "checkpoints" / "iter_0000001")
    assert worker.adapter().digest == digest


def test_what_changes_during_a_save_is_not_in_it(worker_of, tmp_path):
    worker = worker_of()
    digest = worker.adapter().digest
    folder = tmp_path / "checkpoints" / "iter_0000001"
    worker.begin_save(folder)
    for parameter in worker.adapters.parameters().values():
        parameter.data.add_(1.0)
    worker.write_save()
    metrics = worker.finish_save()
    assert metrics["save/bytes"] == 41056 * 4 * 3
    worker.load(folder)
    assert worker.adapter().digest == digest
