"""The commands ``export`` and ``eval``: options, and what is printed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from glm_lora.config import DEFAULT_MODEL
from glm_lora.errors import ConfigError
from glm_lora.options import path_option

if TYPE_CHECKING:
    from glm_lora.protocols import AdapterState

out = Console(highlight=False)


def export(
    output: Annotated[Path, path_option("New or empty folder to write.")],
    run: Annotated[Path | None, path_option("Run folder: its newest checkpoint.")] = None,
    adapter_checkpoint: Annotated[
        Path | None, path_option("A run's checkpoints/iter_*, or an adapter folder to convert.")
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", help="peft, sglang or merged (whole checkpoint).")
    ] = "peft",
    model_name: Annotated[str, typer.Option(help="Model of --adapter-checkpoint.")] = DEFAULT_MODEL,
    hf_checkpoint: Annotated[
        Path | None, path_option("The base's folder (default: the run's).")
    ] = None,
    fp8: Annotated[
        str, typer.Option(help="Merged FP8 weights: requantise or bf16.")
    ] = "requantise",
    license_: Annotated[str, typer.Option("--license", help="Of the adapter.")] = "other",
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Reload with stock PEFT: compare every tensor, and (--run) the trainer."
        ),
    ] = False,
) -> None:
    """Write an adapter for PEFT or SGLang, or merge it into a whole checkpoint."""
    if (run is None) == (adapter_checkpoint is None):
        raise ConfigError("--run and --adapter-checkpoint", "exactly one of them")
    from glm_lora.export.folder import check_output

    check_output(output)
    from glm_lora.export.source import from_checkpoint, from_run
    from glm_lora.export.write import export as write_export

    if run is not None:
        source = from_run(run)
    else:
        assert adapter_checkpoint is not None
        source = from_checkpoint(adapter_checkpoint, hf_checkpoint, model_name)
    base = hf_checkpoint or source.hf_checkpoint
    if check and (format_ != "peft" or base is None):
        raise ConfigError("--check", "--format peft and a base (--hf-checkpoint)")
    facts = replace(source.facts, license=license_)
    write_export(source.state, output, format_, facts, hf_checkpoint=base, fp8=fp8)
    selection = source.state.selection
    out.print(
        f"{format_}: {selection.num_sites} projections, rank {selection.rank}, version "
        f"{source.state.version}, digest {source.state.digest[:16]}"
    )
    if check and base is not None:
        _check(output, base, source.state, run)
    out.print(f"written to {output}", soft_wrap=True)


def _check(output: Path, base: Path, state: AdapterState, run: Path | None) -> None:
    """Reload with stock PEFT and compare; with ``run``, its trainer's numbers too."""
    from glm_lora.export.check import check_peft

    references = []
    if run is not None:
        from glm_lora.cluster.evaluation import trainer_references

        references = trainer_references(run, state)
    report = check_peft(output, base, state, references)
    out.print(f"checked: stock PEFT uses all {report.num_tensors} tensors, bit-equal")
    if references:
        out.print(
            f"checked: log-probabilities of {len(references)} prompts equal the trainer's within "
            f"{report.max_difference:.1e} (the adapter changes them by up to {report.effect:.2f})"
        )


def evaluate(
    run: Annotated[Path, path_option("Run folder.")],
    prompt_data: Annotated[
        list[str], typer.Option(help="Prompt files; may be given several times.")
    ],
    n_samples_per_prompt: Annotated[int, typer.Option(min=1, help="Samples for pass@k.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seeds the requests.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare base and adapter on prompts: pass@k and length, same prompts and seeds."""
    import json as json_module

    from rich.table import Table

    from glm_lora.cluster.evaluation import evaluate_run
    from glm_lora.json_numbers import jsonable

    result = evaluate_run(
        run,
        prompt_data,
        n_samples_per_prompt,
        seed,
        lambda text: typer.echo(f"note: {text}", err=True),
    )
    if json:
        spelled = {
            name: {key: jsonable(value) for key, value in values.items()}
            for name, values in result.items()
        }
        typer.echo(json_module.dumps(spelled, allow_nan=False))
        return
    table = Table("", *result)
    for name in next(iter(result.values())):
        table.add_row(name, *(f"{values[name]:.4f}" for values in result.values()))
    out.print(table)
