"""The commands ``report`` and ``doctor``: options, and what is printed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from glm_lora import settings
from glm_lora.errors import ConfigError
from glm_lora.options import given_path, path_option

WATCH_SECONDS = 5
COLOURS = {"ok": "green", "missing": "yellow", "broken": "red"}


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders, for --compare.", parser=given_path),
    ] = None,
    run: Annotated[Path | None, path_option("Run folder.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Draw several runs over each other.")
    ] = False,
    output: Annotated[
        Path | None,
        path_option("File to write (default RUN/report.html; compare.html for --compare)."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Write again whenever the run goes on, until its end.")
    ] = False,
) -> None:
    """Write report.html and PNG charts of a run, or of several over each other."""
    named = list(runs or ())
    console = Console(highlight=False)
    if compare:
        if len(named) < 2 or run is not None or watch:
            raise ConfigError("--compare", "two or more run folders, without --run and --watch")
        from glm_lora.report.html import write_comparison

        target = output or Path("compare.html")
        with _write_errors(target):
            path = write_comparison(named, target)
        console.print(f"report  {path}", soft_wrap=True)
        return
    if run is None or named:
        raise ConfigError("report", "--run RUN, or --compare RUN RUN ...")
    from glm_lora.report.run_folder import REPORT

    if watch:
        from glm_lora.report.watch import watch as keep_writing

        with _write_errors(output or run / REPORT):
            keep_writing(
                run,
                output,
                WATCH_SECONDS,
                lambda path: console.print(f"report  {path}", soft_wrap=True),
            )
        return
    from glm_lora.report.html import write_report

    with _write_errors(output or run / REPORT):
        path = write_report(run, output)
    console.print(f"report  {path}", soft_wrap=True)


@contextlib.contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    """Turn an operating-system error of the block into a ConfigError that names the report."""
    try:
        yield
    except BrokenPipeError:
        raise  # nobody reads what is printed; it is no error of the file
    except OSError as error:
        named = str(error.filename or target)
        also = "" if named == str(target) else f" of {named}"
        raise ConfigError(
            f"the report {target} cannot be written ({error.strerror or error}{also})",
            "a file on a disk with free space that this user may write to",
            "Name another file with --output",
        ) from error


def doctor(
    sglang_python: Annotated[
        Path | None,
        path_option("Interpreter of SGLang's environment (default .venv-sglang/bin/python)."),
    ] = None,
    model_dir: Annotated[Path | None, path_option("Folder for checkpoints.")] = None,
    ckpt_dir: Annotated[Path | None, path_option("Folder for bases.")] = None,
    data_dir: Annotated[Path | None, path_option("Folder for datasets.")] = None,
    run_dir: Annotated[Path, path_option("Folder for runs.")] = Path("runs"),
    self_test: Annotated[
        bool, typer.Option(help="Take one training step on the CPU and on each GPU.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what works on this machine, and the command that mends what does not."""
    import json as json_module

    from glm_lora.doctor.doctor import examine

    folders = {
        "--model-dir": settings.model_dir(model_dir),
        "--ckpt-dir": settings.ckpt_dir(ckpt_dir),
        "--data-dir": settings.data_dir(data_dir),
        "--run-dir": run_dir,
    }
    console = Console(highlight=False)
    findings = []
    for finding in examine(folders, sglang_python, self_test=self_test):
        findings.append(finding)
        if json:
            continue
        line = Text(f"{finding.state:<8}", style=COLOURS[finding.state])
        line.append(f"{finding.name:<28} {finding.detail}", style="default")
        if finding.mend:
            line.append(f"\n{'':<8}mend: {finding.mend}", style="default")
        console.print(line, soft_wrap=True)
    fatal = [finding for finding in findings if finding.fatal]
    if json:
        rows = [finding.as_json() for finding in findings]
        typer.echo(json_module.dumps({"works": not fatal, "findings": rows}))
    elif fatal:
        console.print(f"broken: {', '.join(finding.name for finding in fatal)}", soft_wrap=True)
    if fatal:
        raise typer.Exit(1)
