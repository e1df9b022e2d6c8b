from __future__ import annotations

import asyncio
import enum
from typing import Any

import pytest

from rlhf_core.agents.environment import Environment, StepResult
from rlhf_core.agents.sessions import EnvironmentSession, checked_step, open_sessions
from rlhf_core.config.agents import EnvironmentAgent
from tests.rlhf_core.agents.scripted import WORLDS


class Closing(Environment):
    closed = False

    def step(self, action: str, truncated: bool) -> StepResult:  # type: ignore[override]  # it wants no other keyword
        return StepResult(str(truncated))

    async def close(self) -> None:
        Closing.closed = True


def test_a_step_is_given_the_keywords_that_it_takes_and_an_environment_is_closed() -> None:
    async def scenario() -> Any:
        session = EnvironmentSession(Closing)
        assert await session.begin({}, 7) == ("observed", None)
        stepped = await session.step("a", {"turn": 3, "truncated": True})
        await session.close()
        return stepped

    assert asyncio.run(scenario()) == ("stepped", StepResult("True"))
    assert Closing.closed


def test_what_reset_returns_must_be_a_text() -> None:
    class Numbers(Environment):
        def reset(self, prompt: Any, seed: int) -> Any:
            return 5

    with pytest.raises(TypeError, match="reset returned a int"):
        asyncio.run(EnvironmentSession(Numbers).begin({}, 7))


@pytest.mark.parametrize("wrong", [None, {"reward": 1.0}, ("text", 1.0, True), StepResult([{"text": "no role"}])])
def test_a_step_of_another_shape_is_an_error(wrong: Any) -> None:
    with pytest.raises((TypeError, KeyError)):
        checked_step(wrong)


class Word(enum.StrEnum):
    ROLE = "tool"
    TEXT = "42"


def test_texts_of_the_user_s_own_classes_become_plain_ones() -> None:
    class Naming(Environment):
        def reset(self, prompt: Any, seed: int) -> str:
            return Word.TEXT

    kind, added = asyncio.run(EnvironmentSession(Naming).begin({}, 7))
    single = checked_step(StepResult(Word.TEXT, extras={Word.ROLE: 1.0}))
    (turn,) = checked_step(StepResult([{"role": Word.ROLE, "content": Word.TEXT}])).observation
    assert isinstance(turn, dict) and (kind, added, turn) == ("observed", "42", {"role": "tool", "content": "42"})
    assert {type(text) for text in (added, single.observation, *single.extras, *turn.values())} == {str}


def test_arguments_reach_the_environment() -> None:
    agent = EnvironmentAgent(environment=f"{WORLDS}:Echo", arguments={"turns": 1})
    sessions = open_sessions(agent, tokenizer="")

    async def scenario() -> Any:
        session = sessions.open()
        await session.begin({"label": "x"}, 7)
        return await session.step("a", {"turn": 0, "truncated": False})

    assert asyncio.run(scenario())[1].done and not sessions.programs


def test_an_observation_that_is_nothing_is_named() -> None:
    with pytest.raises(TypeError, match="a NoneType as observation; it must return text or messages"):
        checked_step(StepResult(None, done=True))  # type: ignore[arg-type]


def test_half_a_surrogate_pair_reaches_no_tokenizer() -> None:
    half = "so \ud83d"
    (turn,) = checked_step(StepResult([{"role": "tool", "content": half}])).observation
    assert checked_step(StepResult(half)).observation == "so ?" and turn == {"role": "tool", "content": "so ?"}
