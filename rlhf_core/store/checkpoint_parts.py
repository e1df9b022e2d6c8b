"""Write parts of a checkpoint in background threads, and wait until all parts are whole.

`write_part` creates the note `.writing-<part>` in the folder before it returns. The writer holds a lock on it, which
the system drops if the process dies. The note is removed when the part is whole; if writing fails, it is renamed to
`.failed-<part>` and holds the reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from rlhf_core.errors import ArtifactError, explain
from rlhf_core.store.layout import disk_full, disk_is_full

logger = logging.getLogger(__name__)

STALLED_SECONDS = 600.0
_WRITING = ".writing-"
_FAILED = ".failed-"
_SLOWEST_POLL = 0.1


def write_part(folder: Path, part: str, write: Callable[[], None]) -> None:
    """Run `write` in its own thread; `wait_for_parts` raises if it fails. The name `part` is unique in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / f"{_WRITING}{part}"
    held = note.open("wb")
    fcntl.flock(held, fcntl.LOCK_EX)
    threading.Thread(target=_write, args=(note, held, write), name=f"checkpoint part {part}").start()


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
            raise ArtifactError(explain("checkpoint.part", _name(notes[0], folder), rule, remedy))
        time.sleep(pause)
        pause = min(2 * pause, _SLOWEST_POLL)
    for note in folder.rglob(f"{_FAILED}*"):
        raise _failure(note, folder)


def _write(note: Path, held: BinaryIO, write: Callable[[], None]) -> None:
    # The file, and its lock, is closed after the note is removed: a note without a lock means that its writer died.
    with held:
        try:
            write()
        except BaseException as error:
            logger.error("could not write the checkpoint part %s", note, exc_info=error)
            _note_failure(note, held, error)
        else:
            note.unlink(missing_ok=True)


def _note_failure(note: Path, held: BinaryIO, error: BaseException) -> None:
    with contextlib.suppress(FileNotFoundError):  # the folder has been removed meanwhile
        # A full disk may have no room for a reason: an empty note means a full disk.
        if not disk_is_full(error, note.parent):
            with contextlib.suppress(OSError):
                os.write(held.fileno(), f"{type(error).__name__}: {error}".encode()[:2000])
        note.rename(note.with_name(_FAILED + note.name.removeprefix(_WRITING)))


def _failure(note: Path, folder: Path) -> ArtifactError:
    reason = note.read_text(encoding="utf-8", errors="replace")
    if not reason:
        return disk_full(folder.parent)
    remedy = "find the cause in the log of the worker; the checkpoint before this one is complete"
    return ArtifactError(explain("checkpoint.part", _name(note, folder), f"could not be written ({reason})", remedy))


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
    raise ArtifactError(explain("checkpoint.part", _name(note, folder), "its writer died", remedy))


def _name(note: Path, folder: Path) -> str:
    name = note.name.removeprefix(_WRITING).removeprefix(_FAILED)
    return (note.parent.relative_to(folder) / name).as_posix()


def _bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # notes are created and removed at any time
                total += Path(parent, name).lstat().st_size
    return total
