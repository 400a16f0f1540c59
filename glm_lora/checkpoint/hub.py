"""Files from the Hugging Face hub: only those needed, checked, and with clear errors.

The hub's own client does the transfer (a connection that drops is continued where it stopped, and
its ``HF_ENDPOINT`` and ``HF_TOKEN`` are honoured); this module decides what to fetch, compares
sha256 sums and says what to do when something is missing.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from glm_lora.checkpoint.files import (
    NOTES_FILE,
    check_space,
    make_folder,
    write_atomic,
    write_errors,
)
from glm_lora.checkpoint.progress import Progress, Report
from glm_lora.errors import CheckpointError

ATTEMPTS = 5
"""Tries per file; the hub's client makes several of its own in each."""
_CHUNK = 2**22


@dataclass(frozen=True)
class RemoteFile:
    """One file of a repository."""

    name: str
    size: int
    sha256: str | None
    """Of large files; small ones have none."""


@dataclass(frozen=True)
class RemoteRepo:
    """A repository at one commit."""

    repo: str
    kind: Literal["model", "dataset"]
    commit: str
    files: Mapping[str, RemoteFile]


def look_up(repo: str, revision: str, kind: Literal["model", "dataset"]) -> RemoteRepo:
    """Ask the hub what a repository holds at a revision.

    Raises:
        CheckpointError: No network, no such repository or revision, or one that is gated.
    """
    from huggingface_hub import HfApi

    with _hub_errors(repo, revision, kind):
        api = HfApi()
        ask = api.model_info if kind == "model" else api.dataset_info
        info = ask(repo, revision=revision, files_metadata=True)
    files = {}
    for sibling in info.siblings or []:
        sha256 = sibling.lfs.sha256 if sibling.lfs else None
        files[sibling.rfilename] = RemoteFile(sibling.rfilename, sibling.size or 0, sha256)
    return RemoteRepo(repo, kind, info.sha or revision, files)


def read_text(remote: RemoteRepo, name: str) -> str:
    """The text of a small file of the repository.

    Raises:
        CheckpointError: It is not there, or cannot be fetched.
    """
    if name not in remote.files:
        raise CheckpointError(
            f"the repository {remote.repo} has no {name}", "a Hugging Face checkpoint"
        )
    with tempfile.TemporaryDirectory() as folder:
        return _fetch(remote, name, Path(folder), lambda nbytes: None).read_text(encoding="utf-8")


