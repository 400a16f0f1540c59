"""Training state: exact at any topology, whole or not at all."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from glm_lora.checkpoint.torch_dist import save_tensors
from glm_lora.checkpoint.train_state import (
    STATE_FILE,
    LocalTensor,
    iteration_folder,
    latest_checkpoint,
    load_train_state,
    passed_over,
    prune_checkpoints,
    read_extra,
    save_train_state,
)
from glm_lora.errors import CheckpointError
from glm_lora.model.parallel import ParallelContext

SHAPES = {"col.lora_A.weight": (4, 6), "col.lora_B.weight": (8, 4), "row.lora_A.weight": (4, 8)}
AXES = {"col.lora_A.weight": None, "col.lora_B.weight": 0, "row.lora_A.weight": 1}


def full() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {k: torch.randn(s, generator=generator) for k, s in SHAPES.items()}


def pieces(ctx: ParallelContext, fill: bool) -> dict[str, LocalTensor]:
    result = {}
    for key, whole in full().items():
        axis = AXES[key]
        piece = whole if axis is None else whole.chunk(ctx.tp_size, axis)[ctx.tp_rank]
        result[key] = LocalTensor(piece.clone() if fill else torch.full_like(piece, -1), axis)
    return result


def check(ctx: ParallelContext, folder: Path) -> None:
    loaded = pieces(ctx, fill=False)
    extra = load_train_state(folder, loaded, ctx)
    assert extra["version"] == 7 and extra["rng"] == [1, 2, 3]
    for key, expected in pieces(ctx, fill=True).items():
        assert torch.equal(loaded[key].tensor, expected.tensor), key


EXTRA = {"version": 7, "rng": [1, 2, 3]}


def rank_main(rank: int, tp: int, dp: int, root: str) -> None:
    """Load what one rank wrote, then write for one rank to read."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{root}/store", tp * dp)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=tp * dp)
    ctx = ParallelContext(
        world_size=tp * dp, rank=rank, tp_size=tp, tp_rank=rank % tp, dp_size=dp, dp_rank=rank // tp
    )
    check(ctx, Path(root) / "narrow")
    save_train_state(Path(root) / "wide", pieces(ctx, fill=True), EXTRA, ctx)
    check(ctx, Path(root) / "wide")
    dist.destroy_process_group()


def test_one_rank(tmp_path: Path) -> None:
    folder = iteration_folder(tmp_path, 12)
    save_train_state(folder, pieces(ParallelContext(), fill=True), EXTRA)
    check(ParallelContext(), folder)
    assert folder.name == "iter_0000012" and latest_checkpoint(tmp_path) == folder
    assert {p.name for p in folder.parent.iterdir()} == {folder.name}


@pytest.mark.parametrize(
    ("tp", "dp"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow, id="2-2")]
)
def test_other_topologies(tmp_path: Path, tp: int, dp: int) -> None:
    save_train_state(tmp_path / "narrow", pieces(ParallelContext(), fill=True), EXTRA)
    mp.spawn(rank_main, (tp, dp, str(tmp_path)), nprocs=tp * dp)
    check(ParallelContext(), tmp_path / "wide")


def test_saving_again_replaces(tmp_path: Path) -> None:
    folder = iteration_folder(tmp_path, 1)
    for version in (1, 2):
        save_train_state(folder, pieces(ParallelContext(), fill=True), {"version": version})
    assert read_extra(folder) == {"version": 2}
    folder.rename(folder.with_name(folder.name + ".old"))
    assert latest_checkpoint(tmp_path) == folder, "a crash between the renames loses nothing"


