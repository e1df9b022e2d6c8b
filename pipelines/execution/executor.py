"""Define the interface between a run and the executor of its stages, and the values passed through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pipelines.execution.listener import Listener
from pipelines.execution.plan import PlannedStage
from pipelines.execution.tracker import Tracker
from pipelines.flows.profile import PipelineConfig
from rlhf_core.stage.decision import Decision, target_of
from rlhf_core.stage.key import StageSpec, Strictness
from rlhf_core.stage.run import find
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef

Progress = Callable[[int, int, str], None]
"""Called with the number of finished steps, the total number of steps, and a message."""


@dataclass(frozen=True)
class RunOptions:
    """The options of a run besides its configuration.

    >>> RunOptions(until="sft", force=("prepare_data",)).forces("sft")
    False
    """

    until: str = ""
    """Label of the last stage to run; if empty, all stages run."""
    force: tuple[str, ...] = ()
    """Labels of the stages that run even if their result is in the store."""
    forced: tuple[str, ...] = ()
    """Labels that were in `force` and have run before the run waited."""
    strict: Strictness = Strictness()
    overrides: tuple[str, ...] = ()
    """`dotted.key=value` changes of the profile, which the tracker shows in the name of the run."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Further tags of the tracking run, such as those of a sweep."""

    def forces(self, label: str) -> bool:
        """Return whether the stage must run even if its result is in the store."""
        return label in self.force


@dataclass(frozen=True)
class RunContext:
    """The values that all stages of a run share: configuration, options, store, tracker and listener."""

    config: PipelineConfig
    options: RunOptions
    store: ArtifactStore
    tracker: Tracker
    listener: Listener
    links: Mapping[str, str] = field(default_factory=dict)
    """Other places where a stage can be looked up; kept in its record and as tags of its tracking run."""

    def key_of(self, spec: StageSpec) -> str:
        """Return the key under which the store has, or will have, the result of the stage."""
        return target_of(self.store, spec, strict=self.options.strict).key


@dataclass(frozen=True)
class StageOutcome:
    """The result of a stage, and the content of its card on Prefect's page."""

    ref: ArtifactRef
    decision: Decision
    metrics: Mapping[str, float]
    seconds: float
    samples: list[dict[str, str]]
    """Rows of the newest table that the stage logged."""
    tracking_url: str
    """Page of the stage's tracking run; empty without one."""


class StageExecutor(Protocol):
    """An executor of stages whose result is not in the store: `LocalExecutor` here, `RayJobExecutor` as Ray jobs."""

    def prepare(self, planned: Sequence[PlannedStage]) -> None:
        """Raise ConfigError if a planned stage could not be executed; start the needed engines in the background."""

    def execute(self, spec: StageSpec, show_progress: Progress) -> StageOutcome:
        """Compute a stage, or wait for another process that is computing it, and return the outcome."""

    def close(self) -> None:
        """Release the engines."""


def find_result(context: RunContext, spec: StageSpec) -> StageOutcome | None:
    """Return the outcome of a stage whose result is in the store, and report the HIT; None if there is no result."""
    found = find(context.store, spec, strict=context.options.strict)
    if found is None:
        return None
    record, decision = found
    context.listener.started(spec.label, decision)
    tracking_id = record.tracking.get("run_id")
    context.tracker.cached(spec.label, run_id=tracking_id, key=decision.key)
    url = context.tracker.url(tracking_id) if tracking_id else ""
    return StageOutcome(record.handle, decision, record.metrics, 0.0, [], url)
