"""Downloads from a local server that speaks the hub's routes, with the hub's real client."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.synthetic_checkpoint import layer_of, write_checkpoint
from glm_lora.arch.spec import spec_from_dir
from glm_lora.checkpoint.hf_reader import HfReader
from glm_lora.checkpoint.prepare import prepare
from glm_lora.checkpoint.progress import Progress
from glm_lora.errors import CheckpointError
from tests.checkpoint.hub_server import Hub
from tests.checkpoint.released_case import SMALL, case
from tests.conftest import ROOT

REPO = "zai-org/small"
DEEP = replace(SMALL, num_hidden_layers=12, layer_types=(), mlp_layer_types=())


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("hub") / "model", DEEP, fp8=True, shards=10)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("not needed")
    data = folder.parent / "data"
    data.mkdir()
    (data / "dapo-math-17k.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n')
    return folder


def use_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """What HF_ENDPOINT does; the client reads it when it is imported, which has happened by now."""
    constants = "huggingface_hub.constants."
    monkeypatch.setattr(constants + "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants + "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(published: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    data = published.parent / "data"
    repos = {f"models/{REPO}": published, "datasets/zhuzilin/dapo-math-17k": data}
    with Hub(repos) as server:
        use_endpoint(monkeypatch, server.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        yield server


def config(root: Path, **changes: object):
    values = {"model_name": "small", "repo": REPO, "num_layers": 4, **changes}
    return case(root, root / "hf", **values)


def test_a_slice_fetches_only_its_shards(tmp_path: Path, hub: Hub, published: Path) -> None:
    whole = HfReader.open(published)
    needed = {
        entry.path.name
        for name, entry in whole.entries.items()
        if not name.startswith("model.visual.") and (layer_of(name) or 0) < 4
    }
    seen: list[Progress] = []
    result = prepare(config(tmp_path), seen.append)
    fetched = {name for name in hub.served if name.endswith(".safetensors")}
    assert fetched == needed and len(needed) < 9
    assert "README.md" not in hub.served and (tmp_path / "hf" / "tokenizer.json").exists()
    assert result.made == ("checkpoint", "base")
    bar = [p for p in seen if p.step == "downloading"]
    assert bar[-1].done == bar[-1].total and [p.done for p in bar] == sorted(p.done for p in bar)
    assert spec_from_dir(tmp_path / "hf") == DEEP.first_layers(4)
    # The same base as from the whole checkpoint, and nothing is fetched twice.
    local = prepare(case(tmp_path / "local", published, num_layers=4))
    assert local.fingerprint == result.fingerprint
    hub.served.clear()
    assert prepare(config(tmp_path)).made == () and not hub.served


def test_drops_in_the_middle_of_a_shard(
    tmp_path: Path, hub: Hub, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client continues after the last whole block, 10 MB as shipped.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 4096)
    hub.drop_after = 60_000
    result = prepare(config(tmp_path, verify=True))
    assert hub.drops > 5 and len(hub.ranges) > 5, "the client continued where it stopped"
    assert result.fingerprint == prepare(case(tmp_path / "l", published, num_layers=4)).fingerprint


def test_a_damaged_shard_is_fetched_again(tmp_path: Path, hub: Hub) -> None:
    hub.damage = "model-00002-of-00010.safetensors"
    with pytest.raises(CheckpointError, match=r"model-00002.* arrived damaged \(sha256"):
        prepare(config(tmp_path))
    assert not (tmp_path / "hf" / hub.damage).exists() and not (tmp_path / "base").exists()
    good = "model-00001-of-00010.safetensors"
    assert (tmp_path / "hf" / good).exists()
    hub.damage = ""
    hub.served.clear()
    assert prepare(config(tmp_path, verify=True)).made == ("checkpoint", "base")
    assert good not in hub.served


def test_a_dry_run_fetches_no_weights(tmp_path: Path, hub: Hub) -> None:
    plan = "\n".join(prepare(config(tmp_path, dry_run=True)).plan)
    assert "download" in plan and "model-00001-of-00010.safetensors" in plan and "GB" in plan
    assert not any(name.endswith(".safetensors") for name in hub.served)
    assert list(tmp_path.iterdir()) == []


def test_the_dataset(tmp_path: Path, hub: Hub) -> None:
    result = prepare(config(tmp_path, task="dapo-math-17k"))
    path = tmp_path / "data" / "dapo-math-17k" / "dapo-math-17k.jsonl"
    assert result.data == {"dapo-math-17k": path}
    assert json.loads(path.read_text()) == {"prompt": "1+1", "label": "2"}
    hub.served.clear()
    assert prepare(config(tmp_path, task="dapo-math-17k")).made == () and not hub.served


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repo": "zai-org/none"}, "'zai-org/none' does not exist, or is private"),
        ({"repo": "not a name"}, "'not a name' is no repository name"),
        ({"revision": "v9"}, "has no revision 'v9'.*--revision"),
        ({"task": "gsm8k"}, "dataset repository 'zhuzilin/gsm8k' does not exist"),
    ],
)
def test_wrong_names(tmp_path: Path, hub: Hub, changes: dict[str, str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        prepare(config(tmp_path, **changes))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "base").exists() and not (tmp_path / "hf").exists()


def test_gated(tmp_path: Path, hub: Hub) -> None:
    hub.gated.add(f"models/{REPO}")
    with pytest.raises(CheckpointError, match=r"is gated.*hf auth login"):
        prepare(config(tmp_path))


def test_no_network(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"cannot be reached.*--hf-checkpoint"):
        prepare(config(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glm_lora.checkpoint.files.free_bytes", lambda folder: 10)
    with pytest.raises(CheckpointError, match=r"what is left of .* needs .* .B and the disk of"):
        prepare(config(tmp_path))
    assert not any(name.endswith(".safetensors") for name in hub.served)


def test_a_folder_with_other_files(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "thesis.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"no config\.json but other files"):
        prepare(config(tmp_path))


@pytest.mark.slow
def test_the_endpoint_variable(tmp_path: Path, hub: Hub) -> None:
    code = (
        "import sys; from pathlib import Path; from glm_lora.checkpoint.prepare import prepare;"
        "from tests.checkpoint.test_hub import config;"
        "print(prepare(config(Path(sys.argv[1]))).made)"
    )
    environment = {**os.environ, "HF_ENDPOINT": hub.url}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT, env=environment, text=True, capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "('checkpoint', 'base')"
