import asyncio
import enum
from collections.abc import Mapping
from typing import Any

import pytest

from rlhf_core.agents.environment import Environment, StepResult
from rlhf_core.agents.programs import Answer, Ask, EpisodeCut, Program, ProgramEngine, ProgramResult, ProgramSession
from rlhf_core.agents.sessions import EnvironmentSession, checked_step, open_sessions
from rlhf_core.config.agents import EnvironmentAgent
from tests.rlhf_core.agents.scripted import WORLDS


class Closing(Environment):
    closed = False

    def step(self, action: str, truncated: bool) -> StepResult:  # it wants no other keyword
        return StepResult(str(truncated))

    async def close(self) -> None:
        Closing.closed = True


def test_a_step_is_given_the_keywords_that_it_takes_and_an_environment_is_closed():
    async def scenario() -> Any:
        session = EnvironmentSession(Closing)
        assert await session.begin({}, 7) == ("observed", None)
        stepped = await session.step("a", {"turn": 3, "truncated": True})
        await session.close()
        return stepped

    assert asyncio.run(scenario()) == ("stepped", StepResult("True"))
    assert Closing.closed


def test_what_reset_returns_must_be_a_text():
    class Numbers(Environment):
        def reset(self, prompt: Any, seed: int) -> Any:
            return 5

    with pytest.raises(TypeError, match="reset returned a int"):
        asyncio.run(EnvironmentSession(Numbers).begin({}, 7))


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (None, "step returned a NoneType; it must return a StepResult"),
        ({"reward": 1.0}, "step returned a dict; it must return a StepResult"),
        (StepResult([{"text": "no role"}]), "'role'"),
        (StepResult(None, done=True), "a NoneType as observation; it must return text or messages"),
    ],
)
def test_a_step_of_another_shape_is_an_error(wrong, problem):
    with pytest.raises((TypeError, KeyError), match=problem):
        checked_step(wrong)


def test_an_environment_says_at_least_what_a_turn_leads_to():
    assert Environment().reset({"id": "q"}, seed=7) is None
    with pytest.raises(NotImplementedError):
        Environment().step("It is 4.", turn=0, truncated=False)


class Word(enum.StrEnum):
    ROLE = "tool"
    TEXT = "42"


def test_texts_of_the_user_s_own_classes_become_plain_ones():
    class Naming(Environment):
        def reset(self, prompt: Any, seed: int) -> str:
            return Word.TEXT

    kind, added = asyncio.run(EnvironmentSession(Naming).begin({}, 7))
    single = checked_step(StepResult(Word.TEXT, extras={Word.ROLE: 1.0}))
    (turn,) = checked_step(StepResult([{"role": Word.ROLE, "content": Word.TEXT}])).observation
    assert isinstance(turn, dict) and (kind, added, turn) == ("observed", "42", {"role": "tool", "content": "42"})
    assert {type(text) for text in (added, single.observation, *single.extras, *turn.values())} == {str}


def test_arguments_reach_the_environment():
    agent = EnvironmentAgent(environment=f"{WORLDS}:Echo", arguments={"turns": 1})
    sessions = open_sessions(agent, tokenizer="")

    async def scenario() -> Any:
        session = sessions.open()
        await session.begin({"label": "x"}, 7)
        return await session.step("a", {"turn": 0, "truncated": False})

    assert asyncio.run(scenario())[1].done and not sessions.programs


def test_half_a_surrogate_pair_reaches_no_tokenizer():
    half = "so \ud83d"
    (turn,) = checked_step(StepResult([{"role": "tool", "content": half}])).observation
    assert checked_step(StepResult(half)).observation == "so ?" and turn == {"role": "tool", "content": "so ?"}


# ---------------------------------------------------------------- programs

ANSWER = Answer((7, 8), (-0.1, -0.2), "yes", "stop", 3)


async def twice(prompt: Mapping[str, Any], seed: int, engine: ProgramEngine) -> ProgramResult:
    first = await engine.generate((1, 2), max_tokens=5)
    try:
        await engine.generate((1, 2, *first.token_ids, 9))
    except EpisodeCut:
        return ProgramResult((0.5,), truncated=True)
    return ProgramResult((0.5, 1.0))


def replies(program: Program, *answers: Answer | str) -> list[Any]:
    async def scenario() -> list[Any]:
        session = ProgramSession(program)
        said = [await session.begin({}, 7)]
        for answer in answers:
            said.append(await session.answer(answer))
        await session.close()
        return said

    return asyncio.run(scenario())


def test_a_program_asks_is_answered_and_ends():
    asks = [("asks", Ask((1, 2), 5)), ("asks", Ask((1, 2, 7, 8, 9)))]
    assert replies(twice, ANSWER, ANSWER) == [*asks, ("finished", ProgramResult((0.5, 1.0)))]


def test_a_program_may_end_well_where_no_turn_is_left():
    assert replies(twice, ANSWER, "max_turns = 1 turns were taken")[-1] == (
        "finished",
        ProgramResult((0.5,), truncated=True),
    )


def test_a_program_that_does_not_expect_the_end_raises():
    with pytest.raises(EpisodeCut, match="no turn"):
        replies(twice, "no turn")


def test_two_turns_at_once_are_refused():
    async def greedy(prompt: Mapping[str, Any], seed: int, engine: ProgramEngine) -> ProgramResult:
        await asyncio.gather(engine.generate((1,)), engine.generate((2,)))
        return ProgramResult(())

    async def scenario() -> None:
        session = ProgramSession(greedy)
        assert await session.begin({}, 7) == ("asks", Ask((1,)))
        with pytest.raises(RuntimeError, match="an episode is one conversation"):
            await session.answer(ANSWER)

    asyncio.run(scenario())
