"""Who has a GPU that a trainer and an engine share: the one sleeps while the other works, as far as each may."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from rlhf_core.runtime.calls import WorkerGroup

Workers = Callable[[], WorkerGroup | None]


class Turns:
    """Puts the engines of `engines()` to sleep before training and wakes them before sampling; one of both at a time.

    `trainers()` hand their unused memory over before sampling and, with `offload`, all the rest of it too, until they
    train again. Without `engines` and `trainers` nobody sleeps, and both may happen at once.

    >>> with Turns().training(): pass
    """

    def __init__(
        self, engines: Workers | None = None, trainers: Workers | None = None, *, offload: bool = False
    ) -> None:
        self._engines = engines
        self._trainers = trainers
        self._offload = offload
        self._lock = threading.RLock()
        self._asleep: WorkerGroup | None = None
        self._resting: WorkerGroup | None = None

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Have the GPU without what the engines can give back."""
        if self._engines is None and self._trainers is None:
            yield
            return
        with self._lock:
            engines, trainers = _living(self._engines), _living(self._trainers)
            if engines is not None and self._asleep is not engines:
                engines.call("policy", "sleep")
                self._asleep = engines
            if trainers is not None and self._resting is trainers and self._offload:
                trainers.call("shared_gpu", "wake")
            self._resting = None
            yield

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Have the engines awake, without what the trainers can give back."""
        if self._engines is None and self._trainers is None:
            yield
            return
        with self._lock:
            trainers = _living(self._trainers)
            if trainers is not None and self._resting is not trainers:
                self._resting = trainers  # before the call: half of it may be done when it fails
                trainers.call("shared_gpu", "rest", self._offload)
            # One that is broken too: the call says how it was lost.
            engines = None if self._engines is None else self._engines()
            if engines is not None and self._asleep is engines:
                engines.call("policy", "wake")
            self._asleep = None
            yield


def _living(workers: Workers | None) -> WorkerGroup | None:
    group = None if workers is None else workers()
    return None if group is None or group.broken else group
