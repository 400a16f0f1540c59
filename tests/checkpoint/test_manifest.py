"""A manifest that was damaged or edited is refused, with the way out."""

import json
import shutil
from collections.abc import Callable
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from glm_lora import __version__
from glm_lora.arch.spec import TINY
from glm_lora.checkpoint import base_build
from glm_lora.checkpoint.base_build import build_base, plan_base
from glm_lora.checkpoint.manifest import MANIFEST, check_base, read_manifest
from glm_lora.checkpoint.random_init import RandomSource
from glm_lora.checkpoint.torch_dist import RELEASE
from glm_lora.errors import CheckpointError


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    source = RandomSource(0)
    build_base(plan_base(folder, TINY, source, source.describe()))
    return folder


@pytest.fixture
def made(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "base"))


def test_what_it_says(made: Path) -> None:
    manifest = read_manifest(made)
    assert manifest.spec == TINY and manifest.source["seed"] == 0
    assert set(manifest.made_with) == {"glm-lora", "torch"}
    assert manifest.files == {p.name: p.stat().st_size for p in (made / RELEASE).glob("*.distcp")}
    assert check_base(made, TINY) == manifest


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a hash": (lambda m: m["tensors"][3].__setitem__(3, "0" * 64), "its own fingerprint.*--force"),
    "a shape": (lambda m: m["tensors"][3][2].append(1), "its own fingerprint"),
    "a tensor left out": (lambda m: m["tensors"].pop(), "its own fingerprint"),
    "another version": (lambda m: m.update(schema=99), "schema version 99; expected 1"),
    "no files": (lambda m: m.pop("files"), "cannot be used: KeyError"),
    "an unknown field": (lambda m: m["spec"].update(odd=1), "cannot be used: TypeError"),
    "a file too many": (lambda m: m["files"].update(x=3), "release/x is missing; expected 3 bytes"),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits(made: Path, name: str) -> None:
    edit, message = EDITS[name]
    path = made / RELEASE / MANIFEST
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=message) as caught:
        check_base(made, TINY)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_no_json(made: Path, text: str) -> None:
    (made / RELEASE / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be used.*--force"):
        check_base(made, TINY)


def test_missing(made: Path) -> None:
    (made / RELEASE / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json does not exist"):
        check_base(made, TINY)


def test_a_base_is_built_from_a_source_tree_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's own version comes from itself: where it is not installed there is no other."""

    def version(name: str) -> str:
        if name == "glm-lora":
            raise PackageNotFoundError(name)
        return metadata.version(name)

    monkeypatch.setattr(base_build, "version", version)
    source = RandomSource(0)
    manifest = build_base(plan_base(tmp_path / "base", TINY, source, source.describe()))
    assert manifest.made_with["glm-lora"] == __version__
