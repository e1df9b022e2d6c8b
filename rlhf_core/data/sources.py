"""Reads rows, one dictionary each with the file and line it came from, out of every kind of file we know."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from rlhf_core.config.data import Source
from rlhf_core.data.validation import Origin
from rlhf_core.errors import ConfigError, DataError, explain

csv.field_size_limit(1 << 30)

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}


@dataclass(frozen=True, slots=True)
class Record:
    """One row as it stood in the file, or why it could not be read (`problem`, then `row` is empty)."""

    origin: Origin
    row: dict[str, Any]
    problem: str


def is_hub(source: Source) -> bool:
    """Return whether `source` names a data set of the Hugging Face Hub and no local file."""
    return file_type(source) == "hub"


def read(source: Source) -> Iterator[Record]:
    """Yield every row of `source`, readable or not; DataError if the file is not there or is not what it should be."""
    kind = file_type(source)
    if kind == "hub":
        yield from _records(source.path, _hub_rows(source))
        return
    path = Path(source.path).expanduser()
    if not path.exists():
        raise DataError(explain(f"data.sources[{source.name}].path", source.path, "is not there", "check the path"))
    try:
        yield from _READERS[kind](path, source)
    except (OSError, EOFError, UnicodeDecodeError, pa.ArrowInvalid) as error:
        raise DataError(
            explain(
                f"data.sources[{source.name}].path",
                source.path,
                f"cannot be read as {kind} ({error})",
                "check the file, or set `file_type`",
            )
        ) from error


def file_type(source: Source) -> str:
    """Return how the source is read; `auto` goes by the name, then by whether it is a folder.

    ConfigError for a name that says nothing, and for a Hub name without the commit that pins it.
    """
    kind: str = source.file_type
    if kind == "auto":
        suffixes = [suffix.lower() for suffix in Path(source.path).suffixes if suffix.lower() != ".gz"]
        path = Path(source.path).expanduser()
        if path.is_dir():
            kind = "saved_dataset"
        elif suffixes and suffixes[-1] in _SUFFIXES:
            kind = _SUFFIXES[suffixes[-1]]
        elif source.path.count("/") == 1 and not source.path.startswith((".", "/", "~")):
            kind = "hub"
        else:
            raise ConfigError(
                explain(
                    f"data.sources[{source.name}].path",
                    source.path,
                    f"neither a folder, a Hub name, nor a file ending in {sorted(_SUFFIXES)}",
                    "check the path, or set `file_type`",
                )
            )
    if kind == "hub" and not re.fullmatch(r"[0-9a-f]{40}", source.revision):
        raise ConfigError(
            explain(
                f"data.sources[{source.name}].revision",
                source.revision,
                f"must be the full commit of the Hub data set {source.path!r}, since branches and tags move",
                "copy the 40-digit hash from the data set's page",
            )
        )
    return kind


# ---------------------------------------------------------------- readers


def _jsonl(path: Path, source: Source) -> Iterator[Record]:
    with _open(path) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            origin = Origin(source.path, number)
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                yield Record(origin, {}, f"not JSON: {error.msg} at column {error.colno}")
                continue
            yield _record(origin, row)


def _json(path: Path, source: Source) -> Iterator[Record]:
    """Yield the items of a JSON list, or of the only list in a JSON object."""
    with _open(path) as stream:
        try:
            content = json.load(stream)
        except json.JSONDecodeError as error:
            raise DataError(
                explain(
                    f"data.sources[{source.name}]",
                    f"{source.path}:{error.lineno}",
                    f"not JSON ({error.msg})",
                    "mend the file, or set file_type = 'jsonl' for one row a line",
                )
            ) from error
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(lists) == 1 else content
    if not isinstance(content, list):
        raise DataError(
            explain(f"data.sources[{source.name}].path", source.path, "holds no list of rows", "give a list of objects")
        )
    yield from _records(source.path, content)


def _csv(path: Path, source: Source) -> Iterator[Record]:
    """Yield CSV rows; a cell that is a JSON list or object is read as one (turns in a cell)."""
    with _open(path) as stream:
        reader = csv.DictReader(stream)
        for row in reader:
            origin = Origin(source.path, reader.line_num)
            if None in row or None in row.values():
                yield Record(origin, {}, f"not a row: {len(reader.fieldnames or ())} cells are needed")
                continue
            yield Record(origin, {name: _cell(value) for name, value in row.items()}, "")


def _parquet(path: Path, source: Source) -> Iterator[Record]:
    table = pq.ParquetFile(path)
    yield from _records(source.path, (row for batch in table.iter_batches() for row in batch.to_pylist()))


def _arrow(path: Path, source: Source) -> Iterator[Record]:
    """Yield the rows of an Arrow IPC file or stream (data sets caches are streams)."""
    with pa.memory_map(str(path)) as stream:
        try:
            table = pa.ipc.open_file(stream).read_all()
        except pa.ArrowInvalid:
            stream.seek(0)
            table = pa.ipc.open_stream(stream).read_all()
        yield from _records(source.path, table.to_pylist())


def _saved_dataset(path: Path, source: Source) -> Iterator[Record]:
    from datasets import Dataset, load_from_disk

    try:
        found = load_from_disk(str(path))
    except FileNotFoundError as error:
        raise DataError(
            explain(
                f"data.sources[{source.name}].path",
                source.path,
                "is a folder, but not one that `Dataset.save_to_disk` wrote",
                "give a file of it as a source of its own",
            )
        ) from error
    if not isinstance(found, Dataset):
        if source.split not in found:
            raise DataError(
                explain(
                    f"data.sources[{source.name}].split", source.split, f"choose from {sorted(found)}", "set `split`"
                )
            )
        found = found[source.split]
    yield from _records(source.path, found)


def _hub_rows(source: Source) -> Iterable[Any]:
    from datasets import load_dataset

    try:
        return load_dataset(source.path, source.subset or None, revision=source.revision, split=source.split)
    except Exception as error:  # the library raises its own, the network's and Python's errors
        raise DataError(
            explain(
                f"data.sources[{source.name}].path",
                source.path,
                f"the Hub data set cannot be loaded ({error})",
                "check name, subset, split, revision and network",
            )
        ) from error


_READERS: dict[str, Callable[[Path, Source], Iterator[Record]]] = {
    "jsonl": _jsonl,
    "json": _json,
    "csv": _csv,
    "parquet": _parquet,
    "arrow": _arrow,
    "saved_dataset": _saved_dataset,
}


# ---------------------------------------------------------------- private


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _records(name: str, rows: Iterable[Any]) -> Iterator[Record]:
    for number, row in enumerate(rows, start=1):
        yield _record(Origin(name, number), row)


def _record(origin: Origin, row: Any) -> Record:
    if isinstance(row, dict):
        return Record(origin, row, "")
    return Record(origin, {}, f"not a row: {type(row).__name__}; an object with named columns is needed")


def _cell(value: str) -> Any:
    if value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value
