"""Leave the columns of a worker's results in Ray's object store: the driver gets a reference, and reads what it looks at.

A call of a worker has two results: its value, in which large columns are places in a piece, and the piece, an array of
bytes. The driver owns the piece and does not fetch it. It hands the columns on to other workers as they are, and these map
the piece, if it is on their node, or copy it there once.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from copyreg import dispatch_table
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlhf_core.columns import Column
from rlhf_core.errors import WorkerLostError, explain
from rlhf_core.rows import Columns, Piece, Place, Rows
from rlhf_core.runtime.ray_settings import ray
from rlhf_core.store.places.place import Place as Folder

T = TypeVar("T")
LEAVES_FROM = 2**17
"""Bytes of the columns of a result from which they are left. Ray sends smaller results with the answer itself."""
LEAVING = frozenset({"logprobs", "values", "generate", "advance", "apart"})
"""Methods of workers whose results have columns."""
ALIGNED = 8
READ_TIMEOUT_S = 600.0
"""Seconds in which a piece has to arrive from another node: one of some GB takes a few."""


class RayPiece:
    """An array of bytes in Ray's object store."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref
        self._bytes: NDArray[np.uint8] | None = None

    def bytes(self) -> NDArray[np.uint8]:
        """Return the array, mapped where it is on this node. WorkerLostError if its node, or Ray, is gone."""
        if self._bytes is None:
            try:
                if not ray.is_initialized():  # `ray.get` would start another Ray
                    raise ray.exceptions.RaySystemError("Ray has been stopped")
                self._bytes = ray.get(self._ref, timeout=READ_TIMEOUT_S)
            except ray.exceptions.RayError as error:
                rule, remedy = "Ray holds them no more", "run again to resume from the last checkpoint"
                raise WorkerLostError(explain("columns", "of a step", rule, remedy)) from error
        return self._bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return RayPiece, (self._ref,)


# ---------------------------------------------------------------- pickles


@dataclass(frozen=True, slots=True)
class Packed:
    """A pickle, and beside it the pieces in which its columns are, whose references Ray has to count."""

    value: bytes
    pieces: tuple[Piece, ...]


_pieces: ContextVar[tuple[Piece, ...]] = ContextVar("pieces of the value that is being read")


def _piece(at: int) -> Piece:
    return _pieces.get()[at]


def _place(at: int, kind: str, start: int, end: int, ones: int) -> Column[Any]:
    return Column.elsewhere(Place(_pieces.get()[at], kind, start, end, ones))


def _list(kind: str, pieces: tuple[Piece, ...], places: NDArray[np.int64]) -> list[Column[Any]]:
    return list(Columns(kind, pieces, places))


def _rows(kind: type[T], columns: dict[str, Sequence[Column[Any]]]) -> list[T]:
    return [kind(*each) for each in zip(*columns.values(), strict=True)]


class _Reducers(dict[type, Any]):
    """Functions that pickle values of a type; those of dataclasses are three times as fast as their own."""

    def __missing__(self, kind: type) -> Any:
        if not is_dataclass(kind) or "__slots__" not in kind.__dict__:
            raise KeyError(kind)
        names = _names(kind)
        if len(names) < 2:  # `attrgetter` returns no tuple then
            raise KeyError(kind)
        values = attrgetter(*names)
        self[kind] = lambda value: (_filled, (kind, values(value)))
        return self[kind]


def _filled(kind: type, values: tuple[Any, ...]) -> Any:
    made: Any = object.__new__(kind)
    for put, value in zip(_setters(kind), values, strict=True):
        put(made, value)
    return made


@cache
def _setters(kind: type) -> tuple[Callable[[Any, Any], None], ...]:
    """Return the functions that set the fields of a frozen dataclass with slots."""
    return tuple(getattr(kind, name).__set__ for name in _names(kind))


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))


