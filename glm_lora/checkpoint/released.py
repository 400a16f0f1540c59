"""Where a released model's weights and prompts come from: a local folder, the hub, or a seed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm_lora.arch.agreement import first_layers_as
from glm_lora.arch.checkpoint_index import CUT_KEY, INDEX_FILE, SINGLE_FILE, parse_index
from glm_lora.arch.spec import BUILTIN, ModelSpec, spec_from_config, spec_from_dir
from glm_lora.checkpoint import hub
from glm_lora.checkpoint.base_writer import BaseSource
from glm_lora.checkpoint.convert import HfSource, open_source, skip_reason, wanted_names
from glm_lora.checkpoint.files import NOTES_FILE, write_atomic
from glm_lora.checkpoint.hf_config import SMALL_FILES, cut_config
from glm_lora.checkpoint.hf_reader import HfReader
from glm_lora.checkpoint.progress import Report
from glm_lora.checkpoint.random_init import RandomSource
from glm_lora.config import PrepareConfig
from glm_lora.errors import CheckpointError

DATASETS = {"dapo-math-17k": "zhuzilin/dapo-math-17k", "gsm8k": "zhuzilin/gsm8k"}
_ROWS = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Origin:
    """Where a base's values will come from; nothing large has been read yet."""

    spec: ModelSpec
    folder: Path | None
    """Hugging Face folder; None for random weights."""
    download: Download | None
    lines: tuple[str, ...]
    """The plan, for people."""


@dataclass(frozen=True)
class Download:
    """What has to be fetched before the folder is complete."""

    remote: hub.RemoteRepo
    names: tuple[str, ...]
    config: Mapping[str, Any]
    """The ``config.json`` that the folder gets."""
    index: Mapping[str, str] = field(default_factory=dict)
    """The ``weight_map`` that the folder gets; empty for a single file."""


def find_origin(config: PrepareConfig) -> Origin:
    """Decide where the weights come from, reading at most configuration and index files.

    Raises:
        CheckpointError: Nothing usable locally and no way to the hub.
        ModelError: The configuration is not one of glm5_next.
    """
    folder = config.hf_checkpoint
    local = (folder / "config.json").exists()
    if config.init == "random":
        spec = spec_from_dir(folder) if local else _builtin(config)
        spec = _cut(spec, config, str(folder))
        return Origin(spec, None, None, (f"make random weights from seed {config.seed}",))
    if local and not hub.is_unfinished(folder):
        spec = _cut(spec_from_dir(folder), config, f"{folder}/config.json")
        return Origin(spec, folder, None, (f"read {folder}",))
    if folder.exists() and any(folder.iterdir()) and not (folder / NOTES_FILE).exists():
        raise CheckpointError(
            f"{folder} holds no config.json but other files",
            "a Hugging Face checkpoint, or an empty folder to download to",
        )
    return _remote(config)


def _builtin(config: PrepareConfig) -> ModelSpec:
    if config.model_name not in BUILTIN:
        raise CheckpointError(
            f"{config.hf_checkpoint} has no config.json and {config.model_name!r} is not built in",
            "a folder with a config.json",
        )
    return BUILTIN[config.model_name]


def _cut(spec: ModelSpec, config: PrepareConfig, source: str) -> ModelSpec:
    """The first layers that are wanted; refuses a configuration of other shapes than the name's."""
    known = BUILTIN.get(config.model_name)
    layers = config.num_layers or (known.num_hidden_layers if known else spec.num_hidden_layers)
    if layers > spec.num_hidden_layers:
        raise CheckpointError(
            f"{source} has {spec.num_hidden_layers} layers", f"at least the {layers} asked for"
        )
    spec = spec.first_layers(layers)
    if known is not None and layers <= known.num_hidden_layers:
        return first_layers_as(known.first_layers(layers), spec, config.model_name, source)
    return spec


