"""Define the interface between a run and the executor of its stages, and the values passed through it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from pipelines.execution.plan import PlannedStage
from pipelines.flows.profile import PipelineConfig
from rlhf_core.errors import WorkerLostError, explain
from rlhf_core.interfaces import StageTracker
from rlhf_core.stage import stopping
from rlhf_core.stage.checkpoints import Checkpoints
from rlhf_core.stage.decision import Decision, target_of
from rlhf_core.stage.key import StageSpec, Strictness
from rlhf_core.stage.run import find_hit
from rlhf_core.store import attempts
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.tracking.memory import MemoryTracker, RunStatus
from rlhf_core.tracking.mlflow import MlflowTracker
from rlhf_core.types import ArtifactRef

# ---------------------------------------------------------------- tracker


def status_of(error: BaseException | None) -> RunStatus:
    """Status of a tracking run that ended with this error; SCHEDULED means that the same command resumes the run."""
    if error is None:
        return "FINISHED"
    if isinstance(error, Exception | stopping.RunBlocked):
        return "FAILED"
    return "SCHEDULED" if stopping.goes_on(error) else "KILLED"


Tracker: TypeAlias = MlflowTracker | MemoryTracker
"""The tracker of one run of a pipeline, in memory in tests and in jobs without MLflow."""


# ---------------------------------------------------------------- retry

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAUSE_S = 5.0
"""Seconds between tries without progress; the pause grows with each try."""

Reached = tuple[int, int]
"""Step of the newest checkpoint, -1 without one, and the number of files (shards) next to the checkpoints."""


def reached(store: ArtifactStore, key: str) -> Reached:
    """Progress of the attempts at `key`; more progress compares greater."""
    folder = store.attempts(key)
    checkpoint = Checkpoints(attempts.checkpoints(folder)).latest()
    entries = [attempts.latest_work(folder) / name for name in attempts.unfinished_work(folder)]
    files = sum(1 if entry.is_file() else sum(path.is_file() for path in entry.rglob("*")) for entry in entries)
    return (-1 if checkpoint is None else checkpoint.step, files)


def retry_lost_workers(
    attempt: Callable[[], T], *, label: str, retries: int, where: Callable[[], Reached], sleep: Callable[[float], None]
) -> T:
    """Call `attempt` again after a WorkerLostError, to resume from its last checkpoint, and return its result.

    A try that makes more progress than those before it resets the count of `retries`. When they are used up, an error
    of the same class is raised with the number of tries. Any other error is raised at once.
    """
    best, failures = where(), 0
    while True:
        try:
            return attempt()
        except WorkerLostError as error:
            now = where()
            if now > best:
                best, failures = now, 0
            failures += 1
            if failures > retries:
                raise type(error)(_given_up(label, failures, error)) from error
            what = str(error).partition("; ")[0]  # without the remedy, which is for the user
            logger.warning("%s: %s; retrying from %s (retry %d of %d)", label, what, _place(now), failures, retries)
            sleep(PAUSE_S * (failures - 1))


def _place(at: Reached) -> str:
    step, files = at
    if step >= 0:
        return f"the checkpoint of step {step}"
    return f"the {files} finished files" if files else "the beginning"


def _given_up(label: str, failures: int, error: WorkerLostError) -> str:
    if failures == 1:
        return f"{label}: {error}"
    remedy = (
        "fix the cause and run again, it resumes from there; if memory ran out: lower runtime.trainer.micro_batch "
        "or runtime.sampler.kv_cache_gib"
    )
    return explain(label, f"lost its workers {failures} times without making progress", str(error), remedy)


# ---------------------------------------------------------------- listener

TABLE_ROWS = 20  # of the newest table on a stage's card in Prefect
CELL_CHARACTERS = 300  # of a cell there: whole answers are in the tracker


class Listener:
    """A receiver of the events of every stage, by label, in order. This one ignores them."""

    def planned(self, label: str, decision: Decision) -> None:
        """The plan has a stage."""

    def started(self, label: str, decision: Decision) -> None:
        """A stage begins, or is taken from the store."""

    def progress(self, label: str, done: int, total: int, message: str) -> None:
        """A stage has done some of its steps."""

    def metrics(self, label: str, step: int, values: Mapping[str, float]) -> None:
        """A stage has recorded values at a step."""

    def finished(self, label: str, decision: Decision, metrics: Mapping[str, float], seconds: float) -> None:
        """A stage has a result."""

    def failed(self, label: str, error: BaseException) -> None:
        """A stage has raised an error, or was halted or stopped."""


class Silent(Listener):
    """The listener of runs that only Prefect's pages show."""


class Listeners(Listener):
    """Passes every event on to several listeners."""

    def __init__(self, *listeners: Listener) -> None:
        for event in ("planned", "started", "progress", "metrics", "finished", "failed"):
            setattr(self, event, partial(_tell, [getattr(one, event) for one in listeners]))


def _tell(receivers: Sequence[Callable[..., None]], *values: object) -> None:
    for receive in receivers:
        receive(*values)


class Tally(Listener):
    """Keeps the decision and the metrics of every finished stage."""

    def __init__(self) -> None:
        self.decisions: dict[str, Decision] = {}
        self.metrics_of: dict[str, dict[str, float]] = {}

    def those(self, *, hits: bool) -> tuple[str, ...]:
        """Labels of the finished stages that were taken from the store (`hits`), or that were computed."""
        return tuple(label for label, found in self.decisions.items() if (found.action in ("HIT", "ATTACH")) is hits)

    def finished(self, label: str, decision: Decision, metrics: Mapping[str, float], seconds: float) -> None:
        self.decisions[label] = decision
        self.metrics_of[label] = dict(metrics)


class ShownTracker:
    """A stage's tracker that also passes metrics to the listener and keeps the newest table for the stage's card."""

    def __init__(self, inner: StageTracker, label: str, listener: Listener) -> None:
        self._inner = inner
        self._label = label
        self._listener = listener
        self.samples: list[dict[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._inner.metrics(step, values)
        self._listener.metrics(self._label, step, values)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._inner.table(name, columns, rows)
        self.samples = [
            {column: str(cell)[:CELL_CHARACTERS] for column, cell in zip(columns, row, strict=True)}
            for row in rows[:TABLE_ROWS]
        ]


# ---------------------------------------------------------------- executor

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
    profile: str = ""
    """Name or path of the profile of a command; "" for a deployment, which is given the configuration itself."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Further tags of the tracking run, such as a sweep's."""

    def forces(self, label: str) -> bool:
        """Whether the stage must run even if its result is in the store."""
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
    """Other pages that show a stage; kept in its record and as tags of its tracking run."""

    def key_of(self, spec: StageSpec) -> str:
        """The key under which the store has, or will have, the result of the stage."""
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
    """The outcome of a stage whose result is in the store, reported as a HIT; None if the result is missing."""
    found = find_hit(context.store, spec, strict=context.options.strict)
    if found is None:
        return None
    record, decision = found
    context.listener.started(spec.label, decision)
    tracking_id = record.tracking.get("run_id")
    context.tracker.cached(spec.label, run_id=tracking_id, key=decision.key)
    url = context.tracker.url(tracking_id) if tracking_id else ""
    return StageOutcome(record.handle, decision, record.metrics, 0.0, [], url)