class _Pickler(pickle.Pickler):
    """Notes the pieces of a value; if it `leaves`, it collects the numbers of columns, too, for a piece of their own."""

    def __init__(self, *, leaves: bool) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=5)
        self.dispatch_table = _Reducers(dispatch_table)
        self.dispatch_table[Column] = self._of_column if leaves else self._of_held
        self.dispatch_table[RayPiece] = lambda piece: (_piece, (self._at(piece),))
        # A worker looks at all of them, and more than once; the driver does not.
        make_rows, make_columns = (Rows, Columns) if leaves else (_rows, _list)
        self.dispatch_table[Rows] = lambda rows: (make_rows, (rows.type, rows.columns))
        self.dispatch_table[Columns] = lambda columns: (make_columns, (columns.kind, columns.pieces, columns.places))
        self.size = 0
        self.columns: list[memoryview] = []
        self.pieces: list[Piece] = []
        self._numbers: dict[int, int] = {}
        self._own = 1 if leaves else 0

    def pickled(self, value: Any) -> bytes:
        """Return the pickle of a value; what is in it is freed with this pickler, and does not wait for the collector of cycles."""
        try:
            self.dump(value)
        finally:
            del self.dispatch_table  # its functions refer to this pickler
        return self._file.getvalue()

    def _at(self, piece: Piece) -> int:
        """Return the number of a piece; 0 is that which is being made."""
        if id(piece) not in self._numbers:
            self._numbers[id(piece)] = len(self.pieces) + self._own
            self.pieces.append(piece)
        return self._numbers[id(piece)]

    def add(self, data: memoryview) -> tuple[int, int]:
        """Add the numbers of a column to the piece; return its place there."""
        start = self.size
        self.columns.append(data)
        self.size += -(-data.nbytes // ALIGNED) * ALIGNED
        return start, start + data.nbytes

    def _of_held(self, column: Column[Any]) -> tuple[Any, ...]:
        source = column.source
        if type(source) is Place:
            return _place, (self._at(source.piece), *source[1:])
        return (Column.elsewhere, (source,)) if source else column.__reduce__()

    def _of_column(self, column: Column[Any]) -> tuple[Any, ...]:
        if column.held:
            return self._of_held(column)
        ones = column.count(1) if column.kind == "B" else 0
        return _place, (0, column.kind, *self.add(column.data), ones)


def packed(value: Any) -> Any:
    """Return a value with columns as an argument for a worker, which `opened` reads."""
    pickler = _Pickler(leaves=False)
    return Packed(pickler.pickled(value), tuple(pickler.pieces))


def opened(value: Any, *own: Piece) -> Any:
    """Return the value of `packed`, or of `leave` where its `own` piece is given; what is neither as it is."""
    if not isinstance(value, Packed):
        return value
    token = _pieces.set((*own, *value.pieces))
    try:
        return pickle.loads(value.value)
    finally:
        _pieces.reset(token)


def leave(value: Any, at_least: int) -> tuple[Any, NDArray[np.uint8] | None]:
    """Return `value` for the driver and the piece with its columns; itself and None if they have fewer bytes than that."""
    pickler = _Pickler(leaves=True)
    pickled = pickler.pickled(_in_arrays(value, pickler))
    if pickler.size < at_least and not pickler.pieces:
        return value, None
    piece = np.zeros(pickler.size, np.uint8)
    start = 0
    for data in pickler.columns:
        piece[start : start + data.nbytes] = np.frombuffer(data, np.uint8)
        start += -(-data.nbytes // ALIGNED) * ALIGNED
    return Packed(pickled, tuple(pickler.pieces)), piece


class _Own:
    """The piece that is being made."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _piece, (0,)

    def bytes(self) -> NDArray[np.uint8]:
        raise NotImplementedError


def _in_arrays(value: Any, pickler: _Pickler) -> Any:
    """Return `value` with lists of columns, and of samples that have nothing else, as `Columns` and `Rows`."""
    if type(value) is tuple:
        return tuple(_in_arrays(one, pickler) for one in value)
    if not isinstance(value, list) or not value:
        return value
    first, kinds = value[0], {type(one) for one in value}
    if kinds == {Column}:
        return _columns(value, pickler) if len({one.kind for one in value}) == 1 else value
    if (
        len(kinds) > 1
        or not is_dataclass(first)
        or not all(type(getattr(first, one.name)) is Column for one in fields(first))
    ):
        return value
    names = [one.name for one in fields(first)]
    return Rows(type(first), {name: _columns([getattr(one, name) for one in value], pickler) for name in names})


def _columns(columns: list[Column[Any]], pickler: _Pickler) -> Columns:
    """Return the columns in the piece that is being made, or in those where they are already."""
    pieces: dict[int, Piece] = {}
    places = []
    for column in columns:
        source = column.source
        if type(source) is not Place:
            piece: Piece = _OWN
            places.append((id(piece), *pickler.add(column.data), column.count(1) if column.kind == "B" else 0))
        else:
            piece = source.piece
            places.append((id(piece), source.start, source.end, source.ones))
        pieces[id(piece)] = piece
    numbers = {key: at for at, key in enumerate(pieces)}
    table = np.array([(numbers[key], *rest) for key, *rest in places], np.int64).reshape(-1, 4).T
    return Columns(columns[0].kind, tuple(pieces.values()), np.ascontiguousarray(table))


_OWN = _Own()


class Leaves:
    """A worker that reads packed arguments, can leave the columns of its results, and moves files beside its calls."""

    def __init__(self) -> None:
        self._moving = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._moves: dict[str, Future[Any]] = {}
        """Name of a move -> its result."""

    def move(self, name: str, work: Callable[[], Any]) -> None:
        """Begin to move files, after the moves before; `moved` returns what `work` returns."""
        self._moves[name] = self._moving.submit(work)

    def moved(self, name: str) -> tuple[Any] | None:
        """Return the result of a move, once, in a tuple; None while it goes on. Raises what it has raised."""
        return (self._moves.pop(name).result(),) if self._moves[name].done() else None

    def fetch(self, place: Folder) -> None:
        """Begin to fetch the files of a place to this node."""
        self.move(f"fetch {place.inside}", place.folder)

    def leave(self, at_least: int, method: str, *arguments: Any, **keywords: Any) -> tuple[Any, Any]:
        """Return the value of a method and the piece with its columns, see `leave`."""
        return leave(getattr(self, method)(*map(opened, arguments), **keywords), at_least)

    def apart(self, function: Callable[..., T], given: tuple[tuple[Any, ...], dict[str, Any]]) -> T:
        """Return what a function makes of columns that are held, in its arguments and keywords."""
        arguments, keywords = given
        return function(*arguments, **keywords)
