"""The command line: targets | prepare | train | export | eval | report | doctor.

Parsing, validation, ``--help`` and ``targets`` never import torch. Exit codes: 0 done; 2 the
command or a file given is wrong (nothing was started); 1 a run failed; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar, cast

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from glm_lora import __version__, commands_export, commands_report, commands_train
from glm_lora.config import SglangConfig
from glm_lora.errors import ConfigError, GlmLoraError, Interrupted, RunError, UserError, first_line

app = typer.Typer(
    name="glm-lora",
    help="Train LoRA adapters for GLM-5.3-Flash with reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
T = TypeVar("T")


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    _open_closed_streams()
    output, errors = _Output(sys.stdout), _Errors(sys.stderr)
    with (
        contextlib.redirect_stdout(cast("TextIO", output)),
        contextlib.redirect_stderr(cast("TextIO", errors)),
    ):
        code = _run(arguments)
    output.close_if_lost()
    errors.close_if_lost()
    return code


def _open_closed_streams() -> None:
    """What goes to a standard stream that is closed (``>&-``) goes nowhere, as the caller asked.

    In the order of their numbers: each gets its own back, before a file of ours takes it and gets
    what a library or a process that we start prints.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


class _Stream:
    """A standard stream that knows whether it was lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def close_if_lost(self) -> None:
        """What is still buffered would fail once more when the interpreter ends."""
        if self._lost:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


class _Output(_Stream):
    """Standard output whose own failures are told apart from those of other files."""

    def write(self, text: str) -> int:
        """As the stream; RunError when the disk behind it is full."""
        return self._told(self._stream.write, text)

    def flush(self) -> None:
        """As ``write``."""
        self._told(self._stream.flush)

    def _told(self, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return function(*arguments)
        except BrokenPipeError:
            self._lost = True
            raise  # nobody reads any more: rich and typer end quietly
        except OSError as error:
            self._lost = True
            raise RunError(f"the output cannot be written: {error.strerror}") from error


class _Errors(_Stream):
    """Standard error whose own failures change nothing: there is no other place to tell them.

    rich and typer would end the program with a code of their own.
    """

    def write(self, text: str) -> int:
        """As the stream, where it can be written."""
        self._tried(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """As ``write``."""
        self._tried(self._stream.flush)

    def _tried(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            function(*arguments)
        except OSError:
            self._lost = True


def _run(arguments: list[str]) -> int:
    """One command; its exit code."""
    show_traceback = "--traceback" in arguments
    _quiet_libraries()
    try:
        _refuse_odd_text(arguments)
        app(args=_with_sglang_flags(arguments), prog_name="glm-lora")
        sys.stdout.flush()
    except SystemExit as error:
        if error.code == Interrupted.exit_code:  # typer's way to end on KeyboardInterrupt
            err.print("stopped")
        return error.code if isinstance(error.code, int) else 1
    except GlmLoraError as error:
        return _failed(error, show_traceback)
    except BrokenPipeError:
        raise
    except OSError as error:
        return _failed(_explained(error), show_traceback)
    except KeyboardInterrupt:
        err.print("stopped")
        return Interrupted.exit_code
    return 0


def _failed(error: GlmLoraError, show_traceback: bool) -> int:
    """Show an error; its exit code."""
    if show_traceback:
        err.print_exception()
    _show(error)
    return error.exit_code


def _explained(error: OSError) -> GlmLoraError:
    """An error of the operating system that nothing below has explained, in our words."""
    named = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    what = f"{named}{error.strerror or first_line(error)}"
    if error.errno == errno.ENAMETOOLONG:
        return ConfigError(what, "names of at most 255 bytes", "Name another file or folder")
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, str):
        lost = _lost_folder(Path(error.filename))
        if lost is not None:
            return RunError(
                f"the folder {lost} is gone ({what})",
                "a folder that stays in its place until the command ends",
                "If it was moved, move it back; a run continues with --resume",
            )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(what, "free space on the disk", "Free some, or name a place elsewhere")
    return RunError(what, next_step="Run it again with --traceback to see where")


def _lost_folder(file: Path) -> Path | None:
    """The outermost folder of ``file`` that does not exist."""
    missing = [folder for folder in file.absolute().parents if not folder.exists()]
    return missing[-1] if missing else None


def _refuse_odd_text(arguments: list[str]) -> None:
    """UserError for bytes that are no UTF-8: no configuration, log or report could hold them."""
    for argument in arguments:
        if not argument.isascii() and any("\ud800" <= c <= "\udfff" for c in argument):
            raise UserError(
                f"{argument!a} is not Unicode text", "UTF-8", "Rename the file or folder"
            )


def _with_sglang_flags(arguments: list[str]) -> list[str]:
    """Pack ``--sglang-NAME [VALUE ...]`` that are no options of ours for the one hidden option.

    So every other misspelt option is still refused, while SGLang's flags pass through, of ``train``
    alone.
    """
    if next((a for a in arguments if not a.startswith("-")), "") != "train":
        return [argument for argument in arguments if argument != "--traceback"]
    own = {"--" + name.replace("_", "-") for name in SglangConfig.model_fields}
    own |= {"--no-" + name.removeprefix("--") for name in own}
    kept: list[str] = []
    passed: list[str] = []
    taking = False
    for argument in arguments:
        name = argument.split("=")[0]
        if argument.startswith("--"):
            taking = name.startswith("--sglang-") and name not in own
        if argument == "--traceback":
            continue
        (passed if taking else kept).append(argument)
    if passed:
        from glm_lora.rollout.sglang_server import passed_flags

        kept += [f"--sglang-flags={flag}" for flag in passed_flags(passed)]
    return kept


def _quiet_libraries() -> None:
    """Hide what libraries say about optional packages; what matters is said by our own errors.

    Set before they are imported, and inherited by Ray's processes.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    for module in ("megatron", "transformers", "torch"):
        warnings.filterwarnings("ignore", module=rf"{module}(\..*)?$")


def _show(error: GlmLoraError) -> None:
    """An error as a short box: what (with the value), what is expected, the next step."""
    body = Text(error.what)
    if error.expected:
        body.append(f"\nexpected: {error.expected}")
    if error.next_step:
        body.append(f"\nnext: {error.next_step}")
    err.print(Panel(body, title=type(error).__name__, title_align="left", border_style="red"))


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"glm-lora {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train LoRA adapters for GLM-5.3-Flash with reinforcement learning."""


app.command()(commands_train.targets)
app.command()(commands_train.prepare)
app.command()(commands_train.train)
app.command()(commands_export.export)
app.command("eval")(commands_export.evaluate)
app.command()(commands_report.report)
app.command()(commands_report.doctor)
