from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config.agents import EnvironmentAgent, OpenRLHFAgent, ToolsAgent
from rlhf_core.config.policy import PPOConfig
from rlhf_core.config.rewards import EpisodeReward, FunctionReward, RewardsConfig
from rlhf_core.schema.base import keyed

ECHO: dict[str, Any] = {"type": "environment", "environment": "worlds.py:Echo"}


def test_how_an_episode_is_played_is_no_part_of_a_key_and_what_it_is_allowed_is():
    slow = EnvironmentAgent(**ECHO | {"step_timeout_s": 9, "processes": 4, "retries": 3, "scheduling": "continuous"})
    assert keyed(slow) == keyed(EnvironmentAgent(**ECHO))
    assert keyed(EnvironmentAgent(**ECHO, max_turns=3)) != keyed(slow)


def test_each_kind_names_the_user_s_code():
    assert EnvironmentAgent(**ECHO).callables() == ("worlds.py:Echo",)
    assert OpenRLHFAgent(file="a/agent.py").callables() == ("a/agent.py:AgentExecutor",)
    assert ToolsAgent(tools=("t.py:add", "m:sub")).callables() == ("t.py:add", "m:sub")


@pytest.mark.parametrize(
    "agent",
    [
        {"type": "environment", "environment": "worlds.py"},
        {"type": "openrlhf", "file": "agent"},
        {"type": "tools", "tools": []},
        {"type": "tools", "tools": ["add"]},
        {"type": "environment", "environment": "w:E", "max_turns": 0},
        {"type": "chess"},
    ],
)
def test_what_cannot_be_played_is_refused(agent):
    with pytest.raises(ValidationError, match="agent"):
        PPOConfig(agent=agent)


def test_credit_per_turn_wants_the_environment_s_reward_as_it_is():
    terms: dict[str, Any] = {"won": EpisodeReward(weight=0.5), "short": FunctionReward(function="f.py:f")}
    agent = ECHO | {"credit": "turn"}
    assert PPOConfig(agent=agent, rewards=RewardsConfig(terms=terms)).turn_weight == 0.5
    assert PPOConfig(agent=ECHO, rewards=RewardsConfig(terms=terms)).turn_weight == 0.0
    scheduled = terms | {"won": EpisodeReward(weight_end=2.0, weight_steps=5)}
    for rewards in (
        RewardsConfig(),
        RewardsConfig(terms=terms, normalize="running"),
        RewardsConfig(terms=terms, clip=1.0),
        RewardsConfig(terms=scheduled),
    ):
        with pytest.raises(ValidationError, match="needs a term of type"):
            PPOConfig(agent=agent, rewards=rewards)
