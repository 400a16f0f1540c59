"""The commands ``targets``, ``prepare`` and ``train``: options, and what is printed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from glm_lora import settings
from glm_lora.arch.spec import builtin
from glm_lora.config import (
    DEFAULT_MODEL,
    TINY_DEFAULTS,
    PrepareConfig,
    SelectionConfig,
    TrainConfig,
    build,
)
from glm_lora.errors import ConfigError, GlmLoraError, RunError
from glm_lora.options import collect, merge, path_option, with_options

if TYPE_CHECKING:
    from glm_lora.cluster.plan import Outline, Plan

out = Console(highlight=False)

ModelName = Annotated[
    str, typer.Option("--model-name", help="GLM-5.3-Flash, GLM-5.3-Flash-4layer or tiny.")
]
ModelDir = Annotated[Path | None, path_option("Checkpoints (default ~/.cache/glm-lora/models).")]
CkptDir = Annotated[Path | None, path_option("Bases (default ~/.cache/glm-lora/ckpt).")]
DataDir = Annotated[Path | None, path_option("Datasets (default ~/.cache/glm-lora/data).")]
HfCheckpoint = Annotated[
    Path | None, path_option("Hugging Face folder (default <model-dir>/<name>).")
]
AdapterRecipe = Annotated[
    Path | None, path_option("Adapter recipe (TOML) instead of the selection options.")
]


@with_options(
    SelectionConfig,
    skip=("lora_dropout",),
    other_defaults={"": TINY_DEFAULTS["selection"]},
    repeatable=("target_modules", "exclude_modules"),
)
def targets(
    model_name: ModelName = DEFAULT_MODEL,
    hf_checkpoint: Annotated[
        Path | None, path_option("Folder with config.json (and index) to read instead.")
    ] = None,
    adapter: AdapterRecipe = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    list_sites: Annotated[bool, typer.Option("--list", help="Show every site.")] = False,
    explain: Annotated[str | None, typer.Option(metavar="NAME", help="Explain one site.")] = None,
    **given: Any,
) -> None:
    """Show exactly what a selection trains, before anything is started."""
    from glm_lora.targets.report import run_targets

    tiny = TINY_DEFAULTS["selection"] if model_name == settings.TINY else {}
    config = _selection(adapter, collect(SelectionConfig, given), tiny)
    text = run_targets(
        model_name=model_name,
        config=config,
        hf_checkpoint=hf_checkpoint,
        as_json=json,
        list_sites=list_sites,
        explain=explain,
    )
    typer.echo(text)


def _selection(
    adapter: Path | None, given: dict[str, Any], tiny: dict[str, Any]
) -> SelectionConfig:
    """The selection from a recipe file or from options, which exclude each other."""
    if adapter is None:
        return build(SelectionConfig, merge(tiny, settings.selection_values(given)))
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ConfigError(
            f"--adapter {adapter} was given together with {flags}",
            "a recipe file or selection options, not both",
        )
    from glm_lora.targets.recipes import load_recipe

    return load_recipe(adapter)


@with_options(
    TrainConfig,
    skip=("model_name", "hf_checkpoint", "ref_load", "run_dir", "launcher", "sglang_flags"),
    other_defaults=TINY_DEFAULTS,
    repeatable=("target_modules", "exclude_modules", "prompt_data"),
)
def train(
    model_name: ModelName = DEFAULT_MODEL,
    adapter: AdapterRecipe = None,
    run_dir: Annotated[
        Path | None, path_option("Run folder (default runs/<model>-<time>-<random>).")
    ] = None,
    launcher: Annotated[
        str,
        typer.Option(
            help="ray, torchrun or inline (default ray; torchrun where it started this process)."
        ),
    ] = "",
    hf_checkpoint: HfCheckpoint = None,
    ref_load: Annotated[
        Path | None, path_option("torch_dist base (default <ckpt-dir>/<name>_torch_dist).")
    ] = None,
    model_dir: ModelDir = None,
    ckpt_dir: CkptDir = None,
    data_dir: DataDir = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --run-dir.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the run in --run-dir.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, check everything, start nothing.")
    ] = False,
    log_format: Annotated[
        str, typer.Option(help="text, or json: one object per line on stdout, for machines.")
    ] = "text",
    sglang_flags: Annotated[list[str] | None, typer.Option("--sglang-flags", hidden=True)] = None,
    **given: Any,
) -> None:
    """Train an adapter: sample, score, train, sync, until the last rollout."""
    from glm_lora.cluster.plan import on_base, outline

    if log_format not in ("text", "json"):
        raise ConfigError(f"--log-format {log_format}", "text or json")
    values = collect(TrainConfig, given)
    if sglang_flags:
        values.setdefault("sglang", {})["sglang_flags"] = sglang_flags
    world = settings.torchrun_world()
    stored: dict[str, Any] = {}
    if resume and run_dir is not None:
        from glm_lora.report.resuming import stored_options

        stored = stored_options(
            run_dir,
            values,
            launcher=launcher,
            world_size=world[1] if world else None,
            models=model_dir,
            ckpts=ckpt_dir,
        )
    chosen = launcher or ("torchrun" if world else stored.get("launcher", "ray"))
    for name, value in (
        ("run_dir", run_dir), ("hf_checkpoint", hf_checkpoint), ("ref_load", ref_load),
    ):  # fmt: skip
        if value is not None:
            values[name] = str(value)
    if adapter is not None:
        values["selection"] = _selection(adapter, values.get("selection", {}), {}).model_dump()
    values |= {"model_name": model_name, "launcher": chosen}
    config = settings.resolve_train(
        values,
        stored=stored,
        models=settings.model_dir(model_dir),
        ckpts=settings.ckpt_dir(ckpt_dir),
        data=settings.data_dir(data_dir),
        world_size=world[1] if world and chosen == "torchrun" else None,
    )
    if resume and force:
        raise ConfigError("--resume together with --force", "one of them")
    if resume and run_dir is None:
        raise ConfigError("--resume without --run-dir", "the folder of the run to continue")
    wanted = outline(config)
    leading = world is None or world[0] == 0
    if dry_run:
        _dry_run(wanted, leading=leading, resume=resume, force=force)
        return
    checked = on_base(wanted)
    if leading and log_format == "text":
        _announce(checked)
    _train_checked(checked, log_format, leading=leading, resume=resume, force=force)


def _dry_run(wanted: Outline, *, leading: bool, resume: bool, force: bool) -> None:
    """Print the plan, then check what must exist: a shape is planned before a base is made."""
    from glm_lora.cluster.dry_run import describe
    from glm_lora.cluster.plan import on_base

    lines = describe(wanted)
    if leading:
        _announce(wanted)
        for line in lines:
            out.print(line, soft_wrap=True, markup=False)
    from glm_lora.report.resuming import check_resume, inputs_of
    from glm_lora.report.run_folder import check_new

    if not resume:
        check_new(wanted.config, force=force)
    checked = on_base(wanted)
    from glm_lora.cluster.driver import load_text
    from glm_lora.rollout.engine import check_interpreter

    check_interpreter(checked.config)
    text = load_text(checked)
    text.reward.close()
    if resume:
        inputs = inputs_of(checked.config, text.data.fingerprint)
        check_resume(checked.config, checked.selection, checked.base, inputs)
    if leading:
        out.print(f"prompts: {len(text.data)} usable, {len(text.data.bad_rows)} left out")


def _train_checked(
    checked: Plan, log_format: str, *, leading: bool, resume: bool, force: bool
) -> None:
    """Run a checked command and say where things are; silent on ranks that only follow."""
    from glm_lora.cluster.driver import train as run_training
    from glm_lora.report.console import ConsoleListener, JsonListener

    if log_format == "json":
        log = JsonListener(typer.echo if leading else lambda line: None)
        try:
            folder = run_training(checked, log, resume=resume, force=force)
        except GlmLoraError as error:
            with contextlib.suppress(BrokenPipeError, RunError):  # it may be what ended the run
                log.failed(error)
            raise
        if folder is not None:
            log.event("finished", run_dir=str(folder.path))
        return
    console = out if leading else Console(quiet=True)
    with ConsoleListener(console, 0, checked.config.rollout.num_rollout) as listener:
        folder = run_training(checked, listener, resume=resume, force=force)
    if folder is not None:
        out.print(f"run folder  {folder.path}", soft_wrap=True)
        out.print(f"metrics     {folder.metrics}", soft_wrap=True)
        out.print(f"adapter     {folder.adapter}", soft_wrap=True)
        out.print(f"report      {folder.report}", soft_wrap=True)


@with_options(PrepareConfig, skip=("model_name", "hf_checkpoint", "ref_load", "data_dir"))
def prepare(
    model_name: ModelName = DEFAULT_MODEL,
    hf_checkpoint: HfCheckpoint = None,
    ref_load: Annotated[
        Path | None, path_option("torch_dist base to write (default <ckpt-dir>/<name>_torch_dist).")
    ] = None,
    model_dir: ModelDir = None,
    ckpt_dir: CkptDir = None,
    data_dir: DataDir = None,
    **given: Any,
) -> None:
    """Make the checkpoint, the torch_dist base and the prompt files that train reads."""
    builtin(model_name)
    values = collect(PrepareConfig, given) | {
        "model_name": model_name,
        "hf_checkpoint": hf_checkpoint
        or settings.hf_path(model_name, settings.model_dir(model_dir)),
        "ref_load": ref_load or settings.base_path(model_name, settings.ckpt_dir(ckpt_dir)),
        "data_dir": settings.data_dir(data_dir),
    }
    config = build(PrepareConfig, values)
    from glm_lora.checkpoint.prepare import prepare as run_prepare
    from glm_lora.report.console import prepare_progress

    with prepare_progress(out) as report:
        result = run_prepare(config, report)
    if config.dry_run:
        for line in result.plan:
            out.print(line)
        return
    for name, count in result.skipped.items():
        out.print(f"skipped     {count} tensors: {name}")
    out.print(f"made        {', '.join(result.made) or 'nothing, all was there'}")
    out.print(f"checkpoint  {result.hf_checkpoint}")
    out.print(f"base        {result.ref_load}")
    for path in result.data.values():
        out.print(f"prompts     {path}")
    for path in result.kept:
        out.print(f"kept        {path}, which was changed (--force writes it again)")
    out.print(f"fingerprint {result.fingerprint}")


def _shape(config: TrainConfig) -> str:
    """How several ranks share the model, in the words of the options."""
    if config.world_size == 1:
        return ""
    shape = config.parallel
    tp, pp = shape.tensor_model_parallel_size, shape.pipeline_model_parallel_size
    ep, dp = shape.expert_model_parallel_size, config.world_size // (tp * pp)
    return f" (TP {tp}, PP {pp}, DP {dp}, EP {ep})"


def _announce(wanted: Outline) -> None:
    config, selection = wanted.config, wanted.selection
    out.print(
        f"{config.model_name}: {selection.num_sites} projections, "
        f"{selection.trainable_parameters:,} trainable parameters at rank {selection.rank}; "
        f"{config.launcher}, {config.world_size} trainer rank(s){_shape(config)}, "
        f"{config.rollout.rollout_engine} engine; {config.rollout.num_rollout} rollouts of "
        f"{config.rollout.rollout_batch_size} x {config.rollout.n_samples_per_prompt} samples; "
        f"about {wanted.memory.total / 2**30:.3g} GiB on the fullest trainer rank",
        soft_wrap=True,
    )
    for line in wanted.resolution.warnings:
        out.print(f"note: {line}")
