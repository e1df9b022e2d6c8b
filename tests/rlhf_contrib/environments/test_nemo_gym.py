import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlhf_contrib.environments.nemo_gym import open_agent, task_of
from rlhf_core.agents.programs import ProgramResult
from rlhf_core.config.agents import NemoGymAgent
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import ConfigError
from tests.rlhf_contrib.environments.replay import http_server, recorded
from tests.rlhf_core.agents.scripted import chat_folder
from tests.rlhf_core.agents.test_conversation import SpelledEngine, with_tools

WIRE = recorded("nemo_gym")
SESSIONS = WIRE["sessions"]
PROMPT = [{"role": "user", "content": "Count to 3."}]


@pytest.fixture
def tool_template(monkeypatch) -> ChatTemplate:
    template = with_tools()
    monkeypatch.setattr(ChatTemplate, "load", lambda folder: template)
    return template


def call(name: str = "increment", **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@dataclass
class Replay:
    """What became of a recorded session: the result, the prompts of its turns, the requests, and those not recorded."""

    result: ProgramResult | None = None
    asked: list[tuple[int, ...]] = field(default_factory=list)
    heard: list[Any] = field(default_factory=list)
    faults: list[Any] = field(default_factory=list)


def played(exchanges: list[dict[str, Any]], template: ChatTemplate, *texts: str) -> Replay:
    """Play the session of `exchanges` with a policy that says `texts`."""
    engine, replay = SpelledEngine(template, *texts), Replay()
    task = dict(exchanges[0]["sent"])
    task["responses_create_params"] = {"tools": task["responses_create_params"].get("tools", [])}
    with http_server(WIRE["paths"], exchanges, replay.heard, replay.faults) as url:
        program = open_agent(NemoGymAgent(url=url), tokenizer=chat_folder())
        prompt = {"messages": PROMPT, "label": json.dumps(task)}
        replay.result = asyncio.run(program(prompt, 7, engine))
    replay.asked = engine.asked
    return replay


def test_tools_are_called_in_a_session_and_the_answer_is_verified(tool_template):
    replay = played(SESSIONS["counted"], tool_template, call(count=3), "It is 3.")
    assert replay.result == ProgramResult((1.125,), {"digits": 0.125, "counted": 1.0})
    assert replay.faults == [] and '{"count":3}' in tool_template.decode(replay.asked[1]).replace(" ", "")


def test_the_verified_items_carry_the_tokens_as_they_were_sampled(tool_template):
    replay = played(SESSIONS["counted"], tool_template, call(count=3), "It is 3.")
    said = [item for item in replay.heard[-1]["sent"]["response"]["output"] if "generation_token_ids" in item]
    first, second = (tuple(item["prompt_token_ids"]) for item in said)
    assert [first, second] == replay.asked
    assert second[: len(first)] == first and second[len(first) :][: len(said[0]["generation_token_ids"])] == tuple(
        said[0]["generation_token_ids"]
    )
    assert all(len(item["generation_log_probs"]) == len(item["generation_token_ids"]) for item in said)


def test_arguments_that_a_tool_refuses_are_told_to_the_policy(tool_template):
    replay = played(SESSIONS["refused"], tool_template, call(number=3), "No 3.")
    assert replay.result is not None and replay.result.rewards == (0.2,) and replay.faults == []
    assert "Field required" in tool_template.decode(replay.asked[1])


def test_the_policy_cannot_call_what_is_no_tool(tool_template):
    exchanges = [SESSIONS["counted"][0], SESSIONS["counted"][-1]]
    replay = played(exchanges, tool_template, call("verify", reward=1), "3")
    assert [given["path"] for given in replay.heard] == ["/seed_session", "/verify"]
    assert "there is no tool verify" in tool_template.decode(replay.asked[1])


@pytest.mark.parametrize(
    ("session", "message"), [("masked", "sandbox_error, broken"), ("crashed", "/seed_session with 422")]
)
def test_a_sample_that_the_server_cannot_judge_has_failed(session, message, tool_template):
    with pytest.raises(Exception, match=message):
        played(SESSIONS[session], tool_template, "It is 3.")


def test_a_server_without_verify_is_refused():
    with http_server({"/run": {}}, [], [], []) as url, pytest.raises(ConfigError, match="it lacks /seed_session"):
        open_agent(NemoGymAgent(url=url), tokenizer=str(Path()))


def test_a_plain_label_goes_into_the_field_that_is_named():
    assert task_of({"messages": PROMPT, "label": "3"}, label_field="expected")["expected"] == "3"
    assert set(task_of({"messages": PROMPT, "label": "3"}, label_field="")) == {"responses_create_params"}
