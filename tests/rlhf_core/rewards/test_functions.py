"""Loading reward functions by name, and the checks on what they return."""

from __future__ import annotations

import pytest

from rlhf_core.errors import RewardError
from rlhf_core.rewards.functions import checked
from rlhf_core.types import Completion, Generation, Message, Prompt


def generation(prompt_id: str, text: str) -> Generation:
    prompt = Prompt(prompt_id, (Message("user", "2+2?"),), "4", "test")
    return Generation(prompt, (1, 2), Completion((3,), (-0.5,), text, "stop", 0, 7))


GENERATIONS = [generation("a", "4"), generation("b", "5")]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -2e6])
def test_a_value_that_is_not_a_reward_names_the_reward_and_the_prompt(value: float) -> None:
    with pytest.raises(RewardError, match=r"rewards\.quality\[prompt b\]"):
        checked("quality", [0.0, value], GENERATIONS)


def test_a_missing_value_is_refused() -> None:
    with pytest.raises(RewardError, match=r"rewards\.quality = 1: values for 2 generations"):
        checked("quality", [0.0], GENERATIONS)


def test_a_reward_that_must_apply_names_the_prompt_where_it_does_not() -> None:
    assert checked("gold", [1.0, 0.5], GENERATIONS) == [1.0, 0.5]
    with pytest.raises(RewardError, match=r"rewards\.gold\[prompt b\] = None"):
        checked("gold", [1.0, None], GENERATIONS)
