"""The points of a sweep: grids, ranges, what Optuna chooses among them, what is refused; and which point is the best."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pytest

from pipelines.execution.executor import Tally
from pipelines.execution.plan import plan_stages
from pipelines.execution.summary import Measure
from pipelines.flows.profile import load_profile
from rlhf_contrib.sweep import points as sweep
from rlhf_contrib.sweep.points import (
    Goal,
    Listed,
    Point,
    PointResult,
    Search,
    best_point,
    check_metric,
    default_goal,
    goal_of,
    grid_points,
    random_points,
    rivals,
    run_points,
    span_of,
    ties,
)
from rlhf_core.errors import ConfigError
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef, ReportRef

GOLD = Goal("evaluate", "ppo/gold", "max")


def result(name: str, low: float, mean: float, high: float) -> PointResult:
    measures = {"evaluate": {"ppo/gold": Measure(mean, low, high)}}
    return PointResult((f"ppo.kl_coef={name}",), (), (), 1.0, measures)


FAILED = PointResult(("ppo.kl_coef=9",), (), (), 1.0, error="ValueError: no")


def test_the_best_has_the_best_mean_and_its_rivals_overlap_with_it():
    results = [result("0.1", 1.0, 2.0, 3.0), FAILED, result("0.2", 2.5, 3.5, 4.5), result("0.3", -1.0, 0.0, 1.0)]
    best = best_point(results, GOLD)
    assert best is results[2] and rivals(results, best, GOLD) == [results[0]]
    assert best_point(results, Goal("evaluate", "ppo/gold", "min")) is results[3]
    alone = result("0.4", 0.0, 0.0, 0.0)  # of one prompt: it has no interval
    assert rivals([*results, alone], best, GOLD) == [results[0], alone] and rivals([alone, results[0]], alone, GOLD)
    assert best_point([FAILED], GOLD) is None


def test_numbers_that_are_not_finite_decide_nothing_and_equal_ones_are_named():
    nan, infinite = float("nan"), float("inf")
    broken = [result("0.1", nan, nan, nan), result("0.2", infinite, infinite, infinite)]
    finite = [result("0.3", 0.5, 1.0, 1.5), result("0.4", 1.0, 1.0, 1.0), result("0.5", 0.1, 0.2, 0.3)]
    for direction in ("max", "min"):
        goal = Goal("evaluate", "ppo/gold", direction)
        best = best_point(broken + finite, goal)
        assert best is (finite[0] if direction == "max" else finite[2])
    best = finite[0]
    assert ties(broken + finite, best, GOLD) == [finite[1]] and rivals(broken + finite, best, GOLD) == [finite[1]]
    assert best_point(broken, GOLD) is None and str(GOLD.of(broken[0])) == "not finite"
    with pytest.raises(ConfigError, match=r"--metric = 'ppo/gold': is not finite at any point"):
        check_metric([*broken, FAILED], GOLD)


def test_listed_points_run_in_their_order_whatever_decides(store):
    listed, ran = Listed([("seed=2",), ("seed=1",)]), []

    def run_point(point: tuple[str, ...], tally: Tally) -> dict[str, ArtifactRef]:
        ran.append(point)
        return {}

    results = listed.run(run_point, store, lambda results: None)
    assert ran == listed.to_check() == [one.point for one in results] == [("seed=2",), ("seed=1",)]
    assert listed.identity("gold") == listed.identity("length") == [["seed=2"], ["seed=1"]]
    assert listed.count == 2 and listed.known


def test_a_point_that_cannot_be_measured_fails_alone(store):
    def run_point(point: tuple[str, ...], tally: Tally) -> dict[str, ArtifactRef]:
        if point == ("seed=1",):
            tally.metrics_of["evaluate"] = {}
            return {"evaluate": ReportRef(uri=f"store://{'0' * 64}", digest="0" * 64)}
        return {}

    results = run_points([("seed=1",), ("seed=2",)], run_point, store)
    assert results[0].error.startswith("Gone: ") and results[0].digests == {} and results[1].error == ""


def test_the_number_that_decides_is_named_or_the_gold_reward_of_the_last_policy(tmp_path):
    planned = plan_stages(load_profile("tiny/full"), ArtifactStore(tmp_path))
    runs, policies = [{stage.label: stage.spec for stage in planned}], ["base", "sft", "ppo"]
    assert goal_of("", "max", runs=runs, policies=policies) is None
    found = goal_of("reward_model:held_out/accuracy", "max", runs=runs, policies=policies)
    assert found == Goal("reward_model", "held_out/accuracy", "max")
    assert str(found) == "reward_model:held_out/accuracy"
    for named in (
        "ppo/gold",
        "best-of-8 (sft)/gold",
        "ppo:reward/mean",
        "iterative_dpo/round_1/dpo:eval/rewards/accuracy",
    ):
        assert goal_of(named, "max", runs=runs, policies=policies) is not None
    for wrong, error in (
        ("pppo/gold", r"the runs evaluate no policy 'pppo'; did you mean ppo\?"),
        ("ppo/golf", r"evaluate records no such metric; did you mean ppo/gold"),
        ("reward_model:accuracy", r"reward_model records no such metric; did you mean eval/accuracy"),
        ("sft:eval/los", "did you mean eval/loss"),
        ("ppo:eval/reward/mean", "ppo records no such metric"),  # nothing is evaluated while it is optimized
    ):
        with pytest.raises(ConfigError, match=error):
            goal_of(wrong, "max", runs=runs, policies=policies)
    assert default_goal([FAILED, result("0.1", 1, 2, 3)], policies, "max") == GOLD
    assert default_goal([FAILED], policies, "max") is None


def test_a_number_that_no_point_has_is_refused_with_what_there_is():
    with pytest.raises(ConfigError, match=r"evaluate has no such metric; it has ppo/gold; did you mean ppo/gold\?"):
        check_metric([result("0.1", 1, 2, 3)], Goal("evaluate", "ppo/golf", "max"))
    check_metric([FAILED], GOLD)  # nothing to choose among: the errors of the points say why


def test_a_grid_is_the_product_of_its_values_and_lists_stay_whole():
    points = grid_points(["a.b=1,2", 'c=[1, 2],{x = "u,v"}'])
    assert points == [
        ("a.b=1", "c=[1, 2]"),
        ("a.b=1", 'c={x = "u,v"}'),
        ("a.b=2", "c=[1, 2]"),
        ("a.b=2", 'c={x = "u,v"}'),
    ]
    assert grid_points([r'a="say \"hi, you\"","\\",c']) == [(r'a="say \"hi, you\""',), (r'a="\\"',), ("a=c",)]


@pytest.mark.parametrize(
    ("grids", "error"),
    [
        (["a.b"], "--grid = 'a.b': must read KEY=VALUE,VALUE,..."),
        (["a=1,,2"], "must read"),
        (["=1"], "must read"),
        (["a=1,1"], "--grid = 'a=1,1': names a value twice; remove one of them"),
        (
            ["a=it's,b"],
            "--grid = \"a=it's,b\": has ' without its partner, so that its commas separate nothing; close it",
        ),
        (["a=[1,2"], "has a bracket without its partner"),
        (["a=1", "a=2"], "--grid = 'a': is swept twice; name each key once"),
    ],
)
def test_a_grid_that_cannot_be_read_is_refused(grids, error):
    with pytest.raises(ConfigError) as caught:
        grid_points(grids)
    assert error in str(caught.value)


def test_random_points_are_drawn_alike_for_the_same_seed_and_stay_in_their_range():
    ranges = ["lr=log:1e-5..1e-3", "steps=2..4", "kl=-0.5..0.5"]
    points = random_points(50, ranges, ["loss=dpo,ipo"], seed=3)
    assert (
        points
        == random_points(50, ranges, ["loss=dpo,ipo"], seed=3)
        != random_points(50, ranges, ["loss=dpo,ipo"], seed=4)
    )
    rows = [dict(part.split("=") for part in point) for point in points]
    assert all(1e-5 <= float(row["lr"]) <= 1e-3 and -0.5 <= float(row["kl"]) <= 0.5 for row in rows)
    assert {row["steps"] for row in rows} == {"2", "3", "4"} and {row["loss"] for row in rows} == {"dpo", "ipo"}
    # On a logarithmic scale half of the points lie below the geometric mean of the ends, 1e-4.
    assert 15 <= sum(float(row["lr"]) < 1e-4 for row in rows) <= 35


@pytest.mark.parametrize("text", ["lr", "lr=1", "lr=2..1", "lr=log:0..1", "lr=a..b", "=1..2", "lr=1..inf"])
def test_a_range_that_cannot_be_read_is_refused(text):
    with pytest.raises(ConfigError, match="--range = "):
        random_points(2, [text], [], seed=0)


@pytest.mark.parametrize("text", ["x=0.5..0.99999", "x=12345.6..12346.2", "x=log:0.00012345..0.00012355", "x=-1..0.5"])
def test_values_of_narrow_ranges_stay_apart_and_inside(text):
    span = span_of(text)
    drawn = {point[0].partition("=")[2] for point in random_points(50, [text], [], seed=0)}
    assert len(drawn) > 40 and all(span.low <= float(value) <= span.high for value in drawn)
    assert [float(span.written(end)) for end in (span.low, span.high)] == [span.low, span.high]


SPACE = {"ranges": ["ppo.kl_coef=log:0.001..1", "ppo.epochs=1..3"], "grids": ["ppo.loss=clip,dapo"]}


def values_of(point: Point) -> dict[str, str]:
    return dict(part.split("=") for part in point)


def gold_of(point: Point) -> float:
    """Return a number whose best is at kl_coef = 0.05, two epochs and `dapo`."""
    values = values_of(point)
    distance = math.log10(float(values["ppo.kl_coef"]) / 0.05) ** 2
    return (values["ppo.loss"] == "dapo") - distance - abs(int(values["ppo.epochs"]) - 2)


@pytest.fixture
def asked(monkeypatch) -> list[Point]:
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
    return search.run(lambda point, tally: {}, None, lambda results: GOLD)


def test_later_points_are_better_and_failed_ones_end_nothing(asked):
    first, last = [], []
    for seed in range(4):
        asked.clear()
        results = searched(30, seed=seed)
        assert len(results) == len(asked) == len(set(asked)) > 25
        assert any(result.error for result in results) and any(not result.error for result in results)
        first += [gold_of(point) for point in asked[:10]]
        last += [gold_of(point) for point in asked[-10:]]
    assert fmean(last) > fmean(first) + 0.5


def test_a_point_that_is_chosen_twice_runs_once_and_another_one_is_asked_for(asked):
    results = searched(4, ranges=["ppo.epochs=1..2"], grids=["ppo.kl_coef=0.05", "ppo.loss=clip,dapo"])
    assert len(asked) == len(results) == len(set(asked)) == 4
    asked.clear()
    results = searched(9, ranges=["ppo.epochs=1..2"], grids=["ppo.kl_coef=0.05", "ppo.loss=clip,dapo"])
    assert len(asked) == len(results) == len(set(asked)) <= 4


def test_the_ends_of_all_ranges_and_all_values_are_checked_first():
    search = Search(3, ["a=log:0.01..0.5", "b=1..4"], ["c=x,y,z"])
    assert search.to_check() == [("a=0.01", "b=1", "c=x"), ("a=0.5", "b=4", "c=y"), ("a=0.5", "b=4", "c=z")]


def test_a_search_is_another_one_with_other_ranges_a_seed_or_a_metric():
    search = Search(3, ["a=1..2"], ["c=x"], seed=4)
    # the name of a sweep's folder and of its run comes from it: it must not change
    assert search.identity("gold") == [["a=1", "c=x"], ["a=2", "c=x"], "a=1..2", "c=x", 3, "max", 4, "gold"]
    assert search.params() == {"search": {"points": 3, "in": ["a=1..2", "c=x"]}} and not search.known
    others = [Search(3, ["a=1..3"], ["c=x"], seed=4), Search(3, ["a=1..2"], ["c=x"], seed=5)]
    assert all(other.identity("gold") != search.identity("gold") for other in others)
    assert search.identity("length") != search.identity("gold")


@pytest.mark.parametrize(
    ("count", "ranges", "grids", "error"),
    [
        (0, ["a=1..2"], [], "--optuna = 0: must be >= 1; give the number of points to try"),
        (3, [], [], "--optuna = 3: has nothing to search; add --range"),
        (3, ["a=1..2"], ["a=1,2"], "--grid = 'a': is swept twice"),
    ],
)
def test_a_search_for_nothing_is_refused(count, ranges, grids, error):
    with pytest.raises(ConfigError, match=error):
        Search(count, ranges, grids)
