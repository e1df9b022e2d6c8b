"""Print the result of a stage (`rlhf show`): its preview, report, rows, metrics, or a summary of its weights."""

import argparse
import json
import re
import shlex
import struct
import webbrowser
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from pipelines.cli.common import console, print_line, short, store_folder
from pipelines.execution.key_metric import metric_rank
from pipelines.execution.plan import DIGITS
from pipelines.execution.summary import stage_measures
from pipelines.flows.inputs import find_artifact, parts
from pipelines.flows.profile import load_profile
from pipelines.services.home import Home
from pipelines.services.run_notes import run_records
from rlhf_core.errors import ArtifactError, ConfigError, nearest
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.fingerprint import list_files
from rlhf_core.store.layout import MANIFEST
from rlhf_core.store.records import KeyRecord
from rlhf_core.types import ArtifactRef

METRICS = "metrics"
"""Name under which the numbers of a result are shown, next to the names of files."""
BEST = ("preview.md", "README.md", "*.parquet", "*.jsonl")
"""Patterns of the file that is shown without a name, the most readable first; without any of them the numbers are."""
FIRST = (*BEST, "report.*", "*.html", "*.safetensors")
"""Patterns of the files that are listed before others."""
PAGES = {".html", ".png", ".svg"}
MOST_FILES, MOST_TENSORS = 6, 8
LONGEST_VALUE, LONGEST_LIST = 600, 100
LEAST_LINES = 5


def show(options: argparse.Namespace) -> None:
    """Print one file of an artifact; without a name its files and the best of them, cut to the terminal."""
    if options.rows < 1:
        raise ConfigError("--rows", options.rows, "must be >= 1", "name a file to see less of an artifact")
    store = ArtifactStore(store_folder(options))
    ref = find_artifact(store, ArtifactRef, _of_profile(options, store) or options.artifact)
    made = [one for one in reversed(store.records()) if ref in (one.handle, *parts(one.handle))]
    label = options.artifact.partition(".")[0]
    record = min(made, key=lambda one: one.label != label, default=None)  # of stages with equal results, the named one
    folder = store.path(ref)
    files = [name for name in list_files(folder) if name != MANIFEST and (folder / name).is_file()]
    files.sort(key=lambda name: (_place(name, FIRST), name))
    numbers = [] if record is None or record.handle != ref else _numbers(store, record)
    if options.file:
        shown = _named(options.file, [*files, METRICS])
        _print(numbers if shown == METRICS else _content(folder / shown, options.rows))
    else:
        heading = [*_heading(ref, record, folder), *_list(folder, files, numbers)]
        _print(heading)
        _print_best(options, folder, files, numbers, room=console.size.height - len(heading) - 5)
        shown = next((name for name in files if name.endswith(".html")), "")
    if options.open:
        _open(folder, shown)


def _of_profile(options: argparse.Namespace, store: ArtifactStore) -> str:
    """Digest of the last result of a stage in `--profile`; "" without a profile.

    Raises ArtifactError if it has none.
    """
    if not options.profile:
        return ""
    name = load_profile(options.profile).name
    made = store.latest(options.artifact.partition(".")[0], name)
    if made is None and not re.fullmatch("[0-9a-f]{8,64}", options.artifact) and not Path(options.artifact).exists():
        rule = f"no run of the profile {name} has made it"
        raise ArtifactError("artifact", options.artifact, rule, f"`rlhf run {options.profile}`, or leave --profile out")
    return "" if made is None or "." in options.artifact else made.handle.digest


def _print_best(
    options: argparse.Namespace, folder: Path, files: Sequence[str], numbers: Sequence[str], *, room: int
) -> None:
    """Print the beginning of the most readable file, or of the numbers, and the command that prints the whole."""
    best = files[0] if files and _place(files[0], BEST) < len(BEST) else METRICS
    lines = iter(numbers) if best == METRICS else _content(folder / best, options.rows)
    if best == METRICS and not numbers:
        return
    print_line(f"\n{best}:")
    _print(_fitted(lines, max(room, LEAST_LINES)))
    given = {"--store": options.store, "--profile": options.profile}
    where = [word for option, value in given.items() if value for word in (option, value)]
    print_line(f"\nwhole: {shlex.join(['rlhf', 'show', options.artifact, best, *where])}")


