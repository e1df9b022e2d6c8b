import asyncio
from typing import Any

import pytest

from rlhf_contrib.environments.openenv import open_agent
from rlhf_core.agents.environment import StepResult
from rlhf_core.agents.programs import EpisodeFailed
from rlhf_core.config.agents import OpenEnvAgent
from rlhf_core.errors import ConfigError
from tests.rlhf_contrib.environments.replay import openenv_server, recorded

WIRE = recorded("openenv")
TEXT = {"type": "string"}


def played(session: str | list[Any], actions: list[str], **settings: Any) -> tuple[list[Any], list[Any]]:
    """Return what the reset and the steps of a session led to, and what it was asked beside the record."""

    async def episode(one: Any) -> list[Any]:
        try:
            heard: list[Any] = [await one.reset({"label": '{"level": 2}'}, 7)]
            for action in actions:
                heard.append(await one.step(action))
            return heard
        finally:
            await one.close()

    faults: list[Any] = []
    exchanges = WIRE["sessions"][session] if isinstance(session, str) else session
    with openenv_server(WIRE["http"], exchanges, faults) as url:
        make = open_agent(OpenEnvAgent(url=url, **settings))
        return asyncio.run(episode(make())), faults


def replying(*reply: Any) -> list[Any]:
    """Return a session whose first step is answered with `reply`; without one the connection breaks."""
    step = {"sent": {"type": "step", "data": {"text": "4"}}}
    return [WIRE["sessions"]["played"][0], step | dict(zip(("received",), reply))]


def test_an_episode_is_a_session_on_the_servers_socket():
    heard, faults = played("played", ["It is 42.", "no"])
    assert heard == ["Say digits (7).", StepResult("turn 1", 2 / 9, False), StepResult("", 0.0, True)]
    assert faults == []


def test_an_action_that_the_server_finds_invalid_is_told_to_the_policy():
    heard, faults = played(
        "refused", ["no JSON", '{"word": "no"}', '{"text": "12"}', '{"text": "34"}'], action_field="json"
    )
    assert heard[1].observation.startswith("error: Expecting value") and heard[1].extras == {"invalid_actions": 1.0}
    assert "Field required" in heard[2].observation and not heard[2].done
    assert [step.reward for step in heard[3:]] == [1.0, 1.0] and faults == []


NO_REWARD = {"type": "observation", "data": {"observation": {"message": ""}, "reward": None, "done": True}}
UNKNOWN = "the server answered step with what its protocol does not know"


@pytest.mark.parametrize(
    ("session", "actions", "failure"),
    [
        ("crashed", ["crash"], "EXECUTION_ERROR: the digits are gone"),
        ("full", [], "max_concurrent_envs"),
        (replying(), ["4"], "closed the connection at the step"),
        (replying({"type": "observation", "data": {"what": "?"}}), ["4"], UNKNOWN),  # and no invalid action
        (replying({"observation": {}}), ["4"], UNKNOWN),
        (replying("busy"), ["4"], UNKNOWN),
        (replying(NO_REWARD), ["4"], "without any reward"),
    ],
)
def test_what_the_server_itself_fails_at_is_a_failure(session, actions, failure):
    with pytest.raises(EpisodeFailed, match=failure):
        played(session, actions)


def test_an_episode_may_end_without_a_reward_where_none_is_needed():
    heard, _ = played(replying(NO_REWARD), ["4"], needs_reward=False)
    assert heard[1].done


def test_arguments_of_the_reset_and_the_labels_keys_are_sent():
    _, faults = played("played", [], reset_arguments={"mode": "easy"}, give_label=True)
    assert faults == [{"type": "reset", "data": {"level": 2, "mode": "easy", "seed": 7}}, {"type": "close"}]


@pytest.mark.parametrize(
    ("changed", "settings", "message"),
    [
        ({"/health": {"status": "unhealthy"}}, {}, "unhealthy"),
        ({"/schema": {"actions": {}}}, {}, "it is of another version of OpenEnv"),
        ({"/metadata": {"version": "2.0"}}, {"version": "1.0"}, "is 2.0"),
        ({}, {"action_field": "txt"}, "did you mean text"),
        (
            {"/schema": {"action": {"properties": {"a": TEXT, "b": TEXT}}, "observation": {"properties": {}}}},
            {},
            "'a', 'b'",
        ),
    ],
    ids=["unhealthy", "other protocol", "other version", "misspelt field", "two texts"],
)
def test_a_server_that_cannot_be_used_is_refused_at_the_start(changed, settings, message):
    with openenv_server(WIRE["http"] | changed, [], []) as url, pytest.raises(ConfigError, match=message):
        open_agent(OpenEnvAgent(url=url, **settings))


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"agent.url = 'http://127.0.0.1:9.*start the server"):
        open_agent(OpenEnvAgent(url="http://127.0.0.1:9"))
