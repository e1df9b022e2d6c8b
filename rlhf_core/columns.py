"""Hold the numbers of a sequence, one per token: here as a read-only array, or elsewhere until somebody looks at them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple, Protocol, SupportsIndex, TypeVar, overload

N = TypeVar("N", int, float)


class Source(Protocol):
    """Where the numbers of a column are that are not here. It is picklable, and small."""

    @property
    def kind(self) -> str:
        """Return the kind of the numbers, that of `array.array`."""

    @property
    def length(self) -> int:
        """Return how many numbers there are, without reading them."""

    def read(self) -> memoryview | bytes:
        """Return the numbers, as bytes or as a view of their kind."""

    def counted(self, value: Any) -> int | None:
        """Return how often a number occurs, None if they have to be read for it."""


class Column(Sequence[N]):
    """The numbers of a sequence, one per token: a tuple of them to its users, and a read-only array in memory.

    A number takes 4 bytes, or 1 in a mask, where a tuple takes 8 and an object. `kind` is that of `array.array`: `i` int32,
    `f` float32, `B` uint8, `d` float64. `data` is a view that NumPy and Arrow read without a copy (`np.asarray(column.data)`).
    A column that is `held` elsewhere knows its length; what it holds is read when it is looked at or pickled, and stays where
    it is when the column is sliced or joined.

    >>> column = ids((5, 7, 2))
    >>> column[1], column[1:] + (9,), column == (5, 7, 2), sum(column)
    (7, (7, 2, 9), True, 14)
    """

    __slots__ = ("_data", "source")

    def __init__(self, kind: str, values: Any) -> None:
        try:
            data = memoryview(values.data if isinstance(values, Column) else values)
        except TypeError:  # no array, but numbers one by one
            data = memoryview(array(kind, values))
        if data.format != kind:
            data = memoryview(array(kind, data.tolist()))
        elif not data.readonly or not data.contiguous:
            data = memoryview(data.tobytes()).cast(kind)  # type: ignore[call-overload]
        self._data: memoryview | None = data.toreadonly()
        self.source: Source | None = None
        """Where the numbers are that are held elsewhere."""

    @classmethod
    def elsewhere(cls, source: Source) -> Column[N]:
        """Return a column whose numbers are at `source` until somebody looks at them."""
        made: Column[N] = cls.__new__(cls)
        made._data, made.source = None, source
        return made

    @classmethod
    def all_elsewhere(cls, sources: Sequence[Source]) -> list[Column[N]]:
        """Return a column for each of many sources, without a call of Python for each."""
        made: list[Any] = list(map(object.__new__, repeat(cls, len(sources))))
        for name, values in (("_data", repeat(None)), ("source", sources)):
            deque(map(getattr(cls, name).__set__, made, values), maxlen=0)
        return made

    @property
    def data(self) -> memoryview:
        """Return the numbers as a read-only view."""
        if self._data is None:
            assert self.source is not None
            read = memoryview(self.source.read())
            self._data = read if read.format == self.source.kind else read.cast(self.source.kind)  # type: ignore[call-overload]
        return self._data

    @property
    def kind(self) -> str:
        """Return the kind of the numbers, that of `array.array`."""
        return self.source.kind if self._data is None and self.source else self.data.format

    @property
    def held(self) -> bool:
        """Return whether the numbers are elsewhere."""
        return self.source is not None

    def tolist(self) -> list[N]:
        """Return the numbers as a list."""
        return self.data.tolist()  # type: ignore[return-value]

    def __len__(self) -> int:
        return self.source.length if self._data is None and self.source else len(self.data)

    def __iter__(self) -> Iterator[N]:
        return iter(self.tolist())

    @overload
    def __getitem__(self, at: SupportsIndex) -> N: ...

    @overload
    def __getitem__(self, at: slice) -> Column[N]: ...

    def __getitem__(self, at: SupportsIndex | slice) -> N | Column[N]:
        if isinstance(at, slice) and self.source is not None:
            return Column.elsewhere(Cut(self, at))
        found: Any = self.data[at]
        return Column(self.data.format, found) if isinstance(at, slice) else found

    def __add__(self, other: Sequence[N]) -> Column[N]:
        return joined(self, other)

    def __radd__(self, other: Sequence[N]) -> Column[N]:
        return joined(Column(self.kind, other), self)

    def index(self, value: Any, *bounds: int) -> int:
        """Return the first place of a number; raise ValueError if there is none."""
        return self.tolist().index(value, *bounds)

    def count(self, value: Any) -> int:
        """Return how often a number occurs."""
        if self.source is not None and (counted := self.source.counted(value)) is not None:
            return counted
        fast = self.data.format == "B" and value in (0, 1)
        return self.data.tobytes().count(int(value)) if fast else self.tolist().count(value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Column):
            return self.data == other.data
        return self.tolist() == list(other) if isinstance(other, (tuple, list)) else NotImplemented

    def __lt__(self, other: Sequence[N]) -> bool:
        return self.tolist() < list(other)

    def __hash__(self) -> int:
        return hash(tuple(self.data))

    def __repr__(self) -> str:
        return repr(tuple(self.data))

    def __reduce__(self) -> tuple[Any, ...]:
        return unpickled, (self.data.format, self.data.tobytes())


def unpickled(kind: str, data: bytes) -> Column[Any]:
    """Return the column of these bytes."""
    return Column(kind, memoryview(data).cast(kind))  # type: ignore[call-overload]


def joined(first: Column[N], *others: Sequence[N]) -> Column[N]:
    """Return columns and other sequences one after the other, in the kind of the first."""
    kind: str = first.kind
    given = (first, *(one if isinstance(one, Column) and one.kind == kind else Column(kind, one) for one in others))
    # The parts of one that was joined before, since an answer may grow hundreds of times: by a round, or a turn.
    parts = tuple(part for one in given for part in (one.source.parts if isinstance(one.source, Joint) else (one,)))
    joint = Joint(kind, sum(map(len, given)), parts)
    return Column.elsewhere(joint) if any(part.held for part in parts) else unpickled(kind, joint.read())


def ids(values: Any) -> Column[int]:
    """Return token ids, a sequence of integers or an int32 array [L], as a column."""
    return column("i", values)


def mask(values: Any) -> Column[int]:
    """Return 0 and 1 per token, a sequence or a uint8 array [L], as a column."""
    return column("B", values)


def floats(values: Any) -> Column[float]:
    """Return one number per token, a sequence or a float32 array [L], as a column."""
    return column("f", values)


def zeros(kind: str, length: int, *, beside: Column[Any]) -> Column[Any]:
    """Return a column of zeros, which takes no memory if the one that it is beside is held elsewhere."""
    runs = Runs(kind, length)
    return Column.elsewhere(runs) if beside.held else Column(kind, runs.read())


def column(kind: str, values: Any) -> Column[Any]:
    """Return `values` as a column of this kind: themselves if they are one."""
    return values if type(values) is Column and values.kind == kind else Column(kind, values)


def hold(value: Any, **kinds: str) -> None:
    """Make the fields of a frozen value columns of these kinds."""
    for name, kind in kinds.items():
        if type(given := getattr(value, name)) is not Column or given.kind != kind:
            object.__setattr__(value, name, Column(kind, given))


# ---------------------------------------------------------------- sources that are made of others


class Runs(NamedTuple):
    """Zeros, and ones in some spans (start, end), which follow each other.

    >>> mask(Runs("B", 4, ((1, 3),)).read()), Runs("B", 4, ((1, 3),)).counted(1)
    ((0, 1, 1, 0), 2)
    """

    kind: str
    length: int
    spans: tuple[tuple[int, int], ...] = ()

    def read(self) -> memoryview:
        made = array(self.kind, bytes(self.length * array(self.kind).itemsize))
        for start, end in self.spans:
            made[start:end] = array(self.kind, [1]) * (end - start)
        return memoryview(made).toreadonly()

    def counted(self, value: Any) -> int:
        ones = sum(end - start for start, end in self.spans)
        return {0: self.length - ones, 1: ones}.get(value, 0)


class Joint(NamedTuple):
    """Columns one after the other."""

    kind: str
    length: int
    parts: tuple[Column[Any], ...]

    def read(self) -> bytes:
        return b"".join(part.data for part in self.parts)

    def counted(self, value: Any) -> int:
        return sum(part.count(value) for part in self.parts)


class Cut(NamedTuple):
    """A slice of a column that is held elsewhere."""

    whole: Column[Any]
    part: slice

    @property
    def kind(self) -> str:
        kind: str = self.whole.kind
        return kind

    @property
    def length(self) -> int:
        return len(range(len(self.whole))[self.part])

    def read(self) -> memoryview:
        return memoryview(self.whole.data[self.part].tobytes())

    def counted(self, value: Any) -> None:
        return None
