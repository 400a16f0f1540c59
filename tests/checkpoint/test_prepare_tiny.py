"""prepare on the tiny model: nothing twice, nothing half, clear errors."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from glm_lora.arch.projections import all_params
from glm_lora.arch.spec import FULL, TINY, spec_from_dir
from glm_lora.checkpoint import tiny as toy
from glm_lora.checkpoint.hf_reader import HfReader
from glm_lora.checkpoint.manifest import check_base, read_manifest
from glm_lora.checkpoint.prepare import PrepareResult, prepare
from glm_lora.checkpoint.torch_dist import RELEASE, TRACKER
from glm_lora.cli import main
from glm_lora.errors import CheckpointError, ConfigError
from glm_lora.fingerprint import tensor_bytes
from tests.prepared import folders, tiny_config


@pytest.fixture
def root(tiny: PrepareResult, tmp_path: Path) -> Path:
    """A copy of the prepared folders that a test may damage."""
    shutil.copytree(tiny.hf_checkpoint.parent.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    return {
        str(p.relative_to(root)): (p.stat().st_mtime_ns, p.stat().st_size)
        for p in root.rglob("*")
        if p.is_file() and "data" not in p.parts
    }


def test_again_does_nothing(root: Path, tiny: PrepareResult) -> None:
    before = snapshot(root)
    again = prepare(tiny_config(root, verify=True))
    assert again.made == () and again.fingerprint == tiny.fingerprint
    assert snapshot(root) == before
    assert tiny.made == ("checkpoint", "base", "data")


def test_manifest(tiny: PrepareResult) -> None:
    manifest = check_base(tiny.ref_load, TINY)
    assert manifest.fingerprint == tiny.fingerprint
    assert {r.key: r.shape for r in manifest.tensors} == {
        k: p.shape for k, p in all_params(TINY).items()
    }
    assert manifest.source["skipped"] == {"vision tower": 25}
    with pytest.raises(CheckpointError, match="another model: num_hidden_layers 4 instead of 45"):
        check_base(tiny.ref_load, FULL)


def test_a_base_without_tracker_is_no_base(root: Path, tiny: PrepareResult) -> None:
    (root / "ckpt" / "tiny_torch_dist" / TRACKER).unlink()
    with pytest.raises(CheckpointError, match="unfinished"):
        read_manifest(root / "ckpt" / "tiny_torch_dist")
    again = prepare(tiny_config(root))
    assert again.made == ("base",) and again.fingerprint == tiny.fingerprint


def test_missing_base(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no base.*glm-lora prepare") as caught:
        check_base(tmp_path, TINY)
    assert caught.value.exit_code == 2 and isinstance(caught.value, OSError)


def test_truncated_data_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "STEPS", 1)
    config = tiny_config(root)
    file = config.ref_load / RELEASE / "__0_0.distcp"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has .* expected .* bytes.*--force"):
        check_base(config.ref_load, TINY)
    with pytest.raises(CheckpointError, match="--force"):
        prepare(config)
    assert prepare(tiny_config(root, force=True, verify=True)).made == ("checkpoint", "base")


def test_a_flipped_byte_is_found_by_verify(root: Path) -> None:
    config = tiny_config(root, verify=True)
    file = config.ref_load / RELEASE / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    weights = tensor_bytes(HfReader.open(config.hf_checkpoint).rows("lm_head.weight"))
    data[bytes(data).index(bytes(weights)) + 100] ^= 1
    file.write_bytes(data)
    check_base(config.ref_load, TINY)
    with pytest.raises(CheckpointError, match=r"lm_head.weight in .* sha256 differs"):
        prepare(config)


def test_an_interrupted_checkpoint_is_built_again(root: Path, tiny: PrepareResult) -> None:
    config = tiny_config(root)
    os.truncate(config.hf_checkpoint / "model.safetensors", 1000)
    again = prepare(config)
    assert again.made == ("checkpoint",) and again.fingerprint == tiny.fingerprint


def edit_config(folder: Path) -> None:
    """Another model in a file of the same length."""
    path = folder / "config.json"
    text = path.read_text()
    path.write_text(text.replace('"hidden_size": 64', '"hidden_size": 65'))
    assert path.read_text() != text


def edit_marker(folder: Path) -> None:
    """Valid JSON that lists no files."""
    path = folder / "glm_lora.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": None}))


@pytest.mark.parametrize("damage", [edit_config, edit_marker])
def test_a_folder_that_is_not_as_written_is_made_again(
    root: Path, tiny: PrepareResult, damage: Callable[[Path], None]
) -> None:
    config = tiny_config(root, verify=True)
    damage(config.hf_checkpoint)
    again = prepare(config)
    assert again.made == ("checkpoint",) and again.fingerprint == tiny.fingerprint
    assert spec_from_dir(config.hf_checkpoint) == TINY and prepare(config).made == ()


def test_files_of_others_are_not_lost_with_a_damaged_folder(root: Path) -> None:
    config = tiny_config(root)
    mine = config.hf_checkpoint / "chat_template.jinja"
    mine.write_text("mine")
    assert prepare(config).made == ()
    edit_config(config.hf_checkpoint)
    with pytest.raises(CheckpointError, match=r"damaged and holds.*chat_template.*--force"):
        prepare(config)
    assert mine.read_text() == "mine"


def test_changed_prompts_stay(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(root)
    prompts, clear = prepare(config).data.values()
    written = prompts.read_bytes()
    mine = written + b'{"prompt": "\xff"}\n'
    prompts.write_bytes(mine)
    again = prepare(config)
    assert (again.made, again.kept) == ((), (prompts,)) and prompts.read_bytes() == mine
    clear.unlink()
    again = prepare(config)
    assert (again.made, again.kept) == (("data",), (prompts,)) and clear.exists()
    assert main(["prepare", "--model-name", "tiny", *folders(root)]) == 0
    output = capsys.readouterr().out
    assert "made        nothing, all was there" in output
    assert "kept        " in output and "--force" in output
    monkeypatch.setattr(toy, "STEPS", 1)
    again = prepare(tiny_config(root, force=True))
    assert (again.made, again.kept) == (("checkpoint", "base", "data"), ())
    assert prompts.read_bytes() == written


def test_another_seed_is_refused(root: Path) -> None:
    with pytest.raises(CheckpointError, match=r"made with seed 0.*expected seed 1"):
        prepare(tiny_config(root, seed=1))


@pytest.mark.parametrize("option", ["hf_checkpoint", "ref_load"])
@pytest.mark.parametrize("force", [False, True])
def test_foreign_files_are_left_alone(tmp_path: Path, option: str, force: bool) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="not empty"):
        prepare(tiny_config(tmp_path, force=force, **{option: folder}))
    assert (folder / "thesis.txt").read_text() == "precious"
    assert {p.name for p in tmp_path.iterdir()} == {"mine"}, "something was started"


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "ckpt").write_text("")
    with pytest.raises(CheckpointError, match=r"is a file|Not a directory|cannot be written"):
        prepare(tiny_config(tmp_path))
    assert {p.name for p in tmp_path.iterdir()} == {"ckpt"}


def test_dry_run_touches_nothing(tmp_path: Path) -> None:
    result = prepare(tiny_config(tmp_path / "new", dry_run=True))
    assert result.fingerprint == "" and any("pre-train" in line for line in result.plan)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("force", [False, True])
def test_the_plan_says_what_stays(root: Path, force: bool) -> None:
    plan = prepare(tiny_config(root, dry_run=True, force=force)).plan
    assert [line.split()[0] for line in plan] == (
        ["pre-train", "write", "write"] if force else ["use", "keep", "keep"]
    )


def test_layers_that_tiny_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--num-layers 2 .* which has 4; expected .*random"):
        prepare(tiny_config(tmp_path, num_layers=2))
    assert not list(tmp_path.iterdir())
    assert prepare(tiny_config(tmp_path, num_layers=4, dry_run=True)).plan
    random = prepare(tiny_config(tmp_path, num_layers=2, init="random"))
    assert read_manifest(random.ref_load).spec.num_hidden_layers == 2


@pytest.mark.parametrize("init", ["base", "random"])
@pytest.mark.parametrize("link", [False, True])
def test_one_folder_for_two_things(tmp_path: Path, init: str, link: bool) -> None:
    one = other = tmp_path / "one"
    if link:
        other = tmp_path / "other"
        other.symlink_to(one)
    before = list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"--ref-load and --hf-checkpoint are both"):
        prepare(tiny_config(tmp_path, hf_checkpoint=one, ref_load=other, init=init))
    with pytest.raises(ConfigError, match=r"--ref-load and --to-hf are both"):
        prepare(tiny_config(tmp_path, ref_load=one, to_hf=other, init=init))
    assert list(tmp_path.iterdir()) == before


def test_full_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "ckpt" / "tiny_torch_dist" / TRACKER).unlink()
    monkeypatch.setattr("glm_lora.checkpoint.files.free_bytes", lambda folder: 1000)
    with pytest.raises(CheckpointError, match=r"needs 1\.\d MB and the disk .* has 1\.0 kB"):
        prepare(tiny_config(root))


def test_threads_are_restored(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "STEPS", 1)
    threads = torch.get_num_threads()
    prepare(tiny_config(root, force=True))
    assert torch.get_num_threads() == threads
