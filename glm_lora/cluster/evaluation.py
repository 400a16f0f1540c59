"""Base against adapter on prompt files, with the run's own engine, reward and limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from glm_lora.cluster.driver import prompts_of
from glm_lora.config import ParallelConfig, TrainConfig, from_toml
from glm_lora.export.check import Reference
from glm_lora.export.source import from_run
from glm_lora.protocols import AdapterState
from glm_lora.report.run_folder import CONFIG
from glm_lora.rl.chat import ChatFormat
from glm_lora.rl.evaluate import compare
from glm_lora.rl.rewards import reward_of
from glm_lora.rollout.engine import build_engine

CHECKED_TOKENS = 256
"""Longest sequence that ``export --check`` scores."""


def trainer_references(run: Path, state: AdapterState) -> list[Reference]:
    """What the trainer itself says of some sequences under an adapter.

    The trainer is built in this process with one rank; the sequences are the run's first prompts.

    Args:
        run: Run folder.
        state: One of the run's adapters. A run that goes on may have a newer one by now.

    Raises:
        ConfigError, CheckpointError, DataError: The run or a prompt file cannot be used.
    """
    from glm_lora.cluster.plan import plan
    from glm_lora.train.worker import build_worker, init_process_group

    config = from_toml(TrainConfig, run / CONFIG)
    alone = config.model_copy(
        update={"parallel": ParallelConfig(), "num_nodes": 1, "num_gpus_per_node": 1}
    )
    checked = plan(alone)
    init_process_group(alone, 0, 1, None)
    worker = build_worker(alone, checked.selection)
    worker.set_adapter(state)
    chat = ChatFormat.load(config.hf_checkpoint, checked.spec.eos_token_ids)
    reward = reward_of(config.rollout)
    try:
        data = prompts_of(config.rollout, config.rollout.prompt_data, chat, reward)
    finally:
        reward.close()
    sequences = [
        (*prompt.ids, *chat.stop_token_ids)[:CHECKED_TOKENS] for prompt in data.files[0].prompts[:8]
    ]
    found = worker.logprobs(sequences)
    return [Reference(tokens, values) for tokens, values in zip(sequences, found, strict=True)]


def evaluate_run(
    run: Path,
    prompt_data: Sequence[str],
    samples_per_prompt: int,
    seed: int,
    note: Callable[[str], None],
) -> dict[str, dict[str, float]]:
    """``eval/...`` scalars of ``base`` and ``adapter`` of a run, same prompts and seeds.

    ``note`` hears what is left out of them, and why.

    Raises:
        ConfigError, CheckpointError, DataError: The run or a prompt file cannot be used.
        RolloutError: No response has a reward.
    """
    source = from_run(run)
    config = from_toml(TrainConfig, run / CONFIG)
    chat = ChatFormat.load(config.hf_checkpoint, source.spec.eos_token_ids)
    reward = reward_of(config.rollout)
    try:
        data = prompts_of(config.rollout, prompt_data, chat, reward)
        for row in data.bad_rows:
            note(f"left out: {row}")
        engine = build_engine(config, source.state.selection)
        try:
            engine.push(source.state)
            return compare(
                engine,
                source.state.ref(),
                [p for file in data.files for p in file.prompts],
                reward,
                chat.decode,
                sampling=chat.sampling(config.rollout),
                samples_per_prompt=samples_per_prompt,
                seed=seed,
                note=note,
            )
        finally:
            engine.close()
    finally:
        reward.close()
