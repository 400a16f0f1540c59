import json
import struct
from dataclasses import asdict
from pathlib import Path

import pytest

from glm_lora.arch.checkpoint_index import INDEX_FILE
from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.spec import ModelSpec


def write_model(folder: Path, spec: ModelSpec, *, index: bool = True) -> Path:
    """config.json, index and shard headers of ``spec``; the shards hold no weights."""
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
        header = {
            f"{s.disk_name}.weight": {
                "dtype": "BF16",
                "shape": list(s.shape),
                "data_offsets": [0, 0],
            }
            for s in trainable_sites(spec)
            if s.layer == layer
        }
        weight_map.update(dict.fromkeys(header, shard))
        encoded = json.dumps(header).encode()
        (folder / shard).write_bytes(struct.pack("<Q", len(encoded)) + encoded)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def model_folder(tmp_path):
    def make(spec: ModelSpec, name: str = "model", *, index: bool = True) -> Path:
        return write_model(tmp_path / name, spec, index=index)

    return make
