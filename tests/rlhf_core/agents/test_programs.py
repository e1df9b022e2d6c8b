from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from rlhf_core.agents.programs import Answer, Ask, EpisodeCut, Program, ProgramEngine, ProgramResult, ProgramSession

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


def test_a_program_asks_is_answered_and_ends() -> None:
    asks = [("asks", Ask((1, 2), 5)), ("asks", Ask((1, 2, 7, 8, 9)))]
    assert replies(twice, ANSWER, ANSWER) == [*asks, ("finished", ProgramResult((0.5, 1.0)))]


def test_a_program_may_end_well_where_no_turn_is_left() -> None:
    assert replies(twice, ANSWER, "max_turns = 1 turns were taken")[-1] == (
        "finished",
        ProgramResult((0.5,), truncated=True),
    )


def test_a_program_that_does_not_expect_the_end_raises() -> None:
    with pytest.raises(EpisodeCut, match="no turn"):
        replies(twice, "no turn")


def test_two_turns_at_once_are_refused() -> None:
    async def greedy(prompt: Mapping[str, Any], seed: int, engine: ProgramEngine) -> ProgramResult:
        await asyncio.gather(engine.generate((1,)), engine.generate((2,)))
        return ProgramResult(())

    async def scenario() -> None:
        session = ProgramSession(greedy)
        assert await session.begin({}, 7) == ("asks", Ask((1,)))
        with pytest.raises(RuntimeError, match="an episode is one conversation"):
            await session.answer(ANSWER)

    asyncio.run(scenario())
