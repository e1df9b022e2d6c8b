from __future__ import annotations

import dataclasses

import pytest

from rlhf_core.agents.environment import Environment, StepResult


def test_a_turn_that_says_nothing_earns_nothing_and_goes_on() -> None:
    assert StepResult() == StepResult("", reward=0.0, done=False, extras={})


def test_what_a_turn_led_to_is_fixed_and_shares_nothing_with_another() -> None:
    result = StepResult(reward=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.reward = 2.0  # type: ignore[misc]
    assert result.extras is not StepResult(reward=1.0).extras


def test_an_environment_without_a_reset_adds_nothing_to_the_prompt() -> None:
    assert Environment().reset({"id": "q"}, seed=7) is None


def test_an_environment_must_say_what_a_turn_leads_to() -> None:
    with pytest.raises(NotImplementedError):
        Environment().step("It is 4.", turn=0, truncated=False)
