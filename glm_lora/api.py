"""The steps of the command line as functions, for notebooks and scripts (``import glm_lora``).

Options have the names they have on the command line, without dashes; an unknown one is refused
with the nearest name, and a value that cannot be used by a ConfigError that names the argument.
Wherever a path goes, text and ``Path`` are the same, and ``~`` is the home folder. Paths that are
not given (or None) are those of the command line; a list may stand for what is listed with commas
there.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

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
logger = logging.getLogger(__name__)
_FILE_NAMES = ("prompt_data", "eval_prompt_data", "reward")
"""Options of text that may name files."""


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
    spec = _spec(model_name, _path(hf_checkpoint, "hf_checkpoint"))
    return resolve(spec, model_name, config).selection


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

    models = settings.model_dir(_path(model_dir, "model_dir"))
    ckpts = settings.ckpt_dir(_path(ckpt_dir, "ckpt_dir"))
    paths = {
        "model_name": _named(model_name),
        "hf_checkpoint": settings.hf_path(model_name, models),
        "ref_load": settings.base_path(model_name, ckpts),
        "data_dir": settings.data_dir(_path(data_dir, "data_dir")),
    }
    return run(build(PrepareConfig, paths | _nested(PrepareConfig, options)))


def train(
    model_name: str = DEFAULT_MODEL,
    *,
    run_dir: Folder | None = None,
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
        run_dir: Run folder to make, or with ``resume`` to continue; default
            ``runs/<model>-<time>``.
        model_dir: Folder of Hugging Face checkpoints.
        ckpt_dir: Folder of bases.
        data_dir: Folder of datasets.
        resume: Continue the run in ``run_dir``; options that are not given are its own.
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
    from glm_lora.report.resuming import stored_options

    values: dict[str, Any] = {"launcher": "inline"}
    values |= _nested(TrainConfig, options)
    values["model_name"] = _named(model_name)
    folder = _path(run_dir, "run_dir")
    if folder is not None:
        values["run_dir"] = str(folder)
    elif resume:
        raise ConfigError("resume without run_dir", "the folder of the run to continue")
    if resume and force:
        raise ConfigError("resume together with force", "one of them")
    models, ckpts = _path(model_dir, "model_dir"), _path(ckpt_dir, "ckpt_dir")
    stored: dict[str, Any] = {}
    if resume and folder is not None:
        launcher = values["launcher"]
        stored = stored_options(folder, values, launcher=launcher, models=models, ckpts=ckpts)
    config = settings.resolve_train(
        values,
        stored=stored,
        models=settings.model_dir(models),
        ckpts=settings.ckpt_dir(ckpts),
        data=settings.data_dir(_path(data_dir, "data_dir")),
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

    folder = _needed(output, "output")
    source = from_run(_needed(run, "run"))
    base = source.hf_checkpoint
    write(source.state, folder, format, source.facts, hf_checkpoint=base, fp8=fp8)
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

    spec = _spec(model_name, _path(hf_checkpoint, "hf_checkpoint"))
    return load(_needed(folder, "folder"), spec, model_name)


def evaluate(
    run: Folder,
    prompt_data: Folder | Sequence[Folder],
    *,
    n_samples_per_prompt: int = 8,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Compare base and adapter of a run on prompt files: same prompts, same seeds.

    Args:
        run: Run folder.
        prompt_data: A prompt file, or several.
        n_samples_per_prompt: Samples for pass@k.
        seed: Seeds the requests.

    Returns:
        ``eval/...`` scalars of ``base`` and of ``adapter``. Why samples have no score is logged.

    Raises:
        ConfigError, CheckpointError, DataError: The run or a prompt file cannot be used.
        RolloutError: Not one sample has a score.
    """
    from glm_lora.cluster.evaluation import evaluate_run

    listed = prompt_data if isinstance(prompt_data, list | tuple) else [prompt_data]
    return evaluate_run(
        _needed(run, "run"),
        [str(_needed(path, "prompt_data")) for path in listed],
        _whole(n_samples_per_prompt, "n_samples_per_prompt", 1),
        _whole(seed, "seed", 0),
        logger.warning,
    )


def write_report(run: Folder, output: Folder | None = None) -> Path:
    """Write ``report.html`` and PNG charts of a run.

    Args:
        run: Run folder; it may still be running.
        output: The file; default in the run folder.

    Returns:
        The file.

    Raises:
        ConfigError: ``run`` is no run folder, or ``output`` no file to write.
    """
    from glm_lora.report.html import write_report as write

    return write(_needed(run, "run"), _path(output, "output"))


def _nested(cls: type[BaseModel], options: dict[str, Any]) -> dict[str, Any]:
    """Flat options in the sections of ``cls``; ConfigError names the nearest of an unknown one."""
    fields = {leaf.name: leaf.field for leaf in leaves(cls)}
    for name in options:
        if name not in fields:
            raise ConfigError(
                f"unknown option {name!r}",
                f"an option of {cls.__name__.removesuffix('Config').lower()}",
                did_you_mean(name, fields),
            )
    given = {name: value for name, value in options.items() if value is not None}
    return collect(cls, {name: _value(value, name, fields[name]) for name, value in given.items()})


def _value(value: Any, name: str, field: FieldInfo) -> Any:
    """An option's value as ``collect`` takes it; ConfigError when it is of another kind."""
    kind = field.annotation
    if kind is Path or Path in get_args(kind):
        return _path(value, name)
    if kind is str or get_origin(kind) is tuple:
        if not isinstance(value, list | tuple | range):
            return _text(value, name)
        texts = tuple(_text(part, name) for part in value)  # pyright: ignore[reportUnknownVariableType]
        return ",".join(texts) if kind is str else texts
    try:
        whole: Any = Annotated[kind, field]  # pyright: ignore[reportInvalidTypeForm]
        return TypeAdapter(whole).validate_python(value)
    except ValidationError as error:
        said = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(f"{name} is {value!r}", said.removeprefix("Input should be ")) from None


def _text(value: Any, name: str) -> str:
    if isinstance(value, os.PathLike) or (name in _FILE_NAMES and str(value).startswith("~")):
        return str(_needed(value, name))
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return str(value)
    raise ConfigError(f"{name} is {value!r}", "text, a number, or a list of them")


def _named(model_name: Any) -> str:
    if isinstance(model_name, str):
        return model_name
    raise ConfigError(f"model_name is {model_name!r}", f"a name such as {DEFAULT_MODEL!r}")


def _whole(value: Any, name: str, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}", f"a whole number of at least {least}")
    return number


def _spec(model_name: str, hf_checkpoint: Path | None) -> ModelSpec:
    # A folder without config.json stands for "no other shapes": the built-in description.
    return settings.spec_of(_named(model_name), hf_checkpoint or Path("no-checkpoint-given"))


def _path(given: Any, name: str) -> Path | None:
    """What every argument that is a path goes through; None when it was not given."""
    return None if given is None else _needed(given, name)


def _needed(given: Any, name: str) -> Path:
    if not isinstance(given, str | os.PathLike) or not str(given) or "\0" in str(given):
        raise ConfigError(f"{name} is {given!r}", "a path: text or a Path")
    try:
        path = Path(given).expanduser()
        os.fsencode(path)
    except (TypeError, UnicodeError, RuntimeError) as error:  # RuntimeError: ~ of no user
        raise ConfigError(f"{name} is {given!r}: {error}", "a path: text or a Path") from None
    return path
