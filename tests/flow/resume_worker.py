"""One rank (under torchrun) that loads a checkpoint, saves it again, and takes three more steps.

``resume_worker.py CONFIG.toml CHECKPOINT BATCHES OUTPUT``: the batches are pickled by the test.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch

from glm_lora.config import TrainConfig, from_toml
from glm_lora.settings import spec_of, torchrun_world
from glm_lora.targets.resolve import resolve
from glm_lora.train.worker import build_worker, init_process_group


def main(config_file: str, checkpoint: str, batches: str, output: str) -> None:
    config = from_toml(TrainConfig, Path(config_file))
    rank, world = torchrun_world() or (0, 1)
    init_process_group(config, rank, world, None)
    spec = spec_of(config.model_name, config.hf_checkpoint)
    worker = build_worker(config, resolve(spec, config.model_name, config.selection).selection)
    extra = worker.load(Path(checkpoint))
    worker.save(Path(output) / "iter_0000003", extra)
    for batch in pickle.loads(Path(batches).read_bytes()):
        assert worker.step(batch).applied
    state = worker.adapter()
    if rank == 0:
        torch.save(dict(state.tensors), Path(output) / "adapter.pt")
    worker.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
