"""The whole job on the tiny model: the reward rises, nothing drifts, everything is checked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from glm_lora.cli import main
from glm_lora.fingerprint import fingerprint_tensors
from glm_lora.report.run_data import read_lines
from tests.prepared import folders, tiny_train_config
from tests.support import close, close_as_a_whole, words
from tests.tiny_runs import LAUNCHER, adapter, metric, train


@pytest.fixture(scope="module")
def whole_run(tiny_root, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert train(tiny_root, run) == 0
    return run


def test_the_reward_rises(whole_run):
    rewards = metric(whole_run, "rollout/raw_reward")
    assert len(rewards) == 60
    assert np.mean(rewards[:5]) <= 0.40
    assert np.mean(rewards[-5:]) >= 0.85


def test_trainer_and_engine_agree_in_every_rollout(whole_run):
    # Two fp32 implementations of four layers: rounding only.
    assert max(metric(whole_run, "train/train_rollout_logprob_abs_diff")) <= 1e-4
    assert max(metric(whole_run, "train/train_rollout_logprob_nonfinite")) == 0


def test_only_the_adapter_travels(whole_run):
    selection = json.loads((whole_run / "selection.json").read_text())
    assert len(selection["sites"]) == 43
    sent = set(metric(whole_run, "sync/bytes"))
    assert sent == {41056 * 4}, "43 adapters of rank 8 in fp32, every time, and nothing else"


def test_metrics_have_the_recipes_names(whole_run):
    record = read_lines(whole_run / "metrics.jsonl")[-1]
    wanted = {
        "rollout/step", "rollout/raw_reward", "rollout/response_length", "train/loss",
        "train/grad_norm", "train/ppo_kl", "train/lr", "train/entropy",
        "train/train_rollout_logprob_abs_diff", "sync/bytes", "sync/seconds", "time/rollout",
        "time/train", "time/sync",
    }  # fmt: skip
    assert wanted <= set(record), wanted - set(record)


def test_the_export_loads_in_stock_peft_and_answers_as_the_run_did(whole_run, tiny):
    """Greedy accuracy of the exported adapter on the ambiguous mark, and of the base without it."""
    from peft import PeftModel
    from transformers import AutoTokenizer, Glm5NextForConditionalGeneration

    model = Glm5NextForConditionalGeneration.from_pretrained(tiny.hf_checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(tiny.hf_checkpoint)
    model = PeftModel.from_pretrained(model, whole_run / "adapter").eval()
    prompts = torch.tensor([tokenizer.encode(f"{d}?>") for d in range(10)])
    labels = torch.tensor([tokenizer.encode(str(d))[0] for d in range(10)])

    def chance_of_the_label() -> float:
        with torch.no_grad():
            probabilities = model(prompts).logits[:, -1].softmax(-1)
        return float(probabilities[torch.arange(10), labels].mean())

    assert chance_of_the_label() >= 0.85
    with model.disable_adapter():
        assert chance_of_the_label() <= 0.40


def test_ray_and_inline_give_the_same_adapter(tiny_root, tmp_path):
    for launcher in ("inline", "ray"):
        options = ["--num-rollout", "3"]
        assert train(tiny_root, tmp_path / launcher, *options, launcher=launcher) == 0
    assert adapter(tmp_path / "inline") == adapter(tmp_path / "ray")


def test_ray_is_stopped_when_the_run_started_it(tiny_root, tmp_path):
    import ray

    assert train(tiny_root, tmp_path / "run", "--num-rollout", "1", launcher="ray") == 0
    assert not ray.is_initialized()


def test_the_same_seed_is_the_same_run_and_another_is_another(tiny_root, tmp_path):
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert train(tiny_root, tmp_path / name, "--num-rollout", "2", "--seed", seed) == 0
    assert adapter(tmp_path / "a") == adapter(tmp_path / "b")
    assert adapter(tmp_path / "a") != adapter(tmp_path / "c")


def test_a_resumed_run_equals_the_uninterrupted_one(tiny_root, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train(tiny_root, whole, "--num-rollout", "6") == 0
    assert train(tiny_root, cut, "--num-rollout", "3") == 0
    assert train(tiny_root, cut, "--num-rollout", "6", "--resume") == 0
    assert metric(cut, "rollout/step") == list(range(6))
    assert metric(cut, "rollout/raw_reward") == metric(whole, "rollout/raw_reward")
    assert metric(cut, "train/grad_norm") == metric(whole, "train/grad_norm")
    assert adapter(cut) == adapter(whole)


def test_a_second_start_is_refused(tiny_root, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(tiny_root, run, "--num-rollout", "1") == 0
    before = adapter(run)
    assert train(tiny_root, run, "--num-rollout", "1") == 2
    assert "--resume" in capsys.readouterr().err
    assert adapter(run) == before
    assert train(tiny_root, run, "--num-rollout", "2", "--force") == 0


@pytest.mark.parametrize("launcher", ["inline", "ray"])
def test_ctrl_c_saves_and_exits_130(tiny_root, tmp_path, launcher):
    run = tmp_path / "run"
    command = [sys.executable, LAUNCHER, "train", "--model-name", "tiny", "--launcher", launcher]
    command += ["--run-dir", str(run), "--num-rollout", "500", *folders(tiny_root)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or not metric_lines(run):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "no rollout within two minutes"
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    saved = sorted((run / "checkpoints").glob("iter_*"))
    assert saved, output
    done = metric_lines(run)
    assert saved[-1].name == f"iter_{done:07d}"
    if launcher == "inline":
        assert train(tiny_root, run, "--resume", "--num-rollout", str(done + 1)) == 0
        assert metric_lines(run) == done + 1


def metric_lines(run: Path) -> int:
    return len((run / "metrics.jsonl").read_text().splitlines())


def test_torchrun_without_ray(tiny_root, tmp_path):
    """The name of the test is meant: importing it fails, as where it is not installed."""
    train(tiny_root, tmp_path / "inline", "--num-rollout", "2")
    hidden = without_ray(tmp_path / "absent")
    torchrun(tiny_root, tmp_path / "torchrun", 1, "--num-rollout", "2", environment=hidden)
    assert adapter(tmp_path / "inline") == adapter(tmp_path / "torchrun")


def test_the_default_launcher_without_ray_says_what_to_do(tiny_root, tmp_path):
    command = [sys.executable, LAUNCHER, "train", "--model-name", "tiny"]
    done = subprocess.run(
        [*command, *folders(tiny_root), "--run-dir", str(tmp_path / "run"), "--num-rollout", "1"],
        env={**os.environ, **without_ray(tmp_path / "absent")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    said = words(done.stderr)
    assert "--launcher ray needs Ray, which cannot be imported: No module named 'ray'" in said
    assert "--launcher inline for one process" in said and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def without_ray(folder: Path) -> dict[str, str]:
    """Variables of a process that finds no Ray."""
    folder.mkdir()
    (folder / "ray.py").write_text(
        """raise ModuleNotFoundError("No module named 'ray'", name="ray")"""
    )
    return {"PYTHONPATH": str(folder)}


def torchrun(
    root: Path, run: Path, ranks: int, *options: str, environment: dict[str, str] | None = None
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += [LAUNCHER, "train", "--model-name", "tiny", "--run-dir", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    subprocess.run([*command, *folders(root), *options], check=True, timeout=240, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "shape"),
    [
        (2, ["--tensor-model-parallel-size", "2"]),
        (2, ["--expert-model-parallel-size", "2"]),
        (2, ["--pipeline-model-parallel-size", "2"]),
    ],
)
@pytest.mark.parametrize("launcher", ["ray", "torchrun"])
def test_more_ranks_train_the_same_adapter(tiny_root, tmp_path, whole_run, ranks, shape, launcher):
    """Rounding in other orders changes samples after a while, so the first updates are compared."""
    from safetensors.torch import load_file

    options = ["--num-rollout", "2", "--drift-check-interval", "1", *shape]
    assert train(tiny_root, tmp_path / "one", "--num-rollout", "2") == 0
    if launcher == "ray":
        gpus = ["--num-gpus-per-node", str(ranks)]
        assert train(tiny_root, tmp_path / "many", *options, *gpus, launcher="ray") == 0
    else:
        torchrun(tiny_root, tmp_path / "many", ranks, *options)
    one, many = (
        load_file(tmp_path / n / "adapter" / "adapter_model.safetensors") for n in ("one", "many")
    )
    assert one.keys() == many.keys()
    for key, value in one.items():
        why = f"{key}: rounding through AdamW, at most 1.2e-4 on AVX-512, AVX2 and SSE"
        close_as_a_whole(many[key], value, why, rtol=2e-3)


def test_the_base_is_bit_equal_after_training(whole_run, tiny):
    """The run checked it in memory; here the base on disk is read again."""
    from glm_lora.checkpoint.manifest import read_manifest
    from glm_lora.checkpoint.prepare import prepare
    from tests.prepared import tiny_config

    root = tiny.ref_load.parent.parent
    assert prepare(tiny_config(root, verify=True)).fingerprint == tiny.fingerprint
    recorded = json.loads((whole_run / "base.json").read_text())["fingerprint"]
    assert recorded == read_manifest(tiny.ref_load).fingerprint


def test_fingerprint_sees_one_changed_bit():
    tensors = {"a": torch.zeros(3), "b": torch.ones(2)}
    before = fingerprint_tensors(tensors)
    assert fingerprint_tensors(dict(reversed(tensors.items()))) == before
    tensors["a"][1] = 1e-45
    assert fingerprint_tensors(tensors) != before


def test_export_in_every_format_and_back(whole_run, tiny, tmp_path, capsys):
    from glm_lora.arch.spec import TINY
    from glm_lora.export.load import load_adapter

    base = ["--hf-checkpoint", str(tiny.hf_checkpoint), "--model-name", "tiny"]
    chain = (
        ["--run", str(whole_run), "--format", "peft", "--check"],
        ["--adapter-checkpoint", str(tmp_path / "0"), "--format", "sglang", *base],
        ["--adapter-checkpoint", str(tmp_path / "1"), "--format", "peft", "--check", *base],
        ["--run", str(whole_run), "--format", "merged"],
    )
    for number, arguments in enumerate(chain):
        assert main(["export", *arguments, "--output", str(tmp_path / str(number))]) == 0
    digests = {load_adapter(tmp_path / str(n), TINY).digest for n in range(3)}
    assert len(digests) == 1
    said = capsys.readouterr().out
    assert "all 86 tensors" in said
    assert "equal the trainer's" in said


def test_the_merged_checkpoint_answers_as_base_plus_adapter(whole_run, tiny, tmp_path):
    from peft import PeftModel
    from transformers import Glm5NextForConditionalGeneration as Model

    output = tmp_path / "merged"
    assert (
        main(["export", "--run", str(whole_run), "--format", "merged", "--output", str(output)])
        == 0
    )
    prompts = torch.tensor([[2 + d, 15, 17] for d in range(10)])
    with torch.no_grad():
        merged = Model.from_pretrained(output).eval()(prompts).logits
        base = Model.from_pretrained(tiny.hf_checkpoint)
        expected = PeftModel.from_pretrained(base, whole_run / "adapter").eval()(prompts).logits
    close(merged, expected, "fp32: one rounding of each merged weight", atol=1e-4)


def test_eval_compares_base_and_adapter(whole_run, tiny, capsys):
    arguments = ["eval", "--run", str(whole_run), "--json"]
    assert main([*arguments, "--prompt-data", str(tiny.data["prompts"])]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["base"]["eval/pass@1"] <= 0.40
    assert result["adapter"]["eval/pass@1"] >= 0.85


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--format", "gguf"], "--format gguf"),
        (["--format", "peft", "--adapter-checkpoint", "x"], "exactly one"),
        (["--format", "sglang", "--check"], "--format peft"),
    ],
)
def test_export_refuses(whole_run, tmp_path, options, said, capsys, wide_errors):
    output = str(tmp_path / "out")
    assert main(["export", "--run", str(whole_run), "--output", output, *options]) == 2
    assert said in words(capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_export_into_a_folder_with_files_is_refused(whole_run, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["export", "--run", str(whole_run), "--output", str(tmp_path)]) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_an_adapter_without_gradient_stops_the_run_and_is_named(tiny_root, tmp_path, monkeypatch):
    """A projection that silently trains nothing: its B never gets a gradient."""
    from glm_lora.cluster.driver import train as run_training
    from glm_lora.cluster.plan import plan
    from glm_lora.errors import TrainingError
    from glm_lora.lora.attach import attach_adapters
    from glm_lora.report.console import SilentListener
    from glm_lora.train import worker

    dead = "model.language_model.layers.3.mlp.shared_experts.up_proj"

    def with_a_dead_one(*arguments):
        adapters = attach_adapters(*arguments)
        adapters.parameters()[f"{dead}.lora_B.weight"].register_hook(torch.zeros_like)
        return adapters

    monkeypatch.setattr(worker, "attach_adapters", with_a_dead_one)
    config = tiny_train_config(tiny_root, tmp_path / "run")
    with pytest.raises(TrainingError, match="by update 2") as caught:
        run_training(plan(config), SilentListener())
    assert dead in str(caught.value)
    assert metric_lines(tmp_path / "run") == 1


def test_an_engine_that_keeps_the_old_adapter_stops_the_run(tiny_root, tmp_path, monkeypatch):
    """Push reports success but the weights stay: the probe after the second sync finds it."""
    from glm_lora.rollout.peft_policy import PeftPolicy

    loads = []
    real = PeftPolicy.load_adapter

    def first_only(self, tensors):
        loads.append(1)
        if len(loads) == 1:
            real(self, tensors)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(PeftPolicy, "load_adapter", first_only)
        assert train(tiny_root, run, "--num-rollout", "3") == 1
    assert len(loads) == 2
    # The update before it was made and is kept: the run goes on with a sound engine.
    assert metric(run, "rollout/step") == [0]
    assert train(tiny_root, run, "--num-rollout", "3", "--resume") == 0
    assert metric(run, "rollout/step") == [0, 1, 2]


def test_random_weights_need_no_base_and_equal_the_random_base(tiny, tmp_path):
    """`train --init random` makes in memory what `prepare --init random` writes to disk."""
    import shutil

    hf = tmp_path / "models" / "tiny"
    options = ["--model-name", "tiny", *folders(tmp_path)]
    made = main(["prepare", *options, "--init", "random", "--seed", "5", "--to-hf", str(hf)])
    assert made == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.hf_checkpoint / name, hf / name)
    fast = ["--num-rollout", "1", "--seed", "5", "--logprob-diff-limit", "1e-4"]
    assert train(tmp_path, tmp_path / "from-base", *fast) == 0
    missing = ["--ref-load", str(tmp_path / "nothing")]
    assert train(tmp_path, tmp_path / "in-memory", "--init", "random", *missing, *fast) == 0
    assert adapter(tmp_path / "in-memory") == adapter(tmp_path / "from-base")
