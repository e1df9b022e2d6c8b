"""Read rows from all supported file types, each as a dictionary with its file and line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from rlhf_core.config.data import Source
from rlhf_core.data.file_types import PACKED, at_path, file_type, refuse_other_type, source_files
from rlhf_core.data.limits import Origin
from rlhf_core.data.row_functions import verdicts_of_classes
from rlhf_core.data.turns import RepeatedKey, from_json, looks_like_turns, worth
from rlhf_core.errors import DataError, explain
from rlhf_core.user_code.modules import load_callable

csv.field_size_limit(1 << 30)  # a cell may hold a long conversation; the default is 128 KiB

_BAD_VALUE = (ValueError, OverflowError, TypeError, KeyError, pa.ArrowException)
"""Errors for values that Python cannot represent: dates before year 1, text that is not UTF-8, unknown time zones."""
_LISTS = (
    "messages",
    "conversations",
    "tools",
    "functions",
    "tool_calls",
    "function_call",
    "completions",
    "labels",
    "history",
)
"""Columns of CSV whose cells are JSON. Elsewhere only turns are: `[1, 2]` may be an answer of a person or a model."""
LEFT_OUT = "left out: by the function of its source"
_BATCH = 1000  # rows that are converted to Python at a time
_BEGINNING = 1 << 16  # number of bytes in which the type of a file shows


@dataclass(frozen=True, slots=True)
class Record:
    """One unchanged row of the file, or an empty `row` with the reason in `problem` if it could not be read."""

    origin: Origin
    row: dict[str, Any]
    problem: str


def read(source: Source) -> Iterator[Record]:
    """Yield every row of `source`, readable or not; if the source has a function, the rows that it makes of each.

    Raises DataError if the file is missing or of another type.
    """
    if source.function is None:
        yield from _read(source)
        return
    function = load_callable(f"data.sources[{source.name}].function", source.function)
    for record in _read(source):
        yield from [record] if record.problem else _made(record, function)


def _made(record: Record, function: Callable[[dict[str, Any]], Any]) -> Iterator[Record]:
    """The rows that a user's function makes of one."""
    try:
        made = function(dict(record.row))
    except Exception as error:  # the user's code, which may raise anything
        yield Record(record.origin, {}, f"the function failed: {type(error).__name__}: {error}")
        return
    rows = made if isinstance(made, list) else [made]
    if made is None or not rows:
        yield Record(record.origin, {}, LEFT_OUT)
    for row in rows if made is not None else ():
        yield _record(record.origin, row)


def _read(source: Source) -> Iterator[Record]:
    kind = file_type(source)
    if kind == "hub":
        yield from _records(source.path, _dataset_rows(_hub_rows(source), source))
        return
    files = [Path(source.path).expanduser()] if kind == "saved_dataset" else source_files(source.path)
    for path in files:
        one = source if len(files) == 1 else source.model_copy(update={"path": str(path)})
        yield from _file_rows(path, kind, one)


def _file_rows(path: Path, kind: str, source: Source) -> Iterator[Record]:
    if not path.exists():
        raise DataError(at_path(source, "does not exist", "check the path"))
    try:
        if kind != "saved_dataset":
            refuse_other_type(_beginning(path, kind, source), kind, source, path=path)
        yield from _READERS[kind](path, source)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error, pa.ArrowException) as error:
        remedy = "save it as UTF-8" if isinstance(error, UnicodeDecodeError) else "check the file, or set `file_type`"
        raise DataError(at_path(source, f"cannot be read as {kind} ({error})", remedy)) from error


def _beginning(path: Path, kind: str, source: Source) -> bytes:
    """Read and decompress the first bytes of a file.

    Raises DataError if it has the name of a compressed file but is none.
    """
    with path.open("rb") as raw:
        begin = raw.read(_BEGINNING)
    magic = PACKED.get(path.suffix.lower())
    if magic is None or kind in ("parquet", "arrow") or not begin:
        return begin
    refuse_other_type(b"" if begin.startswith(magic) else begin, kind, source, path=path)
    if not begin.startswith(magic):
        raise DataError(at_path(source, f"is not packed, though its name ends in {path.suffix}", "rename it"))
    with _unpacked(path) as stream:
        return stream.read(_BEGINNING)


# ---------------------------------------------------------------- readers


def _jsonl(path: Path, source: Source) -> Iterator[Record]:
    with _open(path, errors="surrogateescape") as stream:  # a bad byte then spoils its row only
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            origin = Origin(source.path, number)
            try:
                row = from_json(line)
            except DataError as error:
                yield Record(origin, {}, str(error))
                continue
            yield _record(origin, row)


