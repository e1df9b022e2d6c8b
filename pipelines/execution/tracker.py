"""Define the protocols of a run's tracker, which MLflow's tracker and the one in memory implement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from rlhf_core.interfaces import StageTracker

Status = Literal["FINISHED", "FAILED", "KILLED"]


class TrackedStage(StageTracker, Protocol):
    """The tracker of one stage, with the id of its tracking run and a way to end it."""

    @property
    def run_id(self) -> str: ...

    def finish(self, status: Status) -> None: ...


class Tracker(Protocol):
    """The tracker of one run of a pipeline: `MlflowTracker`, or `MemoryTracker` in tests and jobs without MLflow."""

    def start(self, name: str, *, run_id: str | None, params: Mapping[str, Any], tags: Mapping[str, str]) -> str: ...

    def stage(
        self, label: str, *, key: str, params: Mapping[str, Any], tags: Mapping[str, str], fresh: bool
    ) -> TrackedStage: ...

    @property
    def parent(self) -> StageTracker: ...

    def tag(self, tags: Mapping[str, str]) -> None: ...

    def cached(self, label: str, *, run_id: str | None, key: str) -> None: ...

    def finish(self, status: Status, *, note: str) -> None: ...

    def url(self, run_id: str) -> str: ...

    @property
    def token(self) -> str: ...

    def leave(self) -> None: ...
