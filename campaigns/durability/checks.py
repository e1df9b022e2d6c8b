"""Check a completed pipeline, regardless of the number of kills before."""

from __future__ import annotations

import itertools
import json
import math
import re
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.store import attempts
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.layout import sweep_temporaries
from rlhf_core.store.leases import owner_in
from rlhf_core.store.records import KeyRecord, stored_handle

Points = list[tuple[str, int, float]]
"""(metric, step, value) in the order of the file."""

_TEMPORARY = re.compile(r"^\..+\.[0-9a-f]{8}-\d+-[0-9a-f]{6}$|^\.saving-")


@dataclass(frozen=True)
class StageResult:
    """The result of a stage: the handle with the digests of all its parts, its final metrics and its curve."""

    key: str
    handle: dict[str, Any]
    metrics: dict[str, float]
    points: Points
    attempts: int


@dataclass(frozen=True)
class Repeat:
    """A stage that resumed after a kill and repeated `steps` finished steps; it saves every `interval` steps."""

    label: str
    steps: int
    interval: int


def results(home: Path) -> dict[str, StageResult]:
    """Label -> result of all stages with a record in the store of a state folder."""
    return dict(every_result(ArtifactStore(home / "store")))


def every_result(store: ArtifactStore) -> list[tuple[str, StageResult]]:
    """(label, result) of every record in a store, oldest first; a label that was computed twice appears twice."""
    return [(record.label, _result(store, record)) for record in store.records()]


def problems(home: Path, twin: Mapping[str, StageResult], *, tracked: bool = True) -> list[str]:
    """List the problems in the state folder of a completed pipeline, one line each; empty if it is sound.

    The digests must equal those in `twin`, an uninterrupted run. The store must be undamaged, and every point of a
    curve must be recorded once, with `tracked` also in MLflow.
    """
    store = ArtifactStore(home / "store")
    every = every_result(store)
    found, published = dict(every), sum(label == "publish" for label, _ in every)
    return [
        *differences(found, twin),
        *(f"damaged object {damage.digest[:12]}: {damage.problem}" for damage in store.verify()),
        *itertools.chain.from_iterable(saw_teeth(label, result.points) for label, result in found.items()),
        *(tracking_problems(home / "mlflow.db", found, published) if tracked and (home / "mlflow.db").exists() else ()),
    ]


def differences(found: Mapping[str, StageResult], twin: Mapping[str, StageResult]) -> Iterator[str]:
    """Yield the stages whose key, artifact, final metrics or curve differ from the twin's."""
    for label in sorted(found.keys() ^ twin.keys()):
        yield f"{label}: {'missing' if label in twin else 'not in the twin'}"
    for label in sorted(found.keys() & twin.keys()):
        ours, theirs = found[label], twin[label]
        if ours.handle != theirs.handle:
            names = ours.handle["fields"]["digest"][:12], theirs.handle["fields"]["digest"][:12]
            yield f"{label}: digest {names[0]}, the twin has {names[1]}"
        if ours.key != theirs.key:
            yield f"{label}: key {ours.key[:12]}, the twin has {theirs.key[:12]}"
        if ours.metrics != theirs.metrics:
            yield f"{label}: final metrics differ from the twin's"
        odd = _exact(ours.points) ^ _exact(theirs.points)
        if odd:
            yield f"{label}: metrics.jsonl differs from the twin's in {len(odd)} points, first {min(odd)}"


def leftovers(home: Path, *, unfinished: Collection[str] = ()) -> list[str]:
    """List items that a finished pipeline must not leave in its store: leases, unfinished work, temporary files.

    Small files of killed writers are removed first, as `rlhf reconcile` does. `unfinished` are keys that are no longer
    needed: their unfinished work may stay, and leases of dead owners are removed.
    """
    store = home / "store"
    sweep_temporaries(store)
    opened = ArtifactStore(store)
    held = [table.name for table in opened.shared.tables("keys/") if owner_in(table.value) is not None]
    odd = [store / name for name in held if not unfinished]
    odd += [*store.glob("quarantine/*"), *store.glob("trash/*"), *store.rglob("*.tmp")]
    for folder in store.glob("attempts/*"):
        past = opened.attempts(folder.name)
        kept = attempts.latest_work(past), attempts.metrics(past)
        odd += [path for path in (*folder.glob("*"), *folder.glob("work-*/*")) if path not in kept]
    odd += [path for path in store.rglob(".*") if _TEMPORARY.search(path.name)]
    names = {_named(path, store) for path in odd if not path.name.endswith(".log")}
    return sorted(name for name in names if not any(name.startswith(f"attempts/{key}/") for key in unfinished))


