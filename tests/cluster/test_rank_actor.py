"""What travels from the trainer's ranks to the driver: real Ray, real ranks."""

from __future__ import annotations

import pytest
import ray

from glm_lora.cluster.actors import RankActor
from glm_lora.cluster.plan import plan
from tests.prepared import tiny_train_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_only_rank_zero_sends_its_adapter(tiny_root, tmp_path):
    config = tiny_train_config(tiny_root, tmp_path / "run", launcher="ray", num_gpus_per_node=2)
    selection = plan(config).selection
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        actors = [ray.remote(RankActor).options(num_cpus=1).remote() for _ in range(2)]
        address = ray.get(actors[0].address.remote())
        ray.get([a.start.remote(config, selection, i, address) for i, a in enumerate(actors)])
        first, other = ray.get([a.call.remote("adapter", "bfloat16") for a in actors])
    finally:
        ray.shutdown()
    assert first.selection == selection and len(first.tensors) == len(selection.tensor_shapes())
    assert other is None
