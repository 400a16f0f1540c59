"""Real processes are killed, stopped and starved; the run ends as if nothing had happened.

Every run here is compared with one that nothing disturbed: the same rewards and norms in every
rollout, each rollout once, and a bit-equal adapter.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from glm_lora.checkpoint.train_state import latest_checkpoint
from tests.flow.processes import Run
from tests.support import small_disk, words
from tests.tiny_runs import adapter, metric, train

ROLLOUTS = 8
LONG = ["--num-rollout", "500", "--save-interval", "1"]
NO_RESTART = ["--max-restarts", "0", "--save-interval", "100"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def undisturbed(tiny_root, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train(tiny_root, run, "--num-rollout", str(ROLLOUTS)) == 0
    return run


def same_result(run: Run, undisturbed: Path) -> None:
    assert run.wait() == 0, run.text()
    assert metric(run.dir, "rollout/step") == list(range(ROLLOUTS)), "each rollout once"
    for name in ("rollout/raw_reward", "train/grad_norm", "rollout/response_tokens"):
        assert metric(run.dir, name) == metric(undisturbed, name)
    assert adapter(run.dir) == adapter(undisturbed)
    assert not list((run.dir / "checkpoints").glob("*.partial"))


def options(*more: str) -> list[str]:
    return ["--num-rollout", str(ROLLOUTS), *more]


def test_a_killed_engine_is_replaced(tiny_root, tmp_path, undisturbed):
    with Run(tiny_root, tmp_path / "run", *options()) as run:
        run.until_rollout(2)
        (engine,) = run.named("EngineActor")
        engine.kill()
        same_result(run, undisturbed)
        assert "engine 0 is lost and restarts" in run.text()
        assert metric(run.dir, "run/restarts") == [0] * ROLLOUTS, "the trainer went on"


def test_a_killed_trainer_rank_restarts_the_run_from_its_checkpoint(
    tiny_root, tmp_path, undisturbed
):
    with Run(tiny_root, tmp_path / "run", *options("--save-interval", "2")) as run:
        run.until_rollout(5)
        (rank,) = run.named("RankActor")
        rank.kill()
        same_result(run, undisturbed)
        assert "restart 1 of 3" in run.text()
        assert "continuing after rollout 3" in run.text()


def test_a_trainer_rank_killed_while_it_saves_leaves_the_checkpoint_before(
    tiny_root, tmp_path, undisturbed
):
    with Run(tiny_root, tmp_path / "run", *options("--save-interval", "3")) as run:
        partial = tmp_path / "run" / "checkpoints" / "iter_0000006.partial"
        run.until_rollout(1)
        (rank,) = run.named("RankActor")
        run.until(partial.exists, "the second save")
        rank.kill()
        same_result(run, undisturbed)
        assert "restart 1 of 3" in run.text()


def test_whatever_is_killed_and_whenever(tiny_root, tmp_path, undisturbed):
    """Sampling, training, sync and save are hit as chance has it; the seed only picks who."""
    dice = random.Random(8)
    more = ["--save-interval", "1", "--max-restarts", "9"]
    with Run(tiny_root, tmp_path / "run", *options(*more)) as run:
        for number in (1, 3, 5, 7):
            run.until_rollout(number)
            victims = [*run.named("EngineActor"), *run.named("RankActor")]
            time.sleep(dice.random() * 0.2)
            if victims and run.process.poll() is None:
                dice.choice(victims).kill()
        same_result(run, undisturbed)


def test_a_trainer_that_keeps_dying_ends_the_run_clearly(tiny_root, tmp_path):
    with Run(tiny_root, tmp_path / "run", *LONG, "--max-restarts", "1") as run:
        for already in (0, 1):
            run.until(lambda n=already: f"restart {n} of" in run.text() or not n, "the restart")
            run.until_rollout(already * 2 + 2)
            run.until(lambda: run.named("RankActor"), "a rank")
            run.named("RankActor")[0].kill()
        assert run.wait() == 1, run.text()
        assert latest_checkpoint(run.dir) is not None
        assert "is valid: continue with --resume" in words(run.text())
        assert "at most --max-restarts 1" in run.text()


def test_a_trainer_that_dies_before_a_checkpoint_is_not_said_to_have_one(tiny_root, tmp_path):
    with Run(tiny_root, tmp_path / "run", *LONG, *NO_RESTART) as run:
        run.until_rollout(1)
        run.named("RankActor")[0].kill()
        assert run.wait() == 1, run.text()
        assert "Nothing was saved yet" in run.text() and "is valid" not in run.text()


def test_an_engine_that_is_gone_for_good_costs_nothing_that_was_trained(tiny_root, tmp_path):
    with Run(tiny_root, tmp_path / "run", *LONG, *NO_RESTART) as run:
        run.until_rollout(2)
        run.named("EngineActor")[0].kill()
        assert run.wait() == 1, run.text()
        done = len(run.records())
        assert latest_checkpoint(run.dir) == run.dir / "checkpoints" / f"iter_{done:07d}"


@pytest.mark.parametrize(
    ("actor", "limit"), [("EngineActor", "--rollout-timeout"), ("RankActor", "--step-timeout")]
)
def test_a_silent_process_counts_as_lost_after_its_limit(
    tiny_root, tmp_path, undisturbed, actor, limit
):
    """SIGSTOP: the process lives and keeps its connections, but never answers."""
    with Run(tiny_root, tmp_path / "run", *options("--save-interval", "1", limit, "15")) as run:
        run.until_rollout(2)
        (process,) = run.named(actor)
        process.suspend()
        try:
            same_result(run, undisturbed)
        finally:
            if process.is_running():
                process.kill()
        assert "did not finish within 15 s" in run.text()


def test_a_killed_driver_leaves_nothing_running_and_the_run_can_continue(
    tiny_root, tmp_path, undisturbed
):
    with Run(tiny_root, tmp_path / "run", *options("--save-interval", "2")) as run:
        run.until_rollout(5)
        below, agents = run.descendants(), run.named("Agent")
        run.process.kill()
        run.process.wait()
        # Ray's own two agents wait for its dead control service before they end.
        _, left = psutil.wait_procs([p for p in below if p not in agents], timeout=30)
        assert not left, [p.cmdline() for p in left]
    with Run(tiny_root, tmp_path / "run", *options("--resume")) as again:
        same_result(again, undisturbed)
    _, left = psutil.wait_procs(agents, timeout=150)
    assert not left, [p.cmdline() for p in left]


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("launcher", ["ray", "inline"])
def test_a_polite_end_saves_and_leaves_nothing(tiny_root, tmp_path, undisturbed, sign, launcher):
    with Run(tiny_root, tmp_path / "run", *options(), launcher=launcher) as run:
        run.until_rollout(3)
        below = run.descendants()
        run.process.send_signal(sign)
        assert run.wait(60) == 130, run.text()
        _, left = psutil.wait_procs(below, timeout=30)
        assert not left, [p.cmdline() for p in left]
    with Run(tiny_root, tmp_path / "run", *options("--resume"), launcher=launcher) as again:
        same_result(again, undisturbed)


def halted_while_sampling(run: Run, engine: psutil.Process) -> bool:
    """Suspend the engine; let it go on when the run waits for it in another phase."""
    engine.suspend()
    before = last_phase(run)
    time.sleep(0.5)
    if before[1] == "sample" and last_phase(run) == before:
        return True
    engine.resume()
    time.sleep(0.01)
    return False


def last_phase(run: Run) -> tuple[int, str]:
    """How many phases the run has told of, and the last one."""
    names = re.findall(r'"event": "phase", "name": "(\w+)"', run.text())
    return len(names), names[-1]


def test_preemption_while_sampling_gives_the_samples_up_at_once(tiny_root, tmp_path):
    """An engine that would take an hour does not delay the end."""
    with Run(tiny_root, tmp_path / "run", *LONG, "--log-format", "json") as run:
        run.until_rollout(2)
        (engine,) = run.named("EngineActor")
        run.until(lambda: halted_while_sampling(run, engine), "an engine that stops while sampling")
        start = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        try:
            assert run.wait(60) == 130, run.text()
        finally:
            if engine.is_running():
                engine.kill()
        assert time.monotonic() - start < 60
        done = len(run.records())
        saved = latest_checkpoint(run.dir)
        assert saved is not None and saved.name == f"iter_{done:07d}", run.text()


REWARD = """
def reward(prompt, response, label, metadata):
    return float(response.strip() == label)
