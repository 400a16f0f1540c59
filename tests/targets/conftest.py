import json
from dataclasses import asdict
from pathlib import Path

import pytest

from glm_lora.arch.checkpoint_index import INDEX_FILE
from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.spec import ModelSpec
from tests.hollow import write_hollow


def write_model(folder: Path, spec: ModelSpec, *, index: bool = True) -> Path:
    """config.json, index and shard headers of ``spec``; the weights are holes."""
    folder.mkdir(exist_ok=True)
    text = asdict(spec)
    text["eos_token_id"] = list(text.pop("eos_token_ids"))
    config = {"model_type": "glm5_next", "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    if not index:
        return folder
    weight_map: dict[str, str] = {}
    for layer in range(spec.num_hidden_layers):
        shard = f"model-{layer:05}.safetensors"
        tensors = {
            f"{s.disk_name}.weight": ("BF16", s.shape)
            for s in trainable_sites(spec)
            if s.layer == layer
        }
        weight_map.update(dict.fromkeys(tensors, shard))
        write_hollow(folder / shard, tensors)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def model_folder(tmp_path):
    def make(spec: ModelSpec, name: str = "model", *, index: bool = True) -> Path:
        return write_model(tmp_path / name, spec, index=index)

    return make
