"""Which point of a sweep is the best."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.execution.plan import plan
from pipelines.execution.summary import Measure
from pipelines.execution.sweep import (
    Goal,
    Listed,
    PointResult,
    Tally,
    best_of,
    check_metric,
    default_goal,
    goal_of,
    rivals,
    run_points,
    ties,
)
from pipelines.flows.profile import load_profile
from rlhf_core.errors import ConfigError
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef, ReportRef

GOLD = Goal("evaluate", "ppo/gold", "max")


def result(name: str, low: float, mean: float, high: float) -> PointResult:
    measures = {"evaluate": {"ppo/gold": Measure(mean, low, high)}}
    return PointResult((f"ppo.kl_coef={name}",), (), (), 1.0, measures)


FAILED = PointResult(("ppo.kl_coef=9",), (), (), 1.0, error="ValueError: no")


def test_the_best_has_the_best_mean_and_its_rivals_overlap_with_it() -> None:
    results = [result("0.1", 1.0, 2.0, 3.0), FAILED, result("0.2", 2.5, 3.5, 4.5), result("0.3", -1.0, 0.0, 1.0)]
    best = best_of(results, GOLD)
    assert best is results[2] and rivals(results, best, GOLD) == [results[0]]
    assert best_of(results, Goal("evaluate", "ppo/gold", "min")) is results[3]
    alone = result("0.4", 0.0, 0.0, 0.0)  # of one prompt: it has no interval
    assert rivals([*results, alone], best, GOLD) == [results[0], alone] and rivals([alone, results[0]], alone, GOLD)
    assert best_of([FAILED], GOLD) is None


def test_numbers_that_are_not_finite_decide_nothing_and_equal_ones_are_named() -> None:
    nan, infinite = float("nan"), float("inf")
    broken = [result("0.1", nan, nan, nan), result("0.2", infinite, infinite, infinite)]
    finite = [result("0.3", 0.5, 1.0, 1.5), result("0.4", 1.0, 1.0, 1.0), result("0.5", 0.1, 0.2, 0.3)]
    for direction in ("max", "min"):
        goal = Goal("evaluate", "ppo/gold", direction)  # type: ignore[arg-type]
        best = best_of(broken + finite, goal)
        assert best is (finite[0] if direction == "max" else finite[2])
    best = finite[0]
    assert ties(broken + finite, best, GOLD) == [finite[1]] and rivals(broken + finite, best, GOLD) == [finite[1]]
    assert best_of(broken, GOLD) is None and str(GOLD.of(broken[0])) == "not finite"
    with pytest.raises(ConfigError, match=r"--metric = 'ppo/gold': is not finite at any point"):
        check_metric([*broken, FAILED], GOLD)


def test_listed_points_run_in_their_order_whatever_decides(store: ArtifactStore) -> None:
    listed, ran = Listed([("seed=2",), ("seed=1",)]), []

    def run_point(point: tuple[str, ...], tally: Tally) -> dict[str, ArtifactRef]:
        ran.append(point)
        return {}

    results = listed.run(run_point, store, lambda results: None)
    assert ran == listed.to_check() == [one.point for one in results] == [("seed=2",), ("seed=1",)]
    assert listed.identity("gold") == listed.identity("length") == [["seed=2"], ["seed=1"]]
    assert listed.count == 2 and listed.known


def test_a_point_that_cannot_be_measured_fails_alone(store: ArtifactStore) -> None:
    def run_point(point: tuple[str, ...], tally: Tally) -> dict[str, ArtifactRef]:
        if point == ("seed=1",):
            tally.metrics_of["evaluate"] = {}
            return {"evaluate": ReportRef(uri=f"store://{'0' * 64}", digest="0" * 64)}
        return {}

    results = run_points([("seed=1",), ("seed=2",)], run_point, store)
    assert results[0].error.startswith("ArtifactError: ") and results[0].digests == {} and results[1].error == ""


def test_the_number_that_decides_is_named_or_the_gold_reward_of_the_last_policy(tmp_path: Path) -> None:
    planned = plan(load_profile("tiny/full"), ArtifactStore(tmp_path))
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


def test_a_number_that_no_point_has_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"evaluate has no such metric; it has ppo/gold; did you mean ppo/gold\?"):
        check_metric([result("0.1", 1, 2, 3)], Goal("evaluate", "ppo/golf", "max"))
    check_metric([FAILED], GOLD)  # nothing to choose among: the errors of the points say why
