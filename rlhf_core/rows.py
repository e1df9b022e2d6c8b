"""Hold many columns, and samples that consist of them, as places in pieces: arrays of numbers where a list has objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import repeat
from typing import Any, NamedTuple, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from rlhf_core.columns import Column

S = TypeVar("S")


class Piece(Protocol):
    """An array of bytes that some place holds, to which this is a reference."""

    def bytes(self) -> NDArray[np.uint8]:
        """Return the array. WorkerLostError if nobody holds it any more."""


class Place(NamedTuple):
    """Bytes `start` to `end` of a piece: the numbers of one column. `ones` counts the ones of a mask."""

    piece: Piece
    kind: str
    start: int
    end: int
    ones: int

    @property
    def length(self) -> int:
        return (self.end - self.start) // WIDTH[self.kind]

    def read(self) -> memoryview:
        return self.piece.bytes()[self.start : self.end].data

    def counted(self, value: Any) -> int | None:
        return self.ones if self.kind == "B" and value == 1 else None


WIDTH = {"B": 1, "i": 4, "f": 4, "d": 8}
"""Bytes of a number."""


class Columns(Sequence[Column[Any]]):
    """Columns of one kind in pieces: arrays of numbers where a list would have objects.

    Row `at` is bytes `start` to `end` of piece number `which`: `places` [4, N] has these and the ones of masks.
    """

    __slots__ = ("kind", "pieces", "places")

    def __init__(self, kind: str, pieces: tuple[Piece, ...], places: NDArray[np.int64]) -> None:
        self.kind, self.pieces, self.places = kind, pieces, places

    def __len__(self) -> int:
        return self.places.shape[1]

    @overload
    def __getitem__(self, at: int) -> Column[Any]: ...

    @overload
    def __getitem__(self, at: slice) -> Columns: ...

    def __getitem__(self, at: int | slice) -> Column[Any] | Columns:
        if isinstance(at, slice):
            return Columns(self.kind, self.pieces, self.places[:, at])
        which, start, end, ones = self.places[:, at].tolist()
        return Column.elsewhere(Place(self.pieces[which], self.kind, start, end, ones))

    def __iter__(self) -> Iterator[Column[Any]]:
        which, *bounds = self.places.tolist()
        each = zip(map(self.pieces.__getitem__, which), repeat(self.kind), *bounds)
        return iter(Column.all_elsewhere(list(map(Place._make, each))))

    def take(self, rows: Sequence[int]) -> Columns:
        """Return some of the rows, in this order, with the pieces that they lie in."""
        places = self.places[:, np.asarray(rows, np.int64)]
        used, places[0] = np.unique(places[0], return_inverse=True)
        return Columns(self.kind, tuple(self.pieces[at] for at in used.tolist()), places)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of numbers of each row."""
        lengths: NDArray[np.int64] = (self.places[2] - self.places[1]) // WIDTH[self.kind]
        return lengths

    @property
    def ones(self) -> int:
        """Return the number of ones of all masks."""
        return int(self.places[3].sum())

    @classmethod
    def merged(cls, parts: Sequence[Columns], order: Sequence[int]) -> Columns:
        """Return the rows of all parts; row i of them, counted through, becomes row `order[i]`."""
        before = np.cumsum([0, *(len(part.pieces) for part in parts)])
        places = np.concatenate([part.places for part in parts], axis=1)
        places[0] += np.repeat(before[:-1], [len(part) for part in parts])
        ordered = np.empty_like(places)
        ordered[:, np.asarray(order, np.int64)] = places
        return cls(parts[0].kind, tuple(piece for part in parts for piece in part.pieces), ordered)


class Rows(Sequence[S]):
    """Samples of one type, all of whose fields are held columns; each is made when somebody looks at it."""

    __slots__ = ("columns", "type")

    def __init__(self, type: type[S], columns: Mapping[str, Columns]) -> None:
        self.type, self.columns = type, columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @overload
    def __getitem__(self, at: int) -> S: ...

    @overload
    def __getitem__(self, at: slice) -> Rows[S]: ...

    def __getitem__(self, at: int | slice) -> S | Rows[S]:
        if isinstance(at, slice):
            return Rows(self.type, {name: each[at] for name, each in self.columns.items()})
        return self.type(**{name: each[at] for name, each in self.columns.items()})

    def __iter__(self) -> Iterator[S]:
        for fields_of in zip(*self.columns.values(), strict=True):
            yield self.type(*fields_of)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def take(self, rows: Sequence[int]) -> Rows[S]:
        """Return some of the rows, in this order."""
        return Rows(self.type, {name: each.take(rows) for name, each in self.columns.items()})


class Shared(tuple[S, ...]):
    """Values that workers get one after the other: they are pickled once, see `rlhf_core.runtime.pieces.packed`."""

    packed: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Shared, (list(self),)


def chosen(rows: Sequence[S], places: Sequence[int]) -> Sequence[S]:
    """Return the rows at some places, in this order, without making those that are held."""
    return rows.take(places) if isinstance(rows, (Rows, Columns)) else [rows[at] for at in places]


def held_lengths(rows: Sequence[Any]) -> list[int] | None:
    """Return the number of tokens of each row that is held; None for rows that are here."""
    columns = next(iter(rows.columns.values())) if isinstance(rows, Rows) else rows
    return columns.lengths.tolist() if isinstance(columns, Columns) else None


def ones(rows: Sequence[Any]) -> int:
    """Return the number of ones in the loss masks of samples."""
    if isinstance(rows, Rows):
        return rows.columns["loss_mask"].ones
    return sum(sample.loss_mask.count(1) for sample in rows)


def holds(value: Any) -> bool:
    """Return whether some column in `value`, which may be in lists and dataclasses, is held elsewhere.

    >>> holds(Column("i", (5, 7))), holds([Column.elsewhere(Place(None, "B", 0, 3, 0))])
    (False, True)
    """
    if isinstance(value, (Columns, Rows)):
        return True
    if isinstance(value, Column):
        return value.held
    if isinstance(value, (tuple, list)):
        return any(map(holds, value))
    return is_dataclass(value) and any(holds(getattr(value, one.name)) for one in fields(value))