def _json(path: Path, source: Source) -> Iterator[Record]:
    """Yield the items of a JSON list, or of the only list in a JSON object."""
    with _open(path) as stream:
        try:
            content = from_json(stream.read())
        except DataError as error:
            cause = error.__cause__
            line = cause.lineno if isinstance(cause, json.JSONDecodeError) else 1
            place, remedy = f"{source.path}:{line}", "fix the file, or set file_type = 'jsonl' for one row a line"
            raise DataError(f"data.sources[{source.name}]", place, str(error), remedy) from error
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(lists) == 1 else content
    if not isinstance(content, list):
        raise DataError(at_path(source, "does not contain a list of rows", "give a list of objects"))
    yield from _records(source.path, content)


def _csv(path: Path, source: Source, delimiter: str = ",") -> Iterator[Record]:
    """Yield CSV rows, with the JSON of turns and of known lists parsed."""
    strict = {*_LISTS, "label", source.columns.label, source.columns.messages}
    with _open(path, errors="surrogateescape") as stream:
        reader = csv.DictReader(stream, strict=True, delimiter=delimiter)
        _refuse_twins(reader.fieldnames or (), source)
        for first, row in _csv_rows(reader):
            last = reader.reader.line_num  # DictReader's own number does not advance past an unreadable row
            origin = Origin(source.path, last)
            if isinstance(row, csv.Error):
                yield Record(origin, {}, f"not CSV: {row} in lines {first} to {last}")
            elif None in row or None in row.values():
                yield Record(origin, {}, f"not a row: {len(reader.fieldnames or ())} cells are needed")
            else:
                try:
                    cells = {name: _cell(value, name in _LISTS, name in strict) for name, value in row.items()}
                    yield Record(origin, cells, "")
                except RepeatedKey as error:
                    yield Record(origin, {}, str(error))


def _csv_rows(reader: csv.DictReader[str]) -> Iterator[tuple[int, dict[str, Any] | csv.Error]]:
    """Yield the first line of each row with the row, or with the error if it cannot be read.

    Raises csv.Error for a quote that is never closed, because its text may contain any number of rows.
    """
    while True:
        first = reader.reader.line_num + 1
        try:
            yield first, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise csv.Error(f"a quote that begins in line {first} or later is not closed") from error
            yield first, error


def _parquet(path: Path, source: Source) -> Iterator[Record]:
    table = pq.ParquetFile(path, page_checksum_verification=True)
    _refuse_twins(table.schema_arrow.names, source)
    rows = _with_names(_table_rows(table.iter_batches()), _features(table.schema_arrow.metadata), source)
    yield from _records(source.path, rows)


def _arrow(path: Path, source: Source) -> Iterator[Record]:
    """Yield the rows of an Arrow IPC file or stream (caches of the `datasets` library are streams)."""
    with pa.memory_map(str(path)) as stream:
        try:
            table = pa.ipc.open_file(stream).read_all()
        except pa.ArrowInvalid:
            stream.seek(0)
            table = pa.ipc.open_stream(stream).read_all()
        _refuse_twins(table.column_names, source)
        table.validate(full=True)  # a damaged offset would be read beyond the end of the file
        rows = _table_rows(table.to_batches(max_chunksize=_BATCH))
        yield from _records(source.path, _with_names(rows, _features(table.schema.metadata), source))


def _saved_dataset(path: Path, source: Source) -> Iterator[Record]:
    from datasets import Dataset, load_from_disk  # 1.2 s, which files do without

    try:
        found = load_from_disk(str(path))
    except Exception as error:  # damaged metadata of a dataset makes the library raise errors of any type
        rule = f"is a folder, but not one that `Dataset.save_to_disk` wrote ({type(error).__name__}: {error})"
        raise DataError(at_path(source, rule, "list its files as sources")) from error
    if not isinstance(found, Dataset):
        if source.split not in found:
            key, rule = f"data.sources[{source.name}].split", f"choose from {sorted(found)}"
            raise DataError(key, source.split, rule, "set `split`")
        found = found[source.split]
    found.data.validate(full=True)
    yield from _records(source.path, _dataset_rows(found, source))


def _hub_rows(source: Source) -> Any:
    from datasets import load_dataset  # 1.2 s, which files do without

    try:
        return load_dataset(source.path, source.subset or None, revision=source.revision, split=source.split)
    except Exception as error:  # errors come from the library, the network and Python
        remedy = "check name, subset, split, revision and network"
        raise DataError(at_path(source, f"the Hub data set cannot be loaded ({error})", remedy)) from error