def _place(name: str, patterns: Sequence[str]) -> int:
    """Index of the first pattern that matches a file's name; beyond the last if none matches."""
    return next((place for place, pattern in enumerate(patterns) if Path(name).match(pattern)), len(patterns))


def _numbers(store: ArtifactStore, record: KeyRecord) -> list[str]:
    """One line for each measure of a result, the most informative first: of policies, then by its metrics."""
    measures = stage_measures(store, record.handle, record.metrics)
    own = sorted(record.metrics.keys() & measures.keys(), key=lambda name: (metric_rank(name), name))
    return [f"{name} = {measures[name]}" for name in (*(name for name in measures if name not in own), *own)]


def _heading(ref: ArtifactRef, record: KeyRecord | None, folder: Path) -> Iterator[str]:
    """Yield lines that name the artifact, the run that made it, and its folder."""
    kind = type(ref).__name__.removesuffix("Ref")
    if record is None:
        yield f"{kind} {ref.digest[:DIGITS]}, which no stage of this store made"
    else:
        part = next((f".{name}" for name, value in record.handle if value == ref), "")
        yield f"{record.label}{part}: {kind} {ref.digest[:DIGITS]}, {record.made}, {_made_by(record)}"
    yield f"in: {folder}"


def _made_by(record: KeyRecord) -> str:
    """Name the run that made an artifact: the last run of this folder that had begun by then."""
    started = datetime.fromisoformat(record.started).timestamp()
    for run in run_records(Home.here()):
        if run.began <= started <= run.began + run.seconds:
            profile = " ".join([run.profile or "a deployment", *(f"--set {one}" for one in run.overrides)])
            return f"made by the run {run.name} of {profile}"
    user = f" by {record.user}" if record.user else ""
    return f"made{user} in a run that this folder has no record of"


def _list(folder: Path, files: Sequence[str], numbers: Sequence[str]) -> Iterator[str]:
    """Yield a line for each of the first files, with its size and for weights their number, and one for the metrics."""
    for name in files[:MOST_FILES]:
        tensors = f": {next(_content(folder / name, 1))}" if name.endswith(".safetensors") else ""
        page = "  (--open shows it in a browser)" if name.endswith(".html") else ""
        yield f"  {_size((folder / name).stat().st_size):>9}  {name}{tensors}{page}"
    if len(files) > MOST_FILES:
        others = f"{len(files) - MOST_FILES} more: {', '.join(files[MOST_FILES:])}"
        yield f"{'and':>11}  {short(others, console.size.width - 13)}"
    if numbers:
        yield f"{len(numbers):>11}  {METRICS}"


def _named(wanted: str, names: Sequence[str]) -> str:
    """Find a file by its name, or by the end of its name if only one file ends so."""
    if wanted in names:
        return wanted
    found = [name for name in names if name.endswith(f"/{wanted}")]
    if len(found) == 1:
        return found[0]
    rule = f"{len(found)} files have this name" if found else "the artifact has no such file"
    remedy = f"name one: {', '.join(found)}" if found else nearest(wanted, list(names))
    raise ConfigError("FILE", wanted, rule, remedy)


def _open(folder: Path, page: str) -> None:
    """Open a page in the browser of this machine."""
    if Path(page).suffix not in PAGES:
        rule, remedy = "is no page for a browser", "name an .html or .png file of the artifact"
        raise ConfigError("--open", page, rule, remedy)
    if not webbrowser.open((folder / page).as_uri()):
        print_line(f"this machine has no browser: copy {folder / page} to one that has")


# ---------------------------------------------------------------- content of files


