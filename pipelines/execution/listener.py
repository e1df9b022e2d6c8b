"""Define `Listener`, which receives the events of a running pipeline: the display, a log or a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlhf_core.interfaces import RegistryState, StageTracker
from rlhf_core.stage.decision import Decision

TABLE_ROWS = 20
CELL_CHARACTERS = 300


class Listener(Protocol):
    """A receiver of the events of every stage, by label, in order."""

    def planned(self, label: str, decision: Decision) -> None: ...

    def started(self, label: str, decision: Decision) -> None: ...

    def progress(self, label: str, done: int, total: int, message: str) -> None: ...

    def metrics(self, label: str, step: int, values: Mapping[str, float]) -> None: ...

    def finished(self, label: str, decision: Decision, metrics: Mapping[str, float], seconds: float) -> None: ...

    def failed(self, label: str, error: BaseException) -> None: ...


class ShownTracker:
    """A stage's tracker that also passes metrics to the listener and keeps the newest table for the stage's card."""

    def __init__(self, inner: StageTracker, label: str, listener: Listener) -> None:
        self._inner = inner
        self._label = label
        self._listener = listener
        self.samples: list[dict[str, str]] = []

    @property
    def uri(self) -> str:
        return self._inner.uri

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._inner.metrics(step, values)
        self._listener.metrics(self._label, step, values)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._inner.table(name, columns, rows)
        self.samples = [
            {column: str(cell)[:CELL_CHARACTERS] for column, cell in zip(columns, row, strict=True)}
            for row in rows[:TABLE_ROWS]
        ]

    def file(self, path: Path, folder: str) -> None:
        self._inner.file(path, folder)

    def dataset(self, name: str, digest: str, context: str) -> None:
        self._inner.dataset(name, digest, context)

    def model(self, name: str, digest: str, uri: str) -> None:
        self._inner.model(name, digest, uri)

    def input_model(self, digest: str) -> None:
        self._inner.input_model(digest)

    def set_tags(self, values: Mapping[str, str]) -> None:
        self._inner.set_tags(values)

    def register(
        self, name: str, digest: str, *, aliases: Sequence[str], tags: Mapping[str, str], uri: str = ""
    ) -> str:
        return self._inner.register(name, digest, aliases=aliases, tags=tags, uri=uri)

    def champions(self, name: str) -> RegistryState | None:
        return self._inner.champions(name)


class Silent:
    """A `Listener` that ignores all events, for runs that only Prefect's pages show."""

    def planned(self, label: str, decision: Decision) -> None:
        return None

    def started(self, label: str, decision: Decision) -> None:
        return None

    def progress(self, label: str, done: int, total: int, message: str) -> None:
        return None

    def metrics(self, label: str, step: int, values: Mapping[str, float]) -> None:
        return None

    def finished(self, label: str, decision: Decision, metrics: Mapping[str, float], seconds: float) -> None:
        return None

    def failed(self, label: str, error: BaseException) -> None:
        return None
