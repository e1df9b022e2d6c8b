"""Choose the GPUs of the workers. On CPUs Ray reserves nothing: trainer and sampler use the same cores in turn, of all nodes.

Ray fills one GPU with fractions before it uses the next, so two ranks of half a GPU each would share one. Fractions are
therefore taken from bundles of a whole GPU, which hold at most one train worker and one engine. Ray has no fractions of
several GPUs: where an engine shares several, its bundle has them all, each train worker there takes one, and the
engine, which reserves none, receives their numbers.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.config.runtime import RuntimeConfig
from rlhf_core.errors import ConfigError, WorkerLostError
from rlhf_core.runtime.cluster import available_cores
from rlhf_core.runtime.ray_settings import ray
from rlhf_core.runtime.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0  # between checks whether waiting still makes sense
LOG_EVERY_S = 30.0
"""Seconds between log lines of a reservation that waits."""

Bundle = Mapping[str, float]


@dataclass(frozen=True)
class Placement:
    """Options of the Ray actors, one dictionary per worker. `group` is the placement group to free, None on CPUs."""

    train: tuple[dict[str, Any], ...]
    sample: tuple[dict[str, Any], ...]
    group: Any
    pools: Mapping[str, tuple[dict[str, Any], ...]] = field(default_factory=dict)
    nodes: Mapping[int, str] = field(default_factory=dict)
    """Node of each bundle."""

    def cores_each(self, workers: Sequence[dict[str, Any]], at_once: Sequence[dict[str, Any]]) -> list[int]:
        """For each of the workers, its share of the cores of its node among those there that compute `at_once`.

        Without GPUs, all workers of a Ray of one node share the cores of this machine.
        """
        if not any("scheduling_strategy" in one for one in at_once):
            return [available_cores() // len(at_once)] * len(workers)
        cores = node_cores()
        crowd = Counter(map(self._node, at_once))
        return [cores.get(self._node(one), 1) // crowd[self._node(one)] for one in workers]

    def _node(self, options: dict[str, Any]) -> str:
        strategy = options["scheduling_strategy"]
        return self.nodes[strategy.placement_group_bundle_index] if self.nodes else strategy.node_id

    def lent(self, gpus: Sequence[Sequence[str]], *, parallel: int) -> list[list[str]]:
        """The GPUs, as `node:index`, of each engine that shares `parallel` of the train workers' `gpus` on its node.

        >>> from types import SimpleNamespace
        >>> bundles = [{"scheduling_strategy": SimpleNamespace(placement_group_bundle_index=each)} for each in range(2)]
        >>> Placement((), tuple(bundles), None, nodes={0: "b", 1: "a"}).lent([["a:0"], ["b:0"], ["a:1"], ["b:1"]], parallel=2)
        [['b:0', 'b:1'], ['a:0', 'a:1']]
        """
        free: dict[str, list[str]] = {}
        for (gpu,) in gpus:
            free.setdefault(gpu.partition(":")[0], []).append(gpu)
        return [[free[self._node(one)].pop(0) for _ in range(parallel)] for one in self.sample]

    def of(self, pool: str) -> tuple[dict[str, Any], ...]:
        """Options of the train workers of a pool; "" names the workers of roles without a pool."""
        return self.pools[pool] if pool else self.train


@dataclass(frozen=True)
class Layout:
    """The bundles that are reserved together, each on one node, and the bundle of each worker."""

    bundles: tuple[Bundle, ...]
    train: tuple[int, ...]
    sample: tuple[int, ...]
    pools: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def layout(config: RuntimeConfig) -> Layout:
    """Plan the bundles of a `config` with GPUs: no GPU holds two train workers or two engines.

    >>> shared = layout(RuntimeConfig(train_workers=2, gpus_per_train_worker=0.5, gpus_per_engine=0.5))
    >>> shared.bundles, shared.train, shared.sample
    (({'CPU': 2, 'GPU': 1}, {'CPU': 1, 'GPU': 1}), (0, 1), (0,))
    """
    trainers, engines = config.train_workers, config.sampler.needs().engines
    train_gpus, engine_gpus = config.gpus_per_train_worker, config.gpus_per_engine
    if config.lends_gpus:
        parallel = config.sampler.needs().tensor_parallel
        bundles: list[Bundle] = [{"CPU": parallel + 1, "GPU": parallel}] * engines
        train, sample = tuple(rank // parallel for rank in range(trainers)), tuple(range(engines))
    elif config.shares_gpus:
        number = max(trainers, engines)
        # A single pair reserves only its fractions, which are always of one GPU, and leaves the rest to other runs.
        gpus = _plain(1 if number > 1 else round(train_gpus + engine_gpus, 4))
        bundles = [{"CPU": (each < trainers) + (each < engines), "GPU": gpus} for each in range(number)]
        train, sample = tuple(range(trainers)), tuple(range(engines))
    else:
        bundles = [*_own(train_gpus, trainers), *_own(engine_gpus, engines)]
        train, sample = tuple(range(trainers)), tuple(range(trainers, trainers + engines))
    pools = {}
    for name, pool in config.pools.items():
        pools[name] = tuple(range(len(bundles), len(bundles) + pool.workers))
        bundles += _own(pool.gpus_per_worker, pool.workers)
    return Layout(tuple(bundles), train, sample, pools)


def _own(gpus: float, workers: int) -> list[Bundle]:
    """A bundle for each of `workers` that share their GPUs with no other kind of worker."""
    whole = 1 if 0 < gpus < 1 and workers > 1 else _plain(gpus)
    return [{"CPU": 1, **({"GPU": whole} if whole else {})}] * workers


def _plain(number: float) -> float:
    """`number` as an int if it is whole, as Ray requires."""
    return int(number) if number == int(number) else number


def by_node(made: Layout, nodes: Mapping[int, str]) -> Layout:
    """Reorder `made` so that workers of one kind are neighbors, node by node; `nodes` is the node of each bundle.

    Bundles of the same size are interchangeable; the node that has most of them comes first.

    >>> halves = Layout(({"GPU": 1},) * 4, (0, 1), (2, 3))
    >>> by_node(halves, {0: "a", 1: "b", 2: "b", 3: "a"})
    Layout(bundles=({'GPU': 1}, {'GPU': 1}, {'GPU': 1}, {'GPU': 1}), train=(0, 3), sample=(1, 2), pools={})
    """
    kinds = {"train": made.train, "sample": made.sample, **made.pools}
    apart = not set(made.train) & set(made.sample)
    alike = apart and len({tuple(sorted(bundle.items())) for bundle in made.bundles}) == 1
    if alike:
        order = iter(_node_order(range(len(made.bundles)), nodes))
        placed = {name: tuple(itertools.islice(order, len(kind))) for name, kind in kinds.items()}
    else:
        pairs = _node_order(set(made.train) & set(made.sample), nodes)
        placed = {name: _node_order(set(kind) - set(pairs), nodes) for name, kind in kinds.items()}
        placed |= {name: (*pairs, *placed[name]) for name in ("train", "sample")}
        ranks = Counter(made.train)  # several in the bundle of an engine that shares their GPUs
        placed["train"] = tuple(bundle for bundle in placed["train"] for _ in range(ranks[bundle]))
    train, sample = placed.pop("train"), placed.pop("sample")
    return Layout(made.bundles, train, sample, placed)


def _node_order(bundles: Sequence[int] | set[int] | range, nodes: Mapping[int, str]) -> tuple[int, ...]:
    crowd = Counter(nodes[bundle] for bundle in bundles)
    return tuple(sorted(bundles, key=lambda bundle: (-crowd[nodes[bundle]], nodes[bundle], bundle)))


def gpu_order(gpus: Sequence[Sequence[str]]) -> list[int]:
    """Sort workers by node, as nodes appear, then by GPU; `gpus` has each worker's `node:index`.

    >>> gpu_order([["b:1"], ["b:0"], ["a:10"], ["a:9"]])
    [1, 0, 3, 2]
    """
    nodes = [own[0].partition(":")[0] if own else "" for own in gpus]
    indices = [own[0].partition(":")[2] if own else "" for own in gpus]
    # Indices are numbers; if GPUs have other names, any fixed order will do.
    return sorted(range(len(gpus)), key=lambda one: (nodes.index(nodes[one]), len(indices[one]), indices[one]))


def node_cores() -> dict[str, int]:
    """CPUs of each node of Ray that has some; a head may have none."""
    nodes = {one["NodeID"]: int(one["Resources"].get("CPU", 0)) for one in ray.nodes() if one["Alive"]}
    return {node: cores for node, cores in nodes.items() if cores}


def node_of_each(workers: int, cores: Mapping[str, int], *, first: str) -> list[str]:
    """The nodes of workers without GPUs: each has as many cores as possible, and workers of one node are neighbors.

    The node `first` comes before nodes that are as good.

    >>> node_of_each(4, {"small": 4, "large": 8}, first="small")
    ['small', 'large', 'large', 'large']
    >>> node_of_each(3, {"b": 8, "a": 8}, first="b")
    ['b', 'b', 'a']
    """
    crowd: Counter[str] = Counter()
    for _ in range(workers):
        crowd[min(cores, key=lambda node: (-cores[node] / (crowd[node] + 1), node != first, node))] += 1
    return [node for node in sorted(crowd, key=lambda node: (node != first, node)) for _ in range(crowd[node])]


def without_gpus(config: RuntimeConfig, cores: Mapping[str, int], *, own: str) -> Placement:
    """Places of workers that reserve nothing: on the nodes in proportion to their `cores`, if others than our `own` have some."""

    def places(workers: int) -> tuple[dict[str, Any], ...]:
        idle: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0}
        if cores.keys() <= {own}:
            return (idle,) * workers
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        # Not only there: another node takes the worker of a lost node.
        nodes = node_of_each(workers, cores, first=own)
        return tuple({**idle, "scheduling_strategy": affinity(node, soft=True)} for node in nodes)

    # Train workers and pools compute at once, and the engines in their turn.
    counts = [config.train_workers, *(pool.workers for pool in config.pools.values())]
    together = iter(places(sum(counts)))
    train, *pools = (tuple(itertools.islice(together, count)) for count in counts)
    return Placement(train, places(config.sampler.needs().engines), None, dict(zip(config.pools, pools, strict=True)))


def reserve(config: RuntimeConfig, *, fixed: bool = False, over: Callable[[], str] = lambda: "") -> Placement:
    """Reserve GPUs for all workers at once, packed on as few nodes as possible, and place the workers.

    Waits for resources that are missing or busy, because an autoscaler starts nodes for waiting requests. Raises
    ConfigError after `placement_timeout_s`, or at once if the cluster is `fixed`, as it will not grow. `over` returns a
    reason to stop waiting, or ""; a reason raises WorkerLostError.
    """
    if config.gpus_per_train_worker == 0 and config.gpus_per_engine == 0:
        return without_gpus(config, node_cores(), own=ray.get_runtime_context().get_node_id())
    made = layout(config)
    there = ray.cluster_resources() if fixed else {}
    if fixed and any(_total(made.bundles, kind) > there.get(kind, 0) for kind in ("GPU", "CPU")):
        raise _not_there(config, made, "a Ray cluster that rlhf has started does not grow")
    group = ray.util.placement_group([dict(bundle) for bundle in made.bundles], strategy="PACK")
    try:
        _wait(group, config, made, over)
        table = ray.util.placement_group_table(group)
    except BaseException:
        ray.util.remove_placement_group(group)  # or it would stay queued and take the GPUs from the next attempt
        raise
    nodes = {int(bundle): str(node) for bundle, node in table["bundles_to_node_id"].items()}
    placed = by_node(made, nodes)

    def options(gpus: float, bundle: int) -> dict[str, Any]:
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle
        )
        return {"num_cpus": 1, "num_gpus": _plain(gpus), "scheduling_strategy": strategy}

    lends = config.lends_gpus
    return Placement(
        train=tuple(options(1 if lends else config.gpus_per_train_worker, bundle) for bundle in placed.train),
        sample=tuple(options(0 if lends else config.gpus_per_engine, bundle) for bundle in placed.sample),
        group=group,
        pools={
            name: tuple(options(config.pools[name].gpus_per_worker, bundle) for bundle in bundles)
            for name, bundles in placed.pools.items()
        },
        nodes=nodes,
    )


def _wait(group: Any, config: RuntimeConfig, made: Layout, over: Callable[[], str]) -> None:
    """Wait until the bundles of `group` are reserved."""
    ready = group.ready()
    began = logged_at = time.monotonic()
    while not ray.wait([ready], timeout=LOOK_EVERY_S)[0]:
        now = time.monotonic()
        reason = over()
        if reason:
            wanted = _spelled(made.bundles)
            raise WorkerLostError("runtime", wanted, f"stopped waiting: {reason}", "run again")
        if now - began > config.placement_timeout_s:
            limit = f"runtime.placement_timeout_s = {config.placement_timeout_s:g}"
            raise _not_there(config, made, f"not all of this became available within {limit} s")
        if now - logged_at > LOG_EVERY_S:
            logged_at = now
            left = config.placement_timeout_s - (now - began)
            logger.warning("waiting for %s, up to %.0f s more; %s", _spelled(made.bundles), left, _there())


def _not_there(config: RuntimeConfig, made: Layout, rule: str) -> ConfigError:
    gpus, cpus = (_total(made.bundles, kind) for kind in ("GPU", "CPU"))
    return ConfigError(
        "runtime.gpus_per_train_worker, gpus_per_engine",
        (config.gpus_per_train_worker, config.gpus_per_engine),
        f"{gpus:g} GPUs and {cpus:g} CPUs are needed, {_spelled(made.bundles)}; {_there()}; {rule}",
        "use fewer workers, or 0 GPUs to run on CPUs; start the missing nodes; "
        "or raise runtime.placement_timeout_s for a cluster that grows",
    )


def _there() -> str:
    """Describe the cluster's resources and how many of them are free."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    free = ray.available_resources()
    gpus, cpus = (_total(nodes, kind) for kind in ("GPU", "CPU"))
    each = _spelled([{kind: node.get(kind, 0) for kind in ("CPU", "GPU")} for node in nodes])
    return (
        f"the cluster has {gpus:g} GPUs and {cpus:g} CPUs (nodes: {each}), "
        f"of which {free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} CPUs are free"
    )