def test_a_crash_while_saving_leaves_the_previous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = iteration_folder(tmp_path, 9), iteration_folder(tmp_path, 10)
    save_train_state(first, pieces(ParallelContext(), fill=True), EXTRA)

    def save_and_die(*args: object, **kwargs: object) -> None:
        save_tensors(*args, **kwargs)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr("glm_lora.checkpoint.train_state.save_tensors", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        save_train_state(second, pieces(ParallelContext(), fill=True), EXTRA)
    assert latest_checkpoint(tmp_path) == first
    monkeypatch.undo()
    save_train_state(second, pieces(ParallelContext(), fill=True), EXTRA)
    assert latest_checkpoint(tmp_path) == second


def test_latest_is_the_highest_number(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    for iteration in (2, 9999999, 10000000):
        save_train_state(
            iteration_folder(tmp_path, iteration), pieces(ParallelContext(), fill=True), EXTRA
        )
    assert latest_checkpoint(tmp_path) == iteration_folder(tmp_path, 10000000)
    (iteration_folder(tmp_path, 3)).mkdir()
    prune_checkpoints(tmp_path, 2)
    names = {p.name for p in (tmp_path / "checkpoints").iterdir()}
    assert names == {"iter_9999999", "iter_10000000"}


def test_unfinished_and_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000001"
    wanted = pieces(ParallelContext(), fill=False)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_train_state(folder, wanted)
    save_train_state(folder, pieces(ParallelContext(), fill=True), EXTRA)
    data = next(folder.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="has 100 bytes"):
        load_train_state(folder, wanted)
    shutil.rmtree(folder)
    save_train_state(folder, pieces(ParallelContext(), fill=True), EXTRA)
    with pytest.raises(CheckpointError, match="does not hold other"):
        load_train_state(folder, {"other": LocalTensor(torch.zeros(2))})
    with pytest.raises(CheckpointError, match="shape mismatch"):
        load_train_state(folder, {"col.lora_A.weight": LocalTensor(torch.zeros(8, 6))})


def saved(root: Path, *iterations: int) -> list[Path]:
    folders = [iteration_folder(root, number) for number in iterations]
    for folder in folders:
        save_train_state(folder, pieces(ParallelContext(), fill=True), EXTRA)
    return folders


def flip(path: Path) -> None:
    """Change bytes in the middle of a file and leave its length."""
    data = bytearray(path.read_bytes())
    for place in range(len(data) // 2, min(len(data) // 2 + 64, len(data))):
        data[place] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", STATE_FILE])
def test_damage_at_equal_length_is_refused(tmp_path: Path, name: str) -> None:
    first, second, third = saved(tmp_path, 1, 2, 3)
    if name == STATE_FILE:  # a digit of a generator's state, say
        text = (third / name).read_text()
        (third / name).write_text(text.replace("[1, 2, 3]", "[1, 2, 4]"))
    else:
        flip(third / name)
    flip(second / "__0_0.distcp")
    with pytest.raises(CheckpointError) as error:
        load_train_state(third, pieces(ParallelContext(), fill=False))
    assert f"{third / name} is damaged" in error.value.what
    assert error.value.next_step.startswith(f"{first} is whole"), "not the other damaged one"


def test_a_checkpoint_without_digests_loads(tmp_path: Path) -> None:
    """As they were written before there were any."""
    (folder,) = saved(tmp_path, 1)
    state = json.loads((folder / STATE_FILE).read_text())
    (folder / STATE_FILE).write_text(json.dumps({k: state[k] for k in ("schema", "extra")}))
    check(ParallelContext(), folder)


def test_an_entry_that_is_missing_is_an_error_of_the_file(tmp_path: Path) -> None:
    first, second = saved(tmp_path, 1, 2)
    state = {"schema": 1, "extra": {"driver": {"rollouts": 2}}}
    (second / STATE_FILE).write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="has no 'prompts'") as error:
        read_extra(second)["driver"]["prompts"]
    assert str(second / STATE_FILE) in error.value.what and str(first) in error.value.next_step
    (second / STATE_FILE).write_text('{"schema": 1}')
    with pytest.raises(CheckpointError, match="has no 'extra'"):
        read_extra(second)


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    _, good, cut, newest = saved(tmp_path, 1, 2, 3, 4)
    (cut / "__0_0.distcp").write_bytes(b"")
    (newest / STATE_FILE).unlink()
    assert latest_checkpoint(tmp_path) == cut
    prune_checkpoints(tmp_path, 1)
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {good.name, cut.name, newest.name}
    saved(tmp_path, 5)
    prune_checkpoints(tmp_path, 1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["iter_0000005"]


def test_pruning_leaves_folders_with_names_of_their_own(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    place = tmp_path / "checkpoints"
    mine = {"iter_0000001.backup", "iter_0000001_before_lr_spike", "iter_best.old", "iter_"}
    left = {"iter_0000001.partial", "iter_0000001.old"}
    for name in mine | left:
        (place / name).mkdir()
    assert latest_checkpoint(tmp_path) == place / "iter_0000002"
    prune_checkpoints(tmp_path, 1)
    assert {path.name for path in place.iterdir()} == {"iter_0000002", *mine}


def test_newer_folders_that_are_passed_over_are_named(tmp_path: Path) -> None:
    _, second, third = saved(tmp_path, 1, 2, 3)
    (second / ".metadata").unlink()
    (third / STATE_FILE).unlink()
    said = passed_over(tmp_path)
    assert [line.split()[0] for line in said] == [second.name, third.name]
    assert ".metadata is missing" in said[0] and STATE_FILE in said[1]
    saved(tmp_path, 4)
    assert not passed_over(tmp_path)


def test_not_writable(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="checkpoints"):
        save_train_state(iteration_folder(tmp_path, 1), pieces(ParallelContext(), fill=True), EXTRA)
