"""The steps of the command line as functions, for notebooks and scripts (``import glm_lora``).

Options have the names they have on the command line, without dashes; an unknown one is refused
with the nearest name. Paths that are not given are those of the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from glm_lora import settings
from glm_lora.arch.spec import ModelSpec
from glm_lora.config import DEFAULT_MODEL, PrepareConfig, SelectionConfig, TrainConfig, build
from glm_lora.errors import ConfigError, did_you_mean
from glm_lora.options import collect, leaves
from glm_lora.targets.resolve import resolve
from glm_lora.targets.selection import Selection

if TYPE_CHECKING:
    from glm_lora.checkpoint.prepare import PrepareResult
    from glm_lora.protocols import AdapterState
    from glm_lora.report.console import Listener

Folder = str | Path


def resolve_targets(
    model_name: str = DEFAULT_MODEL, *, hf_checkpoint: Folder | None = None, **options: Any
) -> Selection:
    """What a selection trains. No torch is loaded.

    Args:
        model_name: ``GLM-5.3-Flash``, ``GLM-5.3-Flash-4layer`` or ``tiny``.
        hf_checkpoint: Folder with another ``config.json`` to take the shapes from.
        options: ``target_modules``, ``exclude_modules``, ``layers``, ``lora_rank``, ... as in
            ``glm-lora targets``.

    Returns:
        The selected sites with their ranks.

    Raises:
        TargetError: A pattern selects nothing, or something that cannot be trained.
    """
    config = build(SelectionConfig, _nested(SelectionConfig, options))
    return resolve(_spec(model_name, hf_checkpoint), model_name, config).selection


def prepare(
    model_name: str = DEFAULT_MODEL,
    *,
    model_dir: Folder | None = None,
    ckpt_dir: Folder | None = None,
    data_dir: Folder | None = None,
    **options: Any,
) -> PrepareResult:
    """Make the checkpoint, the torch_dist base and the prompt files; what is there is kept.

    Args:
        model_name: As above.
        model_dir: Folder of Hugging Face checkpoints.
        ckpt_dir: Folder of bases.
        data_dir: Folder of datasets.
        options: As in ``glm-lora prepare``.

    Raises:
        ConfigError, CheckpointError: See ``glm-lora prepare``.
    """
    from glm_lora.checkpoint.prepare import prepare as run

    paths = {
        "model_name": model_name,
        "hf_checkpoint": settings.hf_path(model_name, settings.model_dir(_path(model_dir))),
        "ref_load": settings.base_path(model_name, settings.ckpt_dir(_path(ckpt_dir))),
        "data_dir": settings.data_dir(_path(data_dir)),
    }
    return run(build(PrepareConfig, paths | _nested(PrepareConfig, options)))


def train(
    model_name: str = DEFAULT_MODEL,
    *,
    run_dir: Folder,
    model_dir: Folder | None = None,
    ckpt_dir: Folder | None = None,
    data_dir: Folder | None = None,
    resume: bool = False,
    force: bool = False,
    listener: Listener | None = None,
    **options: Any,
) -> Path:
    """Train an adapter in this process (``launcher="inline"``, the default here) or on Ray.

    Args:
        model_name: As above.
        run_dir: Run folder to make, or with ``resume`` to continue.
        model_dir: Folder of Hugging Face checkpoints.
        ckpt_dir: Folder of bases.
        data_dir: Folder of datasets.
        resume: Continue the run in ``run_dir``.
        force: Overwrite the run in ``run_dir``.
        listener: Hears phases and rollouts; default is silence.
        options: As in ``glm-lora train``: ``num_rollout``, ``lr``, ``lora_rank``, ...

    Returns:
        The run folder; ``adapter/`` in it is the PEFT adapter.

    Raises:
        UserError, CheckpointError: The options or a file are wrong; nothing was started.
        RunError: The run failed.
    """
    from glm_lora.cluster.driver import train as run
    from glm_lora.cluster.plan import plan
    from glm_lora.report.console import SilentListener

    values: dict[str, Any] = {"launcher": "inline"}
    values |= _nested(TrainConfig, options)
    values |= {"model_name": model_name, "run_dir": str(run_dir)}
    config = settings.resolve_train(
        values,
        models=settings.model_dir(_path(model_dir)),
        ckpts=settings.ckpt_dir(_path(ckpt_dir)),
        data=settings.data_dir(_path(data_dir)),
    )
    run(plan(config), listener or SilentListener(), resume=resume, force=force)
    return config.run_dir


def export(
    run: Folder, output: Folder, format: str = "peft", *, fp8: str = "requantise"
) -> AdapterState:
    """Write the adapter of a run's newest checkpoint for PEFT or SGLang, or merged.

    Args:
        run: Run folder.
        output: New or empty folder.
        format: ``peft``, ``sglang`` or ``merged``.
        fp8: What becomes of merged FP8 weights: ``requantise`` or ``bf16``.

    Returns:
        The adapter that was written.

    Raises:
        ConfigError, CheckpointError, ExportError: See ``glm-lora export``.
    """
    from glm_lora.export.source import from_run
    from glm_lora.export.write import export as write

    source = from_run(Path(run))
    base = source.hf_checkpoint
    write(source.state, Path(output), format, source.facts, hf_checkpoint=base, fp8=fp8)
    return source.state


def load_adapter(
    folder: Folder, model_name: str = DEFAULT_MODEL, *, hf_checkpoint: Folder | None = None
) -> AdapterState:
    """Read an adapter folder (PEFT's or SGLang's names) strictly: every tensor known and used.

    Args:
        folder: Holds ``adapter_config.json`` and ``adapter_model.safetensors``.
        model_name: The model it is for.
        hf_checkpoint: Folder with another ``config.json`` to take the shapes from.

    Raises:
        CheckpointError: It cannot be read exactly; everything that does not fit is listed.
    """
    from glm_lora.export.load import load_adapter as load

    return load(Path(folder), _spec(model_name, hf_checkpoint), model_name)


def evaluate(
    run: Folder,
    prompt_data: Sequence[Folder],
    *,
    n_samples_per_prompt: int = 8,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Compare base and adapter of a run on prompt files: same prompts, same seeds.

    Args:
        run: Run folder.
        prompt_data: Prompt files.
        n_samples_per_prompt: Samples for pass@k.
        seed: Seeds the requests.

    Returns:
        ``eval/...`` scalars of ``base`` and of ``adapter``.

    Raises:
        ConfigError, CheckpointError, DataError: The run or a prompt file cannot be used.
    """
    from glm_lora.cluster.evaluation import evaluate_run

    return evaluate_run(Path(run), [str(path) for path in prompt_data], n_samples_per_prompt, seed)


