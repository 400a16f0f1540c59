"""The ``prepare`` step: everything that ``train`` reads, made once and recognised afterwards."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from glm_lora.arch.projections import all_params
from glm_lora.arch.spec import TINY, ModelSpec
from glm_lora.checkpoint import ranks
from glm_lora.checkpoint.base_build import (
    build_base,
    check_target,
    plan_base,
    verify_base,
    worker_count,
)
from glm_lora.checkpoint.base_writer import CHUNK_BYTES, READ_AHEAD, BaseSource
from glm_lora.checkpoint.convert import open_source, wanted_names
from glm_lora.checkpoint.files import (
    check_empty,
    free_bytes,
    make_folder,
    size_text,
    write_errors,
)
from glm_lora.checkpoint.hf_reader import HfReader
from glm_lora.checkpoint.manifest import BaseManifest, check_base
from glm_lora.checkpoint.progress import Report, silent
from glm_lora.checkpoint.random_init import RandomSource
from glm_lora.checkpoint.released import (
    Origin,
    dataset_files,
    describe,
    fetch,
    fetch_dataset,
    find_origin,
    has_dataset,
    open_origin,
)
from glm_lora.checkpoint.tiny import changed_prompts, prompt_files, write_prompts
from glm_lora.checkpoint.tiny_folder import is_made, make_tiny, read_marker
from glm_lora.checkpoint.to_hf import write_hf
from glm_lora.checkpoint.torch_dist import TRACKER
from glm_lora.config import PrepareConfig
from glm_lora.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class PrepareResult:
    """What ``prepare`` made or found."""

    hf_checkpoint: Path
    ref_load: Path
    fingerprint: str = ""
    """Of the base; empty in a dry run."""
    data: Mapping[str, Path] = field(default_factory=dict)
    """Prompt files by name."""
    made: tuple[str, ...] = ()
    """Which of ``checkpoint``, ``base`` and ``data`` were made now; empty when all was there."""
    kept: tuple[Path, ...] = ()
    """Prompt files of the tiny set that hold something else, and were left as they are."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Tensors of the source that are not part of the base, by reason."""
    plan: tuple[str, ...] = ()
    """What was (or in a dry run would be) read, written and downloaded, one line each."""
    seconds: float = 0.0


def prepare(config: PrepareConfig, report: Report = silent) -> PrepareResult:
    """Make the Hugging Face folder, the torch_dist base and the prompt files of a model.

    What is there already and belongs to the same source is left alone; a half-written result is
    continued or built again, never taken for a finished one.

    Raises:
        CheckpointError: A source that is missing, damaged or of another model, or an output folder
            that cannot be used.
        ConfigError: Options that do nothing, or one folder for two things.
        ModelError: A ``config.json`` of another architecture.
    """
    started = time.monotonic()
    _check_folders(config)
    tiny = config.model_name == "tiny" and config.init == "base"
    with ranks.joined():
        result = _prepare_tiny(config, report) if tiny else _prepare_released(config, report)
    return replace(result, seconds=time.monotonic() - started)


def _check_folders(config: PrepareConfig) -> None:
    """Refuse a base in the place of a Hugging Face folder: each is written as a whole."""
    for option, folder in (("--hf-checkpoint", config.hf_checkpoint), ("--to-hf", config.to_hf)):
        if folder and os.path.realpath(folder) == os.path.realpath(config.ref_load):
            raise ConfigError(
                f"--ref-load and {option} are both {folder}",
                "two folders",
                "Name another folder with --ref-load",
            )


def _prepare_tiny(config: PrepareConfig, report: Report) -> PrepareResult:
    if config.to_hf is not None:
        raise ConfigError(
            f"--to-hf {config.to_hf} with the pre-trained tiny model, which is made as a Hugging "
            "Face folder",
            "--hf-checkpoint to say where, or --init random with --to-hf",
        )
    if config.num_layers not in (None, TINY.num_hidden_layers):
        raise ConfigError(
            f"--num-layers {config.num_layers} with the pre-trained tiny model, which has "
            f"{TINY.num_hidden_layers}",
            f"--num-layers {TINY.num_hidden_layers}, or --init random",
        )
    folder, made = config.hf_checkpoint, []
    if config.force and read_marker(folder) is not None:
        there = False
    else:
        there = is_made(folder, config.seed)
    check_target(config.ref_load)
    prompts = config.data_dir / "tiny"
    all_there = all(path.exists() for path in prompt_files(prompts).values()) and not config.force
    plan = [
        f"{'use' if there else 'pre-train and write'} the tiny checkpoint in {folder}",
        f"{'keep' if _has_base(config) else 'write'} the base in {config.ref_load}",
        f"{'keep' if all_there else 'write'} the prompts in {prompts}",
    ]
    if config.dry_run:
        return PrepareResult(folder, config.ref_load, plan=tuple(plan))
    make_folder(config.ref_load.parent)
    make_folder(prompts)
    # Every rank takes part in every wait, whatever it has found itself.
    ranks.first_then_all(None if there else lambda: make_tiny(folder, config.seed, report))
    made += [] if there else ["checkpoint"]
    source = open_source(HfReader.open(folder, wanted_names(TINY)), TINY)
    manifest, built = _base(config, TINY, source, describe(source), report)
    made += ["base"] if built else []
    data, written, kept = _prompts(config, report)
    made += ["data"] if written else []
    return PrepareResult(
        folder,
        config.ref_load,
        manifest.fingerprint,
        data,
        tuple(made),
        kept,
        source.skipped,
        tuple(plan),
    )


