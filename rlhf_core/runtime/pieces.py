"""Leave the columns of a worker's results in Ray's object store: the driver gets a reference, and reads what it looks at.

A call of a worker has two results: its value, in which large columns are places in a piece, and the piece, an array of
bytes. The driver owns the piece and does not fetch it. It hands the columns on to other workers as they are, and these map
the piece, if it is on their node, or copy it there once.
"""

import io
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from copyreg import dispatch_table
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import chain, count, islice, repeat
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlhf_core.columns import Column
from rlhf_core.errors import WorkerLostError, explain
from rlhf_core.rows import Columns, Piece, Place, Rows, Shared
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


def _small(columns: Columns) -> tuple[Any, ...]:
    """Return what columns are made of, with places of few bytes: Ray sends a call of up to 100 KB without its object store."""
    which, start, end, ones = columns.places
    which, ones = (one if one.any() else one[:1] for one in (which, ones))
    small = [one.astype(np.min_scalar_type(one.max(initial=0))) for one in (which, start, end - start, ones)]
    return columns.kind, columns.pieces, small


def _held(kind: str, pieces: tuple[Piece, ...], small: list[NDArray[Any]]) -> Columns:
    places = np.array(np.broadcast_arrays(*small), np.int64)
    places[2] += places[1]
    return Columns(kind, pieces, places)


def _list(kind: str, pieces: tuple[Piece, ...], small: list[NDArray[Any]]) -> list[Column[Any]]:
    return list(_held(kind, pieces, small))


def _shared(value: bytes, places: tuple[int, ...]) -> Any:
    pieces = _pieces.get()
    return opened(Packed(value, tuple(pieces[at] for at in places)))