def _remote(config: PrepareConfig) -> Origin:
    remote = hub.look_up(config.repo, config.revision, "model")
    text = hub.read_text(remote, "config.json")
    source = f"config.json of {config.repo}"
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{source} is not valid JSON: {error}") from error
    spec = _cut(spec_from_config(parsed, source=source), config, source)
    wanted = wanted_names(spec)
    weight_map: dict[str, str] = {}
    shards = [SINGLE_FILE]
    if INDEX_FILE in remote.files:
        text = hub.read_text(remote, INDEX_FILE)
        path = config.hf_checkpoint / INDEX_FILE
        index = parse_index(text, path, f"{INDEX_FILE} of {config.repo}")
        shards = [*index.shards_of(wanted)]
        # The vision tower's tensors stay in the folder's index where their shard comes anyway.
        weight_map = {
            name: shard
            for name, shard in index.weight_map.items()
            if shard in shards
            and skip_reason(name, spec.num_hidden_layers) in (None, "vision tower")
        }
    absent = [name for name in shards if name not in remote.files]
    if absent:
        raise CheckpointError(
            f"{config.repo} has no {', '.join(absent[:3])}", "every shard that its index names"
        )
    small = [
        name
        for name in remote.files
        if "/" not in name
        and name.endswith(SMALL_FILES)
        and name not in ("config.json", INDEX_FILE)
    ]
    names = (*sorted(small), *shards)
    download = Download(remote, names, cut_config(parsed, spec.num_hidden_layers), weight_map)
    total = sum(remote.files[name].size for name in names)
    lines = (
        f"download {len(shards)} shards and {len(small)} small files of {config.repo} at "
        f"{remote.commit[:12]}, {total / 1e9:.1f} GB, to {config.hf_checkpoint}",
        *(f"  {name}" for name in shards),
    )
    return Origin(spec, config.hf_checkpoint, download, lines)


def fetch(origin: Origin, report: Report) -> None:
    """Download what the origin needs; its folder is then a checkpoint of just these layers."""
    if origin.download is None:
        return
    assert origin.folder is not None
    work, folder = origin.download, origin.folder
    layers = origin.spec.num_hidden_layers
    hub.download(work.remote, work.names, folder, report, {"layers": layers})
    if work.index:
        index = {"metadata": {CUT_KEY: layers}, "weight_map": dict(work.index)}
        write_atomic(folder / INDEX_FILE, json.dumps(index, indent=1) + "\n")
    write_atomic(folder / "config.json", json.dumps(dict(work.config), indent=2) + "\n")
    hub.finish(work.remote, folder, {"layers": layers})


def open_origin(origin: Origin, seed: int) -> tuple[BaseSource, dict[str, Any]]:
    """The checked source of the values, and how the manifest describes it."""
    if origin.folder is None:
        random = RandomSource(seed)
        return random, random.describe()
    reader = HfReader.open(origin.folder, wanted_names(origin.spec))
    source = open_source(reader, origin.spec)
    return source, describe(source)


def describe(source: HfSource) -> dict[str, Any]:
    """What the manifest says about a Hugging Face source; equal for equal contents."""
    reader = source.reader
    return {
        "kind": "huggingface",
        "identity": reader.identity(),
        "files": {name: file.size for name, file in sorted(reader.files.items())},
        "headers": {name: file.header_sha256 for name, file in sorted(reader.files.items())},
        "skipped": dict(source.skipped),
    }


def has_dataset(config: PrepareConfig) -> bool:
    """Whether nothing has to be fetched for the task."""
    folder = config.data_dir / config.task
    return config.task == "none" or (bool(_rows(folder)) and not hub.is_unfinished(folder))


def dataset_files(config: PrepareConfig) -> dict[str, Path]:
    """The prompt files of the task by name."""
    if config.task == "none":
        return {}
    return {path.stem: path for path in _rows(config.data_dir / config.task)}


def fetch_dataset(config: PrepareConfig, report: Report) -> None:
    """Download the prompt files of the task.

    Raises:
        CheckpointError: They cannot be fetched.
    """
    folder = config.data_dir / config.task
    remote = hub.look_up(DATASETS[config.task], "main", "dataset")
    names = [name for name in remote.files if name.endswith(_ROWS)]
    if not names:
        raise CheckpointError(f"{remote.repo} has no JSONL or parquet files", "a dataset")
    hub.download(remote, names, folder, report, {})
    hub.finish(remote, folder, {})


def _rows(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in _ROWS) if folder.is_dir() else []
