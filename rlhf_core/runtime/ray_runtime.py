"""Run engines on Ray, in warm worker processes that stages lease."""

import atexit
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.config.runtime import RuntimeConfig
from rlhf_core.errors import SamplingError, TrainingError, WorkerLostError
from rlhf_core.interfaces import ModelSpec, Role, Sampler, T, Trainer, Transfer
from rlhf_core.runtime.cluster import available_cores, threads_per_worker, worker_environment
from rlhf_core.runtime.connection import RECONNECT_TIMEOUT_S, connect, connect_again, servers, until_possible
from rlhf_core.runtime.handles import RaySampler, RayTrainer
from rlhf_core.runtime.liveness import CallHangs, RayWatch, within
from rlhf_core.runtime.placement import GpuSharing, Placement, gpu_order, reserve
from rlhf_core.runtime.ray_settings import ray
from rlhf_core.runtime.sample_worker import SampleWorker
from rlhf_core.runtime.train_worker import TrainWorker
from rlhf_core.runtime.weight_sync import choose_transfer
from rlhf_core.runtime.worker_group import WorkerGroup
from rlhf_core.store.node_folders import named

logger = logging.getLogger(__name__)


STOP_TIMEOUT_S = 10.0  # for engines to free their GPUs by themselves
SHUTDOWN_TIMEOUT_S = 30.0  # after it the processes of Ray are killed


