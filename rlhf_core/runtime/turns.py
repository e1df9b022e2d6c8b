"""Who has a GPU that a trainer and an engine share: an engine that may sleep does so whenever a model trains."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from rlhf_core.runtime.calls import WorkerGroup


class Turns:
    """Puts the engines of `engines()` to sleep before training and wakes them before sampling; one of both at a time.

    Without `engines` nobody sleeps, and both may happen at once.

    >>> with Turns().training(): pass
    """

    def __init__(self, engines: Callable[[], WorkerGroup | None] | None = None) -> None:
        self._engines = engines
        self._lock = threading.RLock()
        self._asleep = False

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Have the GPU without what the engines can give back."""
        if self._engines is None:
            yield
            return
        with self._lock:
            workers = self._engines()
            if workers is not None and not workers.broken and not self._asleep:
                workers.call("policy", "sleep")
                self._asleep = True
            yield

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Have the engines awake."""
        if self._engines is None:
            yield
            return
        with self._lock:
            workers = self._engines()
            if workers is not None and self._asleep:
                workers.call("policy", "wake")
            self._asleep = False
            yield
