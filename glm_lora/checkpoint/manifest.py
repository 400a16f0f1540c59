"""What a base says about itself: ``release/manifest.json``, and the check before training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from glm_lora.arch.agreement import differences
from glm_lora.arch.spec import ModelSpec
from glm_lora.checkpoint.files import FileRecord, check_file
from glm_lora.checkpoint.torch_dist import release_folder
from glm_lora.errors import MAKE_AGAIN, CheckpointError
from glm_lora.fingerprint import TensorRecord, fingerprint

MANIFEST = "manifest.json"
SCHEMA = 1


@dataclass(frozen=True)
class BaseManifest:
    """The manifest of a finished base."""

    fingerprint: str
    """Over all tensors; independent of files, ranks and topology."""
    spec: ModelSpec
    tensors: tuple[TensorRecord, ...]
    files: Mapping[str, int]
    """Size of every data file."""
    source: Mapping[str, Any]
    """What it was made from: kind, identity, files with sizes, skipped tensors."""
    made_with: Mapping[str, str]
    """Versions of the packages that wrote it."""
    index: Mapping[str, FileRecord] = field(default_factory=dict[str, FileRecord])
    """The small files that say where in the data files everything lies."""

    def to_json(self) -> str:
        """The text of ``manifest.json``."""
        data = {
            "schema": SCHEMA,
            "fingerprint": self.fingerprint,
            "spec": asdict(self.spec),
            "source": dict(self.source),
            "made_with": dict(self.made_with),
            "files": dict(self.files),
            "index": {name: asdict(record) for name, record in self.index.items()},
            "tensors": [list(record) for record in self.tensors],
        }
        return json.dumps(data, indent=1) + "\n"


def read_manifest(ref_load: Path) -> BaseManifest:
    """The manifest of the finished base in ``ref_load``.

    Raises:
        CheckpointError: No finished base, or a manifest that is damaged or of another version.
    """
    path = release_folder(ref_load) / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise CheckpointError(f"{path} has schema version {data['schema']!r}", str(SCHEMA))
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in data["spec"].items()
        }
        spec = ModelSpec(**values)
        tensors = tuple(TensorRecord(k, d, tuple(s), h) for k, d, s, h in data["tensors"])
        manifest = BaseManifest(
            data["fingerprint"],
            spec,
            tensors,
            data["files"],
            data["source"],
            data["made_with"],
            # Bases of before these were recorded are as good.
            {name: FileRecord(**record) for name, record in data.get("index", {}).items()},
        )
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist", "a base with its manifest", MAKE_AGAIN
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be used: {error!r}", "a manifest", MAKE_AGAIN
        ) from error
    if fingerprint(tensors) != manifest.fingerprint:
        raise CheckpointError(f"{path} does not match its own fingerprint", "", MAKE_AGAIN)
    return manifest


def check_base(ref_load: Path, spec: ModelSpec) -> BaseManifest:
    """Check, without reading a weight, that ``ref_load`` is a finished base of ``spec``.

    Raises:
        CheckpointError: Missing, unfinished, a file missing, truncated or (a small one) damaged, or
            another model.
    """
    manifest = read_manifest(ref_load)
    check_same_model(manifest.spec, spec, str(ref_load))
    release = release_folder(ref_load)
    for name, size in manifest.files.items():
        path = release / name
        found = path.stat().st_size if path.exists() else None
        if found != size:
            what = "is missing" if found is None else f"has {found:,} bytes"
            raise CheckpointError(f"{path} {what}", f"{size:,} bytes", MAKE_AGAIN)
    for name, record in manifest.index.items():
        try:
            check_file(release / name, record)
        except CheckpointError as error:
            raise CheckpointError(error.what, error.expected, MAKE_AGAIN) from error
    return manifest


def check_same_model(found: ModelSpec, wanted: ModelSpec, what: str) -> None:
    """Raise CheckpointError naming the first fields in which two models differ."""
    if differing := differences(found, wanted):
        raise CheckpointError(
            f"{what} was made for another model: " + "; ".join(differing[:3]),
            "a base of the model that is trained",
            "Name the right one with --ref-load, or make it again: glm-lora prepare --force with "
            "the --model-name and folders of the model that is trained",
        )
