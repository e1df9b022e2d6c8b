"""Run one profile with several values of its options, and choose the best.

Every point is an ordinary run with overrides, so stages that points share are computed once. A killed sweep resumes
with the same command, because finished stages are in the store.

Optuna draws the points: at random, or one at a time, each based on the results of the earlier points.

Akiba et al., "Optuna: A Next-generation Hyperparameter Optimization Framework" (arXiv 1907.10902); its sampler is the
tree-structured Parzen estimator (Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011).
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pipelines.execution.executor import Tally
from pipelines.execution.gates import Gatekeeper, GateVerdict, Outcome, gate_condition
from pipelines.execution.summary import Measure, shown_overrides, stage_measures
from pipelines.flows.run_rules import GateConfig
from rlhf_core.config.former_names import present_option
from rlhf_core.config.monitors import is_named, remedy_of
from rlhf_core.errors import ConfigError, nearest
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.stage.gate_decisions import GateDecisions, Question
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.stopping import RunHalted
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef
from stages.table import numbers_of

if TYPE_CHECKING:
    from optuna.trial import Trial


# ---------------------------------------------------------------- The points of a sweep: the product of values, or draws from ranges

Point: TypeAlias = tuple[str, ...]
"""The overrides of one run, such as `("ppo.kl.coef=0.05",)`."""
_RANGE = re.compile(r"(?P<log>log:)?(?P<low>[^.:].*?)\.\.(?P<high>.+)")


def keys_of(points: Sequence[Point]) -> list[str]:
    """The keys that the points set, under their present names and in their order."""
    return list(dict.fromkeys(key_of(part) for point in points for part in point))


def key_of(override: str) -> str:
    """The key of an override under its present name.

    >>> key_of("ppo.kl_coef=0.1")
    'ppo.kl.coef'
    """
    return present_option(override.partition("=")[0].strip())


def named(point: Point) -> str:
    """Describe a point for people, without secrets."""
    return " ".join(shown_overrides(point)) or "the profile as it is"


def grid_points(grids: Sequence[str]) -> list[Point]:
    """The product of the values in `key=value,value`; the last key varies fastest.

    >>> grid_points(["ppo.kl.coef=0.05,0.1", "seed=1,2"])[1]
    ('ppo.kl.coef=0.05', 'seed=2')
    """
    choices = [choices_of(grid) for grid in grids]
    check_keys([key for key, _ in choices])
    return list(itertools.product(*([f"{key}={value}" for value in values] for key, values in choices)))


def random_points(count: int, ranges: Sequence[str], grids: Sequence[str], *, seed: int) -> list[Point]:
    """Draw `count` points from ranges and from the values of grids; the same `seed` draws the same points.

    >>> random_points(1, ["ppo.kl.coef=log:0.01..0.1"], ["seed=1,2"], seed=0)
    [('ppo.kl.coef=0.03538', 'seed=1')]
    """
    if count < 1:
        raise ConfigError("--random", count, "must be >= 1", "give the number of points to draw")
    space, study = Space.of(ranges, grids), new_study("RandomSampler", seed=seed)
    return list(dict.fromkeys(space.point(study.ask()) for _ in range(count)))


def new_study(sampler: str, direction: Direction = "max", **options: Any) -> Any:
    import optuna  # takes a second, so other commands do not import it

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    best: Literal["maximize", "minimize"] = "maximize" if direction == "max" else "minimize"
    return optuna.create_study(direction=best, sampler=getattr(optuna.samplers, sampler)(**options))


@dataclass(frozen=True)
class Space:
    """The ranges and lists of values in which Optuna chooses points."""

    spans: Sequence[Span]
    choices: Sequence[tuple[str, list[str]]]

    @classmethod
    def of(cls, ranges: Sequence[str], grids: Sequence[str]) -> Space:
        """Parse the space of `--range` and `--grid`; raises ConfigError for a key that appears twice."""
        space = cls([span_of(text) for text in ranges], [choices_of(grid) for grid in grids])
        check_keys([span.key for span in space.spans] + [key for key, _ in space.choices])
        return space

    def point(self, trial: Trial) -> Point:
        """The point that Optuna chooses for a trial."""
        drawn = []
        for span in self.spans:
            if span.whole:
                value: float = trial.suggest_int(span.key, int(span.low), int(span.high), log=span.log)
            else:
                value = trial.suggest_float(span.key, span.low, span.high, log=span.log)
            drawn.append(f"{span.key}={span.written(value)}")
        return (*drawn, *(f"{key}={trial.suggest_categorical(key, listed)}" for key, listed in self.choices))

    def ends(self) -> list[Point]:
        """Points that cover both ends of every range and all values of every list."""
        named = [(span.key, [span.written(span.low), span.written(span.high)]) for span in self.spans]
        named += self.choices
        most = max(len(values) for _, values in named)
        return [tuple(f"{key}={values[min(n, len(values) - 1)]}" for key, values in named) for n in range(most)]


@dataclass(frozen=True)
class Span:
    """A range of values from `low` to `high`, linear or logarithmic; integers if `whole`."""

    key: str
    low: float
    high: float
    log: bool
    whole: bool

    def written(self, value: float) -> str:
        """Format a value of this range for an override: four significant digits, or more if the range is narrow."""
        value = min(max(value, self.low), self.high)
        if self.whole:
            return str(int(value))
        digits = 4 + max(0, math.floor(math.log10(max(abs(self.low), abs(self.high)) / (self.high - self.low))))
        text = f"{value:.{digits}g}"
        return text if self.low <= float(text) <= self.high else repr(value)


def span_of(text: str) -> Span:
    key, _, written = text.partition("=")
    matched = _RANGE.fullmatch(written.strip())
    remedy = "write KEY=LOW..HIGH or KEY=log:LOW..HIGH, such as ppo.kl.coef=log:0.01..0.2"
    if not key.strip() or matched is None:
        raise ConfigError("--range", text, "must read KEY=LOW..HIGH", remedy)
    ends = (matched["low"].strip(), matched["high"].strip())
    try:
        low, high = (float(end) for end in ends)
    except ValueError:
        raise ConfigError("--range", text, "its ends must be numbers", remedy) from None
    log = matched["log"] is not None
    if not low < high or not math.isfinite(high - low) or (log and low <= 0):
        rule = "must begin above 0" if log and low <= 0 else "must have its lower end first"
        raise ConfigError("--range", text, rule, remedy)
    whole = all(re.fullmatch(r"[+-]?\d+", end) for end in ends)
    return Span(key.strip(), low, high, log, whole)


def choices_of(grid: str) -> tuple[str, list[str]]:
    key, _, written = grid.partition("=")
    values = _split(grid, written)
    if not key.strip() or not all(values):
        remedy = "for example --grid ppo.kl.coef=0.02,0.05,0.1"
        raise ConfigError("--grid", grid, "must read KEY=VALUE,VALUE,...", remedy)
    if len(set(values)) < len(values):
        raise ConfigError("--grid", grid, "names a value twice", "remove one of them")
    return key.strip(), values


def _split(grid: str, text: str) -> list[str]:
    """Split a list into its values; commas inside brackets, braces and quotes do not separate."""
    parts, depth, quote, escaped = [""], 0, "", False
    for letter in text:
        if escaped or (quote == '"' and letter == "\\"):  # \" does not end a text
            escaped = not escaped
        elif quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    if quote or depth:
        rule = f"has {quote or 'a bracket'} without its partner, so that its commas separate nothing"
        raise ConfigError("--grid", grid, rule, "close it, or put the value in quotes")
    return [part.strip() for part in parts]


def check_keys(keys: Sequence[str]) -> None:
    present = [*map(present_option, keys)]
    for key in present:
        if present.count(key) > 1:
            raise ConfigError("--grid", key, "is swept twice", "name each key once")


# ---------------------------------------------------------------- Run one profile with several values of its options, and choose the best

logger = logging.getLogger(__name__)

Direction: TypeAlias = Literal["max", "min"]


@dataclass(frozen=True)
class PointResult:
    """Result of one point. `measures` and `digests` have an entry for each finished stage, by label."""

    point: Point
    hits: tuple[str, ...]
    computed: tuple[str, ...]
    seconds: float
    measures: Mapping[str, Mapping[str, Measure]] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    """Reason why the run has no result; empty if it has one."""


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
        """The number at a point; None if the point has none."""
        return result.measures.get(self.label, {}).get(self.name)

    def finite(self, result: PointResult) -> Measure | None:
        """The number at a point; None if it is missing, NaN or infinite."""
        found = self.of(result)
        return found if found is not None and found.is_finite else None

    def __str__(self) -> str:
        return self.name if self.label == "evaluate" else f"{self.label}:{self.name}"


def run_points(
    points: Sequence[Point], run_point: Callable[[Point, Tally], Mapping[str, ArtifactRef]], store: ArtifactStore
) -> list[PointResult]:
    """Run every point through `run_point`, which returns the artifacts by label; other points run even if one fails.

    `run_point` may set the listener inside the tally that it receives.
    """
    results = []
    for point in points:
        tally, began, error = Tally(), time.monotonic(), ""
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
        hits, computed = tally.those(hits=True), tally.those(hits=False)
        results.append(PointResult(point, hits, computed, seconds, measures, digests, error))
    return results


RunPoint: TypeAlias = Callable[[Point, Tally], Mapping[str, ArtifactRef]]
GoalIn: TypeAlias = Callable[[Sequence[PointResult]], Goal | None]
"""Finds the goal of the search, as soon as a result has it."""


@dataclass(frozen=True)
class Listed:
    """Points that are known before the first one runs, and are run in order.

    >>> Listed((("seed=1",), ("seed=2",))).params()
    {'point': {'1': 'seed=1', '2': 'seed=2'}}
    """

    points: Sequence[Point]
    known = True
    """Whether the runs of the points can be planned before the first one."""

    @property
    def count(self) -> int:
        return len(self.points)

    def to_check(self) -> list[Point]:
        """Points whose keys and values are checked before the first run."""
        return list(self.points)

    def identity(self, metric: str) -> list[object]:
        """Values that distinguish these points from those of other sweeps."""
        return [list(point) for point in self.points]

    def params(self) -> dict[str, object]:
        """The parameters of the points for a tracker."""
        return {"point": {str(number): named(point) for number, point in enumerate(self.points, start=1)}}

    def run(self, run_point: RunPoint, store: ArtifactStore, goal_in: GoalIn) -> list[PointResult]:
        return run_points(self.points, run_point, store)


# ---------------------------------------------------------------- the best one


def goal_of(
    metric: str, direction: Direction, *, runs: Sequence[Mapping[str, StageSpec]], policies: Sequence[str]
) -> Goal | None:
    """Parse the goal `[STAGE:]METRIC`; None for an empty one. Raises ConfigError for an unknown one.

    `runs` are the stages of the runs by label.
    """
    if not metric:
        return None
    before, colon, after = metric.rpartition(":")
    label, name = (before, after) if colon else ("evaluate", metric)
    labels = list(dict.fromkeys(one for run in runs for one in run))
    if label not in labels:
        rule = f"the runs have no stage {label!r}"
        raise ConfigError("--metric", metric, rule, nearest(label, labels))
    policy = name.partition("/")[0]
    if label == "evaluate" and not policy.startswith("best-of") and policy not in policies:
        rule = f"the runs evaluate no policy {policy!r}"
        raise ConfigError("--metric", metric, rule, nearest(policy, policies))
    found = [numbers_of(run[label], run) for run in runs if label in run]
    known = list(dict.fromkeys(one for numbers in found if numbers is not None for one in numbers.record))
    if None not in found and not is_named(name, known):
        rule = f"{label} records no such metric"
        raise ConfigError("--metric", metric, rule, remedy_of(name, known))
    return Goal(label, name, direction)


def default_goal(results: Sequence[PointResult], policies: Sequence[str], direction: Direction) -> Goal | None:
    """The gold reward of the last policy, or else its reward-model score; None if no point has either."""
    for measure in ("gold", "reward_model"):
        for policy in reversed(policies):
            goal = Goal("evaluate", f"{policy}/{measure}", direction)
            if any(goal.of(result) for result in results):
                return goal
    return None


def best_point(results: Sequence[PointResult], goal: Goal) -> PointResult | None:
    """The first point with the best mean; None if no point has a finite number."""
    found = [(measure.mean, result) for result in results if (measure := goal.finite(result)) is not None]
    choose = max if goal.direction == "max" else min
    return choose(found, key=lambda pair: pair[0])[1] if found else None


def ties(results: Sequence[PointResult], best: PointResult, goal: Goal) -> list[PointResult]:
    """The other points with exactly the same mean as the best."""
    ours = goal.finite(best)
    assert ours is not None
    others = ((result, goal.finite(result)) for result in results if result is not best)
    return [result for result, one in others if one is not None and one.mean == ours.mean]


def rivals(results: Sequence[PointResult], best: PointResult, goal: Goal) -> list[PointResult]:
    """The other points that are not significantly worse: their intervals overlap, or one has no interval."""
    ours = goal.finite(best)
    assert ours is not None
    others = ((result, goal.finite(result)) for result in results if result is not best)
    return [result for result, one in others if one is not None and not _apart(ours, one)]


def _apart(one: Measure, other: Measure) -> bool:
    known = one.has_interval and other.has_interval
    return known and (one.low > other.high or other.low > one.high)


def check_metric(results: Sequence[PointResult], goal: Goal) -> None:
    """Raise ConfigError if points have a result, but none of them has the number of the goal."""
    finished = [result for result in results if not result.error]
    if any(goal.of(result) for result in finished) and best_point(finished, goal) is None:
        rule = "is not finite at any point"
        raise ConfigError("--metric", str(goal), rule, "see why in the runs of the points, or name another")
    if finished and best_point(finished, goal) is None:
        known = sorted({name for result in finished for name in result.measures.get(goal.label, {})})
        rule = f"{goal.label} has no such metric; it has {', '.join(known) or 'none'}"
        raise ConfigError("--metric", goal.name, rule, nearest(goal.name, known))


def check_approved(
    run: str, best: PointResult, goal: Goal, results: Sequence[PointResult], store: ArtifactStore, *, profile: str
) -> None:
    """Request an approval of the best point, as a gate does; `profile` is the digest of the swept profile.

    Raises StageWaiting until a person has answered, and RunBlocked if they have rejected it.
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
    question = Question(gate=gate.title, condition=gate_condition(gate), digest=digest, found=found, run=run)
    decisions = GateDecisions(store.shared)
    request = decisions.find(question.id)
    if request is None or request.answer is None:
        decisions.ask(question, run=run, profile=profile, links={})
    answer = None if request is None else request.answer
    outcome: Outcome = "waiting" if answer is None else "approved" if answer.answer == "approve" else "rejected"
    verdict = GateVerdict(gate, goal.label, question, outcome, answer)
    Gatekeeper([gate], store, run, verdicts=[verdict]).check()


