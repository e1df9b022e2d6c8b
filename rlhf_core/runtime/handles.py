"""Provide the `Trainer` and the `Sampler` of a stage, backed by Ray workers."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.errors import RlhfError, SamplingError
from rlhf_core.interfaces import Metrics, Objective, Trainer, Transfer, Weights
from rlhf_core.models.micro_batches import row_lengths
from rlhf_core.runtime.packed_completions import pack_request, unpack_completions
from rlhf_core.runtime.placement import GpuSharing
from rlhf_core.runtime.weight_sync import DeviceWeights, StoredWeights
from rlhf_core.runtime.worker_group import WorkerGroup
from rlhf_core.sequences import Samples, Sequences, Subset, offsets_of, take
from rlhf_core.stage.checkpoints import write_part
from rlhf_core.store.checkpoint_parts import note_elsewhere, parts_elsewhere
from rlhf_core.store.node_folders import NodeFolder, named
from rlhf_core.store.protocol import Damaged, Gone
from rlhf_core.training.batching import reduce, shares, step_counts
from rlhf_core.types import Completion, SamplingRequest

P = ParamSpec("P")
T = TypeVar("T")


def _by_sample(method: Callable[Concatenate[Trainer, P], T]) -> Callable[Concatenate[RayTrainer, P], T]:
    """Adapt a method of `Trainer` to `RayTrainer` by dividing the samples, the first argument, among the ranks.

    Ranks return one result per sample, or an array with one number per token. They are joined in the order of the samples;
    numbers of a selection, which is trained on later, stay in the object store.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: RayTrainer, *arguments: P.args, **keywords: P.kwargs) -> T:
        _, (_, samples), *others = signature.bind(self, *arguments, **keywords).arguments.items()
        results, shares = self._call_shares(method.__name__, samples, **dict(others))
        joined = _join(results, shares, samples)
        return cast("T", self._workers.keep([joined])[0] if isinstance(samples, Subset) else joined)

    return call


