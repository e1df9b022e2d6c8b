"""The Ray actor that trains: one process per rank, which hosts the models of several roles at once."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.interfaces import ModelSpec, RankTrainer, Transfer, Weights
from rlhf_core.processes.identity import is_loopback, network
from rlhf_core.processes.large_imports import large_imports
from rlhf_core.runtime.cluster import free_port, trainer_versions
from rlhf_core.runtime.connection import check_gpus, own_gpus
from rlhf_core.runtime.file_moves import FileMoves
from rlhf_core.runtime.ray_settings import ray
from rlhf_core.runtime.shared_sequences import SharedSequences
from rlhf_core.runtime.weight_sync import StagedWeights, StoredWeights, described
from rlhf_core.sequences import Subset
from rlhf_core.stage.checkpoints import wait_for_parts
from rlhf_core.store.checkpoint_parts import Parts
from rlhf_core.store.layout import remove_tree
from rlhf_core.store.node_folders import NodeFolder

if TYPE_CHECKING:
    from rlhf_core.runtime.hosted_models import HostedModels
    from rlhf_core.runtime.vllm_transfer import DeviceSender

P = ParamSpec("P")
T = TypeVar("T")


class MeetingPoint(NamedTuple):
    """Address where the ranks of a group find each other; `network` names the network in which it is valid.

    >>> MeetingPoint("10.0.0.7", 29500, "0f7ab2c4 net:[4026531840]").host
    '10.0.0.7'
    """

    host: str
    port: int
    network: str


def _of_lease(
    method: Callable[Concatenate[RankTrainer, P], T], *, changes: bool = False
) -> Callable[Concatenate[TrainWorker, str, P], T]:
    """Return a worker method that takes the name of a lease and calls `method` of that lease's trainer.

    Weights that are still to be sent are copied before a method that `changes` them. A `NodeFolder` is opened on this node, and
    sequences in the object store are mapped.
    """

    def call(self: TrainWorker, lease: str, *arguments: P.args, **keywords: P.kwargs) -> T:
        if changes:
            self._keep_staged(lease)
        here = map(open_here, arguments)
        result: T = getattr(self._trainer(lease), method.__name__)(*here, **keywords)
        return result

    # Not functools.wraps: Ray would check calls against the wrapped signature, which has no lease.
    call.__name__, call.__doc__ = method.__name__, method.__doc__
    return call


def open_here(argument: Any) -> Any:
    """The argument on this node: the folder of a place, and sequences in the object store as mapped arrays."""
    match argument:
        case NodeFolder():
            return argument.folder()
        case SharedSequences():
            return argument.map()
        case Subset():
            return replace(argument, sequences=open_here(argument.sequences))
        case _:
            return argument


def _path(folder: Path | NodeFolder) -> Path:
    return folder.root / folder.inside if isinstance(folder, NodeFolder) else folder


def _upload(place: NodeFolder, scratch: Path) -> Parts:
    wait_for_parts(scratch)
    return place.upload(scratch)


class TrainWorker(FileMoves):
    """One of `world` ranks. Every lease is one `LocalTrainer`; all ranks must receive the same calls in the same order.

    `join` sets the rank, which depends on the GPU that the process got. `gpus_per_worker` is the number requested. With
    `adapters_alone` a sampler gets the adapters of a policy without its other weights.
    """

    def __init__(
        self,
        world: int,
        threads: int,
        config: TrainerConfig,
        *,
        gpus_per_worker: float = 0.0,
        adapters_alone: bool = False,
    ) -> None:
        super().__init__()
        self._rank = 0
        self._world = world
        self._meeting_point: MeetingPoint | None = None
        self._gpus_per_worker = gpus_per_worker
        self._threads = threads
        self._config = config
        self._adapters_alone = adapters_alone
        self._ticket = 0
        self._staged: StagedWeights | None = None
        self._staged_lease = ""
        """Lease whose model the staged weights are a stream of; "" for a copy of them."""
        self._sender: DeviceSender | None = None
        self._sender_engines: list[Any] = []

    # ------------------------------------------------------------ process

    def address(self) -> MeetingPoint:
        """Return the host of this worker and a free port on it, where the ranks of this group can meet."""
        return MeetingPoint(self._host(), free_port(), network())

    def join(self, rank: int, address: MeetingPoint) -> None:
        """Set torch.distributed's environment, fix the number of threads and import the engine."""
        self._rank = rank
        self._meeting_point = address
        host, port, _ = address
        os.environ.pop("LOCAL_WORLD_SIZE", None)  # set by a launcher that started Ray, not for this group
        os.environ.update(
            RANK=str(self._rank),
            LOCAL_RANK="0",  # Ray shows each worker its own GPU only
            WORLD_SIZE=str(self._world),
            MASTER_ADDR=host,
            MASTER_PORT=str(port),
        )
        with large_imports():
            self._models.warm(self._threads)

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    def gpus(self) -> list[str]:
        """Return the GPUs that Ray gave this process, as `node:index`."""
        return own_gpus()

    def _host(self) -> str:
        host: str = ray.util.get_node_ip_address() if self._world > 1 or self.gpus() else "127.0.0.1"
        return host

    @cached_property
    def _models(self) -> HostedModels:
        # Torch and transformers are for the workers; the driver imports this module too.
        from rlhf_core.runtime.hosted_models import HostedModels

        return HostedModels(self._config, adapters_alone=self._adapters_alone)

    # ------------------------------------------------------------ leases

    def sees(self, place: NodeFolder) -> bool:
        """Return whether this process reads and writes the folder itself, and not a copy on another node."""
        return place.is_here

    def open(
        self, lease: str, model: ModelSpec, optimizer: OptimizerConfig | None, place: NodeFolder | None = None
    ) -> dict[str, str]:
        """Load `model` under the name `lease`, from `place` if given; return the versions of the engines that serve it.

        Raises ConfigError if it would not be on the GPU that was reserved for it, or if the ranks cannot meet.
        """
        self._check_meeting_point()
        if self._gpus_per_worker > 0:
            check_gpus("runtime.gpus_per_train_worker", self._gpus_per_worker, self.gpus())
        here = model if place is None else replace(model, path=str(place.folder()))
        self._models.open(lease, here, optimizer)
        return trainer_versions(self._config)

    def _check_meeting_point(self) -> None:
        """Raise ConfigError if rank 0 is on another machine but has a loopback address, which is unreachable from here.

        The check is not in `join`, whose result is not awaited.
        """
        there = self._meeting_point
        if there is not None and there.network != network() and is_loopback(there.host):
            rule = f"rank 0 is on another machine than rank {self._rank}, which cannot reach this address"
            remedy = "start Ray's nodes with --node-ip-address, set to an address that the others can reach; or use one machine"
            raise ConfigError("MASTER_ADDR", there.host, rule, remedy)

    def release(self, lease: str) -> None:
        """Free the model of `lease`, and its GPU memory for other processes too."""
        self._keep_staged(lease)
        self._models.release(lease)

    # ------------------------------------------------------------ shared GPU

    def rest(self, offload: bool) -> int:
        """Free unused memory for other users of the GPU; with `offload`, move all models to host memory until `wake`.

        Return how many bytes of the models were moved to host memory.
        """
        if offload:
            self._keep_staged(self._staged_lease)
        return self._models.rest(offload)

    def wake(self) -> None:
        """Move all models back to the GPU."""
        self._models.wake()

    def _trainer(self, lease: str) -> RankTrainer:
        return self._models.trainer(lease)

    # ------------------------------------------------------------ Trainer, one shard each; `weights` is below

    forward_backward = _of_lease(RankTrainer.forward_backward)
    optim_step = _of_lease(RankTrainer.optim_step, changes=True)
    logprobs = _of_lease(RankTrainer.logprobs)
    top_logprobs = _of_lease(RankTrainer.top_logprobs)
    values = _of_lease(RankTrainer.values)
    scores = _of_lease(RankTrainer.scores)
    compute = _of_lease(RankTrainer.compute)
    step_scores = _of_lease(RankTrainer.step_scores)
    loss = _of_lease(RankTrainer.loss)
    load = _of_lease(RankTrainer.load, changes=True)
    damage = _of_lease(RankTrainer.damage)

    def save(self, lease: str, folder: Path | NodeFolder) -> None:
        """Save into the folder; if it is on another node, this rank's part is uploaded: `moved` returns the files."""
        if isinstance(folder, NodeFolder) and not folder.is_here:
            scratch = folder.scratch()
            self._trainer(lease).save(scratch)
            self.move(folder.inside, partial(_upload, folder, scratch))
        else:
            self._trainer(lease).save(_path(folder))

    def export(self, lease: str, folder: Path | NodeFolder) -> None:
        """Export into the folder; if it is on another node, rank 0 uploads the files, which `moved` returns."""
        if not isinstance(folder, NodeFolder) or folder.is_here:
            self._trainer(lease).export(_path(folder))
            return
        scratch = folder.scratch()
        self._trainer(lease).export(scratch)
        if self._rank == 0:
            self.move(folder.inside, partial(_upload, folder, scratch))
        else:
            remove_tree(scratch)

    # ------------------------------------------------------------ weights

    def weights(self, lease: str) -> Weights | None:
        """Gather one weight after another on all ranks; rank 0 puts full buckets into the object store, whose places it returns."""
        refs = tuple(map(ray.put, self._models.packed(lease, keep=self._rank == 0)))
        trainer = self._trainer(lease)
        digest = trainer.stream().digest()
        return Weights(StoredWeights(refs), digest, trainer.adapters) if self._rank == 0 else None

    def stage_weights(self, lease: str) -> tuple[int, str] | None:
        """Note on all ranks that the weights are to be sent; rank 0 returns their ticket and digest.

        They are streamed from the model when they are sent, and only copied if they change, or the model leaves the GPU,
        before that.
        """
        stream = self._trainer(lease).stream()
        self._ticket += 1
        self._staged, self._staged_lease = stream, lease
        digest = stream.digest()
        return (self._ticket, digest) if self._rank == 0 else None

    def _keep_staged(self, lease: str) -> None:
        if self._staged is not None and lease and lease == self._staged_lease:
            shapes = described(self._staged)
            kept: Any = self._trainer(lease).weights().payload
            self._staged, self._staged_lease = kept if self._rank == 0 else shapes, ""

    def send_weights(self, ticket: int, engines: Sequence[Any], transfer: Transfer, tensor_parallel: int) -> None:
        """Send the weights of `ticket` to `engines`, GPU to GPU. Only the newest can be sent, and only once.

        All ranks make each weight whole. By NCCL rank 0 sends it, by IPC each rank to its own GPU.
        """
        if ticket != self._ticket or self._staged is None:
            remedy = "load weights before requesting newer ones"
            raise TrainingError("weights", ticket, f"is not the newest ticket, {self._ticket}", remedy)
        staged, self._staged, self._staged_lease = self._staged, None, ""
        ranks = self._world if transfer == "ipc" else 1
        if self._rank >= ranks:
            deque(iter(staged), maxlen=0)
            return
        if self._sender is None or self._sender_engines != list(engines) or not self._sender.fits(staged):
            from rlhf_core.runtime.vllm_transfer import DeviceSender

            self._sender_engines = list(engines)
            self._sender = DeviceSender(
                transfer,
                engines,
                tensor_parallel=tensor_parallel,
                host=self._host(),
                weights=staged,
                rank=self._rank,
                ranks=ranks,
            )
        self._sender.send(staged)
        del staged
        if transfer == "ipc":
            self.rest(offload=False)  # an engine is on this GPU and needs the memory of the buffer
