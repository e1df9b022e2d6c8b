"""Give each episode its own random numbers, in a process that runs many episodes on one event loop.

Before each resumption of an episode's code the global generators of `random`, `numpy` and `torch` get the episode's
state, so its samples do not depend on the other episodes. Its ticket is written where the parent process can read it
even after a crash, so a hang is attributed to the right episode.
"""

import random
import sys
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")

NO_EPISODE = -1  # tickets count from 0


class EpisodeRng:
    """The random states of one episode.

    `mark` is called with the episode's ticket when its code resumes, and with NO_EPISODE when it is suspended.
    """

    def __init__(self, ticket: int, seed: int, mark: Callable[[int], None]) -> None:
        self._ticket = ticket
        self._seed = seed
        self._mark = mark
        self._states: dict[str, Any] = {}

    def enter(self) -> None:
        """Load the random states of this episode."""
        self._mark(self._ticket)
        for name, (read, write, seed) in _generators().items():
            if name in self._states:
                write(self._states[name])
            else:
                seed(self._seed)
                self._states[name] = read()

    def leave(self) -> None:
        self._states = {name: read() for name, (read, _, _) in _generators().items()}
        self._mark(NO_EPISODE)


EPISODE_RNG: ContextVar[EpisodeRng | None] = ContextVar("EPISODE_RNG", default=None)
"""The episode of the current task; tasks that it starts inherit it."""


async def with_episode_rng(code: Coroutine[Any, Any, T]) -> T:
    """Await `code`; each part of it between two suspensions runs with the random states of the current episode."""
    rng = EPISODE_RNG.get()
    if rng is None:
        return await code
    result: T = await _resumed(code, rng)
    return result


@coroutine
def _resumed(code: Coroutine[Any, Any, Any], rng: EpisodeRng) -> Generator[Any, Any, Any]:
    value: Any = None
    error: BaseException | None = None
    while True:
        rng.enter()
        try:
            waits_for = code.send(value) if error is None else code.throw(error)
        except StopIteration as end:
            return end.value
        finally:
            rng.leave()
        try:
            value, error = (yield waits_for), None
        except BaseException as caught:  # a cancellation is the code's business
            value, error = None, caught


def _generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]]:
    """Map each random library in use to the (read, write, seed) functions of its global generator."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]] = {
        "random": (random.getstate, random.setstate, random.seed)
    }
    if "numpy.random" in sys.modules:
        numpy_random = sys.modules["numpy.random"]
        found["numpy"] = (numpy_random.get_state, numpy_random.set_state, numpy_random.seed)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        found["torch"] = (torch.get_rng_state, torch.set_rng_state, torch.manual_seed)
    return found
