"""The history that monitors read, and each monitor of a band on histories that are made by hand."""

import json
import math
import re

import pytest
from pydantic import ValidationError

from rlhf_core.monitoring.bands import EVALUATIONS, FIRST, LAST, Band, Collapse, Drift, History
from tests.support.monitoring import found


def test_first_and_last_values_are_kept_and_those_between_are_not():
    history = History(["a"])
    for step in range(1, 1001):
        history.add(step, {"a": float(step), "b": 1.0})
    assert history.first("a", 2) == [(1, 1.0), (2, 2.0)]
    assert history.last("a", 2) == [(999, 999.0), (1000, 1000.0)]
    assert len(history.state()["points"]["a"]) == FIRST + LAST
    assert history.last("a", LAST)[0] == (1000 - LAST + 1, 1000.0 - LAST + 1)


def test_only_the_last_evaluations_keep_the_score_of_each_prompt():
    history = History([])
    for step in range(EVALUATIONS + 5):
        history.add_samples(step, {"eval/reward/mean": (1.0, 2.0)})
    assert [step for step, _ in history.samples("eval/reward/mean", 1000)] == list(range(5, EVALUATIONS + 5))


def test_a_history_survives_json_and_forgets_what_was_rolled_back():
    history = History(["a"])
    for step in (1, 2, 3):
        history.add(step, {"a": 0.1 * step})
        history.add_samples(step, {"m": (0.1, 0.2)})
    restored = History(["a"])
    restored.restore(json.loads(json.dumps(history.state())))
    assert restored.state() == history.state()
    restored.forget_after(2)
    assert restored.last("a", 9) == [(1, 0.1), (2, 0.2)]
    assert [step for step, _ in restored.samples("m", 9)] == [1, 2]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([6.0], ""),
        ([5.9], "rollout/length 5.9 < 6"),
        ([9.1], "rollout/length 9.1 > 9"),
        ([math.nan], "rollout/length nan < 6"),
    ],
)
def test_a_band_is_closed_and_a_value_that_is_not_a_number_is_outside(values, expected):
    assert found(Band(metric="rollout/length", low=6.0, high=9.0), rollout__length=values) == expected


def test_a_band_is_of_the_mean_over_a_full_window():
    monitor = Band(metric="a/b", high=2.0, window=3)
    assert found(monitor, a__b=[9.0, 9.0]) == ""
    assert found(monitor, a__b=[0.0, 3.0, 3.0]) == ""  # the mean is 2
    assert found(monitor, a__b=[0.0, 1.0, 3.0, 3.0]) == "a/b 2.33 > 2"


@pytest.mark.parametrize(
    ("fault", "good", "bad"),
    [
        ("zero_variance", {"rollout__zero_variance": [0.5]}, {"rollout__zero_variance": [1.0]}),
        ("invalid", {"rollout__valid": [1.0]}, {"rollout__valid": [0.5]}),
        ("skipped", {"policy__skipped": [0.25]}, {"policy__skipped": [0.5]}),
        ("end_token", {"rollout__ended": [1.0]}, {"rollout__ended": [0.0]}),
        (
            "explained_variance",
            {"value__explained_variance": [-1.5, 0.5, 0.2]},  # the first steps of a new value model explain nothing
            {"value__explained_variance": [-1.0, -1.0, -1.0]},
        ),
    ],
)
def test_a_known_fault_is_found_with_its_defaults_any_of_which_may_be_changed(fault, good, bad):
    monitor = Band.model_validate({"type": fault})
    assert monitor.label == fault and found(monitor, **good) == "" and found(monitor, **bad) != ""
    assert found(Band.model_validate({"type": fault, "low": -9.0, "high": 9.0}), **bad) == ""
    assert Band.model_validate(monitor.model_dump()) == monitor


def test_a_drift_is_from_the_mean_of_the_first_steps():
    monitor = Drift(metric="a/b", low=0.5, reference_steps=2, window=2)
    assert found(monitor, a__b=[4.0, 6.0, 1.0]) == ""  # the window is not past the first steps yet
    assert found(monitor, a__b=[4.0, 6.0, 2.0, 3.0]) == ""  # 2.5 of 5
    assert found(monitor, a__b=[4.0, 6.0, 2.0, 2.0]) == "a/b: ratio to the first 2 steps 0.4 < 0.5"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([-4.0, -4.0, -4.0], ""),  # 1
        ([-4.0, -4.0, -2.0], ""),  # 1.5: it rose by half of 4
        ([-4.0, -4.0, -7.0], "0.25 < 0.5"),
        ([-4.0, -4.0, 1.0], "2.25 > 2"),
        ([math.nan, 4.0, 4.0], ""),
        ([math.inf, 4.0, 4.0], ""),
        ([4.0, 4.0, math.nan], "nan < 0.5"),
    ],
)
def test_a_drift_from_a_negative_mean_keeps_its_direction_and_one_that_is_not_finite_is_no_reference(values, text):
    monitor = Drift(metric="a/b", low=0.5, high=2.0, reference_steps=2)
    assert found(monitor, a__b=values) == (f"a/b: ratio to the first 2 steps {text}" if text else "")


START = [20.0] * 5
DIVERSE = [0.9] * 5


@pytest.mark.parametrize(
    ("length", "unique", "distinct", "collapsed"),
    [
        ([2.0] * 3, [0.1] * 3, [0.9] * 3, True),  # everyone gets the same word
        ([2.0] * 3, [0.9] * 3, [0.0] * 3, True),  # one word, without a pair of tokens
        ([2.0] * 3, [0.8] * 3, [0.8] * 3, False),  # short, and of its own
        ([19.0] * 3, [0.1] * 3, [0.1] * 3, False),  # alike, and long: another monitor's
        ([2.0] * 2, [0.1] * 2, [0.1] * 2, False),  # the window is not past the first steps
    ],
)
def test_answers_collapse_when_they_are_short_and_alike(length, unique, distinct, collapsed):
    values = {"rollout__length": START + length, "rollout__unique": DIVERSE + unique}
    text = found(Collapse(), **values, rollout__distinct_2=DIVERSE + distinct)
    assert bool(text) == collapsed
    if collapsed:
        assert text.startswith("length x0.10, unique answers x")


@pytest.mark.parametrize("kind", [Band, Drift])
@pytest.mark.parametrize(
    ("metric", "bounds", "error"),
    [
        ("a/b", {}, "low, high = None: {type} needs at least one bound; give one"),
        ("a/b", {"low": 2.0, "high": 1.0}, "low = 2.0: must be < high = 1.0; lower it"),
        ("time/train", {"low": 2.0}, "differs from run to run, and a resumed run must end as a whole one"),
    ],
)
def test_bounds_and_metrics_that_could_decide_nothing_are_refused(kind, metric, bounds, error):
    with pytest.raises(ValidationError, match=re.escape(error.format(type=kind.model_fields["type"].default))):
        kind(metric=metric, **bounds)
