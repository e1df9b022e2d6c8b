"""Run agent programs: code that drives an episode itself and requests turns, in the child process of `process`.

A program is `async (prompt, seed, engine) -> ProgramResult`. The driver samples each turn of `engine.generate` and
keeps its tokens, so they cannot be changed on the way: the result only lists the turns that count and their rewards.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from rlhf_core.agents.episode_rng import with_episode_rng
from rlhf_core.types import FinishReason

ProgramEvent: TypeAlias = tuple[Literal["asks", "finished"], Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """A turn that a program requests; `max_tokens` 0 means the limit of the configuration and the episode."""

    prompt_ids: tuple[int, ...]
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The turn that was sampled; `text` is without special tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    policy_version: int


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The result of an episode.

    `rewards` belong to the turns that count, in order. If there are fewer rewards than turns, the last turn gets their
    sum. `token_ids` is the whole conversation with the prompt, and `actions` its sampled (start, end) ranges; without
    them all turns count, and the prompt of each must begin with the turns before it. Dynamic sampling uses `score`, if
    it is given, in place of the reward.
    """

    rewards: tuple[float, ...]
    extras: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False
    token_ids: tuple[int, ...] = ()
    actions: tuple[tuple[int, int], ...] = ()
    score: float | None = None


class EpisodeCut(RuntimeError):
    """Raised by `generate` where the episode has no turn or no token left; a program may catch it and return its result."""


class EpisodeFailed(Exception):
    """The reason why an episode cannot continue."""


def rewarded(result: ProgramResult, *, needed: bool) -> ProgramResult:
    """Check that `result` has a reward if one is needed. Raises EpisodeFailed otherwise: the episode would earn 0."""
    if needed and not result.rewards:
        raise EpisodeFailed("it ended without any reward (needs_reward = false takes rewards from elsewhere)")
    return result


class ProgramEngine:
    """The engine that a program samples from, one turn at a time.

    >>> answer = await engine.generate(prompt_ids, max_tokens=32)    # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._requests: asyncio.Queue[Ask] = asyncio.Queue()
        self._answer: asyncio.Future[Answer] | None = None

    async def generate(self, prompt_ids: tuple[int, ...], *, max_tokens: int = 0) -> Answer:
        """Sample the policy's continuation of `prompt_ids`.

        Raises EpisodeCut if no turn is left, and RuntimeError if another one is still being sampled.
        """
        if self._answer is not None:
            raise RuntimeError(
                "a turn was requested while another one is being sampled; an episode is one conversation"
            )
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._requests.put_nowait(Ask(tuple(prompt_ids), max_tokens))
            return await self._answer
        finally:
            self._answer = None

    async def next_request(self) -> Ask:
        """Wait for the next turn that the program requests."""
        return await self._requests.get()

    def answer(self, answer: Answer | str) -> None:
        """Pass on the requested turn, or the reason why none is left."""
        if self._answer is None or self._answer.done():
            return
        if isinstance(answer, str):
            self._answer.set_exception(EpisodeCut(answer))
        else:
            self._answer.set_result(answer)


Program: TypeAlias = Callable[[Mapping[str, Any], int, ProgramEngine], Coroutine[Any, Any, ProgramResult]]


class ProgramSession:
    """One episode of a program: `begin`, then `answer` after each turn, return its next request or result."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._engine = ProgramEngine()
        self._running: asyncio.Future[ProgramResult] | None = None

    async def begin(self, prompt: Mapping[str, Any], seed: int) -> ProgramEvent:
        """Start the program; return its first request, or its result."""
        self._running = asyncio.ensure_future(with_episode_rng(self._program(prompt, seed, self._engine)))
        return await self._next()

    async def answer(self, answer: Answer | str) -> ProgramEvent:
        """Continue with the sampled turn, or with the reason why none is left.

        The result is the next request or the end.
        """
        self._engine.answer(answer)
        return await self._next()

    async def close(self) -> None:
        """Cancel the running tasks."""
        if self._running is not None:
            self._running.cancel()

    async def _next(self) -> ProgramEvent:
        assert self._running is not None
        next_request = asyncio.ensure_future(self._engine.next_request())
        try:
            both: list[asyncio.Future[Any]] = [self._running, next_request]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            return ("asks", next_request.result()) if next_request.done() else ("finished", self._running.result())
        finally:
            next_request.cancel()
