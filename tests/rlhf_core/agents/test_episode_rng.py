import asyncio
import random

import pytest

from rlhf_core.agents.episode_rng import EPISODE_RNG, NO_EPISODE, EpisodeRng, with_episode_rng


async def draws(count: int) -> list[float]:
    drawn = []
    for _ in range(count):
        drawn.append(random.random())
        await asyncio.sleep(0)
    return drawn


async def together(seeds: list[int], marks: list[int]) -> list[list[float]]:
    async def one(ticket: int, seed: int) -> list[float]:
        EPISODE_RNG.set(EpisodeRng(ticket, seed, marks.append))
        return await with_episode_rng(draws(4))

    return await asyncio.gather(*(one(ticket, seed) for ticket, seed in enumerate(seeds)))


def test_what_an_episode_draws_does_not_depend_on_its_company():
    alone = asyncio.run(together([7], []))
    crowd = asyncio.run(together([3, 7, 7], []))
    assert crowd[1] == crowd[2] == alone[0] != crowd[0]
    generator = random.Random(7)
    assert alone[0] == [generator.random() for _ in range(4)]


def test_whose_code_runs_is_marked_at_every_resumption():
    marks: list[int] = []
    asyncio.run(together([1, 2], marks))
    assert marks[:6] == [0, NO_EPISODE, 1, NO_EPISODE, 0, NO_EPISODE] and marks[-1] == NO_EPISODE
    assert marks.count(0) == marks.count(1) == 5


def test_errors_and_cancellations_pass_through():
    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("inside")

    async def late() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "cancelled inside"
        return "never"

    async def scenario() -> None:
        marks: list[int] = []
        EPISODE_RNG.set(EpisodeRng(0, 7, marks.append))
        with pytest.raises(ValueError, match="inside"):
            await with_episode_rng(fails())
        task = asyncio.create_task(with_episode_rng(late()))
        await asyncio.sleep(0.01)
        task.cancel()
        assert await task == "cancelled inside"
        assert marks[-1] == NO_EPISODE

    asyncio.run(scenario())


def test_code_without_an_owner_just_runs():
    assert len(asyncio.run(with_episode_rng(draws(2)))) == 2
