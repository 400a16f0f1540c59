"""What a run that continues takes from itself, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glm_lora.checkpoint.train_state import iteration_folder
from glm_lora.errors import ConfigError
from glm_lora.report.resuming import changes, inputs_of, resume_run, stored_options
from tests.report.test_run_folder import BASE, INPUTS, config, create, selection


def saved(run: Path, rollouts: int = 1, **values: Any) -> Path:
    """A run with a finished checkpoint, as far as its names tell."""
    create(run, **values).close()
    folder = iteration_folder(run, rollouts)
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    (folder / ".metadata").touch()
    return run


def resume(run: Path, inputs: dict[str, str] = INPUTS, **values: Any) -> None:
    resume_run(config(run, **values), selection(), BASE, inputs).close()


@pytest.mark.parametrize(
    ("values", "rank", "base", "named"),
    [
        ({"seed": 1}, 8, BASE, "seed: 0 then, 1 now"),
        ({"optimizer": {"lr": 0.5}}, 8, BASE, "optimizer.lr"),
        ({"rollout": {"reward": "math"}}, 8, BASE, "rollout.reward: 'exact' then, 'math' now"),
        ({}, 4, BASE, "selection"),
        ({}, 8, {"fingerprint": "0"}, "base: ffff"),
    ],
)
def test_what_decides_the_numbers_must_not_change(tmp_path, values, rank, base, named):
    run = saved(tmp_path / "run", rollout={"reward": "exact"})
    now = {"rollout": {"reward": "exact"}} | values
    with pytest.raises(ConfigError, match=named):
        resume_run(config(run, **now), selection(rank), base, INPUTS)


@pytest.mark.parametrize("name", ["rollout.prompt_data", "rollout.reward"])
def test_files_are_compared_by_content(tmp_path, name):
    run = saved(tmp_path / "run", rollout={"reward": "/then/r.py", "prompt_data": ["/then/a"]})
    (run / "inputs.json").write_text('{"rollout.prompt_data": "aa", "rollout.reward": "bb"}')
    then = {"rollout.prompt_data": "aa", "rollout.reward": "bb"}
    moved = {"reward": "/now/r.py", "prompt_data": ["/now/a"]}
    resume(run, then, rollout=moved)
    with pytest.raises(ConfigError, match=f"{name}: another content .*cc now"):
        resume(run, {**then, name: "cc"}, rollout=moved)


def test_the_content_of_a_reward_file_is_an_input(tmp_path):
    reward = tmp_path / "reward.py"
    digests = set()
    for text in ("def reward(): return 1.0\n", "def reward(): return 0.0\n"):
        reward.write_text(text)
        made = inputs_of(config(tmp_path, rollout={"reward": str(reward)}), "aa")
        assert made["rollout.prompt_data"] == "aa"
        digests.add(made["rollout.reward"])
    assert len(digests) == 2
    assert inputs_of(config(tmp_path, rollout={"reward": "math"}), "aa") == {
        "rollout.prompt_data": "aa"
    }


def test_another_shape_and_more_rollouts_are_allowed_and_named(tmp_path):
    run = saved(tmp_path / "run")
    now = config(
        run,
        launcher="inline",
        rollout={"num_rollout": 99},
        parallel={"tensor_model_parallel_size": 2},
    )
    resume_run(now, selection(), BASE, INPUTS).close()
    named = {line.split(":")[0] for line in changes(now)}
    assert {"rollout.num_rollout", "parallel.tensor_model_parallel_size"} <= named
    assert "run_dir" not in named


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_is_not_bent(tmp_path, schedule):
    """It falls to the last rollout: with another number the rate would jump up again."""
    optimizer = {"lr_schedule": schedule}
    run = saved(tmp_path / "run", optimizer=optimizer, rollout={"num_rollout": 3})
    resume(run, optimizer=optimizer, rollout={"num_rollout": 3})
    with pytest.raises(ConfigError, match=r"rollout\.num_rollout: 3 then, 6 now"):
        resume(run, optimizer=optimizer, rollout={"num_rollout": 6})


def test_a_run_that_saved_nothing_is_refused_before_anything_starts(tmp_path):
    create(tmp_path / "run").close()
    with pytest.raises(ConfigError, match="holds no finished checkpoint"):
        resume(tmp_path / "run")
    with pytest.raises(ConfigError, match="holds no run"):
        resume(tmp_path / "nothing")


def test_fewer_rollouts_than_done(tmp_path):
    run = saved(tmp_path / "run", 5)
    with pytest.raises(ConfigError, match="has done more rollouts than --num-rollout 4"):
        resume(run, rollout={"num_rollout": 4})


def two_ranks(path: Path) -> None:
    saved(
        path,
        launcher="ray",
        num_nodes=1,
        num_gpus_per_node=2,
        keep_every=7,
        parallel={"tensor_model_parallel_size": 2, "max_tokens_per_gpu": 99},
        rollout={"rollout_engine": "sglang"},
        sglang={"sglang_mem_fraction": 0.5, "rollout_num_gpus_per_engine": 2},
        ray_address="10.0.0.1:6379",
    )


def test_options_that_are_not_given_are_the_runs_own(tmp_path):
    two_ranks(tmp_path / "run")
    stored = stored_options(tmp_path / "run", {})
    assert stored["keep_every"] == 7 and stored["launcher"] == "ray"
    assert stored["num_gpus_per_node"] == 2
    assert stored["parallel"]["tensor_model_parallel_size"] == 2
    assert stored["sglang"]["sglang_mem_fraction"] == 0.5
    # Where the cluster is, and what the command names anyway, is not the run's.
    assert "ray_address" not in stored and "run_dir" not in stored
    assert stored_options(tmp_path / "none", {}) == {}


@pytest.mark.parametrize(
    ("given", "launcher", "world"),
    [({"num_gpus_per_node": 4}, "", None), ({}, "", 4), ({}, "inline", None)],
)
def test_on_another_number_of_ranks_the_shape_is_the_commands(tmp_path, given, launcher, world):
    two_ranks(tmp_path / "run")
    stored = stored_options(tmp_path / "run", given, launcher=launcher, world_size=world)
    assert "tensor_model_parallel_size" not in stored["parallel"]
    assert "rollout_num_gpus_per_engine" not in stored["sglang"]
    assert stored["parallel"]["max_tokens_per_gpu"] == 99
    assert stored["sglang"]["sglang_mem_fraction"] == 0.5


def test_the_same_number_of_ranks_by_torchrun_keeps_the_shape(tmp_path):
    two_ranks(tmp_path / "run")
    stored = stored_options(tmp_path / "run", {}, launcher="torchrun", world_size=2)
    assert stored["parallel"]["tensor_model_parallel_size"] == 2


def test_options_of_an_engine_do_not_go_to_another(tmp_path):
    two_ranks(tmp_path / "run")
    given = {"rollout": {"rollout_engine": "embedded"}}
    assert "sglang" not in stored_options(tmp_path / "run", given)