# ---------------------------------------------------------------- sweep search

ASKS = 4
"""Requests to Optuna per new point; in a small space it may choose a point again."""


@dataclass
class Search:
    """A search for the best of `count` points in ranges and lists of values.

    The same seed and results give the same points, so a killed search finds its points in the store when it resumes.
    """

    count: int
    ranges: Sequence[str]
    grids: Sequence[str]
    direction: Direction = "max"
    seed: int = 0
    known = False
    _study: Any = field(init=False)
    _space: Space = field(init=False)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError("--optuna", self.count, "must be >= 1", "give the number of points to try")
        self._space = Space.of(self.ranges, self.grids)
        if not self.ranges and not self.grids:
            rule, remedy = "has nothing to search", "add --range KEY=LOW..HIGH or --grid KEY=VALUE,VALUE"
            raise ConfigError("--optuna", self.count, rule, remedy)
        # Optuna's default of 10 random points before it learns is more than most sweeps here have in total.
        first = max(2, min(10, self.count // 3))
        self._study = new_study("TPESampler", direction=self.direction, seed=self.seed, n_startup_trials=first)

    def to_check(self) -> list[Point]:
        return self._space.ends()

    def identity(self, metric: str) -> list[object]:
        """The identity of the search; another metric leads to other points."""
        ends: list[object] = [list(point) for point in self.to_check()]
        return [*ends, *self.ranges, *self.grids, self.count, self.direction, self.seed, metric]

    def params(self) -> dict[str, object]:
        """The parameters for a tracker: the number of points, and their space."""
        return {"search": {"points": self.count, "in": shown_overrides((*self.ranges, *self.grids))}}

    def run(self, run_point: RunPoint, store: ArtifactStore, goal_in: GoalIn) -> list[PointResult]:
        """Run `count` different points; fewer if Optuna keeps choosing the same ones.

        `goal_in` returns the goal as soon as a result has its number. A point without the number counts as worse than
        all points that have it.
        """
        results: dict[Point, PointResult] = {}
        goal: Goal | None = None
        for _ in range(ASKS * self.count):
            if len(results) == self.count:
                break
            trial = self._study.ask()
            point = self._space.point(trial)
            if point not in results:
                results[point] = run_points([point], run_point, store)[0]
            goal = goal or goal_in(list(results.values()))
            if goal is not None and not any(goal.of(result) for result in results.values()):
                check_metric(list(results.values()), goal)  # without the number, the search would continue blindly
            found = goal.finite(results[point]) if goal is not None else None
            self._report(trial, None if found is None else found.mean)
        return list(results.values())

    def _report(self, trial: Trial, value: float | None) -> None:
        from optuna.trial import TrialState

        if value is None:
            self._study.tell(trial, state=TrialState.PRUNED)  # the sampler ignores FAIL and would repeat the point
        else:
            self._study.tell(trial, value)


Points: TypeAlias = Listed | Search
"""Source of a sweep's points: all are listed before the first run, or each is chosen after the previous one."""
