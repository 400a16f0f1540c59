"""Read an adapter folder back, strictly: every tensor known, present and of its shape.

Takes PEFT's names (transformers' memory) and disk names (SGLang, vLLM). Whatever cannot be read
exactly is refused and listed; nothing is dropped or guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm_lora.arch.projections import Site, trainable_sites
from glm_lora.arch.spec import ModelSpec
from glm_lora.errors import CheckpointError
from glm_lora.export.adapter_folder import SELECTION_FILE
from glm_lora.export.peft import KEY_PREFIX
from glm_lora.fingerprint import fingerprint_tensors
from glm_lora.lora.serving import CONFIG_FILE, WEIGHTS_FILE
from glm_lora.protocols import AdapterState
from glm_lora.sync.verify import is_finite, some
from glm_lora.targets.selection import Selection, make_selection

if TYPE_CHECKING:
    import torch

_REFUSED = {
    "use_rslora": "rsLoRA scales by alpha / sqrt(r); engines ignore it and serve alpha / r",
    "use_dora": "DoRA rescales the base weights; engines refuse or ignore it",
    "rank_pattern": "engines ignore ranks per module",
    "alpha_pattern": "engines ignore alphas per module",
    "modules_to_save": "it replaces whole modules of the base",
    "layers_to_transform": "it narrows target_modules outside of them",
    "layer_replication": "it changes the base model",
    "target_parameters": "routed experts are not adapted here",
    "exclude_modules": "engines ignore it",
    "trainable_token_indices": "embeddings are not adapted here",
    "fan_in_fan_out": "it transposes the weights",
    "lora_bias": "B has no bias here",
}
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight")


def load_adapter(folder: Path, spec: ModelSpec, model: str = "adapter") -> AdapterState:
    """Read the adapter in ``folder`` for a model of ``spec``.

    Args:
        folder: Holds ``adapter_config.json`` and ``adapter_model.safetensors``; a
            ``selection.json`` beside them is read and checked too.
        spec: The base model's dimensions.
        model: Name of the model for the selection, where no ``selection.json`` gives it.

    Returns:
        The adapter under serving keys, in the dtype on disk, with the version on disk (or 0).
        Ranks padded by the export are cut back where ``selection.json`` says so.

    Raises:
        CheckpointError: A file is missing or unreadable, a feature cannot be served, or tensors
            are unknown, missing, misshapen or not finite (all of them are listed).
        TargetError: ``selection.json`` was made for another model or edited.
    """
    config = _read_config(folder)
    stored, metadata = _read_tensors(folder / WEIGHTS_FILE)
    sites = _sites_by_name(spec)
    tensors, problems = _place(stored, sites, _rank(config, folder))
    found = list(dict.fromkeys(_site_of(key, sites) for key in tensors))
    problems["missing"] += _missing_targets(config, found, spec)
    selection = _selection(folder, spec)
    if selection is None:
        _refuse(folder, problems)
        selection = make_selection(
            model,
            spec,
            found,
            rank=config["r"],
            alpha=config["lora_alpha"],
            dropout=config.get("lora_dropout", 0.0),
        )
    else:
        _compare(tensors, selection, problems)
        _refuse(folder, problems)
        tensors = _cut(folder, tensors, selection)
        _same_scaling(folder, config, selection)
    ordered = {key: tensors[key] for key in selection.tensor_shapes()}
    digest = fingerprint_tensors(ordered)
    if metadata.get("digest", digest) != digest:
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE} holds other values than its own digest says",
            "an unedited file",
        )
    return AdapterState(selection, ordered, int(metadata.get("version", 0)), digest)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", "a folder with an adapter") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", "a JSON file") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path} is not the configuration of a LoRA adapter")
    for key, why in _REFUSED.items():
        if config.get(key):
            raise CheckpointError(f"{path} sets {key} {config[key]!r} ({why})", f"no {key}")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{path} sets bias {config['bias']!r}", "'none'")
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not alpha > 0:
        raise CheckpointError(f"{path} has lora_alpha {alpha!r}", "a positive number")
    return config


def _rank(config: Mapping[str, Any], folder: Path) -> int:
    rank = config.get("r")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise CheckpointError(f"{folder / CONFIG_FILE} has r {rank!r}", "a positive whole number")
    return rank


def _read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names: list[str] = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", "the adapter's weights") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", "a safetensors file") from error


def _sites_by_name(spec: ModelSpec) -> dict[str, Site]:
    sites = trainable_sites(spec)
    return {s.name: s for s in sites} | {s.disk_name: s for s in sites}


def _site_of(key: str, sites: Mapping[str, Site]) -> Site:
    return sites[key.rsplit(".lora_", 1)[0]]


def _place(
    stored: Mapping[str, torch.Tensor], sites: Mapping[str, Site], rank: int
) -> tuple[dict[str, torch.Tensor], dict[str, list[str]]]:
    """Sort the stored tensors under serving keys; the second value lists what is wrong."""
    placed: dict[str, torch.Tensor] = {}
    problems: dict[str, list[str]] = {
        k: [] for k in ("unknown", "missing", "misshapen", "twice", "not finite")
    }
    for name, tensor in stored.items():
        match = _KEY.fullmatch(name.removeprefix(KEY_PREFIX))
        site = sites.get(match["module"]) if match else None
        if match is None or site is None:
            problems["unknown"].append(name)
            continue
        factor = match["factor"]
        key = f"{site.disk_name}.lora_{factor}.weight"
        shape = (rank, site.in_features) if factor == "A" else (site.out_features, rank)
        if key in placed:
            problems["twice"].append(name)
        elif tuple(tensor.shape) != shape:
            problems["misshapen"].append(f"{name} {list(tensor.shape)} instead of {list(shape)}")
        elif not tensor.is_floating_point() or not is_finite(tensor):
            problems["not finite"].append(name)
        placed[key] = tensor
    for key in list(placed):
        module, factor = key.removesuffix(".weight").rsplit(".lora_", 1)
        partner = f"{module}.lora_{'B' if factor == 'A' else 'A'}.weight"
        if partner not in placed:
            problems["missing"].append(partner)
    return placed, problems


def _missing_targets(config: Mapping[str, Any], found: list[Site], spec: ModelSpec) -> list[str]:
    """Sites that target_modules asks for and the weights do not have."""
    targets = config.get("target_modules")
    have = {s.name for s in found}
    if isinstance(targets, str):
        pattern = re.compile(targets)
        return [
            s.name
            for s in trainable_sites(spec)
            if s.name not in have and (pattern.fullmatch(s.name) or pattern.fullmatch(s.disk_name))
        ]
    missing = []
    for target in targets or ():
        # A leaf name may stand for any of its layers, so one site is enough.
        if not any(f".{n}".endswith(f".{target}") for s in found for n in (s.name, s.disk_name)):
            missing.append(f"anything for target {target!r}")
    return missing


def _selection(folder: Path, spec: ModelSpec) -> Selection | None:
    path = folder / SELECTION_FILE
    return Selection.from_json(path.read_text(encoding="utf-8"), spec) if path.exists() else None


def _compare(
    tensors: Mapping[str, torch.Tensor], selection: Selection, problems: dict[str, list[str]]
) -> None:
    shapes = selection.tensor_shapes()
    known = set(problems["missing"])
    problems["missing"] += [key for key in shapes if key not in tensors and key not in known]
    problems["unknown"] += [key for key in tensors if key not in shapes]


def _cut(
    folder: Path, tensors: Mapping[str, torch.Tensor], selection: Selection
) -> dict[str, torch.Tensor]:
    """Take the zero padding off again."""
    cut: dict[str, torch.Tensor] = {}
    for key, (rows, columns) in selection.tensor_shapes().items():
        tensor = tensors[key]
        if bool(tensor[rows:].any()) or bool(tensor[:, columns:].any()):
            raise CheckpointError(
                f"{key} in {folder / WEIGHTS_FILE} has values outside the rank of its selection"
            )
        cut[key] = tensor[:rows, :columns].contiguous()
    return cut


def _refuse(folder: Path, problems: Mapping[str, list[str]]) -> None:
    found = [f"{len(names)} {kind} ({some(names)})" for kind, names in problems.items() if names]
    if found:
        raise CheckpointError(
            f"the tensors of {folder / WEIGHTS_FILE} do not fit: {'; '.join(found)}",
            "A and B of every adapted projection of this model",
            "See which projections there are: glm-lora targets --list",
        )


def _same_scaling(folder: Path, config: Mapping[str, Any], selection: Selection) -> None:
    pair, expected = (config["r"], config["lora_alpha"]), (selection.rank, selection.alpha)
    if pair != expected:
        raise CheckpointError(
            f"{folder / CONFIG_FILE} has r and lora_alpha {pair}, its selection.json {expected}",
            "the same in both",
        )