"""


def test_a_killed_reward_worker_costs_one_score(tiny_root, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    more = ["--reward", str(reward), "--num-rollout", "6"]
    with Run(tiny_root, tmp_path / "run", *more) as run:
        run.until_rollout(2)
        for worker in run.named("worker_main"):
            worker.kill()
        assert run.wait() == 0, run.text()
        assert len(run.records()) == 6


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_costs_checkpoints_and_not_the_run(tiny_root, tmp_path, undisturbed):
    with small_disk(tmp_path / "disk", "size=3m") as disk:
        more = ["--save-interval", "1", "--keep-last", "9"]
        with Run(tiny_root, disk / "run", *options(*more), log=tmp_path / "log") as run:
            assert run.wait() == 1, run.text()
            assert "no checkpoint after" in run.text() and "is full" in run.text()
            assert "the last checkpoint was not written" in run.text()
        assert metric(disk / "run", "rollout/step") == list(range(ROLLOUTS)), "the run went on"
        assert metric(disk / "run", "train/grad_norm") == metric(undisturbed, "train/grad_norm")
        good = sorted((disk / "run" / "checkpoints").iterdir())
        assert good[-1] == latest_checkpoint(disk / "run") and good[-1].suffix == ""
        assert adapter(disk / "run") == adapter(undisturbed), "it fits where a checkpoint does not"
        for old in [*good[:-1], disk / "run" / "adapter"]:
            subprocess.run(["rm", "-r", str(old)], check=True)
        more = ["--resume", "--save-interval", "0", "--keep-last", "1"]
        with Run(tiny_root, disk / "run", *options(*more), log=tmp_path / "log") as run:
            assert run.wait() == 0, run.text()
        assert metric(disk / "run", "train/grad_norm") == metric(undisturbed, "train/grad_norm")
        assert adapter(disk / "run") == adapter(undisturbed)
