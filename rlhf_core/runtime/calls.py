"""Calls into Ray workers with a deadline, and errors that say which worker, which role and what to do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rlhf_core.errors import RlhfError, SamplingError, TrainingError, explain


class WorkerGroup:
    """Ray actors that work as one: they are called together, and one failure of one makes all of them `broken`.

    A broken group is killed at once, so that nothing keeps computing, and is never leased again.

    >>> group = WorkerGroup("trainer", actors, TrainingError, timeout_s=600.0)   # doctest: +SKIP
    >>> group.call("policy", "optim_step", ("policy-1", 1e-5))                    # doctest: +SKIP
    """

    def __init__(
        self,
        kind: str,
        actors: Sequence[Any],
        error: type[TrainingError] | type[SamplingError],
        *,
        timeout_s: float,
        log_folder: str,
    ) -> None:
        self.kind = kind
        self.actors = list(actors)
        self.broken = False
        self._error = error
        self._timeout_s = timeout_s
        self._log_folder = log_folder

    def call(self, role: str, method: str, *arguments: Any) -> list[Any]:
        """Call `method(*arguments)` on every actor; return the results in rank order."""
        return self.call_each(role, method, [arguments] * len(self.actors))

    def call_each(self, role: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` on actor i with `arguments[i]`; return the results in rank order.

        Raises the worker's own error if it is one of this library's, else TrainingError or SamplingError.
        """
        self._check_alive(role, method)
        refs = [getattr(actor, method).remote(*args) for actor, args in zip(self.actors, arguments, strict=True)]
        return self._gather(role, method, refs)

    def call_first(self, role: str, method: str, *arguments: Any) -> Any:
        """Call `method(*arguments)` on rank 0 alone; return its result."""
        self._check_alive(role, method)
        return self._gather(role, method, [getattr(self.actors[0], method).remote(*arguments)])[0]

    def send(self, method: str, *arguments: Any) -> None:
        """Call `method` on every actor without waiting for it."""
        for actor in self.actors:
            getattr(actor, method).remote(*arguments)

    def kill(self) -> None:
        """End the processes of all actors."""
        import ray

        self.broken = True
        for actor in self.actors:
            ray.kill(actor)

    def _check_alive(self, role: str, method: str) -> None:
        if self.broken:
            raise self._error(
                explain(f"{self.kind}.{role}", method, "its worker is gone", "leave this lease and take a new one")
            )

    def _gather(self, role: str, method: str, refs: Sequence[Any]) -> list[Any]:
        import ray

        deadline = time.monotonic() + self._timeout_s
        waiting = list(refs)
        while waiting:
            # One at a time, so that a failed rank is seen while the others wait for it in a collective.
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = [rank for rank, ref in enumerate(refs) if ref in waiting]
                self.kill()
                raise self._error(
                    explain(
                        f"{self.kind}.{role}",
                        f"{method} on worker {ranks[0]}",
                        f"no answer within runtime.worker_timeout_s = {self._timeout_s:g}",
                        f"raise it, or look for the cause in {self._log_folder}",
                    )
                )
            self._check(role, method, refs.index(ready[0]), ready[0])
        return [ray.get(ref) for ref in refs]

    def _check(self, role: str, method: str, rank: int, ref: Any) -> None:
        import ray

        where = (f"{self.kind}.{role}", f"{method} on worker {rank}")
        try:
            ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            if len(self.actors) > 1:
                self.kill()  # the other ranks may wait for this one for ever
            cause = error.cause
            if isinstance(cause, RlhfError):
                raise cause from error
            reason = f"{type(cause).__name__}: {cause}"
            raise self._error(explain(*where, reason, "see the traceback above this error")) from error
        except ray.exceptions.RayError as error:
            self.kill()
            reason = f"the worker died ({str(error).strip().splitlines()[0]})"
            remedy = f"run again, it goes on from the last checkpoint; the cause is in {self._log_folder}"
            raise self._error(explain(*where, reason, remedy)) from error