def write_report(run: Folder, output: Folder | None = None) -> Path:
    """Write ``report.html`` and PNG charts of a run.

    Args:
        run: Run folder; it may still be running.
        output: The file; default in the run folder.

    Returns:
        The file.

    Raises:
        ConfigError: ``run`` is no run folder.
    """
    from glm_lora.report.html import write_report as write

    return write(Path(run), _path(output))


def _nested(cls: type[BaseModel], options: dict[str, Any]) -> dict[str, Any]:
    """Flat options in the sections of ``cls``; ConfigError names the nearest of an unknown one."""
    names = [leaf.name for leaf in leaves(cls)]
    for name in options:
        if name not in names:
            raise ConfigError(
                f"unknown option {name!r}",
                f"an option of {cls.__name__.removesuffix('Config').lower()}",
                did_you_mean(name, names),
            )
    listed = {k: [*map(str, v)] if isinstance(v, tuple) else v for k, v in options.items()}
    return collect(cls, listed)


def _spec(model_name: str, hf_checkpoint: Folder | None) -> ModelSpec:
    # A folder without config.json stands for "no other shapes": the built-in description.
    return settings.spec_of(model_name, Path(hf_checkpoint or "no-checkpoint-given"))


def _path(folder: Folder | None) -> Path | None:
    return None if folder is None else Path(folder).expanduser()
