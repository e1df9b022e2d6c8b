"""The points of a sweep chosen one after the other by Optuna, each after the results of those before.

Akiba et al., "Optuna: A Next-generation Hyperparameter Optimization Framework" (arXiv 1907.10902); its sampler is the
tree-structured Parzen estimator (Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipelines.execution.summary import shown_overrides
from pipelines.execution.sweep import Direction, Goal, GoalIn, PointResult, RunPoint, check_metric, run_points
from pipelines.execution.sweep_points import Point, Span, check_keys, choices_of, span_of
from rlhf_core.errors import ConfigError, explain
from rlhf_core.store.artifacts import ArtifactStore

if TYPE_CHECKING:
    from optuna.trial import Trial


ASKS = 4
"""How often Optuna is asked for each point that is wanted; in a small space it may choose a point again."""


@dataclass
class Search:
    """A search for the best of `count` points in ranges and lists of values.

    The same seed and the same results give the same points, so a search that was killed finds its own again.
    """

    count: int
    ranges: Sequence[str]
    grids: Sequence[str]
    direction: Direction = "max"
    seed: int = 0
    known = False
    _study: Any = field(init=False)
    _spans: list[Span] = field(init=False)
    _choices: list[tuple[str, list[str]]] = field(init=False)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(explain("--optuna", self.count, "must be >= 1", "say how many points to try"))
        self._spans = [span_of(text) for text in self.ranges]
        self._choices = [choices_of(grid) for grid in self.grids]
        check_keys([span.key for span in self._spans] + [key for key, _ in self._choices])
        if not self._spans and not self._choices:
            rule, remedy = "has nothing to search", "add --range KEY=LOW..HIGH or --grid KEY=VALUE,VALUE"
            raise ConfigError(explain("--optuna", self.count, rule, remedy))
        self._study = self._new_study()

    def _new_study(self) -> Any:
        import optuna  # a second, which other commands need not wait

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # Optuna's own default of 10 random points before it learns is more than most sweeps here have.
        sampler = optuna.samplers.TPESampler(seed=self.seed, n_startup_trials=max(2, min(10, self.count // 3)))
        return optuna.create_study(direction="maximize" if self.direction == "max" else "minimize", sampler=sampler)

    def to_check(self) -> list[Point]:
        """Return points with both ends of every range and all values of every list, to be checked before the first run."""
        values = [[span.written(span.low), span.written(span.high)] for span in self._spans]
        values += [listed for _, listed in self._choices]
        keys = [span.key for span in self._spans] + [key for key, _ in self._choices]
        most = max(len(listed) for listed in values)
        return [
            tuple(f"{key}={listed[min(number, len(listed) - 1)]}" for key, listed in zip(keys, values, strict=True))
            for number in range(most)
        ]

    def identity(self, metric: str) -> list[object]:
        """Return what distinguishes this search from others; other results, of another metric, lead to other points."""
        ends: list[object] = [list(point) for point in self.to_check()]
        return [*ends, *self.ranges, *self.grids, self.count, self.direction, self.seed, metric]

    def params(self) -> dict[str, object]:
        """Return what a tracker shows: how many points are looked for, and where."""
        return {"search": {"points": self.count, "in": shown_overrides((*self.ranges, *self.grids))}}

    def run(self, run_point: RunPoint, store: ArtifactStore, goal_in: GoalIn) -> list[PointResult]:
        """Return the results of `count` different points; of fewer, where Optuna keeps choosing the same ones.

        `goal_in` returns the number that decides, as soon as a result has one. A point without it counts as worse than all that have it.
        """
        results: dict[Point, PointResult] = {}
        goal: Goal | None = None
        for _ in range(ASKS * self.count):
            if len(results) == self.count:
                break
            trial = self._study.ask()
            point = self._point(trial)
            if point not in results:
                results[point] = run_points([point], run_point, store)[0]
            goal = goal or goal_in(list(results.values()))
            if goal is not None and not any(goal.of(result) for result in results.values()):
                check_metric(list(results.values()), goal)  # a search without its number would go on blindly
            found = goal.finite(results[point]) if goal is not None else None
            self._tell(trial, None if found is None else found.mean)
        return list(results.values())

    def _point(self, trial: Trial) -> Point:
        drawn = []
        for span in self._spans:
            if span.whole:
                value: float = trial.suggest_int(span.key, int(span.low), int(span.high), log=span.log)
            else:
                value = trial.suggest_float(span.key, span.low, span.high, log=span.log)
            drawn.append(f"{span.key}={span.written(value)}")
        return (*drawn, *(f"{key}={trial.suggest_categorical(key, listed)}" for key, listed in self._choices))

    def _tell(self, trial: Trial, value: float | None) -> None:
        from optuna.trial import TrialState

        if value is None:
            self._study.tell(trial, state=TrialState.PRUNED)  # the sampler ignores FAIL, and would come back
        else:
            self._study.tell(trial, value)
