"""Run one profile with several values of its options, and choose the best.

Every point is an ordinary run with overrides, so stages that points share are computed once, and a sweep that was killed
goes on with the same command: what is done is in the store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from pipelines.execution.gates import Gatekeeper, Outcome, Verdict, condition
from pipelines.execution.listener import Listener, Silent
from pipelines.execution.measures import Measure, stage_measures
from pipelines.execution.sweep_points import Point, named
from pipelines.flows.run_rules import GateConfig
from rlhf_core.config.measured import is_named, remedy_of
from rlhf_core.errors import ConfigError, explain, nearest
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.stage.decision import Decision
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.stopping import RunHalted
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.gate_decisions import GateDecisions, Question
from rlhf_core.types import ArtifactRef
from stages.config.measured import measured

logger = logging.getLogger(__name__)

Direction: TypeAlias = Literal["max", "min"]


class Tally:
    """A `Listener` that notes which stages were hits and which were computed, and passes everything on."""

    def __init__(self, inner: Listener) -> None:
        self.inner = inner
        self.hits: list[str] = []
        self.computed: list[str] = []
        self.metrics_of: dict[str, dict[str, float]] = {}

    def planned(self, label: str, decision: Decision) -> None:
        self.inner.planned(label, decision)

    def started(self, label: str, decision: Decision) -> None:
        self.inner.started(label, decision)

    def progress(self, label: str, done: int, total: int, message: str) -> None:
        self.inner.progress(label, done, total, message)

    def metrics(self, label: str, step: int, values: Mapping[str, float]) -> None:
        self.inner.metrics(label, step, values)

    def finished(self, label: str, decision: Decision, metrics: Mapping[str, float], seconds: float) -> None:
        (self.hits if decision.action in ("HIT", "ATTACH") else self.computed).append(label)
        self.metrics_of[label] = dict(metrics)
        self.inner.finished(label, decision, metrics, seconds)

    def failed(self, label: str, error: BaseException) -> None:
        self.inner.failed(label, error)


@dataclass(frozen=True)
class PointResult:
    """What came of one point. `measures` and `digests` have an entry for each finished stage, by label."""

    point: Point
    hits: tuple[str, ...]
    computed: tuple[str, ...]
    seconds: float
    measures: Mapping[str, Mapping[str, Measure]] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    """Why the run has no result; empty if it has one."""


@dataclass(frozen=True)
class Goal:
    """The number that decides which point is the best: `name` of the stage `label`.

    >>> str(Goal("evaluate", "ppo/gold", "max"))
    'ppo/gold'
    """

    label: str
    name: str
    direction: Direction

    def of(self, result: PointResult) -> Measure | None:
        """Return the number at a point; None if the point has none."""
        return result.measures.get(self.label, {}).get(self.name)

    def finite(self, result: PointResult) -> Measure | None:
        """Return the number at a point; None if the point has none, or one that is NaN or infinite."""
        found = self.of(result)
        return found if found is not None and found.is_finite else None

    def __str__(self) -> str:
        return self.name if self.label == "evaluate" else f"{self.label}:{self.name}"


def run_points(
    points: Sequence[Point], run_point: Callable[[Point, Tally], Mapping[str, ArtifactRef]], store: ArtifactStore
) -> list[PointResult]:
    """Run every point through `run_point`, which returns the artifacts by label; a point that fails stops no other one.

    `run_point` may set the listener inside the tally that it is given.
    """
    results = []
    for point in points:
        tally, began, error = Tally(Silent()), time.monotonic(), ""
        measures: dict[str, dict[str, Measure]] = {}
        digests: dict[str, str] = {}
        try:
            made = run_point(point, tally)
            measures = {label: stage_measures(store, ref, tally.metrics_of[label]) for label, ref in made.items()}
            digests = {label: ref.digest for label, ref in made.items()}
        except RunHalted as halted:
            error = f"{halted.state}: {halted}"
        except Exception as failure:
            logger.exception("the point %s failed", named(point))
            error = without_secrets(f"{type(failure).__name__}: {failure}")
        seconds = time.monotonic() - began
        results.append(PointResult(point, tuple(tally.hits), tuple(tally.computed), seconds, measures, digests, error))
    return results


RunPoint: TypeAlias = Callable[[Point, Tally], Mapping[str, ArtifactRef]]
GoalIn: TypeAlias = Callable[[Sequence[PointResult]], Goal | None]
"""Returns the number that decides, as soon as a result has one."""


class Points(Protocol):
    """How the points of a sweep come about: all are listed before the first runs, or each is chosen after the one before."""

    @property
    def count(self) -> int:
        """The number of points that are wanted."""

    @property
    def known(self) -> bool:
        """Whether the runs of the points can be planned before the first one."""

    def to_check(self) -> list[Point]:
        """Return points whose keys and values are checked before the first run."""

    def identity(self, metric: str) -> list[object]:
        """Return what distinguishes these points from those of other sweeps, of which `metric` may be a part."""

    def params(self) -> dict[str, object]:
        """Return what a tracker shows of the points."""

    def run(self, run_point: RunPoint, store: ArtifactStore, goal_in: GoalIn) -> list[PointResult]:
        """Run the points and return their results."""


@dataclass(frozen=True)
class Listed:
    """Points that are known before the first one runs, and run in their order.

    >>> Listed((("seed=1",), ("seed=2",))).params()
    {'point': {'1': 'seed=1', '2': 'seed=2'}}
    """

    points: Sequence[Point]
    known = True

    @property
    def count(self) -> int:
        return len(self.points)

    def to_check(self) -> list[Point]:
        return list(self.points)

    def identity(self, metric: str) -> list[object]:
        return [list(point) for point in self.points]

    def params(self) -> dict[str, object]:
        return {"point": {str(number): named(point) for number, point in enumerate(self.points, start=1)}}

    def run(self, run_point: RunPoint, store: ArtifactStore, goal_in: GoalIn) -> list[PointResult]:
        return run_points(self.points, run_point, store)


# ---------------------------------------------------------------- the best one


def goal_of(
    metric: str, direction: Direction, *, runs: Sequence[Mapping[str, StageSpec]], policies: Sequence[str]
) -> Goal | None:
    """Return the goal that `[STAGE:]METRIC` names, None for an empty one; raise ConfigError for what no run has.

    `runs` are the stages of the runs by label.
    """
    if not metric:
        return None
    before, colon, after = metric.rpartition(":")
    label, name = (before, after) if colon else ("evaluate", metric)
    labels = list(dict.fromkeys(one for run in runs for one in run))
    if label not in labels:
        rule = f"the runs have no stage {label!r}"
        raise ConfigError(explain("--metric", metric, rule, nearest(label, labels)))
    policy = name.partition("/")[0]
    if label == "evaluate" and not policy.startswith("best-of") and policy not in policies:
        rule = f"the runs evaluate no policy {policy!r}"
        raise ConfigError(explain("--metric", metric, rule, nearest(policy, policies)))
    found = [measured(run[label], run) for run in runs if label in run]
    known = list(dict.fromkeys(one for numbers in found if numbers is not None for one in numbers.record))
    if None not in found and not is_named(name, known):
        rule = f"{label} records no such metric"
        raise ConfigError(explain("--metric", metric, rule, remedy_of(name, known)))
    return Goal(label, name, direction)


def default_goal(results: Sequence[PointResult], policies: Sequence[str], direction: Direction) -> Goal | None:
    """Return the gold reward of the last policy, or its reward-model score; None if no point has either."""
    for measure in ("gold", "reward_model"):
        for policy in reversed(policies):
            goal = Goal("evaluate", f"{policy}/{measure}", direction)
            if any(goal.of(result) for result in results):
                return goal
    return None


def best_of(results: Sequence[PointResult], goal: Goal) -> PointResult | None:
    """Return the first point with the best mean; None if no point has the number, or it is finite at none of them."""
    found = [(measure.mean, result) for result in results if (measure := goal.finite(result)) is not None]
    choose = max if goal.direction == "max" else min
    return choose(found, key=lambda pair: pair[0])[1] if found else None


def ties(results: Sequence[PointResult], best: PointResult, goal: Goal) -> list[PointResult]:
    """Return the other points with exactly the mean of the best."""
    ours = goal.finite(best)
    assert ours is not None
    others = ((result, goal.finite(result)) for result in results if result is not best)
    return [result for result, one in others if one is not None and one.mean == ours.mean]


def rivals(results: Sequence[PointResult], best: PointResult, goal: Goal) -> list[PointResult]:
    """Return the other points that the best cannot be told apart from: their intervals overlap, or one has none."""
    ours = goal.finite(best)
    assert ours is not None
    others = ((result, goal.finite(result)) for result in results if result is not best)
    return [result for result, one in others if one is not None and not _apart(ours, one)]


def _apart(one: Measure, other: Measure) -> bool:
    known = one.has_interval and other.has_interval
    return known and (one.low > other.high or other.low > one.high)


def check_metric(results: Sequence[PointResult], goal: Goal) -> None:
    """Raise ConfigError if points have a result, but none of them the number that decides."""
    finished = [result for result in results if not result.error]
    if any(goal.of(result) for result in finished) and best_of(finished, goal) is None:
        rule = "is not finite at any point"
        raise ConfigError(explain("--metric", str(goal), rule, "see why in the runs of the points, or name another"))
    if finished and best_of(finished, goal) is None:
        known = sorted({name for result in finished for name in result.measures.get(goal.label, {})})
        rule = f"{goal.label} has no such metric; it has {', '.join(known) or 'none'}"
        raise ConfigError(explain("--metric", goal.name, rule, nearest(goal.name, known)))


def check_approved(
    run: str, best: PointResult, goal: Goal, results: Sequence[PointResult], store: ArtifactStore, *, profile: str
) -> None:
    """Ask a person, as a gate does, whether the best point may go on; `profile` is the digest of what is swept.

    Raises StageWaiting until somebody has answered, and RunBlocked if they have rejected it.
    """
    gate = GateConfig(name="sweep", after=goal.label, otherwise="approve")
    found = f"{goal} {goal.of(best)} with {named(best.point)}, the best of {len(results)} points"
    for what, some in (
        ("tied with it", ties(results, best, goal)),
        ("no result", [result for result in results if result.error]),
        ("not finite", [result for result in results if goal.of(result) and not goal.finite(result)]),
    ):
        found += f"; {what}: {', '.join(named(result.point) for result in some)}" if some else ""
    digest = best.digests[goal.label]
    question = Question(gate=gate.title, condition=condition(gate), digest=digest, found=found, run=run)
    decisions = GateDecisions(store.layout)
    request = decisions.find(question.id)
    if request is None or request.answer is None:
        decisions.ask(question, run=run, profile=profile, links={})
    answer = None if request is None else request.answer
    outcome: Outcome = "waiting" if answer is None else "approved" if answer.answer == "approve" else "rejected"
    verdict = Verdict(gate, goal.label, question, outcome, answer)
    Gatekeeper([gate], store, run, verdicts=[verdict]).check()