_READERS: dict[str, Callable[[Path, Source], Iterator[Record]]] = {
    "jsonl": _jsonl,
    "json": _json,
    "csv": _csv,
    "tsv": partial(_csv, delimiter="\t"),
    "parquet": _parquet,
    "arrow": _arrow,
    "saved_dataset": _saved_dataset,
}


def _open(path: Path, *, errors: str = "strict") -> IO[str]:
    return io.TextIOWrapper(_unpacked(path), encoding="utf-8-sig", errors=errors, newline="")


def _unpacked(path: Path) -> io.BufferedReader:
    if path.suffix.lower() == ".gz":
        return io.BufferedReader(gzip.open(path))
    if path.suffix.lower() == ".zst":
        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))
    return path.open("rb")


def _table_rows(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the rows of Arrow batches, or the error for a row with a value that Python cannot represent."""
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except _BAD_VALUE:
            rows = [_row_or_error(lambda one: one.to_pylist()[0], batch.slice(at, 1)) for at in range(len(batch))]
        yield from rows


def _dataset_rows(found: Any, source: Source) -> Iterator[Any]:
    """Yield the rows of a dataset, or the error for a row with a value that Python cannot represent."""

    def rows() -> Iterator[Any]:
        for start in range(0, len(found), _BATCH):
            part = found.select(range(start, min(start + _BATCH, len(found))))
            try:
                yield from list(part)
            except _BAD_VALUE:
                yield from [_row_or_error(part.__getitem__, at) for at in range(len(part))]

    return _with_names(rows(), found.features.to_dict(), source)


def _row_or_error(read_row: Callable[[Any], Any], where: Any) -> Any:
    try:
        return read_row(where)
    except _BAD_VALUE as error:
        return error


def _records(name: str, rows: Iterable[Any]) -> Iterator[Record]:
    for number, row in enumerate(rows, start=1):
        yield _record(Origin(name, number), row)


def _record(origin: Origin, row: Any) -> Record:
    if isinstance(row, dict):
        return Record(origin, row, "")
    if isinstance(row, Exception):
        return Record(origin, {}, f"not readable: {row}")
    return Record(origin, {}, f"not a row: {type(row).__name__}; an object with named columns is needed")


def _refuse_twins(names: Sequence[str], source: Source) -> None:
    """Raise DataError if two columns have the same name, because a row would keep only the last of them."""
    twins = [name for name, count in Counter(names).items() if count > 1]
    if twins:
        raise DataError(at_path(source, f"has more than one column {twins[0]!r}", "rename one of them"))


def _cell(value: str, lists: bool, strict: bool) -> Any:
    if value[:1] not in ("[", "{"):
        return value
    try:
        parsed = from_json(value)
    except DataError as error:
        if isinstance(error, RepeatedKey) and strict:
            raise
        return value
    return parsed if lists or looks_like_turns(parsed) else value


# ---------------------------------------------------------------- named classes


def _with_names(rows: Iterable[Any], features: Mapping[str, Any], source: Source) -> Iterator[Any]:
    """Yield rows of the `datasets` library with the names of classes for their numbers, which have any order.

    Raises DataError for verdicts whose names do not say which one is good.
    """
    classes = {name: one for name, one in features.items() if _has_classes(one)}
    label = source.columns.label or "label"
    names = classes.get(label, {}).get("names", []) if isinstance(classes.get(label), Mapping) else []
    judged = source.label_coding == "verdict" or source.format == "unpaired_preference"
    if source.function is None and judged and None in map(worth, names):
        key, rule = f"data.sources[{source.name}].columns.label", f"its classes {names} do not say which one is good"
        raise DataError(explain(key, label, rule, verdicts_of_classes(source.columns.model_dump(), label, names)))
    for row in rows:
        if classes and isinstance(row, dict):
            try:
                row |= {name: _named(row[name], one) for name, one in classes.items()}
            except IndexError:
                row = ValueError("a class has a number beyond its names")
        yield row


def _has_classes(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return feature.get("_type") == "ClassLabel" or any(map(_has_classes, feature.values()))
    return isinstance(feature, list) and any(map(_has_classes, feature))


def _named(value: Any, feature: Any) -> Any:
    """A value with names for the numbers of its classes; -1 is the number of an unknown class."""
    if isinstance(feature, list):
        feature = {"_type": "List", "feature": feature[0]}
    if value is None or not _has_classes(feature):
        return value
    if feature.get("_type") == "ClassLabel":
        return feature["names"][value] if value >= 0 else None
    inner = feature["feature"] if isinstance(feature.get("_type"), str) else feature
    if isinstance(value, list):
        return [_named(one, inner) for one in value]
    return {name: _named(one, inner.get(name)) for name, one in value.items()}


def _features(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """The features that the `datasets` library wrote into the schema of a file, none for other files."""
    try:
        found = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