def _named(path: Path, store: Path) -> str:
    """The name of a file relative to the store."""
    return path.relative_to(store).as_posix()


def saw_teeth(label: str, points: Sequence[tuple[str, int, float]]) -> Iterator[str]:
    """Yield the metrics whose steps do not increase from line to line."""
    last: dict[str, int] = {}
    for name, step, _ in points:
        if name in last and step <= last[name]:
            yield f"{label}: {name} goes from step {last[name]} to {step}"
            return
        last[name] = step


def tracking_problems(database: Path, found: Mapping[str, StageResult], published: int = 1) -> Iterator[str]:
    """Yield the problems in MLflow's database: stages with zero or two runs, unfinished runs, wrong curves.

    `published` is the number of results of `publish`; a user's edit makes it two.
    """
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        running = connection.execute("SELECT name FROM runs WHERE status = 'RUNNING'").fetchall()
        yield from (f"MLflow: run {name} is left RUNNING" for (name,) in running)
        runs: dict[str, list[str]] = {}
        for key, run in connection.execute("SELECT value, run_uuid FROM tags WHERE key = 'store.key'"):
            runs.setdefault(key, []).append(run)
        versions = connection.execute("SELECT name, COUNT(*) FROM model_versions GROUP BY name").fetchall()
        yield from (
            f"MLflow: {name} has {number} versions, not {published}" for name, number in versions if number > published
        )
        for label, result in found.items():
            own = runs.get(result.key, [])
            if len(own) != 1:
                yield f"MLflow: {label} has {len(own)} runs, not 1"
                continue
            ((status,),) = connection.execute("SELECT status FROM runs WHERE run_uuid = ?", own).fetchall()
            if status not in ("FINISHED", "RUNNING"):
                yield f"MLflow: the run of {label} is {status}"
            rows = connection.execute("SELECT key, step FROM metrics WHERE run_uuid = ?", own)
            recorded = Counter((str(name), int(step)) for name, step in rows if not _is_time(str(name)))
            yield from _curve_problems(label, recorded, result.points)


def repeats(events: Iterable[Mapping[str, Any]], intervals: Mapping[str, int]) -> list[Repeat]:
    """For every process that resumed a stage of another one, count the finished steps that it repeated."""
    last: dict[str, tuple[int, int]] = {}
    found = []
    for event in events:
        if event["event"] != "progress" or event["label"] not in intervals:
            continue
        label, pid, done = event["label"], event["pid"], event["done"]
        if label in last and last[label][0] != pid:
            found.append(Repeat(label, max(0, last[label][1] - done + 1), intervals[label]))
        last[label] = (pid, done)
    return found


def _result(store: ArtifactStore, record: KeyRecord) -> StageResult:
    return StageResult(
        key=record.key,
        handle=stored_handle(record.handle),
        metrics=record.metrics,
        points=_points(attempts.metrics(store.attempts(record.key))),
        attempts=len(attempts.history(store.attempts(record.key))),
    )


def _points(path: Path) -> Points:
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    figures = [(name, entry["step"], value) for entry in entries for name, value in entry["values"].items()]
    return [figure for figure in figures if not _is_time(figure[0])]


def _is_time(name: str) -> bool:
    """Whether a metric measures time, so that it differs in every run."""
    return "/time/" in name


def _exact(points: Points) -> set[tuple[str, int, str]]:
    return {(name, step, repr(value)) for name, step, value in points}  # as text, where a NaN equals itself


def _curve_problems(label: str, recorded: Counter[tuple[str, int]], points: Points) -> Iterator[str]:
    """Yield differences between the points in the database and metrics.jsonl; each point must be recorded once."""
    twice = [point for point, number in recorded.items() if number > 1]
    if twice:
        yield f"MLflow: {label}: {len(twice)} points are there twice, first {min(twice)}"
    wanted = {(name, step) for name, step, value in points if math.isfinite(value)}
    if wanted - recorded.keys():
        missing = wanted - recorded.keys()
        yield f"MLflow: {label}: {len(missing)} of {len(wanted)} points are missing, first {min(missing)}"
    if recorded.keys() - wanted:
        yield f"MLflow: {label}: points that metrics.jsonl has not, first {min(recorded.keys() - wanted)}"
