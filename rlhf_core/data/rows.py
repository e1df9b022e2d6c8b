"""Rows in a temporary file: sequences in memory hold a number for each row.

A row of text and its messages are several Python objects, which take a few KiB: mixtures have millions of rows.
"""

import os
import pickle
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from io import BytesIO
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_RECENT = 1 << 20  # bytes of rows that are written together; fewer rows need no file
SHOW_EVERY_S = 5.0


class RowProgress:
    """The progress of a stage: its steps, and in each loop over rows the number of rows and the rows per second.

    `show(done, total, message)` gets the finished steps, all steps, and the current one.
    """

    def __init__(
        self,
        show: Callable[[int, int, str], None] = lambda *_: None,
        steps: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.message = ""
        """Name of the current step. A loop over rows may be a more specific one."""
        self._show, self._steps, self._clock = show, steps, clock
        self._done = 0

    def begin(self, done: int, message: str) -> None:
        """Begin a step after `done` others."""
        self._done, self.message = done, message
        self._show(done, self._steps, message)

    def walk(self, rows: Iterable[T], total: int = 0) -> Iterator[T]:
        """Yield the rows. Shows how many the loop has finished, at most once in `SHOW_EVERY_S`."""
        began = shown = self._clock()
        for done, row in enumerate(rows):
            if (now := self._clock()) - shown >= SHOW_EVERY_S:
                shown, of = now, f" of {total:,}" if total else ""
                rate = f"{done / (now - began):,.0f} a second"
                self._show(self._done, self._steps, f"{self.message}: {done:,}{of} rows, {rate}")
            yield row


class RowFile:
    """A temporary file of values, each of which has a number. Dataclasses of `kinds` take the least time.

    It has no name on a disk, so it is gone with the process. `progress` shows loops over its rows.
    """

    def __init__(self, *kinds: type, folder: Path | None = None, progress: RowProgress | None = None) -> None:
        self._table = {kind: _reducer(kind) for kind in kinds}
        self.folder = folder
        self.progress = progress or RowProgress()
        self._stream: Any = None
        self._ends = array("q", (0,))
        self._written = 0
        self._recent = bytearray()
        self._objects: dict[int, Any] = {}

    def add(self, value: Any) -> int:
        """Add a value. The result is its number."""
        number, data = len(self._ends) - 1, BytesIO()
        pickler = pickle.Pickler(data, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = self._table
        try:
            pickler.dump(value)
            self._recent += data.getbuffer()
        except (
            RecursionError,
            TypeError,
            AttributeError,
            pickle.PicklingError,
        ):  # brackets too deep, or a decoder of sound or video: few rows have either
            self._objects[number] = value
        self._ends.append(self._written + len(self._recent))
        if len(self._recent) >= _RECENT:
            self._write()
        return number

    def read(self, number: int) -> Any:
        """The value with a number, as a new object each time."""
        if number in self._objects:
            return self._objects[number]
        start, end = self._ends[number], self._ends[number + 1]
        if start >= self._written:
            return pickle.loads(self._recent[start - self._written : end - self._written])
        return pickle.loads(os.pread(self._stream.fileno(), end - start, start))

    def _write(self) -> None:
        if self._stream is None:
            self._stream = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115
        self._stream.write(self._recent)
        self._stream.flush()
        self._written += len(self._recent)
        self._recent = bytearray()


class StoredRows(Sequence[T]):
    """Values of a file in some order, some of them perhaps more than once. Each access reads the value again.

    >>> rows = StoredRows(RowFile(), [])
    >>> for text in ("a", "b", "c"):
    ...     rows.append(text)
    >>> list(rows[1:]), rows[0], list(rows.changed(lambda text: text if text != "b" else None))
    (['b', 'c'], 'a', ['a', 'c'])
    """

    def __init__(self, file: RowFile, numbers: Iterable[int] = ()) -> None:
        self.file = file
        self.numbers = array("q", numbers)

    def append(self, value: T) -> None:
        """Add a value to the file, and to the end of these rows."""
        self.numbers.append(self.file.add(value))

    def changed(self, change: Callable[[T], T | None]) -> "StoredRows[T]":
        """The rows for which `change` returns the row itself, another one for it, or None to leave it out."""
        kept = StoredRows[T](self.file)
        for number, row in self.numbered():
            made = change(row)
            if made is row:
                kept.numbers.append(number)
            elif made is not None:
                kept.append(made)
        return kept

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[T]:
        return self.file.progress.walk(map(self.file.read, self.numbers), len(self))

    def __getitem__(self, at: Any) -> Any:
        numbers = self.numbers[at]
        return StoredRows(self.file, numbers) if isinstance(at, slice) else self.file.read(numbers)

    def numbered(self) -> Iterator[tuple[int, T]]:
        """Yield each value with its number in the file."""
        return zip(self.numbers, self, strict=True)


Some = TypeVar("Some", StoredRows[Any], list[Any])


def changed(rows: Some, change: Callable[[Any], Any]) -> Some:
    """As `StoredRows.changed`, for a list too."""
    if isinstance(rows, StoredRows):
        return rows.changed(change)  # type: ignore[return-value]  # the checker thinks of a list that is both
    return [made for row in rows if (made := change(row)) is not None]


def selected(rows: Sequence[T], places: Sequence[int]) -> Sequence[T]:
    """The rows at these places."""
    if isinstance(rows, StoredRows):
        return StoredRows(rows.file, map(rows.numbers.__getitem__, places))
    return tuple(rows[place] for place in places)


def _reducer(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    """How to pickle a dataclass. The default for frozen ones with slots is written in Python, and takes four times as long."""
    values = attrgetter(*(field.name for field in fields(kind)))
    return lambda value: (kind, values(value))
