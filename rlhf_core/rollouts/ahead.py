"""Sample ahead: one thread loads weights and samples for later steps while the caller trains.

Step s trains on what the weights of step max(0, s - staleness) sampled. This is a fixed schedule: which weights answer
which prompts with which seeds does not depend on timing, so a resumed run has the same bytes, with overlap too.
On Ray the thread only waits for other processes; a sampler in this process shares its cores with the training. Scoring
waits for the step, since the trainers' workers do it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from rlhf_core.data.rollout_log import Drawn, read_drawn, write_drawn
from rlhf_core.errors import DataError, SamplingError, explain
from rlhf_core.interfaces import Weights
from rlhf_core.rollouts.answers import StepSampler
from rlhf_core.types import Generation

T = TypeVar("T")

LOOK_EVERY_S = 1.0
"""How often a wait for a job checks that its thread is alive."""
INTERRUPT_PATIENCE_S = 5.0
"""How long an interrupted stage waits for the running job, which cannot be stopped."""


class AheadSampler:
    """A `StepSampler` that samples up to `staleness` steps ahead, with the `inner` sampler in a thread.

    >>> with AheadSampler(inner, staleness=1, steps=100, group_size=8) as sampler:   # doctest: +SKIP
    ...     sampler.load_weights(policy.weights, version=0)
    """

    def __init__(self, inner: StepSampler, *, staleness: int, steps: int, group_size: int) -> None:
        self._inner = inner
        self._staleness = staleness
        self._steps = steps
        self._group_size = group_size
        self._jobs = Background("sampling")
        self._loaded: Future[None] | None = None
        self._drawn: dict[int, Future[Drawn]] = {}
        """Step -> its answers, requested and not taken yet."""
        self._requested = 0
        """All steps below this one were requested."""

    @property
    def ahead(self) -> int:
        """Return how many steps are requested and not taken yet."""
        return len(self._drawn)

    def load_weights(self, weights: Callable[[], Weights], *, version: int) -> None:
        """Request with these weights all steps up to `version + staleness` that were not requested yet.

        Near the end of the training there are none, and the weights are not sent.
        """
        end = min(version + self._staleness + 1, self._steps)
        if self._requested >= end:
            return
        if self._loaded is not None:
            # Only the newest weights can be sent from a GPU, and no more than two sets are kept waiting anywhere.
            self._jobs.result(self._loaded)
        sent = weights()  # here and not in the thread: the training changes them
        self._loaded = self._jobs.submit(partial(self._inner.load_weights, lambda: sent, version=version))
        for step in range(self._requested, end):
            self._drawn[step] = self._jobs.submit(partial(self._inner.generate, step))
        self._requested = end

    def generate(self, step: int) -> Drawn:
        """Wait for the answers of `step`; raise whatever went wrong while sampling ahead."""
        return self._jobs.result(self._drawn.pop(step))

    def borrow(self, weights: Callable[[], Weights], *, version: int, job: Callable[[], T]) -> T:
        """Return what `job` returns in the thread, after all steps that are requested, while the engine has `weights()`."""
        if self._loaded is not None:
            self._jobs.result(self._loaded)
        sent = weights()
        return self._jobs.result(self._jobs.submit(partial(self._inner.borrow, lambda: sent, version=version, job=job)))

    def save(self, folder: Path) -> None:
        """Wait for all requested steps and write those not taken yet: newer weights could not sample them again."""
        write_drawn(folder, {step: self._jobs.result(drawn) for step, drawn in self._drawn.items()})
        self._inner.save(folder)

    def load(self, folder: Path, step: int) -> None:
        """Continue at `step` from what `save` wrote. DataError if rollouts are missing that older weights sampled.

        A step in which every group has a failed episode is sampled again, and so are those after it, by the current weights.
        """
        kept = read_drawn(folder)
        if step == 0 and not kept:
            return  # nothing was requested before the first step
        end = min(step + self._staleness, self._steps)
        if sorted(kept) != list(range(step, end)):
            rule = f"rollouts of the steps {step} to {end - 1} should be here, but found those of {sorted(kept)}"
            raise DataError(explain("checkpoint.rollouts", str(folder), rule, "start the stage over with --force"))
        usable = takewhile(lambda one: self._has_whole_group(one[1].generations), sorted(kept.items()))
        self._drawn = {number: _completed(drawn) for number, drawn in usable}
        self._requested = step + len(self._drawn)
        self._inner.load(folder, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._jobs.close(interrupted=kind is not None and not issubclass(kind, Exception))

    def _has_whole_group(self, generations: list[Generation]) -> bool:
        starts = range(0, len(generations), self._group_size)
        groups = [generations[start : start + self._group_size] for start in starts]
        return any(not any(one.completion.failure for one in group) for group in groups)


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
                self._failure = error  # before the future is done, so that no caller sees it done without the failure
                made.set_exception(error)

        self._jobs.put(run)
        return made

    def result(self, job: Future[T]) -> T:
        """Wait for the job and return what it returned; raise what it, or one before it, raised."""
        while not wait([job], timeout=LOOK_EVERY_S).done:
            if not self._thread.is_alive():
                rule = "the sampling thread ended before it had finished"
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


def _completed(drawn: Drawn) -> Future[Drawn]:
    future: Future[Drawn] = Future()
    future.set_result(drawn)
    return future