def _prepare_released(config: PrepareConfig, report: Report) -> PrepareResult:
    check_target(config.ref_load)
    if config.to_hf is not None:
        check_empty(config.to_hf)
    origin = find_origin(config)
    plan = [*origin.lines, *_base_lines(config, origin)]
    if config.dry_run:
        return PrepareResult(config.hf_checkpoint, config.ref_load, plan=tuple(plan))
    made: list[str] = []
    data, written, kept = _prompts(config, report)
    made += ["data"] if written else []
    ranks.first_then_all(lambda: fetch(origin, report))
    made += ["checkpoint"] if origin.download is not None else []
    source, description = open_origin(origin, config.seed)
    manifest, built = _base(config, origin.spec, source, description, report)
    made += ["base"] if built else []
    if config.to_hf is not None:
        target = config.to_hf
        ranks.first_then_all(
            lambda: write_hf(config.ref_load, manifest, origin.folder, target, report)
        )
        made.append("to_hf")
    return PrepareResult(
        config.hf_checkpoint,
        config.ref_load,
        manifest.fingerprint,
        data,
        tuple(made),
        kept,
        description["skipped"],
        tuple(plan),
    )


def _prompts(
    config: PrepareConfig, report: Report
) -> tuple[dict[str, Path], bool, tuple[Path, ...]]:
    """The prompt files by name, whether any was made now, and those kept though they differ."""
    if config.model_name != "tiny":
        there = has_dataset(config)
        ranks.first_then_all(None if there else lambda: fetch_dataset(config, report))
        return dataset_files(config), not there, ()
    folder = config.data_dir / "tiny"
    files = prompt_files(folder)
    with write_errors(folder):
        changed = tuple(changed_prompts(folder))
        keep = () if config.force else changed
        written = bool(changed and config.force) or not all(p.exists() for p in files.values())
        ranks.first_then_all(lambda: write_prompts(folder, keep))
    return files, written, keep


def _base_lines(config: PrepareConfig, origin: Origin) -> list[str]:
    """The part of the plan that tells what the base will need."""
    # Without the source's headers this counts bfloat16; a source in fp32 takes twice as much.
    estimate = RandomSource(0)
    params = all_params(origin.spec).values()
    nbytes = sum(p.numel * estimate.dtype(p).itemsize for p in params)
    workers = worker_count(config.workers)
    rows = max(CHUNK_BYTES, *(p.numel // p.shape[0] * 4 for p in params))
    memory = workers * (READ_AHEAD + 2) * rows
    lines = [
        f"{'keep' if _has_base(config) else 'write'} a base of "
        f"{origin.spec.num_hidden_layers} layers, "
        f"{sum(p.numel for p in params):,} parameters, about {size_text(nbytes)}, "
        f"in {config.ref_load} ({size_text(free_bytes(config.ref_load))} free)",
        f"use {workers} threads and about {size_text(memory)} of memory",
    ]
    if config.to_hf is not None:
        lines.append(f"write it back as a Hugging Face checkpoint in {config.to_hf}")
    if config.task != "none" and config.model_name != "tiny":
        lines.append(f"keep or download {config.task} in {config.data_dir / config.task}")
    return lines


def _has_base(config: PrepareConfig) -> bool:
    """Whether a finished base is there that is not to be built again."""
    return (config.ref_load / TRACKER).exists() and not config.force


def _base(
    config: PrepareConfig,
    spec: ModelSpec,
    source: BaseSource,
    description: Mapping[str, Any],
    report: Report,
) -> tuple[BaseManifest, bool]:
    """The base of ``source``, and whether it was written now rather than found."""
    if _has_base(config):
        manifest = check_base(config.ref_load, spec)
        if manifest.source != description:
            raise CheckpointError(
                f"{config.ref_load} holds a base that was made from another source",
                "the base of this source",
                "Use --force to build it again, or another folder with --ref-load",
            )
        _verify(config, manifest, report)
        return manifest, False
    manifest = build_base(
        plan_base(config.ref_load, spec, source, description), config.workers, report
    )
    _verify(config, manifest, report)
    return manifest, True


def _verify(config: PrepareConfig, manifest: BaseManifest, report: Report) -> None:
    if config.verify:
        ranks.first_then_all(lambda: verify_base(config.ref_load, manifest, report))
