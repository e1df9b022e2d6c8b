"""The points of a sweep, and which one is the best."""

from __future__ import annotations

import pytest

from pipelines.execution.measures import Measure
from pipelines.execution.sweep import (
    Goal,
    PointResult,
    best_of,
    check_metric,
    default_goal,
    goal_of,
    grid_points,
    random_points,
    rivals,
)
from rlhf_core.errors import ConfigError

GOLD = Goal("evaluate", "ppo/gold", "max")


def result(name: str, low: float, mean: float, high: float) -> PointResult:
    measures = {"evaluate": {"ppo/gold": Measure(mean, low, high)}}
    return PointResult((f"ppo.kl_coef={name}",), (), (), 1.0, measures)


FAILED = PointResult(("ppo.kl_coef=9",), (), (), 1.0, error="ValueError: no")


def test_a_grid_is_the_product_of_its_values_and_lists_stay_whole() -> None:
    points = grid_points(["a.b=1,2", 'c=[1, 2],{x = "u,v"}'])
    assert points == [
        ("a.b=1", "c=[1, 2]"),
        ("a.b=1", 'c={x = "u,v"}'),
        ("a.b=2", "c=[1, 2]"),
        ("a.b=2", 'c={x = "u,v"}'),
    ]


@pytest.mark.parametrize(
    ("grids", "error"),
    [
        (["a.b"], "--grid = 'a.b': must read KEY=VALUE,VALUE,..."),
        (["a=1,,2"], "must read"),
        (["=1"], "must read"),
        (["a=1,1"], "--grid = 'a=1,1': names a value twice; remove one of them"),
        (["a=1", "a=2"], "--grid = 'a': is swept twice; name each key once"),
    ],
)
def test_a_grid_that_cannot_be_read_is_refused(grids: list[str], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        grid_points(grids)
    assert error in str(caught.value)


def test_random_points_are_drawn_alike_for_the_same_seed_and_stay_in_their_range() -> None:
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
def test_a_range_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--range = "):
        random_points(2, [text], [], seed=0)


def test_the_best_has_the_best_mean_and_its_rivals_overlap_with_it() -> None:
    results = [result("0.1", 1.0, 2.0, 3.0), FAILED, result("0.2", 2.5, 3.5, 4.5), result("0.3", -1.0, 0.0, 1.0)]
    best = best_of(results, GOLD)
    assert best is results[2] and rivals(results, best, GOLD) == [results[0]]
    assert best_of(results, Goal("evaluate", "ppo/gold", "min")) is results[3]
    assert best_of([FAILED], GOLD) is None


def test_the_number_that_decides_is_named_or_the_gold_reward_of_the_last_policy() -> None:
    labels, policies = ["reward_model", "evaluate"], ["base", "sft", "ppo"]
    assert goal_of("", "max", labels=labels, policies=policies) is None
    found = goal_of("reward_model:accuracy", "max", labels=labels, policies=policies)
    assert found == Goal("reward_model", "accuracy", "max") and str(found) == "reward_model:accuracy"
    with pytest.raises(ConfigError, match=r"the runs evaluate no policy 'pppo'; did you mean ppo\?"):
        goal_of("pppo/gold", "max", labels=labels, policies=policies)
    assert default_goal([FAILED, result("0.1", 1, 2, 3)], policies, "max") == GOLD
    assert default_goal([FAILED], policies, "max") is None


def test_a_number_that_no_point_has_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"evaluate has no such metric; it has ppo/gold; did you mean ppo/gold\?"):
        check_metric([result("0.1", 1, 2, 3)], Goal("evaluate", "ppo/golf", "max"))
    check_metric([FAILED], GOLD)  # nothing to choose among: the errors of the points say why
