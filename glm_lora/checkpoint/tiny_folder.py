"""The tiny model's Hugging Face folder: made whole, marked, and recognised afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from glm_lora.arch.foreign import VISION_PREFIX
from glm_lora.arch.projections import all_params
from glm_lora.arch.spec import TINY, ModelSpec
from glm_lora.checkpoint import tiny
from glm_lora.checkpoint.convert import disk_names, from_memory
from glm_lora.checkpoint.files import (
    NOTES_FILE,
    FileRecord,
    built_folder,
    check_file,
    make_folder,
    record_file,
    write_atomic,
    write_errors,
)
from glm_lora.checkpoint.hf_config import SGLANG_KEYS
from glm_lora.checkpoint.hf_writer import planned, write_tensors
from glm_lora.checkpoint.progress import Report, silent
from glm_lora.errors import CheckpointError

RECIPE = 1
"""Raised when the toy or its pre-training changes, so that older folders are told apart."""
_WRITTEN = (
    NOTES_FILE,
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def is_made(folder: Path, seed: int) -> bool:
    """Whether ``folder`` holds a whole tiny checkpoint of this seed, as it was written.

    Raises:
        CheckpointError: The folder holds something else, a tiny checkpoint of another seed, or a
            damaged one beside files that are not prepare's and would go with it.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    marker = read_marker(folder)
    if marker is None:
        raise CheckpointError(
            f"{folder} is not empty and was not made by prepare",
            "an empty folder",
            "Name another folder with --hf-checkpoint",
        )
    if (marker["recipe"], marker["seed"]) != (RECIPE, seed):
        raise CheckpointError(
            f"{folder} was made with seed {marker['seed']} (recipe {marker['recipe']})",
            f"seed {seed} (recipe {RECIPE})",
            "Use --force to build it again, or another folder",
        )
    if _as_written(folder, marker["files"]):
        return True
    known = {*_WRITTEN, *(marker["files"] if isinstance(marker["files"], dict) else ())}
    if foreign := sorted({path.name for path in folder.iterdir()} - known):
        raise CheckpointError(
            f"{folder} is damaged and holds other files, too ({', '.join(foreign[:3])})",
            "what prepare wrote and nothing else, to make it again",
            "Move them away, or use --force to lose them",
        )
    return False


def _as_written(folder: Path, files: Any) -> bool:
    """Whether the files are those that the marker lists (anything may stand in a marker)."""
    if not isinstance(files, Mapping):
        return False
    try:
        for name, record in files.items():
            check_file(folder / name, FileRecord(**record))
    except (CheckpointError, TypeError):
        return False
    return "config.json" in files


def read_marker(folder: Path) -> dict[str, Any] | None:
    """The marker of a folder that prepare made, or None."""
    try:
        marker = json.loads((folder / NOTES_FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return None
    known = isinstance(marker, dict) and {"recipe", "seed", "files"} <= marker.keys()
    return marker if known else None


def make_tiny(folder: Path, seed: int, report: Report = silent) -> None:
    """Pre-train the tiny model and write ``folder`` (replaced if it is there) with its tokenizer.

    The files are what transformers reads: ``model.safetensors`` under disk names, ``config.json``,
    ``generation_config.json`` and the tokenizer. The folder appears under its name when complete.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    with write_errors(folder.parent):
        make_folder(folder.parent)
        with built_folder(folder) as partial:
            model = tiny.build_model(seed=seed)
            tiny.pretrain(model, seed, report)
            write_folder(partial, model, seed)


def write_folder(folder: Path, model: Any, seed: int, spec: ModelSpec = TINY) -> None:
    """Write a toy model of ``spec`` into ``folder``: weights, configurations, tokenizer, marker."""
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    tensors = {}
    params = all_params(spec)
    for key, value in from_memory(state, params.values()).items():
        param, names = params[key], disk_names(params[key])
        if param.row.expert:
            tensors |= dict(zip(names, value, strict=True))
        else:
            tensors[names[0]] = value
    tensors |= {name: value for name, value in state.items() if name.startswith(VISION_PREFIX)}
    write_tensors(folder, planned(tensors))
    config = model.config.to_dict()
    config["dtype"] = "float32"
    config["architectures"] = [type(model).__name__]
    # SGLang then asks for no image processor.
    config["language_model_only"] = True
    config["text_config"] |= SGLANG_KEYS
    # A null of some versions of transformers, which SGLang would take for the model's own.
    config["text_config"].pop("architectures", None)
    write_atomic(folder / "config.json", json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD, "do_sample": True}
    write_atomic(folder / "generation_config.json", json.dumps(generation, indent=2) + "\n")
    tiny.tokenizer().save_pretrained(folder)
    marker = {
        "model": "tiny",
        "recipe": RECIPE,
        "seed": seed,
        "files": {path.name: asdict(record_file(path)) for path in sorted(folder.iterdir())},
    }
    write_atomic(folder / NOTES_FILE, json.dumps(marker, indent=2) + "\n")
