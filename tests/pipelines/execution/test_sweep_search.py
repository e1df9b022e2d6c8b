"""A sweep whose points Optuna chooses: what it finds, that it finds the same again, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pytest

from pipelines.execution import sweep
from pipelines.execution.summary import Measure
from pipelines.execution.sweep import Goal, Point, PointResult, Search
from rlhf_core.errors import ConfigError

GOLD = Goal("evaluate", "ppo/gold", "max")
SPACE = {"ranges": ["ppo.kl_coef=log:0.001..1", "ppo.epochs=1..3"], "grids": ["ppo.loss=clip,dapo"]}


def values_of(point: Point) -> dict[str, str]:
    return dict(part.split("=") for part in point)


def gold_of(point: Point) -> float:
    """Return a number whose best is at kl_coef = 0.05, two epochs and `dapo`."""
    values = values_of(point)
    distance = math.log10(float(values["ppo.kl_coef"]) / 0.05) ** 2
    return (values["ppo.loss"] == "dapo") - distance - abs(int(values["ppo.epochs"]) - 2)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Point]:
    """Run points without a pipeline; the list has the points that were run."""
    ran: list[Point] = []

    def run_points(points: Sequence[Point], run_point: Any, store: Any) -> list[PointResult]:
        ran.extend(points)
        found = gold_of(points[0])
        if values_of(points[0])["ppo.epochs"] == "3" and values_of(points[0])["ppo.loss"] == "clip":
            return [PointResult(points[0], (), (), 1.0, error="ValueError: no")]
        return [PointResult(points[0], (), (), 1.0, {"evaluate": {"ppo/gold": Measure(found, found, found)}})]

    monkeypatch.setattr(sweep, "run_points", run_points)
    return ran


def searched(count: int, *, seed: int = 0, **space: Any) -> list[PointResult]:
    search = Search(count, **(SPACE | space), seed=seed)
    return search.run(lambda point, tally: {}, None, lambda results: GOLD)  # type: ignore[arg-type]


def test_later_points_are_better_and_failed_ones_end_nothing(asked: list[Point]) -> None:
    first, last = [], []
    for seed in range(4):
        asked.clear()
        results = searched(30, seed=seed)
        assert len(results) == len(asked) == len(set(asked)) > 25
        assert any(result.error for result in results) and any(not result.error for result in results)
        first += [gold_of(point) for point in asked[:10]]
        last += [gold_of(point) for point in asked[-10:]]
    assert fmean(last) > fmean(first) + 0.5


def test_the_same_seed_and_results_give_the_same_points(asked: list[Point]) -> None:
    points = [[result.point for result in searched(12, seed=seed)] for seed in (3, 3, 4)]
    assert points[0] == points[1] != points[2]
    assert all(0.001 <= float(values_of(point)["ppo.kl_coef"]) <= 1 for point in points[0])


def test_a_point_that_is_chosen_twice_runs_once_and_another_one_is_asked_for(asked: list[Point]) -> None:
    results = searched(4, ranges=["ppo.epochs=1..2"], grids=["ppo.kl_coef=0.05", "ppo.loss=clip,dapo"])
    assert len(asked) == len(results) == len(set(asked)) == 4
    asked.clear()
    results = searched(9, ranges=["ppo.epochs=1..2"], grids=["ppo.kl_coef=0.05", "ppo.loss=clip,dapo"])
    assert len(asked) == len(results) == len(set(asked)) <= 4


def test_the_ends_of_all_ranges_and_all_values_are_checked_first() -> None:
    search = Search(3, ["a=log:0.01..0.5", "b=1..4"], ["c=x,y,z"])
    assert search.to_check() == [("a=0.01", "b=1", "c=x"), ("a=0.5", "b=4", "c=y"), ("a=0.5", "b=4", "c=z")]


def test_a_search_is_another_one_with_other_ranges_a_seed_or_a_metric() -> None:
    search = Search(3, ["a=1..2"], ["c=x"], seed=4)
    # the name of a sweep's folder and of its run comes from it: it must not change
    assert search.identity("gold") == [["a=1", "c=x"], ["a=2", "c=x"], "a=1..2", "c=x", 3, "max", 4, "gold"]
    assert search.params() == {"search": {"points": 3, "in": ["a=1..2", "c=x"]}} and not search.known
    others = [Search(3, ["a=1..3"], ["c=x"], seed=4), Search(3, ["a=1..2"], ["c=x"], seed=5)]
    assert all(other.identity("gold") != search.identity("gold") for other in others)
    assert search.identity("length") != search.identity("gold")


def test_a_search_for_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="--optuna = 0: must be >= 1; say how many points to try"):
        Search(0, ["a=1..2"], [])
    with pytest.raises(ConfigError, match="--optuna = 3: has nothing to search; add --range"):
        Search(3, [], [])
    with pytest.raises(ConfigError, match="--grid = 'a': is swept twice"):
        Search(3, ["a=1..2"], ["a=1,2"])
