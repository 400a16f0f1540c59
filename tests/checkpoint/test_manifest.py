"""A manifest that was damaged or edited is refused, with the way out."""

import json
import pickle
import shutil
from collections.abc import Callable
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from glm_lora import __version__
from glm_lora.arch.spec import TINY
from glm_lora.checkpoint import base_build
from glm_lora.checkpoint.base_build import build_base, plan_base, verify_base
from glm_lora.checkpoint.manifest import MANIFEST, check_base, read_manifest
from glm_lora.checkpoint.random_init import RandomSource
from glm_lora.checkpoint.torch_dist import INDEX_FILES, METADATA, RELEASE, load_base
from glm_lora.errors import CheckpointError
from glm_lora.model.parallel import ParallelContext
from glm_lora.model.stage import build_stage


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
    "an odd index": (lambda m: m.update(index=[1]), "cannot be used: AttributeError"),
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


GARBAGE = [b"", b"garbage garbage", b"I12x\n.", b"\x80\x04N.", b"{}", b"null", b"\x80\x04]q."]


@pytest.mark.parametrize("name", INDEX_FILES)
def test_a_damaged_index(made: Path, name: str) -> None:
    """It is found without reading a weight, and no reader lets torch's own errors through."""
    manifest = read_manifest(made)
    stage = build_stage(TINY, ParallelContext(), dtype=torch.float32)
    for data in GARBAGE:
        (made / RELEASE / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=rf"{name} is damaged.*--force"):
            check_base(made, TINY)
        with pytest.raises(CheckpointError, match=r"cannot be loaded: .*--force"):
            load_base(stage, made)
        if name == METADATA:
            with pytest.raises(CheckpointError, match=r"metadata is damaged: .*--force"):
                verify_base(made, manifest)
    (made / RELEASE / name).unlink()
    with pytest.raises(CheckpointError, match=r"metadata.*--force|missing.*--force"):
        check_base(made, TINY)


def test_an_index_without_a_tensor(made: Path) -> None:
    path = made / RELEASE / METADATA
    metadata = pickle.loads(path.read_bytes())
    del metadata.state_dict_metadata["lm_head.weight"]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight.*--force"):
        verify_base(made, read_manifest(made))


def test_a_base_of_before_the_index_was_recorded(made: Path) -> None:
    path = made / RELEASE / MANIFEST
    data = json.loads(path.read_text())
    assert data.pop("index").keys() == set(INDEX_FILES)
    path.write_text(json.dumps(data))
    assert check_base(made, TINY).index == {}