class _Table(NamedTuple):
    """A list of dataclasses or tuples, as the values of each field: a pickle of each takes three times as long."""

    kind: type
    fields: list[Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _listed, (self.kind, self.fields)


class _Parts(NamedTuple):
    """A list of tuples of different lengths, as the values of all of them: the spans of episodes, for one."""

    lengths: list[int]
    values: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return _parted, (self.lengths, self.values)


def _parted(lengths: list[int], values: Sequence[Any]) -> list[tuple[Any, ...]]:
    each = iter(values)
    return [tuple(islice(each, length)) for length in lengths]


def _listed(kind: type, values: list[Sequence[Any]]) -> list[Any]:
    if kind is tuple:
        return list(zip(*values, strict=True))
    made: list[Any] = list(map(object.__new__, repeat(kind, len(values[0]))))
    for name, each in zip(_names(kind), values, strict=True):
        deque(map(getattr(kind, name).__set__, made, each), maxlen=0)  # the classes may be frozen
    return made


@cache
def _names(kind: type) -> tuple[str, ...]:
    """Return the fields of a frozen dataclass with slots; () of other types, and of those that have a pickle of their own."""
    if not is_dataclass(kind) or getattr(getattr(kind, "__getstate__", None), "__module__", "") != "dataclasses":
        return ()
    own = any(getattr(kind, name) is not getattr(object, name) for name in ("__new__", "__reduce__", "__reduce_ex__"))
    return () if own else tuple(one.name for one in fields(kind))


def _takes(kind: type, names: tuple[str, ...]) -> bool:
    """Return whether a dataclass is made of the values of its fields one after the other."""
    return getattr(kind, "__match_args__", ()) == names


class _Pickler(pickle.Pickler):
    """Notes the pieces of a value; if it `leaves`, it collects the numbers of columns, too, for a piece of their own."""

    def __init__(self, *, leaves: bool) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=5)
        self.leaves = leaves
        self.dispatch_table = dict(dispatch_table)
        self.dispatch_table[Column] = self._of_column if leaves else self._of_held
        self.dispatch_table[RayPiece] = lambda piece: (_piece, (self._at(piece),))
        # A worker looks at all of them, and more than once; the driver does not.
        make_columns = _held if leaves else _list
        self.dispatch_table[Rows] = lambda rows: (
            (Rows, (rows.type, rows.columns)) if leaves else (_listed, (rows.type, [*rows.columns.values()]))
        )
        self.dispatch_table[Columns] = lambda columns: (make_columns, _small(columns))
        self.dispatch_table[Shared] = self._of_shared
        self.size = 0
        self.columns: list[memoryview] = []
        self.pieces: list[Piece] = []
        self._numbers: dict[int, int] = {}
        self._added: dict[int, tuple[int, int, int]] = {}
        self._own = 1 if leaves else 0

    def pickled(self, value: Any) -> bytes:
        """Return the pickle of a value; what is in it is freed with this pickler, and does not wait for the collector of cycles."""
        try:
            self.dump(_arranged(value, self))
        finally:
            del self.dispatch_table  # its functions refer to this pickler
        return self._file.getvalue()

    def _at(self, piece: Piece) -> int:
        """Return the number of a piece; 0 is that which is being made."""
        if id(piece) not in self._numbers:
            self._numbers[id(piece)] = len(self.pieces) + self._own
            self.pieces.append(piece)
        return self._numbers[id(piece)]

    def add(self, column: Column[Any]) -> tuple[int, int, int]:
        """Add the numbers of a column to the piece, once; return its place there and its ones."""
        if id(column) not in self._added:
            data, start = column.data, self.size
            self.columns.append(data)
            self.size += -(-data.nbytes // ALIGNED) * ALIGNED
            self._added[id(column)] = start, start + data.nbytes, column.count(1) if column.kind == "B" else 0
        return self._added[id(column)]

    def _of_held(self, column: Column[Any]) -> tuple[Any, ...]:
        source = column.source
        if type(source) is Place:
            return _place, (self._at(source.piece), *source[1:])
        return (Column.elsewhere, (source,)) if source else column.__reduce__()

    def _of_shared(self, values: Shared[Any]) -> tuple[Any, ...]:
        if values.packed is None:
            values.packed = packed(list(values))
        return _shared, (values.packed.value, tuple(map(self._at, values.packed.pieces)))

    def _of_column(self, column: Column[Any]) -> tuple[Any, ...]:
        if column.held:
            return self._of_held(column)
        return _place, (0, column.kind, *self.add(column))


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
    pickled = pickler.pickled(value)
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


def _arranged(value: Any, pickler: _Pickler) -> Any:
    """Return `value` with lists of columns as `Columns`, and lists of dataclasses or tuples as one list of each field."""
    if type(value) is tuple:
        return tuple(_arranged(one, pickler) for one in value)
    if type(value) is not list or not value:
        return value
    kind: type = type(value[0])
    if set(map(type, value)) != {kind}:
        return value
    if kind is Column:
        return _columns(value, pickler)
    if kind is tuple:
        return _arranged_tuples(value, pickler)
    names = _names(kind)
    if not names or len(set(map(id, value))) < len(value):  # what occurs twice is pickled once
        return value
    made = [_arranged(list(map(attrgetter(name), value)), pickler) for name in names]
    if pickler.leaves and all(type(each) is Columns for each in made) and _takes(kind, names):
        return Rows(kind, dict(zip(names, made, strict=True)))
    return _Table(kind, made)


def _arranged_tuples(value: list[tuple[Any, ...]], pickler: _Pickler) -> Any:
    """Return a list of tuples as one list of each field; as one of all values, if they have other lengths."""
    filled, lengths = [one for one in value if one], list(map(len, value))
    if not filled or len(set(map(id, filled))) < len(filled):
        return value
    if len(set(lengths)) == 1:
        return _Table(tuple, [_arranged(list(each), pickler) for each in zip(*value, strict=True)])
    values = list(chain.from_iterable(value))
    made = _arranged(values, pickler)
    return value if made is values else _Parts(lengths, made)


def _columns(columns: list[Column[Any]], pickler: _Pickler) -> Any:
    """Return the columns where they are already, or in the piece that is being made; as they are if there is none."""
    places: list[Any] = [one.source for one in columns]
    if set(map(type, places)) != {Place}:
        if not pickler.leaves:
            return columns
        for at, column in enumerate(columns):
            if type(places[at]) is not Place:
                places[at] = Place(_OWN, column.kind, *pickler.add(column))
    pieces, kinds, *bounds = zip(*places, strict=True)
    if len(set(kinds)) > 1:
        return columns
    used = dict(zip(map(id, pieces), pieces, strict=True))
    numbers = dict(zip(used, count()))
    which = [numbers[id(piece)] for piece in pieces]
    return Columns(kinds[0], tuple(used.values()), np.array([which, *bounds], np.int64))


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