def _total(bundles: Sequence[Bundle], kind: str) -> float:
    return sum(bundle.get(kind, 0) for bundle in bundles)


def _spelled(bundles: Sequence[Bundle]) -> str:
    """Describe `bundles` in words.

    >>> _spelled([{"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 0.5}])
    '2 x {CPU 1, GPU 1} + 1 x {CPU 1, GPU 0.5}'
    """
    kinds = Counter(", ".join(f"{kind} {number:g}" for kind, number in bundle.items()) for bundle in bundles)
    return " + ".join(f"{number} x {{{text}}}" for text, number in kinds.items())


# ---------------------------------------------------------------- gpu sharing

Workers = Callable[[], WorkerGroup | None]


class GpuSharing:
    """Lets trainers and engines use one GPU in turn, one side at a time.

    Training puts the workers of `engines()` to sleep, sampling wakes them. After `expect_weights` they drop their weights, if
    these are `replaced` whole. Before sampling, the workers of `trainers()` free the memory that they do not use; with
    `offload` they also move their models to host memory until they train again. Without `engines` and `trainers` nothing
    sleeps, and training and sampling may overlap.

    >>> with GpuSharing().training(): pass
    """

    def __init__(
        self,
        engines: Workers | None = None,
        trainers: Workers | None = None,
        *,
        offload: bool = False,
        replaced: bool = True,
    ) -> None:
        self._engines = engines
        self._trainers = trainers
        self._offload = offload
        self._lock = threading.RLock()
        self._asleep: WorkerGroup | None = None
        self._resting: WorkerGroup | None = None
        self._replaced = replaced
        self._keep_weights = True

    def expect_weights(self) -> None:
        """Let the engines drop their weights when they sleep, until the next turn to sample or to load weights."""
        self._keep_weights = not self._replaced

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Hold the GPU for training, while the engines sleep."""
        if self._engines is None and self._trainers is None:
            yield
            return
        with self._lock:
            engines, trainers = _living(self._engines), _living(self._trainers)
            if engines is not None and self._asleep is not engines:
                engines.call("policy", "sleep", self._keep_weights)
                self._asleep = engines
            if trainers is not None and self._resting is trainers and self._offload:
                trainers.call("shared_gpu", "wake")
            self._resting = None
            yield

    @contextlib.contextmanager
    def sampling(self, *, loads: bool = False) -> Iterator[None]:
        """Hold the GPU for sampling, with the engines awake and the trainers' spare memory freed.

        If it `loads` weights, the engines take the memory of their KV cache back afterwards.
        """
        if self._engines is None and self._trainers is None:
            yield
            return
        with self._lock:
            trainers = _living(self._trainers)
            if trainers is not None and self._resting is not trainers:
                self._resting = trainers  # before the call, which may fail halfway
                trainers.call("shared_gpu", "rest", self._offload)
            # A broken group is called too: its error has the cause of the loss.
            engines = None if self._engines is None else self._engines()
            asleep = engines if self._asleep is engines else None
            if asleep is not None:
                asleep.call("policy", "wake", not loads)
            self._asleep, self._keep_weights = None, True
            try:
                yield
            finally:
                if loads and asleep is not None and not asleep.broken:
                    asleep.call("policy", "wake", True)


def _living(workers: Workers | None) -> WorkerGroup | None:
    group = None if workers is None else workers()
    return None if group is None or group.broken else group
