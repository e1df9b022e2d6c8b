"""Policy optimisation against reward functions of others, unchanged."""

import json
import re
from pathlib import Path

import pytest

from rlhf_core.config.rewards import FunctionReward, JudgeReward
from tests.support.chat_server import ChatServer
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


def test_grpo_learns_what_a_judge_of_whole_groups_pays(tmp_path):
    """It pays the same, and more for an answer that it is shown later, which the two orders cancel."""

    def says(asked: str) -> str:
        shown = re.split(r"Answer \d+:\n", asked)[1:]
        shares = [sum(letter.isdigit() for letter in text.strip()) / max(1, len(text.strip())) for text in shown]
        return json.dumps({"scores": [share + place for place, share in enumerate(shares)]})

    server = ChatServer()
    server.says = says
    given = {"url": server.url, "model": "m", "compares": "group", "high": 9.0, "template": "{prompt}\n{answers}"}
    reward = JudgeReward.model_validate(given | {"verdict": {"type": "json", "field": "scores"}})
    try:
        rewards = rewards_of_grpo(tmp_path, reward=reward, steps=20, samples=8)
    finally:
        server.close()
    place = 3.5  # the mean of places 0 to 7, for each answer
    assert rewards[0] - place < 0.2 and rewards[-1] - place > 0.9
    assert len(server.requests) == 20 * 6 * 2
