"""Whose code is running in a process that plays many episodes on one event loop.

Before each resumption of an episode's code its ticket is written where the parent can read it even after a crash, and the
global generators of `random`, `numpy` and `torch` are made the episode's own. So a hang is blamed on the one that hangs,
and what an episode draws does not depend on which others are played beside it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")

NOBODY = -1


class Owner:
    """An episode as the owner of running code; `mark` is told the ticket of who runs, or NOBODY."""

    def __init__(self, ticket: int, seed: int, mark: Callable[[int], None]) -> None:
        self._ticket = ticket
        self._seed = seed
        self._mark = mark
        self._states: dict[str, Any] = {}

    def enter(self) -> None:
        """Take over the process."""
        self._mark(self._ticket)
        for name, (read, write, seed) in _generators().items():
            if name in self._states:
                write(self._states[name])
            else:
                seed(self._seed)
                self._states[name] = read()

    def leave(self) -> None:
        """Give it back."""
        self._states = {name: read() for name, (read, _, _) in _generators().items()}
        self._mark(NOBODY)


OWNER: ContextVar[Owner | None] = ContextVar("OWNER", default=None)
"""Tasks that an episode's code starts inherit it; their code is owned too if it runs through `owned`."""


async def owned(code: Coroutine[Any, Any, T]) -> T:
    """Await `code` with every part of it marked as its owner's."""
    owner = OWNER.get()
    if owner is None:
        return await code
    result: T = await _resumed(code, owner)
    return result


@coroutine
def _resumed(code: Coroutine[Any, Any, Any], owner: Owner) -> Generator[Any, Any, Any]:
    value: Any = None
    error: BaseException | None = None
    while True:
        owner.enter()
        try:
            waits_for = code.send(value) if error is None else code.throw(error)
        except StopIteration as end:
            return end.value
        finally:
            owner.leave()
        try:
            value, error = (yield waits_for), None
        except BaseException as caught:  # a cancellation is the code's business
            value, error = None, caught


def _generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]]:
    """Return name -> (read, write, seed) of the global generators of the libraries that are in use."""
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
