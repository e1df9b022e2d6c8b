"""Share one GPU between trainers and sampling engines: one side frees its memory while the other works."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from rlhf_core.runtime.worker_group import WorkerGroup

Workers = Callable[[], WorkerGroup | None]


class GpuSharing:
    """Lets trainers and engines use one GPU in turn, one side at a time.

    Training puts the workers of `engines()` to sleep, sampling wakes them. Before sampling, the workers of `trainers()` free
    the memory that they do not use; with `offload` they also move their models to host memory until they train again.
    Without `engines` and `trainers` nothing sleeps, and training and sampling may overlap.

    >>> with GpuSharing().training(): pass
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
        """Hold the GPU for training, while the engines sleep."""
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
        """Hold the GPU for sampling, with the engines awake and the trainers' spare memory freed."""
        if self._engines is None and self._trainers is None:
            yield
            return
        with self._lock:
            trainers = _living(self._trainers)
            if trainers is not None and self._resting is not trainers:
                self._resting = trainers  # before the call, which may fail halfway
                trainers.call("shared_gpu", "rest", self._offload)
            # A broken group is called too: its error says how it was lost.
            engines = None if self._engines is None else self._engines()
            if engines is not None and self._asleep is engines:
                engines.call("policy", "wake")
            self._asleep = None
            yield


def _living(workers: Workers | None) -> WorkerGroup | None:
    group = None if workers is None else workers()
    return None if group is None or group.broken else group
