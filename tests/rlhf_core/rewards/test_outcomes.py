"""What passes for a reward."""

from __future__ import annotations

import pytest

from rlhf_core.errors import RewardError
from rlhf_core.rewards.batches import (
    BatchFailed,
    RewardOutcome,
    as_outcome,
    checked,
    merged_logs,
    reason_of,
    screened,
    shortened,
)
from rlhf_core.types import Completion, Generation, Message, Prompt

GENERATIONS = [
    Generation(Prompt(name, (Message("user", "hi"),), "", ""), (1,), Completion((2,), (-1.0,), "said", "stop", 0, 0))
    for name in "abc"
]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -2e6])
def test_a_value_that_is_no_reward_is_a_failure_and_never_zero(value: float) -> None:
    given = RewardOutcome((0.5, value, None), logs={"n": (1.0, 1)})
    outcome = screened("quality", given, GENERATIONS, on_failure="invalid")
    assert outcome.values == (0.5, None, None)
    assert outcome.failures == {1: f"returned {value}: must be finite and within +-1e+06"}
    assert outcome.logs == {"n": (1.0, 1)}
    with pytest.raises(RewardError, match=r"rewards\.quality\[prompt b\].*'said'"):
        screened("quality", given, GENERATIONS, on_failure="fail")


def test_earlier_failures_stay() -> None:
    given = RewardOutcome((None, float("nan"), 1.0), {0: "late"})
    assert set(screened("q", given, GENERATIONS, on_failure="invalid").failures) == {0, 1}


@pytest.mark.parametrize("values", [(), (1.0,), (1.0,) * 4])
def test_a_wrong_number_of_values_is_nobodys_in_particular(values: tuple[float, ...]) -> None:
    with pytest.raises(BatchFailed, match=f"rewards.q = {len(values)}: values for 3 generations") as failed:
        screened("q", RewardOutcome(values), GENERATIONS, on_failure="invalid")
    assert not failed.value.divisible


def test_a_reason_is_one_short_line() -> None:
    assert reason_of(BatchFailed("a\nlong message", reason="late")) == "late"
    assert reason_of(RewardError("two\nlines")) == "two lines"
    assert len(shortened("x" * 500)) == 200
    assert shortened("half a \ud83d") == "half a ?", "no file holds the other half"


def test_logs_add_up_and_plain_lists_are_outcomes() -> None:
    assert merged_logs([{"a": (1.0, 2)}, {"a": (2.0, 1), "b": (0.0, 1)}]) == {"a": (3.0, 3), "b": (0.0, 1)}
    assert as_outcome([1.0, None]) == RewardOutcome((1.0, None))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -2e6])
def test_a_checked_value_that_is_not_a_reward_names_the_reward_and_the_prompt(value: float) -> None:
    with pytest.raises(RewardError, match=r"rewards\.quality\[prompt b\]"):
        checked("quality", [0.0, value], GENERATIONS[:2])


def test_a_missing_checked_value_is_refused() -> None:
    with pytest.raises(RewardError, match=r"rewards\.quality = 1: values for 2 generations"):
        checked("quality", [0.0], GENERATIONS[:2])


def test_a_reward_that_must_apply_names_the_prompt_where_it_does_not() -> None:
    assert checked("gold", [1.0, 0.5], GENERATIONS[:2]) == [1.0, 0.5]
    with pytest.raises(RewardError, match=r"rewards\.gold\[prompt b\] = None"):
        checked("gold", [1.0, None], GENERATIONS[:2])
