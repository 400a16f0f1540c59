"""One training step on tiny dimensions on one device, in a process of its own.

``python -m glm_lora.doctor.self_test DEVICE`` prints one JSON object. A process of its own: a
kernel that crashes takes only the test with it, and no process group stays behind.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from glm_lora.doctor.finding import Finding, broken, ok

SECONDS = 300
"""A first run on a GPU compiles kernels."""
TOLERANCE = 2e-3
"""Mean difference of log-probabilities to the CPU's in fp32; TF32 and other orders of summation
stay below it, a wrong kernel does not."""
LENGTHS = (5, 9, 16, 23)
PROMPT = 3


def self_tests(devices: list[str]) -> list[Finding]:
    """Run the test on each device; a GPU's numbers are compared with the CPU's."""
    findings: list[Finding] = []
    reference: dict[str, Any] | None = None
    for device in devices:
        name = f"self test on {device}"
        answer = _run(device)
        if "error" in answer:
            findings.append(broken(name, answer["error"], "report it with the output of --json"))
            continue
        reference = reference or answer
        gap = _gap(answer["logprobs"], reference["logprobs"])
        detail = f"one step in {answer['seconds']:.1f} s, {answer['sites']} adapters moved"
        if device != "cpu" and gap > TOLERANCE:
            why = f"log-probabilities differ from the CPU's by {gap:.2g} (limit {TOLERANCE:g})"
            findings.append(broken(name, why, "check the driver, torch and flash-linear-attention"))
        else:
            findings.append(ok(name, detail))
    return findings


def _gap(left: list[float], right: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / len(left)


def _run(device: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "glm_lora.doctor.self_test", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {SECONDS} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"ended with {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def one_step(device: str) -> dict[str, Any]:
    """Build the trainer on ``device``, take one step, and check what must and must not move.

    Raises:
        RunError: A check of the training step fired, or the base changed.
    """
    from pathlib import Path

    import torch

    from glm_lora.arch.projections import trainable_sites
    from glm_lora.arch.spec import TINY
    from glm_lora.checkpoint.random_init import init_random
    from glm_lora.config import OptimizerConfig, TrainConfig
    from glm_lora.model.parallel import init_parallel
    from glm_lora.model.stage import build_stage
    from glm_lora.targets.selection import make_selection
    from glm_lora.train.worker import TrainWorker, init_process_group

    kind = "cuda" if device.startswith("cuda") else "cpu"
    config = TrainConfig(
        model_name="tiny",
        hf_checkpoint=Path(),
        ref_load=Path(),
        run_dir=Path(),
        dtype="float32",
        device=kind,
        optimizer=OptimizerConfig(lr=1e-2),
    )
    init_process_group(config, 0, 1, None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    context = init_parallel(config.parallel, torch.device(device))
    start = time.perf_counter()
    parallel = config.parallel
    stage = build_stage(
        TINY,
        context,
        dtype=torch.float32,
        recompute=parallel.recompute,
        dsa_backend=parallel.dsa_backend,
    )
    init_random(stage, seed=0)
    selection = make_selection("tiny", TINY, trainable_sites(TINY), rank=4, alpha=8.0)
    worker = TrainWorker(config, selection, TINY, stage, context)
    sequences = [tuple((7 * i + n) % TINY.vocab_size for i in range(n)) for n in LENGTHS]
    before = worker.adapter()
    logprobs = [value for row in worker.logprobs(sequences) for value in row.tolist()]
    worker.step(_batch(sequences))
    after = worker.adapter()
    worker.verify_base()
    moved = sum(
        not torch.equal(before.tensors[key], value)
        for key, value in after.tensors.items()
        if ".lora_B." in key
    )
    return {
        "device": device,
        "seconds": time.perf_counter() - start,
        "sites": moved,
        "logprobs": logprobs,
    }


def _batch(sequences: list[tuple[int, ...]]) -> Any:
    from glm_lora.protocols import AdapterRef, TrainBatch, TrainSample

    samples = tuple(
        TrainSample(
            prompt_ids=tokens[:PROMPT],
            response_ids=tokens[PROMPT:],
            rollout_logprobs=(-3.0,) * (len(tokens) - PROMPT),
            advantage=1.0 if index % 2 else -1.0,
            loss_mask=(1,) * (len(tokens) - PROMPT),
            adapter=AdapterRef("policy", 0),
        )
        for index, tokens in enumerate(sequences)
    )
    return TrainBatch(samples, step=0)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(one_step(sys.argv[1])) + "\n")
