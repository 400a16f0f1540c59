"""The folders in a run's ``checkpoints``, by their names: which are the run's own."""

from __future__ import annotations

from pathlib import Path

from glm_lora.checkpoint.files import OLD, PARTIAL


def iterations(folder: Path) -> list[Path]:
    """The checkpoint folders in ``folder``, finished or not, oldest first."""
    return sorted(filter(is_iteration, folder.glob("iter_*")), key=iteration_of)


def leftovers(folder: Path) -> list[Path]:
    """What crashes left of checkpoints in ``folder``."""
    return [
        path
        for path in sorted(folder.glob("iter_*"))
        if path.suffix in (PARTIAL, OLD) and is_iteration(path.with_suffix(""))
    ]


def is_iteration(folder: Path) -> bool:
    """Whether a checkpoint has this name, as ``iter_0000012``."""
    return folder.name.startswith("iter_") and folder.name.removeprefix("iter_").isdigit()


def iteration_of(folder: Path) -> int:
    """Rollouts done at the checkpoint in ``folder``, from its name."""
    return int(folder.name.removeprefix("iter_"))
