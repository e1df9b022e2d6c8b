"""Policy optimisation against reward functions of others, unchanged."""

from pathlib import Path

import pytest

from rlhf_core.config.rewards import FunctionReward
from tests.support.training import rewards_of_grpo

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize(
    "function",
    [
        pytest.param("openrlhf_reward_func.py:reward_func", id="OpenRLHF"),
        pytest.param("trl_reward.py:digits_reward", id="TRL"),
        pytest.param("trl_reward.py:digits_reward_async", id="TRL-async"),
    ],
)
def test_grpo_learns_what_they_reward(tmp_path, function):
    """They pay the share of digits in the answer: from 0.05 at random to almost 1."""
    reward = FunctionReward(function=f"{PROGRAMS}/{function}")
    rewards = rewards_of_grpo(tmp_path, reward=reward, steps=20, samples=8)
    assert rewards[0] < 0.2 and rewards[-1] > 0.9
