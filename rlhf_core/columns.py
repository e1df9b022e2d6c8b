"""Hold the numbers of one sequence, one per token, in a read-only array that acts as a tuple of numbers.

A step of training is one `Sequences` of NumPy arrays. Rewards, agents and logs see an answer at a time, and join, compare,
hash and search its numbers. `+` and `==` of NumPy arrays would add and compare the elements there, without an error.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex, TypeVar, overload

N = TypeVar("N", int, float)


class Column(Sequence[N]):
    """The numbers of a sequence, one per token: a tuple of them to its users, and a read-only array in memory.

    A number takes 4 bytes, or 1 in a mask, where a tuple takes 8 and an object. `kind` is a type code of `array.array`:
    `i` int32, `h` int16, `f` float32, `B` uint8, `d` float64. `data` is a view that NumPy and Arrow read without a copy
    (`np.asarray(column.data)`).

    >>> column = ids((5, 7, 2))
    >>> column[1], column[1:] + (9,), column == (5, 7, 2), sum(column)
    (7, (7, 2, 9), True, 14)
    """

    __slots__ = ("data",)
    data: memoryview[Any]

    def __init__(self, kind: str, values: Any) -> None:
        data = values
        if type(values) is not memoryview:
            try:
                data = memoryview(values)
            except TypeError:  # a column of another kind, or numbers one by one
                data = memoryview(array(kind, values))
        if data.format != kind:
            data = memoryview(array(kind, data.tolist()))
        if not data.readonly or not data.contiguous:
            data = memoryview(data.tobytes()).cast(kind)  # type: ignore[call-overload]
        self.data = data

    @property
    def kind(self) -> str:
        """The kind of the numbers, as a type code of `array.array`."""
        return self.data.format

    def tolist(self) -> list[N]:
        """The numbers as a list."""
        return self.data.tolist()  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[N]:
        return iter(self.tolist())

    @overload
    def __getitem__(self, at: SupportsIndex) -> N: ...

    @overload
    def __getitem__(self, at: slice) -> Column[N]: ...

    def __getitem__(self, at: SupportsIndex | slice) -> N | Column[N]:
        found: Any = self.data[at]
        return Column(self.data.format, found) if isinstance(at, slice) else found

    def __add__(self, other: Sequence[N]) -> Column[N]:
        return joined(self, other)

    def __radd__(self, other: Sequence[N]) -> Column[N]:
        return joined(Column(self.kind, other), self)

    def index(self, value: Any, *bounds: int) -> int:
        """Find the first place of a number. Raises ValueError if it does not occur."""
        return self.tolist().index(value, *bounds)

    def count(self, value: Any) -> int:
        """Count how often a number occurs."""
        return self.tolist().count(value)

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
        return unpickled, (self.kind, self.data.tobytes())  # a separate buffer costs more than a short answer


def unpickled(kind: str, data: bytes) -> Column[Any]:
    """Make a column of bytes."""
    return Column(kind, memoryview(data).cast(kind))  # type: ignore[call-overload]


def joined(first: Column[N], *others: Sequence[N]) -> Column[N]:
    """Concatenate columns and other sequences, in the kind of the first."""
    return unpickled(first.kind, b"".join(column(first.kind, one).data for one in (first, *others)))


def ids(values: Any) -> Column[int]:
    """Make a column of token ids: a sequence of integers or an int32 array [L]."""
    return column("i", values)


def mask(values: Any) -> Column[int]:
    """Make a column of 0 and 1 per token: a sequence or a uint8 array [L]."""
    return column("B", values)


def floats(values: Any) -> Column[float]:
    """Make a column of one number per token: a sequence or a float32 array [L]."""
    return column("f", values)


def column(kind: str, values: Any) -> Column[Any]:
    """Make a column of this kind, unless `values` are one."""
    return values if type(values) is Column and values.data.format == kind else Column(kind, values)


def hold(value: Any, **kinds: str) -> None:
    """Make the fields of a frozen value columns of these kinds."""
    for name, kind in kinds.items():
        given = getattr(value, name)
        if type(given) is not Column or given.data.format != kind:
            object.__setattr__(value, name, Column(kind, given))
