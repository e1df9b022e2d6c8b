from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config.agents import EnvironmentAgent, OpenRLHFAgent, ToolsAgent
from rlhf_core.config.policy import PPOConfig
from rlhf_core.config.rewards import EpisodeReward, FunctionReward, RewardsConfig
from rlhf_core.errors import ConfigError
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
    assert PPOConfig(agent=agent, rewards=RewardsConfig(terms=terms)).turn_weight("test") == 0.5
    assert PPOConfig(agent=ECHO, rewards=RewardsConfig(terms=terms)).turn_weight("test") == 0.0
    scheduled = terms | {"won": EpisodeReward(weight_end=2.0, weight_steps=5)}
    for rewards in (
        RewardsConfig(),
        RewardsConfig(terms=terms, normalize="running"),
        RewardsConfig(terms=terms, clip=1.0),
        RewardsConfig(terms=scheduled),
    ):
        with pytest.raises(ValidationError, match="needs a term of type"):
            PPOConfig(agent=agent, rewards=rewards)


GAME, LENGTH = {"type": "episode"}, {"type": "function", "function": "f.py:f"}


def named(**agents: Any) -> dict[str, Any]:
    return {name: ECHO | table for name, table in agents.items()}


def test_the_agent_of_a_prompt_is_that_of_its_source_and_else_the_one_without_sources():
    some = PPOConfig(agents=named(b={"sources": ["code", "web"]}, a={"sources": ["games"]}))
    assert some.agent_keys() == {"": "", "code": "agents.b", "web": "agents.b", "games": "agents.a"}
    assert list(some.by_key) == ["agents.a", "agents.b"] and not some.plays_all
    all_else = PPOConfig(agent=ECHO, agents=named(b={"sources": ["code"]}))
    assert all_else.agent_keys() == {"": "agent", "code": "agents.b"}
    assert PPOConfig(agent=ECHO | {"sources": ["code"]}).agent_keys() == {"": "", "code": "agent"}
    assert (some.longest(4096), all_else.longest(4096), PPOConfig().longest(64)) == (4096, 2048, 64)


def test_sources_of_agents_belong_to_the_key_and_their_absence_does_not():
    assert "agents" not in keyed(PPOConfig(agent=ECHO)) and "sources" not in keyed(PPOConfig(agent=ECHO))["agent"]
    tables = [{"agents": named(a={"sources": [one]})} for one in ("code", "web")]
    assert keyed(PPOConfig(**tables[0])) != keyed(PPOConfig(**tables[1]))


@pytest.mark.parametrize(
    ("table", "rule"),
    [
        ({"agents": named(a={})}, r"agents\.a\.sources = \[\]: an agent in `agents` plays the prompts of its sources"),
        (
            {"agents": named(a={"sources": ["code"]}, b={"sources": ["web", "code"]})},
            r"agents\.b\.sources = .*: agents\.a has 'code', too; leave it to one of them",
        ),
        (
            {"agents": named(a={"sources": ["code"]}), "rewards": {"terms": {"won": GAME, "short": LENGTH}}},
            r"rewards\.terms\.won\.sources = \[\]: only episodes .* play the sources \['code'\]",
        ),
        (
            {"agents": named(a={"sources": ["code"]}), "rewards": {"terms": {"won": GAME | {"sources": ["code", "x"]}}}},
            r"rewards\.terms\.won\.sources = \['code', 'x'\]: only episodes",
        ),
        (
            {"agents": named(a={"sources": ["code"], "credit": "turn"}), "rewards": {"terms": {"short": LENGTH}}},
            r'agents\.a\.credit = "turn": needs a term of type "episode"',
        ),
        (
            {"agents": named(a={"sources": ["code"]}), "sampling": {"max_tokens": 64}, "ahead": {"type": "partial", "tokens": 32}},
            "the episodes of an agent cannot be carried over",
        ),
        ({"agents": named(a={"sources": ["code"]}), "advantage": "remax"}, r"remax.*agents\.a is not made for it"),
    ],
)  # fmt: skip
def test_agents_of_sources_that_do_not_fit_are_refused(table, rule):
    base = {"correction": {"level": "token"}} if "ahead" in table else {}
    with pytest.raises(ValidationError, match=rule):
        PPOConfig(**base | table)


def test_each_source_has_the_weight_of_its_own_turns():
    agents = named(
        a={"sources": ["code"], "credit": "turn"}, b={"sources": ["web"]}, c={"sources": ["game"], "credit": "turn"}
    )
    terms = {"x": GAME | {"sources": ["code"]}, "y": GAME | {"sources": ["game", "web"], "weight": 0.5}, "z": LENGTH}
    made = PPOConfig(agents=agents, rewards={"terms": terms})
    assert [made.turn_weight(source) for source in ("code", "web", "game", "sums")] == [1.0, 0.0, 0.5, 0.0]


def test_a_source_that_no_prompt_has_is_refused():
    made = PPOConfig(agents=named(a={"sources": ["code", "sum"]}))
    with pytest.raises(
        ConfigError, match=r"ppo\.agents\.a\.sources = .*: no prompt has the source 'sum'; did you mean sums"
    ):
        made.check_agents({"code", "sums"}, key="ppo")
