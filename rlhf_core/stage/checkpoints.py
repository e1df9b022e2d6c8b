"""Checkpoint folders of one stage. A new checkpoint is complete and on disk before an old one is removed.

Training does not wait for this: it hands over copies of its state (`write_part`), and a thread here waits for their
writers, seals the folder and removes old checkpoints. At most one checkpoint is in progress at a time.

`write_part` creates the note `.writing-<part>` in the folder before it returns. The writer holds a lock on it, which
the system drops if the process dies. The note is removed when the part is whole; if writing fails, it is renamed to
`.failed-<part>` and contains the reason.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import secrets
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import Field

from rlhf_core.errors import ArtifactError, WorkerLostError
from rlhf_core.store.fingerprint import hash_file, list_files
from rlhf_core.store.layout import (
    disk_full,
    disk_is_full,
    fsync_path,
    fsync_tree,
    naming_disk_errors,
    remove_tree,
    write_json,
)
from rlhf_core.store.sharing import give_made
from rlhf_core.store.typed_json import Stored, read_stored

# ---------------------------------------------------------------- checkpoint parts

logger = logging.getLogger(__name__)

STALLED_SECONDS = 600.0  # a network disk may stand still for minutes while it fails over
_WRITING = ".writing-"
_FAILED = ".failed-"
_SLOWEST_POLL = 0.1  # s


class WriterDied(ArtifactError, WorkerLostError):
    """A process died while it wrote its part of a checkpoint; the run itself is fine and can be retried."""


def write_part(folder: Path, part: str, write: Callable[[], None]) -> threading.Thread:
    """Run `write` in a thread, which is returned; `wait_for_parts` raises if it fails. The name `part` is unique in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / f"{_WRITING}{part}"
    held = note.open("wb")
    fcntl.flock(held, fcntl.LOCK_EX)
    writer = threading.Thread(target=_write, args=(note, held, write), name=f"checkpoint part {part}")
    writer.start()
    return writer


def wait_for_parts(folder: Path, *, stalled_s: float = STALLED_SECONDS) -> None:
    """Wait until no part below `folder` is being written.

    Raises ArtifactError if a part could not be written, if its writer died, or if nothing grew for `stalled_s`.
    """
    size, since, pause = -1, time.monotonic(), 0.002
    while notes := list(folder.rglob(f"{_WRITING}*")):
        for note in notes:
            _check_writer(note, folder)
        grown = _bytes(folder)
        if grown != size:
            size, since = grown, time.monotonic()
        elif time.monotonic() - since > stalled_s:
            rule, remedy = f"nothing was written for {stalled_s:g} s", "check whether the disk of the store responds"
            raise ArtifactError("checkpoint.part", _name(notes[0], folder), rule, remedy)
        time.sleep(pause)
        pause = min(2 * pause, _SLOWEST_POLL)
    for note in folder.rglob(f"{_FAILED}*"):
        raise _failure(note, folder)


def _write(note: Path, held: BinaryIO, write: Callable[[], None]) -> None:
    # The file, and its lock, is closed after the note is removed: a note without a lock means that its writer died.
    with held:
        try:
            write()
        except WorkerLostError as error:  # the note without its lock says that the writer, on another node, has died
            logger.warning("could not write the checkpoint part %s: %s", note, error)
        except BaseException as error:
            logger.error("could not write the checkpoint part %s", note, exc_info=error)
            _note_failure(note, held, error)
        else:
            note.unlink(missing_ok=True)


def _note_failure(note: Path, held: BinaryIO, error: BaseException) -> None:
    with suppress(FileNotFoundError):  # the folder has been removed meanwhile
        # A full disk may have no room for a reason: an empty note means a full disk.
        if not disk_is_full(error, note.parent):
            with suppress(OSError):
                os.write(held.fileno(), f"{type(error).__name__}: {error}".encode()[:2000])
        note.rename(note.with_name(_FAILED + note.name.removeprefix(_WRITING)))


def _failure(note: Path, folder: Path) -> ArtifactError:
    reason = note.read_text(encoding="utf-8", errors="replace")
    if not reason:
        return disk_full(folder.parent)
    remedy = "find the cause in the log of the worker; the checkpoint before this one is complete"
    return ArtifactError("checkpoint.part", _name(note, folder), f"could not be written ({reason})", remedy)


