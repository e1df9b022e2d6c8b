"""Record runs in lists in memory, for tests and for runs without a server."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf_core.interfaces import RegistryState, StageTracker
from rlhf_core.tracking.redaction import flatten

RunStatus = Literal["FINISHED", "FAILED", "KILLED", "SCHEDULED"]
"""How a tracked run ended; SCHEDULED if the same command continues it."""


@dataclass
class MemoryStageTracker(StageTracker):
    """The records of one stage. Can also be used alone: `MemoryStageTracker()`."""

    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    label: str = ""
    key: str = ""
    status: str = "RUNNING"
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    points: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    tables: dict[str, tuple[tuple[str, ...], list[tuple[Any, ...]]]] = field(default_factory=dict)
    files: list[tuple[str, str]] = field(default_factory=list)
    """(folder, file name)"""
    datasets: list[tuple[str, str, str]] = field(default_factory=list)
    models: list[tuple[str, str, str]] = field(default_factory=list)
    input_models: list[str] = field(default_factory=list)
    registered: list[tuple[str, str, tuple[str, ...], dict[str, str]]] = field(default_factory=list)
    known_champions: RegistryState | None = RegistryState()
    uri: str = ""
    _last: dict[str, int] = field(default_factory=dict)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        new = {name: float(value) for name, value in values.items() if step > self._last.get(name, step - 1)}
        if new:
            self.points.append((step, new))
            self._last.update(dict.fromkeys(new, step))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.tables[name] = (tuple(columns), [tuple(row) for row in rows])

    def file(self, path: Path, folder: str) -> None:
        self.files.append((folder, path.name))

    def dataset(self, name: str, digest: str, context: str) -> None:
        self.datasets.append((name, digest, context))

    def model(self, name: str, digest: str, uri: str) -> None:
        self.models.append((name, digest, uri))

    def input_model(self, digest: str) -> None:
        self.input_models.append(digest)

    def set_tags(self, values: Mapping[str, str]) -> None:
        self.tags |= values

    def register(
        self, name: str, digest: str, *, aliases: Sequence[str], tags: Mapping[str, str], uri: str = ""
    ) -> str:
        self.registered.append((name, digest, tuple(aliases), dict(tags)))
        return str(sum(entry[0] == name for entry in self.registered))

    def champions(self, name: str) -> RegistryState | None:
        return self.known_champions

    def finish(self, status: RunStatus) -> None:
        self.status = status


class MemoryTracker:
    """A pipeline run in memory, with the methods of `MlflowTracker`."""

    def __init__(self) -> None:
        self.run_id = ""
        self.token = ""
        """Always empty: no other process can join a run in this process's memory."""
        self.status = ""
        self.note = ""
        self.params: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.stages: dict[str, MemoryStageTracker] = {}
        """Key -> tracker, in the order of first use."""
        self.parent = MemoryStageTracker()
        """The metrics, tables and files of the run itself."""
        self.descriptions: dict[tuple[str, str], str] = {}
        """(model, digest) -> description of the version."""

    def start(self, name: str, *, run_id: str | None, params: Mapping[str, Any], tags: Mapping[str, str]) -> str:
        """Open the run; `run_id` re-opens an earlier one."""
        self.run_id = run_id or uuid.uuid4().hex
        self.status = "RUNNING"
        self.params |= flatten(params)
        self.tags |= {"name": name, **tags}
        return self.run_id

    def stage(
        self, label: str, *, key: str, params: Mapping[str, Any], tags: Mapping[str, str], fresh: bool = False
    ) -> MemoryStageTracker:
        """The tracker of the stage with `key`; the same one if it was opened before, unless it is `fresh`."""
        if fresh:
            self.stages.pop(key, None)
        tracker = self.stages.setdefault(key, MemoryStageTracker(label=label, key=key))
        tracker.status = "RUNNING"
        tracker.params |= flatten(params)
        tracker.tags |= {**tags, "store.key": key, "attempt": str(int(tracker.tags.get("attempt", "0")) + 1)}
        self.tags[f"stage.{label}"] = tracker.run_id
        return tracker

    def tag(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        self.tags |= tags

    def describe(self, name: str, digest: str, text: str) -> None:
        """Describe a version of a registered model."""
        self.descriptions[name, digest] = text

    def cached(self, label: str, *, run_id: str | None, key: str) -> None:
        """Record that a stage was taken from the store."""
        known = self.stages[key].run_id if key in self.stages else ""
        self.tags[f"stage.{label}"] = f"{run_id or known or key} (cached)"

    def finish(self, status: RunStatus, *, note: str) -> None:
        """End the run."""
        self.status, self.note = status, note

    def leave(self) -> None:
        """Leave the run unchanged."""

    def url(self, run_id: str) -> str:
        """An identifier of the run in the form of a URL; nothing is served there."""
        return f"memory:///runs/{run_id}"
