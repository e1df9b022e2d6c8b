"""How often a call is repeated, and after which pauses."""

import pytest

from rlhf_core.http.retries import retried


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_call_is_repeated_as_often_as_said_and_its_last_error_is_raised(retries):
    calls, pauses = [], []

    def fail() -> None:
        calls.append(1)
        raise TimeoutError(f"call {len(calls)}")

    with pytest.raises(TimeoutError, match=f"call {retries + 1}"):
        retried(fail, retries=retries, again=lambda error: True, first_s=1.0, longest_s=3.0, pause=pauses.append)
    assert len(calls) == 1 + retries and pauses == [1.0, 2.0, 3.0][:retries]


def test_an_error_that_is_not_accepted_is_raised_at_once():
    calls, pauses = [], []

    def fail() -> None:
        calls.append(1)
        raise ValueError

    with pytest.raises(ValueError):
        retried(fail, retries=3, again=lambda e: False, first_s=1.0, longest_s=1.0, pause=pauses.append)
    assert len(calls) == 1 and pauses == []


def test_the_first_result_is_returned():
    outcomes = iter([TimeoutError(), "result", "another"])

    def call() -> str:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert retried(call, retries=5, again=lambda e: True, first_s=0.0, longest_s=0.0) == "result"
    assert next(outcomes) == "another"