class RayTrainer:
    """One role on all ranks. Samples are split by length; sums are divided by the denominators of the whole batch.

    `ranks_per_share` neighboring ranks get the same samples, and the first of them returns the results.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        role: str,
        lease: str,
        *,
        transfer: Transfer,
        ranks_per_share: int = 1,
        sharing: GpuSharing | None = None,
    ) -> None:
        self._workers = workers
        self._sharing = sharing or GpuSharing()
        self._transfer = transfer
        self._role = role
        self._lease = lease
        self._ranks_per_share = ranks_per_share

    def forward_backward(self, samples: Samples, objective: Objective) -> Metrics:
        """Accumulate the gradient of `objective` over all ranks' shards; return the metrics of the whole batch."""
        return self._reduced("forward_backward", samples, objective)

    def loss(self, samples: Samples, objective: Objective) -> Metrics:
        """Evaluate the metrics of the whole batch without gradients."""
        return self._reduced("loss", samples, objective)

    logprobs = _by_sample(Trainer.logprobs)
    top_logprobs = _by_sample(Trainer.top_logprobs)
    values = _by_sample(Trainer.values)
    scores = _by_sample(Trainer.scores)
    step_scores = _by_sample(Trainer.step_scores)

    def optim_step(self, *, learning_rate: float) -> Metrics:
        """Update the weights on every rank; return the metrics of rank 0."""
        metrics: Metrics = self._call("optim_step", learning_rate=learning_rate)[0]
        return metrics

    def save(self, folder: Path) -> None:
        """Let every rank write into the folder in the background; ranks on other nodes upload their parts."""
        place, away = self._placed(folder)
        if place is None or not away:
            self._call("save", folder)
            return
        self._call("save", place)
        for rank in away:
            write_part(folder, f"uploaded_{rank:05d}", functools.partial(self._deliver, place, folder, rank))

    def _deliver(self, place: NodeFolder, folder: Path, rank: int) -> None:
        """Wait until a rank has uploaded its part of a checkpoint, and note it there."""
        waits = folder / f".waits-{rank:05d}"  # grows meanwhile, or the disk would seem to stand still

        def grow() -> None:
            with waits.open("ab") as stream:
                stream.write(b".")

        files = self._workers.moved(rank, place.inside, meanwhile=grow)
        waits.unlink(missing_ok=True)
        note_elsewhere(folder, rank, files)

    def load(self, folder: Path) -> None:
        """Restore the state of `save` on every rank."""
        self._call("load", self._readable(folder))

    def damage(self, folder: Path) -> str:
        """Report from the first rank that found damage in its files, or "". Uploaded files that are lost count, too."""
        try:
            readable = self._readable(folder)
        except (Damaged, Gone) as error:
            return str(error)
        return next(filter(None, self._call("damage", readable)), "")

    def export(self, folder: Path) -> None:
        """Write the model; if rank 0 is on another node, its files are downloaded."""
        place, away = self._placed(folder)
        self._call("export", place if place and away else folder)
        if place and 0 in away:
            place.receive(self._workers.moved(0, place.inside))

    def _placed(self, folder: Path) -> tuple[NodeFolder | None, list[int]]:
        """The folder in the form that other nodes resolve, and the ranks that are on other nodes."""
        place = named(folder)
        return place, self._workers.away(self._role, place)

    def _readable(self, folder: Path) -> Path | NodeFolder:
        """Locate a folder for all ranks: a place if some are on other nodes, or have been when it was written."""
        place, away = self._placed(folder)
        if place is None or not (away or parts_elsewhere(folder)):
            return folder
        offered = place.offered()
        self._workers.fetch(self._role, offered)
        return offered

    def weights(self) -> Weights:
        """A reference to the full weights, in the object store, or on rank 0 if GPUs will send them."""
        if self._transfer:
            ticket, digest = self._call("stage_weights")[0]
            return Weights(payload=DeviceWeights(self._workers, ticket), digest=digest)
        weights: Weights = self._call("weights")[0]
        return weights

    def _call(self, method: str, *arguments: Any, **keywords: Any) -> list[Any]:
        with self._sharing.training():
            return self._workers.call(self._role, method, self._lease, *arguments, **keywords)

    def _call_shares(
        self, method: str, samples: Samples, *arguments: Any, **keywords: Any
    ) -> tuple[list[Any], list[list[int]]]:
        """Call `method` of each rank with its share of the samples; return the results, and the rows of each share."""
        dealt = shares(row_lengths(samples), len(self._workers.actors) // self._ranks_per_share)
        if isinstance(samples, Subset):  # the ranks map its sequences
            shared: Any = self._workers.share(samples.sequences)
            parts: list[Any] = [Subset(shared, samples.rows[share]) for share in dealt]
        else:
            parts = [take(samples, share) for share in dealt]
            if self._ranks_per_share > 1:  # they read one copy
                parts = list(map(self._workers.put, parts))
        given = [(self._lease, part, *arguments) for part in parts for _ in range(self._ranks_per_share)]
        with self._sharing.training():
            results = self._workers.call_each(self._role, method, given, **keywords)
        return results[:: self._ranks_per_share], dealt

    def keep(self, sequences: Sequences) -> Sequences:
        """Move the arrays to the object store, which ranks map."""
        return Sequences.of_arrays(self._workers.keep(sequences.arrays), list(sequences.fields))

    def compute(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function` on rank 0, which maps sequences among its arguments."""
        given = [self._workers.share(one) if isinstance(one, Sequences) else one for one in arguments]
        ref = self._workers.begin(self._role, "compute", 0, self._lease, function, *given)
        result: T = self._workers.first(self._role, "compute", {0: ref})[0]
        return result

    def _reduced(self, method: str, samples: Samples, objective: Objective) -> Metrics:
        return reduce(self._call_shares(method, samples, objective, step_counts(objective, samples))[0])


def _join(results: Sequence[Any], shares: Sequence[list[int]], samples: Samples) -> Any:
    """The ranks' results in the order of the samples."""
    if len(results) == 1:
        return results[0]  # one rank gets the samples in their order
    if isinstance(samples, (Sequences, Subset)):
        expected, found = [int(samples.lengths[rows].sum()) for rows in shares], list(map(len, results))
        if found != expected:
            raise ValueError(f"{found} values of the ranks for {expected} tokens; give each token its value")
        bounds = [itertools.pairwise(offsets_of(samples.lengths[rows]).tolist()) for rows in shares]
        views = [one[start:end] for one, part in zip(results, bounds, strict=True) for start, end in part]
        order = np.argsort(list(itertools.chain.from_iterable(shares)))
        return np.concatenate([results[0][:0], *map(views.__getitem__, order.tolist())])
    by_row = {row: one for rows, part in zip(shares, results, strict=True) for row, one in zip(rows, part, strict=True)}
    return [by_row[row] for row in range(len(samples))]


class RaySampler:
    """One policy on all engines. Each engine gets a block of consecutive requests."""

    def __init__(
        self, workers: WorkerGroup, *, transfer: Transfer, tensor_parallel: int, sharing: GpuSharing | None = None
    ) -> None:
        self._workers = workers
        self._sharing = sharing or GpuSharing()
        self._transfer = transfer
        self._tensor_parallel = tensor_parallel
        self._sampled: dict[int, int] = {}
        """Number of a request that was given to `advance` -> its engine."""
        self._waiting: dict[int, list[tuple[int, SamplingRequest]]] = {}
        """Engine -> requests for its next call of `advance`."""
        self._running: dict[int, Any] = {}
        """Engine -> its call of `advance`. Each has its own, so that a slow one keeps no other waiting."""

    def generate(self, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> list[Completion]:
        """Sample one completion per request, in order."""
        self._drop()
        engines = len(self._workers.actors)
        bounds = [len(requests) * index // engines for index in range(engines + 1)]
        # Ray takes a tuple to be one object, and visits each element of a list.
        parts = [(tuple(map(pack_request, requests[start:end])), sampling) for start, end in itertools.pairwise(bounds)]
        with self._sharing.sampling():
            results = self._workers.call_each("policy", "generate", parts)
        return [completion for part in results for completion in unpack_completions(part)]

    def advance(
        self, new: Sequence[tuple[int, SamplingRequest]], sampling: SamplingConfig
    ) -> list[tuple[int, Completion]]:
        """Assign each new request to the least busy engine; then collect the first finished completions."""
        load = Counter(self._sampled.values())
        for number, request in new:
            engine = min(range(len(self._workers.actors)), key=lambda one: load[one])
            load[engine] += 1
            self._sampled[number] = engine
            self._waiting.setdefault(engine, []).append((number, request))
        with self._sharing.sampling():
            for engine in sorted(set(load) - set(self._running)):
                part = self._waiting.pop(engine, [])
                self._running[engine] = self._workers.begin("policy", "advance", engine, part, sampling)
            results = self._workers.first("policy", "advance", self._running) if self._running else {}
        finished = [
            one
            for numbers, answers in results.values()
            for one in zip(numbers, unpack_completions(answers), strict=True)
        ]
        for number, _ in finished:
            del self._sampled[number]
        for engine in results:
            del self._running[engine]
        return finished

    def _drop(self) -> None:
        """Forget the requests in progress; the engines end the calls that run before they take another one."""
        for begun in (self._sampled, self._waiting, self._running):
            begun.clear()

    def expect_weights(self) -> None:
        """Let engines that share GPUs drop their weights while models train: `load_weights` precedes the next sampling."""
        self._sharing.expect_weights()

    def load_weights(self, weights: Weights, *, version: int) -> None:
        """Load a `RayTrainer`'s weights into every engine; completions made after this carry `version`."""
        self._drop()
        match weights.payload:
            case StoredWeights():
                with self._sharing.sampling(loads=True):
                    self._workers.call("policy", "load_weights", weights, version)
            case DeviceWeights(trainers, ticket):
                with self._sharing.sampling(loads=True):
                    self._receive(trainers, ticket)
                    self._workers.call("policy", "adopt", version)
            case other:
                rule, remedy = "does not come from this runtime's trainer", "load what its trainer.weights() returned"
                raise SamplingError("weights.payload", type(other).__name__, rule, remedy)

    def _receive(self, trainers: WorkerGroup, ticket: int) -> None:
        try:
            trainers.call("policy", "send_weights", ticket, self._workers.actors, self._transfer, self._tensor_parallel)
        except RlhfError:
            # The update is half received, or an engine still waits in a broadcast: the engines cannot be used again.
            self._workers.kill()
            raise