def download(
    remote: RemoteRepo, names: Iterable[str], folder: Path, report: Report, state: Mapping[str, Any]
) -> None:
    """Fetch files into ``folder``; a second call fetches only what is not there and checked yet.

    Args:
        remote: Where from.
        names: Which files.
        folder: Where to; made if need be.
        report: Told the bytes that have arrived.
        state: What to keep in the folder's state file beside the list of checked files.

    Raises:
        CheckpointError: No network, a wrong checksum, or a disk that is too small or full.
    """
    wanted = [remote.files[name] for name in names]
    checked = _checked(folder, remote)
    left = [file for file in wanted if file.name not in checked]
    needed = sum(file.size for file in left)
    check_space(folder, needed, f"what is left of {remote.repo}")
    make_folder(folder)
    done, total = sum(f.size for f in wanted) - needed, sum(f.size for f in wanted)

    def arrived(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        report(Progress("downloading", min(done, total), total, "bytes"))

    with write_errors(folder):
        for file in left:
            path = _fetch(remote, file.name, folder, arrived)
            _check(remote, file, path)
            checked[file.name] = path.stat().st_size
            write_atomic(folder / NOTES_FILE, _state(remote, checked, state))


def finish(remote: RemoteRepo, folder: Path, state: Mapping[str, Any]) -> None:
    """Mark a download as complete, after everything else about the folder is written."""
    checked = _checked(folder, remote)
    write_atomic(folder / NOTES_FILE, _state(remote, checked, {**state, "complete": True}))


def is_unfinished(folder: Path) -> bool:
    """Whether an earlier download into ``folder`` was interrupted."""
    try:
        state = json.loads((folder / NOTES_FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return False
    return "commit" in state and not state.get("complete")


def _state(remote: RemoteRepo, checked: Mapping[str, int], state: Mapping[str, Any]) -> str:
    content = {
        "repo": remote.repo,
        "commit": remote.commit,
        "checked": dict(checked),
        "complete": False,
        **state,
    }
    return json.dumps(content, indent=1) + "\n"


def _checked(folder: Path, remote: RemoteRepo) -> dict[str, int]:
    """Files of an earlier call for the same commit that are still there in full."""
    try:
        state = json.loads((folder / NOTES_FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return {}
    if state.get("commit") != remote.commit:
        return {}
    there = {n: (folder / n).stat().st_size for n in state["checked"] if (folder / n).exists()}
    return {name: size for name, size in there.items() if size == state["checked"][name]}


def _fetch(remote: RemoteRepo, name: str, folder: Path, arrived: Callable[[int], None]) -> Path:
    from huggingface_hub import errors, hf_hub_download

    with _hub_errors(remote.repo, remote.commit, remote.kind):
        for attempt in range(ATTEMPTS):
            try:
                path = hf_hub_download(
                    remote.repo,
                    name,
                    repo_type=remote.kind,
                    revision=remote.commit,
                    local_dir=folder,
                    tqdm_class=_progress_class(arrived),
                )
                return Path(path)
            except (errors.HfHubHTTPError, errors.EntryNotFoundError):
                raise
            except (_transport_error(), ConnectionError, TimeoutError):
                if attempt == ATTEMPTS - 1:
                    raise
                time.sleep(min(2**attempt, 8))
    raise AssertionError("unreachable")


def _check(remote: RemoteRepo, file: RemoteFile, path: Path) -> None:
    if file.sha256 is None:
        return
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_CHUNK):
            digest.update(block)
    if digest.hexdigest() != file.sha256:
        path.unlink()
        raise CheckpointError(
            f"{file.name} of {remote.repo} arrived damaged (sha256 {digest.hexdigest()[:16]}...)",
            f"{file.sha256[:16]}...",
            "Run the same command again; the damaged file was removed and the others are kept",
        )


def _transport_error() -> type[Exception]:
    """The base of connection errors in the HTTP library that the hub's client uses."""
    from huggingface_hub import errors

    base: Any = errors.HfHubHTTPError.__mro__[1]
    assert issubclass(base, Exception)
    return base


def _progress_class(arrived: Callable[[int], None]) -> Any:
    """A progress bar class for the hub's client that shows nothing and tells ``arrived``."""
    from huggingface_hub.utils import tqdm

    class Tell(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            arrived(int(n or 0))

    return Tell


@contextmanager
def _hub_errors(repo: str, revision: str, kind: str) -> Iterator[None]:
    """Turn the hub client's errors into CheckpointErrors that say what to do."""
    from huggingface_hub import errors

    page = f"the {kind} repository {repo!r}"
    option = "--repo" if kind == "model" else "--task"
    try:
        yield
    except CheckpointError:
        raise
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{page} is gated",
            "access granted to your account",
            "Accept its terms on the hub and log in with `hf auth login`",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{page} does not exist, or is private",
            "an existing repository",
            f"Check {option}, or log in with `hf auth login`",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{page} has no revision {revision!r}",
            "a branch, tag or commit",
            "Check --revision",
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{repo!r} is no repository name", "OWNER/NAME") from error
    except (
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        _transport_error(),
        ConnectionError,
        TimeoutError,
    ) as error:
        raise CheckpointError(
            f"{page} cannot be reached: {error}",
            "a connection to the hub",
            "Without one, copy the checkpoint to a folder and name it with --hf-checkpoint"
            if kind == "model"
            else "Without one, use --task none and name your own file with train --prompt-data",
        ) from error