def _content(path: Path, rows: int) -> Iterator[str]:
    """Yield the lines that show a file. If it cannot be read as the type of its name, yield the reason."""
    try:
        match path.suffix:
            case ".safetensors":
                yield from _tensors(path)
            case ".parquet" | ".jsonl":
                yield from _rows(path, rows)
            case ".json":
                content = json.loads(path.read_text(encoding="utf-8"))
                yield from json.dumps(content, indent=1, ensure_ascii=False).split("\n")
            case suffix if suffix in PAGES:
                yield f"{path}  (--open shows it in a browser)"
            case _:
                yield from path.read_text(encoding="utf-8").splitlines()
    except (ValueError, RecursionError) as error:
        yield f"{path} ({_size(path.stat().st_size)}) cannot be shown: {error}"


def _tensors(path: Path) -> Iterator[str]:
    """Yield the number of tensors and values, and the largest tensors, from the header: 8 bytes of length, then JSON."""
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        tensors = {name: (str(one["dtype"]), one["shape"]) for name, one in header.items() if name != "__metadata__"}
        values = sum(prod(map(int, shape)) for _, shape in tensors.values())
    except (struct.error, OverflowError, MemoryError, AttributeError, KeyError, TypeError) as error:
        raise ValueError("no header of safetensors") from error
    kinds = Counter(dtype for dtype, _ in tensors.values())
    yield f"{len(tensors)} tensors, {values:,} values, {', '.join(f'{dtype} ({n})' for dtype, n in sorted(kinds.items()))}"
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -prod(item[1][1]))[:MOST_TENSORS]:
        yield f"  {name}  {dtype} {list(shape)}"
    if len(tensors) > MOST_TENSORS:
        yield f"  and {len(tensors) - MOST_TENSORS} smaller ones"


def _rows(path: Path, most: int) -> Iterator[str]:
    """Yield the first rows of a table, a line for each value."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq  # type: ignore[import-untyped]  # 0.3 s, and only tables need it

        file = pq.ParquetFile(path)
        count = file.metadata.num_rows
        found = list(islice((row for batch in file.iter_batches(most) for row in batch.to_pylist()), most))
    else:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        count, found = len(lines), [json.loads(line) for line in lines[:most]]
    for number, row in enumerate(found, start=1):
        yield f"row {number} of {count:,}"
        values = list(row.items()) if isinstance(row, Mapping) else [("", row)]
        values.sort(key=lambda item: _is_plain(item[1]))
        for name, value in values:
            yield from (f"  {line}" for line in _value(name, value))


def _value(name: str, value: Any) -> Iterator[str]:
    """Yield a value of a row: text and turns as they read, numbers of a list in one line."""
    if isinstance(value, Mapping) and {"role", "content"} <= set(value):
        yield f"{value['role']}: {short(str(value['content']), LONGEST_VALUE)}"
    elif isinstance(value, list) and not _is_plain(value):
        yield f"{name}:"
        for one in value:
            yield from (f"  {line}" for line in _value("-", one))
    elif isinstance(value, list) and value:
        yield short(f"{name} ({len(value)}): {', '.join(map(str, value))}", LONGEST_LIST)
    elif value not in (None, "", []):
        yield f"{name}: {short(str(value), LONGEST_VALUE)}"


def _is_plain(value: Any) -> bool:
    """Whether a value is a list of numbers, which few people read."""
    return isinstance(value, list) and not any(isinstance(one, (Mapping, list, str)) for one in value)


def _fitted(lines: Iterator[str], room: int) -> Iterator[str]:
    """Yield as many lines as there is room for, none wider than the terminal."""
    width = console.size.width
    for line in islice(lines, room):
        yield line if len(line) <= width else f"{line[: width - 3]}..."
    left = sum(1 for _ in lines)
    if left:
        yield f"... {left} more line{'s' * (left > 1)}"


def _print(lines: Sequence[str] | Iterator[str]) -> None:
    """Print lines that a model or a file may have written, without secrets."""
    for line in lines:
        print_line(without_secrets(line))


def _size(size: float) -> str:
    """Format a size in the largest unit that it reaches.

    >>> [_size(size) for size in (12, 3000, 5_000_000)]
    ['12 B', '2.9 KiB', '4.8 MiB']
    """
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
