"""Call a group of Ray workers with a deadline; errors name the worker, the role and the remedy."""

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from rlhf_core.errors import (
    RlhfError,
    SamplerLostError,
    SamplingError,
    TrainerLostError,
    TrainingError,
    WorkerLostError,
    explain,
)
from rlhf_core.runtime.ray_settings import ray
from rlhf_core.runtime.shared_sequences import SharedSequences
from rlhf_core.sequences import Sequences
from rlhf_core.store.node_folders import NodeFolder

LOOK_EVERY_S = 1.0
"""Seconds between checks, during a call, that Ray itself is still there."""
FETCH_EVERY_S = 0.2
"""Seconds between checks whether a worker has finished its work besides its calls."""
OTHERS_GRACE_S = 10.0
"""Seconds to wait for other ranks' errors: if a rank dies, its peers often fail in a collective before Ray notices."""


class WorkerGroup:
    """A group of Ray actors that are called together; if one is lost, the whole group is `broken`.

    A broken group is killed at once, so that no actor keeps computing, and is never leased again. Threads may share a
    group: their calls run one after the other, so that all actors see them in the same order. The deadline of a call
    starts when the call starts.

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
        ray_lost: Callable[[], str],
    ) -> None:
        """`ray_lost` returns the lost part of Ray itself, "" while all of it is up."""
        self.kind = kind
        self.actors = list(actors)
        self._killed = False
        self._error = error
        self._lost = TrainerLostError if error is TrainingError else SamplerLostError
        self._timeout_s = timeout_s
        self._log_folder = log_folder
        self._ray_lost = ray_lost
        self._turn = threading.Lock()
        self._shared: dict[int, tuple[Any, int]] = {}
        """Id of an array -> reference to the arrays in the object store that have a copy of it, and its place in them."""
        self._begun: dict[Any, float] = {}
        """Call that `begin` started -> when, by the monotonic clock."""
        self._away: dict[str, list[int]] = {}
        """Mark of a cache -> ranks that do not see it."""

    @property
    def broken(self) -> bool:
        """Whether the workers are gone: killed, or lost with Ray."""
        return self._killed or bool(self._ray_lost())

    def call(self, role: str, method: str, *arguments: Any, **keywords: Any) -> list[Any]:
        """Call `method(*arguments, **keywords)` on every actor; return the results in rank order."""
        return self.call_each(role, method, [arguments] * len(self.actors), **keywords)

    def call_each(self, role: str, method: str, arguments: Sequence[tuple[Any, ...]], **keywords: Any) -> list[Any]:
        """Call `method(*arguments[i], **keywords)` on actor i; return the results in rank order.

        Raises the worker's own error if it belongs to this library, TrainerLostError or SamplerLostError if a worker
        died or missed the deadline, else TrainingError or SamplingError.
        """
        with self._turn:
            self._check_alive(role, method)
            pairs = zip(self.actors, arguments, strict=True)
            refs = dict(enumerate(getattr(actor, method).remote(*args, **keywords) for actor, args in pairs))
            return list(self._gather(role, method, refs).values())

    def fetch(self, role: str, place: NodeFolder | None) -> None:
        """Let the nodes of all actors download the files of a place, without a time limit."""
        if place is None:
            return
        self.call(role, "fetch", place)
        for rank in range(len(self.actors)):
            self.moved(rank, f"fetch {place.inside}")

    def moved(self, rank: int, name: str, *, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """Wait, between the calls of others, until an actor has moved files; return the result of the move.

        `meanwhile` is called now and then. Raises the worker's error, or an error for its loss.
        """
        method = "moved"
        deadline = time.monotonic() + self._timeout_s
        while not self.broken:
            ref = self.actors[rank].moved.remote(name)
            while not self.broken and not ray.wait([ref], timeout=LOOK_EVERY_S)[0]:
                meanwhile()
                if time.monotonic() > deadline:
                    raise self._too_late(self.kind, method, rank)
            try:
                result = ray.get(ref, timeout=LOOK_EVERY_S)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayError as error:
                raise self._died(self.kind, method, rank, error) from error
            if result is not None:
                return result[0]
            deadline = time.monotonic() + self._timeout_s
            meanwhile()
            time.sleep(FETCH_EVERY_S)
        raise self._loss(self.kind, method, "its worker has been stopped", self._run_again)

    def begin(self, role: str, method: str, rank: int, *arguments: Any) -> Any:
        """Start `method(*arguments)` on one actor and return a reference to its result, for `first`."""
        with self._turn:
            self._check_alive(role, method)
            ref = getattr(self.actors[rank], method).remote(*arguments)
            self._begun[ref] = time.monotonic()
            return ref

    def first(self, role: str, method: str, running: Mapping[int, Any]) -> dict[int, Any]:
        """Wait until any call that `begin` started has ended; return the results so far, by rank."""
        with self._turn:
            self._check_alive(role, method)
            self._begun = {ref: self._begun[ref] for ref in running.values()}  # the others were given up
            return self._gather(role, method, running, enough=1)

    def away(self, role: str, place: NodeFolder | None) -> list[int]:
        """Ranks that do not see the cache in which a folder was named: they are on other nodes."""
        if place is None:
            return []
        if place.mark not in self._away:
            seen = self.call(role, "sees", place)
            self._away[place.mark] = [rank for rank, sees in enumerate(seen) if not sees]
        return self._away[place.mark]

    def put(self, value: Any) -> Any:
        """Store a copy in the object store: a reference to hand to several actors."""
        return ray.put(value)

    def share(self, sequences: Sequences) -> SharedSequences:
        """Put the arrays of sequences into the object store, each once. Arrays put together are freed together."""
        arrays = {id(values): values for values in sequences.arrays}
        if missing := [values for number, values in arrays.items() if number not in self._shared]:
            self._note(missing, self.put(missing))
        return SharedSequences([self._shared[id(values)] for values in sequences.arrays], tuple(sequences.fields))

    def keep(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Move arrays to the object store; `share` does not copy them again. The results cannot be written to."""
        ref = self.put(arrays)
        mapped: list[NDArray[Any]] = ray.get(ref)
        self._note(mapped, ref)
        return mapped

    def _note(self, arrays: Sequence[NDArray[Any]], ref: Any) -> None:
        for at, values in enumerate(arrays):
            self._shared[id(values)] = ref, at
            weakref.finalize(values, self._shared.pop, id(values), None)

    def reorder(self, order: Sequence[int]) -> None:
        """Reorder the actors: `order[0]` is the first from now on, and so on."""
        self.actors = [self.actors[index] for index in order]

    def send(self, method: str, *arguments: Any) -> None:
        """Call `method` on every actor without waiting for the result."""
        for actor in self.actors:
            getattr(actor, method).remote(*arguments)

    def kill(self) -> None:
        """End the processes of all actors; Ray sends SIGKILL to actors that do not respond."""
        self._killed = True
        if not self._ray_lost():  # or the call might hang, and no process is left to kill
            for actor in self.actors:
                ray.kill(actor)

    def _check_alive(self, role: str, method: str) -> None:
        self._check_ray(role, method)
        if self._killed:
            raise self._loss(role, method, "its worker has been stopped", "leave this lease and take a new one")

    def _check_ray(self, role: str, method: str) -> None:
        if problem := self._ray_lost():
            raise self._loss(role, method, problem, self._run_again)

    @property
    def _run_again(self) -> str:
        return f"run again to resume from the last checkpoint; the cause is in {self._log_folder}"

    def _loss(self, role: str, what: str, rule: str, remedy: str) -> WorkerLostError:
        return self._lost(explain(f"{self.kind}.{role}", what, rule, remedy))

    def _gather(self, role: str, method: str, refs: Mapping[int, Any], *, enough: int = 0) -> dict[int, Any]:
        """Wait for the results of calls, by rank: all of them, or the finished ones once `enough` are there."""
        ranks = {ref: rank for rank, ref in refs.items()}
        deadline = min((self._begun.get(ref, time.monotonic()) for ref in ranks), default=0.0) + self._timeout_s
        found: dict[int, Any] = {}
        waiting = list(ranks)
        while len(found) < (enough or len(ranks)):
            # One result at a time, so that a failed rank is seen while the others wait for it in a collective.
            left = deadline - time.monotonic()
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, min(LOOK_EVERY_S, left)))
            if ready:
                rank = ranks[ready[0]]
                found[rank] = self._checked(role, method, refs, rank)
                continue
            self._check_ray(role, method)
            if left <= 0:
                raise self._too_late(role, method, ranks[waiting[0]])
        return dict(sorted(found.items()))

    def _checked(self, role: str, method: str, refs: Mapping[int, Any], rank: int) -> Any:
        """The result of a call that has ended, or its exception, raised here. The result may be lost on its way."""
        try:
            return ray.get(refs[rank], timeout=self._timeout_s)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ray.exceptions.RayError):  # it lost another worker, or the weights that one held
                raise self._died(role, method, rank, cause) from error
            if isinstance(cause, RlhfError):
                self._kill_peers()
                raise cause from error
            self._check_others(role, method, refs, rank)
            self._kill_peers()
            reason = f"{type(cause).__name__}: {cause}"
            where = (f"{self.kind}.{role}", f"{method} on worker {rank}")
            raise self._error(explain(*where, reason, _remedy(self.kind, reason))) from error
        except ray.exceptions.RayError as error:
            raise self._died(role, method, rank, error) from error

    def _check_others(self, role: str, method: str, refs: Mapping[int, Any], failed: int) -> None:
        """Raise the loss of another rank if it caused the failure of `failed`."""
        ranks = {ref: rank for rank, ref in refs.items() if rank != failed}
        others = list(ranks)
        deadline = time.monotonic() + OTHERS_GRACE_S
        while others and time.monotonic() < deadline:
            ready, others = ray.wait(others, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            for ref in ready:
                try:
                    ray.get(ref, timeout=OTHERS_GRACE_S)
                except ray.exceptions.RayTaskError:
                    continue
                except ray.exceptions.RayError as error:
                    raise self._died(role, method, ranks[ref], error) from error

    def _kill_peers(self) -> None:
        if len(self.actors) > 1:
            self.kill()  # the other ranks may wait for the failed one forever

    def _too_late(self, role: str, method: str, rank: int) -> WorkerLostError:
        self.kill()
        rule = f"no answer within runtime.worker_timeout_s = {self._timeout_s:g}"
        remedy = f"raise it, or find the cause in {self._log_folder}"
        return self._loss(role, f"{method} on worker {rank}", rule, remedy)

    def _died(self, role: str, method: str, rank: int, error: Exception) -> WorkerLostError:
        self.kill()
        reason = f"the worker died ({str(error).strip().splitlines()[0]})"
        return self._loss(role, f"{method} on worker {rank}", reason, self._run_again)


_SMALLER = {
    "trainer": "lower runtime.trainer.micro_batch, or set runtime.trainer.gradient_checkpointing",
    "sampler": "lower runtime.sampler.gpu_memory_fraction, kv_cache_gib or max_num_seqs",
}


def _remedy(kind: str, reason: str) -> str:
    """The remedy for a worker's exception: the fields that save memory if it ran out of memory."""
    return _SMALLER[kind] if "out of memory" in reason.lower() else "see the traceback above this error"
