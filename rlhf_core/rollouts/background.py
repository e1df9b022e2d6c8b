"""Jobs that run beside the training: sampling for later steps, in one thread, in the order in which it was asked for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from typing import TypeVar

from rlhf_core.errors import SamplingError, explain

T = TypeVar("T")

LOOK_EVERY_S = 1.0
"""How often whoever waits for a job looks whether its thread is still there."""
INTERRUPT_PATIENCE_S = 5.0
"""How long an interrupted stage waits for the job that runs: it cannot be stopped, only left behind."""


class Inline:
    """Jobs that run at once, in the caller's thread: `Background` without any overlap."""

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run the job; what it raises is raised here."""
        done: Future[T] = Future()
        done.set_result(job())
        return done

    def result(self, job: Future[T]) -> T:
        """Return what the job returned."""
        return job.result()

    def close(self, *, interrupted: bool) -> None:
        """Do nothing: no job is ever under way."""


class Background:
    """One thread for all jobs. After a job that failed no other runs: every later call here raises what it raised.

    The jobs' own calls into workers have deadlines, so a wait for a job ends: with its result, its failure, or the end of
    the thread.

    >>> jobs = Background("sampling")
    >>> jobs.result(jobs.submit(lambda: 42))
    42
    >>> jobs.close(interrupted=False)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._closing = False
        # A daemon: an interrupted process must not wait for a job that was left behind.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Put a job behind those that wait."""
        self._check()
        made: Future[T] = Future()

        def run() -> None:
            if self._closing or self._failure is not None:
                made.set_exception(self._failure or CancelledError())
                return
            try:
                made.set_result(job())
            except BaseException as error:
                self._failure = error  # before the future is done, so that nobody sees it done and all well
                made.set_exception(error)

        self._jobs.put(run)
        return made

    def result(self, job: Future[T]) -> T:
        """Wait for the job and return what it returned; raise what it, or one before it, raised."""
        while not wait([job], timeout=LOOK_EVERY_S).done:
            if not self._thread.is_alive():
                rule = "the thread that samples ended before its work was done"
                raise SamplingError(explain("rollouts", self._name, rule, "run again"))
        self._check()
        return job.result()

    def close(self, *, interrupted: bool) -> None:
        """Drop the jobs that wait, and wait for the one that runs; for a few seconds only when `interrupted`."""
        self._closing = True
        self._jobs.put(None)
        if interrupted:
            self._thread.join(INTERRUPT_PATIENCE_S)
            return
        while self._thread.is_alive():
            self._thread.join(LOOK_EVERY_S)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