def _check_writer(note: Path, folder: Path) -> None:
    """Raise ArtifactError if a note exists and no process holds its lock."""
    try:
        with note.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not note.exists():
                return  # the writer finished between the listing and this check
    except (BlockingIOError, FileNotFoundError):
        return
    remedy = "run again to resume from the checkpoint before this one"
    raise WriterDied("checkpoint.part", _name(note, folder), "its writer died", remedy)


def _name(note: Path, folder: Path) -> str:
    name = note.name.removeprefix(_WRITING).removeprefix(_FAILED)
    return (note.parent.relative_to(folder) / name).as_posix()


def _bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # notes are created and removed at any time
                total += Path(parent, name).lstat().st_size
    return total


# ---------------------------------------------------------------- checkpoints

_STATE = "state.json"
_COMPLETE = "COMPLETE"
_SMALL_BYTES = 1 << 20  # hashing so many takes a millisecond


class _Marker(Stored):
    sizes: dict[str, int]
    sha256: dict[str, str] = {}
    """Digests of the small files; empty in markers of older versions."""


class _State(Stored):
    step: int = Field(ge=0)
    state: dict[str, Any]
    metric: float | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint: `state` is the stage's JSON state, the folder `path` holds the files that it wrote."""

    step: int
    path: Path
    state: dict[str, Any]
    metric: float | None