class RayRuntime:
    """A `Runtime` on a local Ray, or on the one at `RAY_ADDRESS`. Nothing starts before the first lease or `prewarm`.

    Workers live until `close`, so imports and engine starts are paid once, not once per stage. A worker that dies or
    misses its deadline fails the call in progress and is replaced at the next lease. So is our own Ray if it dies or
    hangs; a head at `RAY_ADDRESS` is waited for instead (see `connection.connect_again`).

    >>> runtime = RayRuntime(RuntimeConfig())                                     # doctest: +SKIP
    >>> with runtime.trainer("policy", spec, optimizer) as trainer: ...           # doctest: +SKIP
    """

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self._placement: Placement | None = None
        self._owns_ray = False
        self._watch: RayWatch | None = None
        self._connected_before = False
        self._train: dict[str, WorkerGroup] = {}
        """Pool -> its train workers; "" has the workers of roles without a pool."""
        self._sample: WorkerGroup | None = None
        self._sampler_leased = False
        self._leases = itertools.count(1)
        self._served: dict[str, str] = {}
        self._closing = threading.Event()
        engines_sleep = config.sampler.needs().sleeps
        share_gpu = engines_sleep or config.trainer.sleep
        self._sharing = GpuSharing(
            (lambda: self._sample) if engines_sleep else None,
            (lambda: self._train.get("")) if share_gpu else None,
            offload=config.trainer.sleep,
            replaced=not config.sampler.needs().adapters,
        )
        self._starting = threading.RLock()
        """Lock for starting workers, which a thread of the caller may also do ahead of time."""

    # ------------------------------------------------------------ Runtime

    @contextlib.contextmanager
    def trainer(self, role: Role, model: ModelSpec, optimizer: OptimizerConfig | None) -> Iterator[Trainer]:
        """Lease `model` on the train workers of its role, with an optimizer if it is to be trained."""
        pool = self._config.pool_of(role)
        workers = self._train_workers(pool)
        sharing = GpuSharing() if pool else self._sharing
        lease = f"{role}-{next(self._leases)}"
        with sharing.training():
            place = named(Path(model.path))
            if place is not None and workers.away(role, place):
                place = place.offered()
                workers.fetch(role, place)
            self._note_served(workers.call(role, "open", lease, model, optimizer, place))
        try:
            shared = self._config.trainer.ranks_per_share
            transfer = "" if pool else self._transfer()
            yield RayTrainer(workers, role, lease, transfer=transfer, ranks_per_share=shared, sharing=sharing)
        except (KeyboardInterrupt, SystemExit):
            workers.kill()  # or the release would wait for the interrupted call
            raise
        finally:
            if not workers.broken:
                with contextlib.suppress(WorkerLostError):  # the next lease replaces lost workers
                    workers.call(role, "release", lease)

    @contextlib.contextmanager
    def sampler(self, policy: Path) -> Iterator[Sampler]:
        """Lease the engines with the weights of `policy`, version 0. One lease at a time."""
        if self._sampler_leased:
            raise SamplingError(
                "sampler", str(policy), "the engines are already leased", "leave the other `with` block first"
            )
        workers = self._sample_workers()
        self._sampler_leased = True
        try:
            transfer = self._transfer()
            with self._sharing.sampling():
                place = named(policy)
                workers.fetch("policy", place and place.offered())
                self._note_served(workers.call("policy", "open", place.offered() if place else policy, transfer))
            tensor_parallel = self._config.sampler.needs().tensor_parallel
            yield RaySampler(workers, transfer=transfer, tensor_parallel=tensor_parallel, sharing=self._sharing)
        finally:
            self._sampler_leased = False

    def prewarm(self, *, trainer: bool, sampler: bool) -> None:
        """Start the worker processes; they import their engines while the caller continues."""
        if trainer:
            for pool in ("", *self._config.pools):
                self._train_workers(pool)
        if sampler:
            self._sample_workers()

    def together(self, *work: Callable[[], T]) -> list[T]:
        """Make calls of trainers and collect their results: at the same time if some of them have separate workers."""
        if not self._config.pools:
            return [one() for one in work]
        with ThreadPoolExecutor(len(work)) as threads:
            return [one.result() for one in [threads.submit(one) for one in work]]

    def engines(self) -> dict[str, str]:
        """Map name -> version of the engines that served a lease, as the workers reported them."""
        return dict(self._served)

    def close(self) -> None:
        """End all workers, and Ray if this runtime started it. Returns within about a minute, even if calls hang."""
        self._closing.set()
        held = self._starting.acquire(timeout=STOP_TIMEOUT_S)
        try:
            self._stop()
        finally:
            self._closing.clear()
            if held:
                self._starting.release()

    def _stop(self) -> None:
        watch, self._watch = self._watch, None
        if watch is None:
            return
        watch.stop()
        if watch.lost or not _ended(2 * STOP_TIMEOUT_S, self._end_workers):
            watch.kill_family()  # before the shutdown, which would wait forever for a server that hangs
        self._train, self._sample, self._placement = {}, None, None
        if (self._owns_ray or watch.lost) and not _ended(SHUTDOWN_TIMEOUT_S, ray.shutdown):
            logger.warning("Ray did not shut down within %g s", SHUTDOWN_TIMEOUT_S)
            atexit.unregister(ray.shutdown)  # or the interpreter would call it, and wait for it, at exit
        watch.kill_family()

    def _end_workers(self) -> None:
        if self._sample is not None and not self._sample.broken:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get([actor.stop.remote() for actor in self._sample.actors], timeout=STOP_TIMEOUT_S)
        for group in self._groups():
            if not group.broken:
                group.kill()
        if self._placement is not None and self._placement.group is not None:
            ray.util.remove_placement_group(self._placement.group)

    # ------------------------------------------------------------ workers

    def _groups(self) -> list[WorkerGroup]:
        return [*self._train.values(), *([self._sample] if self._sample else [])]

    def _train_workers(self, pool: str = "") -> WorkerGroup:
        with self._starting:
            if pool not in self._train or self._train[pool].broken:
                self._train[pool] = self._start_train_workers(self._place(), pool)
            return self._train[pool]

    def _sample_workers(self) -> WorkerGroup:
        with self._starting:
            if self._sample is None or self._sample.broken:
                self._sample = self._start_sample_workers(self._place())
            return self._sample

    def _start_train_workers(self, placement: Placement, pool: str) -> WorkerGroup:
        places, config = placement.of(pool), self._config.in_pool(pool)
        world, gpus = len(places), config.gpus_per_train_worker
        shares = placement.cores_each(places, (*placement.train, *itertools.chain(*placement.pools.values())))
        alone = config.sampler.needs().adapters
        actors = [
            self._actor(TrainWorker, options, threads).remote(
                world, threads, config.trainer, gpus_per_worker=gpus, adapters_alone=alone
            )
            for options, cores in zip(places, shares, strict=True)
            for threads in [threads_per_worker(self._config, cores=cores)]
        ]
        group = self._group("trainer", actors, TrainingError)
        _order_by_gpu(group, gpus)
        # Not awaited: rank 0's answer goes straight to the other workers, which import their engines meanwhile.
        address = group.actors[0].address.remote()
        for rank, actor in enumerate(group.actors):
            actor.join.remote(rank, address)
        return group

    def _start_sample_workers(self, placement: Placement) -> WorkerGroup:
        sampler = self._config.sampler
        shares = placement.cores_each(placement.sample, placement.sample)
        gpus = self._config.gpus_per_engine
        lent: list[list[str]] = [[]] * len(placement.sample)
        if self._config.lends_gpus:
            held = self._train_workers().call("placement", "gpus")
            lent = placement.lent(held, parallel=sampler.needs().tensor_parallel)
        actors = [
            self._actor(SampleWorker, options, threads).remote(sampler, threads, gpus_per_engine=gpus, lent=own)
            for options, cores, own in zip(placement.sample, shares, lent, strict=True)
            for threads in [threads_per_worker(self._config, cores=cores)]
        ]
        group = self._group("sampler", actors, SamplingError)
        _order_by_gpu(group, gpus)
        group.send("warm")
        return group

    def _actor(self, worker: type, options: dict[str, Any], threads: int) -> Any:
        environment = worker_environment(threads=threads)
        return ray.remote(worker).options(
            max_restarts=0, max_task_retries=0, runtime_env={"env_vars": environment}, **options
        )

    def _transfer(self) -> Transfer:
        """Choose how weights travel: through host memory without GPUs, else as the GPUs of both sides allow."""
        on_gpus = self._config.gpus_per_train_worker > 0 and self._config.gpus_per_engine > 0
        if not on_gpus or not self._config.sampler.needs().device_transfer:
            return ""
        train, sample = self._train_workers(), self._sample_workers()
        return choose_transfer([gpus[0] for gpus in train.call("placement", "gpus")], sample.call("placement", "gpus"))

    def _group(self, kind: str, actors: list[Any], error: type[TrainingError] | type[SamplingError]) -> WorkerGroup:
        watch = self._watch
        assert watch is not None  # there are actors, so there is a Ray
        return WorkerGroup(
            kind,
            actors,
            error,
            timeout_s=self._config.worker_timeout_s,
            log_folder=str(Path(ray._private.worker.global_worker.node.get_logs_dir_path())),
            ray_lost=lambda: watch.lost,
        )

    def _place(self) -> Placement:
        """Connect to Ray and reserve GPUs, unless that was done and is still valid."""
        if self._watch is not None and self._watch.settle():
            self._stop()
        elif self._placement is not None and self._any_broken():
            if self._placement.group is not None:
                self._end_workers()  # a lost node takes workers of both kinds with it, and its reservation is void
                self._train, self._sample = {}, None
            self._placement = None
        patience_s = RECONNECT_TIMEOUT_S if self._connected_before else 0.0
        if self._watch is None:
            self._owns_ray = (connect_again if self._connected_before else connect)(available_cores())
            self._connected_before = True
            self._watch = RayWatch(servers(), own=self._owns_ray)
        if self._placement is None:
            self._placement = self._reserve(patience_s)
        return self._placement

    def _any_broken(self) -> bool:
        return any(group.broken for group in self._groups())

    def _reserve(self, patience_s: float) -> Placement:
        """Reserve the workers' places; nodes that were there before have `patience_s` to come back."""
        try:
            return until_possible(
                lambda: reserve(self._config, fixed=self._owns_ray, over=self._no_use_waiting), timeout_s=patience_s
            )
        except (ray.exceptions.RayError, ConnectionError) as error:
            rule = f"Ray failed at the same time ({error})"
            raise WorkerLostError("runtime", "reserving the workers' places", rule, "run again") from error

    def _no_use_waiting(self) -> str:
        lost = "" if self._watch is None else self._watch.lost
        return lost or ("the runtime is being closed" if self._closing.is_set() else "")

    def _note_served(self, reports: list[dict[str, str]]) -> None:
        self._served["ray"] = ray.__version__
        for report in reports:
            self._served.update(report)


def _order_by_gpu(group: WorkerGroup, gpus: float) -> None:
    """Order the workers by their nodes and GPUs, so that neighboring ranks are on neighboring GPUs."""
    if gpus > 0 and len(group.actors) > 1:
        group.reorder(gpu_order(group.call("placement", "gpus")))


def _ended(seconds: float, action: Callable[[], object]) -> bool:
    """Call `action` and return whether it ended in time; an error must not keep the caller from stopping the rest."""
    try:
        within(seconds, action)
    except CallHangs:
        return False
    except Exception as error:
        logger.warning("while stopping: %s: %s", type(error).__name__, error)
    return True
