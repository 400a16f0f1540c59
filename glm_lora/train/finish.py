"""The end of a run: its adapter, and what can be done when the disk took no last checkpoint."""

from __future__ import annotations

from pathlib import Path

from glm_lora.checkpoint.train_state import latest_checkpoint
from glm_lora.errors import ConfigError, ExportError, RunError
from glm_lora.export.peft import export_peft
from glm_lora.protocols import AdapterState
from glm_lora.report.run_folder import RunFolder


def write_result(adapter: AdapterState, folder: RunFolder, base_model: str, *, saved: bool) -> None:
    """Write the PEFT adapter into the run folder, over the one of an earlier finish.

    Until it is complete that one stays; other files in its folder stay anyway. Where the folder is
    a link, what that names is written to.

    Args:
        adapter: The trained adapter.
        folder: The run's.
        base_model: Name of the base in the adapter's configuration.
        saved: Whether the last checkpoint was written. The adapter is smaller: it may still fit
            where that did not.

    Raises:
        RunError: The adapter, or the last checkpoint, was not written.
    """
    try:
        export_peft(adapter, folder.adapter, base_model, over=True)
    except (ConfigError, ExportError) as error:
        if saved:
            last = latest_checkpoint(folder.path)
            raise RunError(
                f"the adapter was not written ({error.what})",
                error.expected,
                f"{last} holds all that was trained: mend that, then --resume writes it",
            ) from error
        raise RunError(
            f"neither the last checkpoint nor the adapter was written ({error.what})",
            next_step=_way_on(folder.path, None),
        ) from error
    if not saved:
        raise RunError(
            f"the last checkpoint was not written; the adapter is complete in {folder.adapter}",
            next_step=_way_on(folder.path, folder.adapter),
        )


def _way_on(run_dir: Path, adapter: Path | None) -> str:
    last = latest_checkpoint(run_dir)
    if last is not None:
        return f"Free some space, then --resume repeats the rollouts after {last}"
    if adapter is not None:
        return (
            "There is no checkpoint for --resume: to train on from the adapter, start with another "
            f"--run-dir and --lora-adapter-path {adapter}"
        )
    return "Free some space, then start anew with --force: there is no checkpoint for --resume"