class Checkpoints:
    """The checkpoints in `root`: the newest and the `keep_best` with the largest metric are kept.

    `fence` raises an error if this process may no longer write here, because another one has taken over.
    """

    def __init__(self, root: Path, *, keep_best: int = 0, fence: Callable[[], None] = lambda: None) -> None:
        self.root = Path(root)
        self.keep_best = keep_best
        self._fence = fence
        self._sealing = _Sealing()

    def keeping(self, *, best: int) -> Checkpoints:
        """A copy with `keep_best=best`; both objects share a checkpoint in progress."""
        other = Checkpoints(self.root, keep_best=best, fence=self._fence)
        other._sealing = self._sealing
        return other

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint; unreadable ones are skipped with a warning. Reads no large file."""
        return self.to_resume(lambda folder: "")

    def to_resume(self, damage: Callable[[Path], str]) -> Checkpoint | None:
        """The newest complete checkpoint after verifying every byte; damaged ones are skipped with a warning.

        `damage` describes damage of the large archives of a checkpoint, which this does not read, or returns "".
        """
        self.settle()
        for folder in sorted(self._folders(), reverse=True):
            checkpoint = _read(folder)
            if checkpoint is not None and not _warned(folder, damage(folder)):
                return checkpoint
        return None

    def best(self) -> Checkpoint | None:
        """The complete checkpoint with the largest metric (the newest of equals); None if none has a metric."""
        self.settle()
        ranked = _by_metric(self._readable())
        return ranked[0] if ranked else None

    @contextmanager
    def saving(self, step: int, state: Mapping[str, Any], *, metric: float | None = None) -> Iterator[Path]:
        """Yield an empty folder to write into; soon after a clean exit it becomes the checkpoint of `step`.

        Parts begun with `write_part` in the folder are written in the background. Waits first for the previous
        checkpoint. `state` must be JSON-serializable. Larger metrics are better. After an exception, even if `settle`
        or the next call raises it because something could not be written, the older checkpoints are unchanged.
        """
        self.settle()
        self._fence()
        if not self.root.is_dir():
            self.root.mkdir()  # not its parents: if another attempt has taken over the folder, this must fail
            fsync_path(self.root.parent)
        for stale in self.root.glob(".saving-*"):
            remove_tree(stale)
        folder = self.root / f".saving-{step:010d}-{secrets.token_hex(4)}"
        try:
            with naming_disk_errors(self.root):
                folder.mkdir()
                yield folder
                noted = _plain(step, state, metric)
        except BaseException:
            _give_up(folder)
            raise
        self._sealing.begin(lambda: self._finish(folder, step, noted))

    def settle(self) -> None:
        """Wait until no checkpoint is in progress. Raises, once, the error that kept the last one from completing."""
        self._sealing.settle()

    def settle_after(self, error: BaseException) -> None:
        """Wait like `settle` when `error` ends the stage; a failure of the checkpoint becomes a note of `error`."""
        try:
            self._sealing.settle()
        except Exception as failure:
            logger.error("%s: could not write the last checkpoint: %s", self.root, failure)
            error.add_note(f"the last checkpoint could not be written: {failure}")

    def _finish(self, folder: Path, step: int, noted: dict[str, Any]) -> None:
        try:
            with naming_disk_errors(self.root):
                wait_for_parts(folder)
                _seal(folder, noted)
                self._fence()
                folder.rename(self.root / f"step-{step:010d}-{time.time_ns():020d}")
                fsync_path(self.root)
        except BaseException:
            _give_up(folder)
            raise
        self._evict()

    def _folders(self) -> list[Path]:
        return [path for path in self.root.glob("step-*") if path.is_dir()]

    def _readable(self) -> list[Checkpoint]:
        found = [_read(folder) for folder in sorted(self._folders(), reverse=True)]
        return [checkpoint for checkpoint in found if checkpoint is not None]

    def _evict(self) -> None:
        newest_first = self._readable()
        keep = {checkpoint.path for checkpoint in newest_first[:1]}
        keep |= {checkpoint.path for checkpoint in _by_metric(newest_first)[: self.keep_best]}
        for folder in self._folders():
            if folder not in keep:
                remove_tree(folder)


def _by_metric(newest_first: list[Checkpoint]) -> list[Checkpoint]:
    measured = [item for item in newest_first if item.metric is not None and not math.isnan(item.metric)]
    return sorted(measured, key=lambda item: -float(item.metric or 0.0))


class _Sealing:
    """The thread that seals a checkpoint, and the error that ended it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def begin(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as failure:
                self._failure = failure

        self._thread = threading.Thread(target=run, name="sealing a checkpoint")
        self._thread.start()

    def settle(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def _plain(step: int, state: Mapping[str, Any], metric: float | None) -> dict[str, Any]:
    """Content of the state file: a copy, because the stage runs on and may change its own state."""
    try:
        noted: dict[str, Any] = json.loads(json.dumps({"step": step, "metric": metric, "state": dict(state)}))
    except TypeError as error:
        remedy = "write tensors and random states into the folder"
        raise ArtifactError("checkpoint.state", sorted(state), f"is not JSON-able ({error})", remedy) from error
    return noted


def _seal(folder: Path, noted: dict[str, Any]) -> None:
    write_json(folder / _STATE, noted)
    sizes = {path: (folder / path).stat().st_size for path in list_files(folder)}
    # Hashing everything would cost as much as writing it; the large files are archives with their own checksums.
    digests = {path: hash_file(folder / path) for path, size in sizes.items() if not _is_archive(path, size)}
    give_made(folder)
    fsync_tree(folder)
    write_json(folder / _COMPLETE, {"sizes": sizes, "sha256": digests})


def _give_up(folder: Path) -> None:
    # Errors are suppressed so that they do not hide the original one; leftovers are removed at the next save.
    with suppress(ArtifactError, OSError):
        wait_for_parts(folder)
    with suppress(OSError):
        remove_tree(folder)


def _read(folder: Path) -> Checkpoint | None:
    if _warned(folder, _problem(folder)):
        return None
    noted = read_stored(folder / _STATE, _State)
    return None if noted is None else Checkpoint(step=noted.step, path=folder, state=noted.state, metric=noted.metric)


def _warned(folder: Path, problem: str) -> bool:
    if problem:
        logger.warning("skipping checkpoint %s: %s", folder, problem)
    return bool(problem)


def _problem(folder: Path) -> str:
    marker = read_stored(folder / _COMPLETE, _Marker)
    if marker is None:
        return f"it has no readable {_COMPLETE} marker"
    for path, size in marker.sizes.items():
        file = folder / path
        if not file.is_file():
            return f"{path} is missing"
        if file.stat().st_size != size:
            return f"{path} has {file.stat().st_size} bytes, not {size}"
    for path, digest in marker.sha256.items():
        if path not in marker.sizes or hash_file(folder / path) != digest:
            return f"{path} is not what was written"
    return f"{_STATE} cannot be read" if read_stored(folder / _STATE, _State) is None else ""


def _is_archive(path: str, size: int) -> bool:
    return path.endswith(".pt") and size > _SMALL_BYTES


def damaged_archive(folder: Path, reads: Callable[[str], bool] = lambda path: True) -> str:
    """Find a damaged large file by the checksums that torch writes into its archives; "" if none is damaged.

    `reads` is true for each relative path to check.
    """
    for path in list_files(folder):
        file = folder / path
        if not _is_archive(path, file.stat().st_size) or not reads(path):
            continue
        try:
            with zipfile.ZipFile(file) as archive:
                bad = archive.testzip()
        except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, OSError) as error:  # damaged tables of contents
            bad = str(error)
        if bad is not None:
            return f"{path} is not what was written ({bad})"
    return ""
