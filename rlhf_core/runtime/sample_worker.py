"""The Ray actor that samples: one engine per process, kept warm between leases."""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.runtime import AnySamplerConfig
from rlhf_core.errors import SamplingError
from rlhf_core.interfaces import DeviceSampler, EngineSampler, Probes, Transfer, TransferVerb, Weights
from rlhf_core.processes.large_imports import large_imports
from rlhf_core.runtime.connection import check_gpus, own_gpus
from rlhf_core.runtime.file_moves import FileMoves
from rlhf_core.runtime.packed_completions import PackedCompletions, PackedRequest, pack_completions
from rlhf_core.runtime.ray_settings import ray
from rlhf_core.runtime.samplers import reopen_sampler, sampler_engine
from rlhf_core.runtime.weight_sync import StoredWeights
from rlhf_core.store.node_folders import NodeFolder
from rlhf_core.types import SamplingRequest

# ---------------------------------------------------------------- Run work at low priority, so that it does not slow down other threads

R = TypeVar("R")

LOW = 10
"""Nice value of such work: a tenth of the CPU share of a busy thread at 0. With 19, a seventieth, an import of vLLM
took longer than `runtime.worker_timeout_s` on a machine whose cores were all busy.
"""


def at_low_priority(work: Callable[[], R]) -> R:
    """Call `work()` in a thread of low priority. Only Linux has priorities per thread.

    A trainer whose threads wait for each other thousands of times a second becomes several times slower if a thread
    shares its core with an import as heavy as vLLM's.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="low-priority", initializer=_give_way) as pool:
        return pool.submit(work).result()


def _give_way() -> None:
    if sys.platform == "linux":
        thread = threading.get_native_id()
        # Only a superuser may lower a nice value that is already higher.
        os.setpriority(os.PRIO_PROCESS, thread, max(LOW, os.getpriority(os.PRIO_PROCESS, thread)))


# ---------------------------------------------------------------- The Ray actor that samples: one engine per process, kept warm between leases


class SampleWorker(FileMoves):
    """The host of one sampler. `open` reuses the engine if only the weights of the policy differ, else replaces it."""

    def __init__(
        self, config: AnySamplerConfig, threads: int, *, gpus_per_engine: float = 0.0, lent: Sequence[str] = ()
    ) -> None:
        """`lent` are GPUs of train workers, as `node:index`, which this process shares with them."""
        super().__init__()
        self._lent = list(lent)
        if lent:  # before CUDA starts; Ray, of which this process has no GPU, has hidden them all
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.partition(":")[2] for gpu in lent)
        self._config = config
        self._gpus_per_engine = gpus_per_engine
        self._threads = threads
        self._sampler: EngineSampler | None = None
        self._has_weights = True

    def warm(self) -> None:
        """Import the engine, at low priority."""
        at_low_priority(self._import_engine)

    def _import_engine(self) -> None:
        with large_imports():
            sampler_engine(self._config).warm(self._config, threads=self._threads)

    def pid(self) -> int:
        """The process id."""
        return os.getpid()

    def gpus(self) -> list[str]:
        """The GPUs that Ray gave this process or a train worker has lent it, as `node:index`."""
        return self._lent or own_gpus()

    def open(self, policy: Path | NodeFolder, transfer: Transfer) -> dict[str, str]:
        """Serve `policy`, a folder of this node or of a place, from version 0; return the versions of the engines that serve it.

        `transfer` is the same in every call. Raises ConfigError if the engine would not compute on the GPUs that were
        reserved for it.
        """
        self._check_gpus()
        warm, self._sampler = self._sampler, None  # not kept if opening fails
        folder = policy.folder() if isinstance(policy, NodeFolder) else policy
        opened = reopen_sampler(warm, folder, self._config, threads=self._threads, transfer=transfer)
        self._sampler, self._has_weights = opened, True
        return opened.versions()

    def _check_gpus(self) -> None:
        if self._gpus_per_engine == 0:
            return
        self._import_engine()
        built_for = sampler_engine(self._config).built_for()
        check_gpus("runtime.gpus_per_engine", self._gpus_per_engine, self.gpus(), built_for=built_for)

    def _opened(self) -> EngineSampler:
        if self._sampler is None:
            raise SamplingError("sampler", None, "no policy was opened on this worker", "take a new lease")
        return self._sampler

    def _with_weights(self) -> EngineSampler:
        """The sampler; SamplingError if it has dropped its weights and got no others."""
        if not self._has_weights:
            rule = "the engine dropped its weights while a model trained, and has no new ones"
            raise SamplingError("sampler", "no weights", rule, "call load_weights before sampling")
        return self._opened()

    def _on_device(self) -> DeviceSampler:
        sampler = self._opened()
        if not isinstance(sampler, DeviceSampler):
            rule = "its configuration needs a sampler that sleeps or takes weights on a GPU"
            remedy = "give the class the methods of interfaces.DeviceSampler, or correct needs() of the configuration"
            raise SamplingError("sampler", type(sampler).__name__, rule, remedy)
        return sampler

    def generate(self, requests: Sequence[PackedRequest], sampling: SamplingConfig) -> PackedCompletions:
        """Sample one completion per request, in order."""
        return pack_completions(self._with_weights().generate([SamplingRequest(*one) for one in requests], sampling))

    def advance(
        self, new: Sequence[tuple[int, SamplingRequest]], sampling: SamplingConfig
    ) -> tuple[list[int], PackedCompletions]:
        """Add requests and run the engine until one has finished. Returns the finished ones with their numbers."""
        finished = self._with_weights().advance(new, sampling)
        return [number for number, _ in finished], pack_completions([one for _, one in finished])

    def load_weights(self, weights: Weights, version: int) -> None:
        """Read the weights from the object store (shared memory on this node) and load them into the engine."""
        from rlhf_core.runtime.weights import unpack_weights  # torch is for workers; the driver imports this module too

        if not isinstance(weights.payload, StoredWeights):
            kind, rule = type(weights.payload).__name__, "must be in the object store"
            raise SamplingError("weights.payload", kind, rule, "load what the trainer's weights() returned")
        tensors: dict[str, Any] = {}
        for bucket in ray.get(list(weights.payload.refs)):
            tensors |= unpack_weights(bucket)
        self._opened().load_weights(replace(weights, payload=tensors), version=version)
        self._has_weights = True

    # ------------------------------------------------------------ shared GPU

    def sleep(self, keep_weights: bool = True) -> None:
        """Free the engine's GPU memory, if there is an engine; without `keep_weights` it cannot sample until it gets others."""
        if self._sampler is not None:
            self._has_weights = self._has_weights and keep_weights
            self._on_device().sleep(keep_weights=keep_weights)

    def wake(self, kv_cache: bool = True) -> None:
        """Reclaim the engine's GPU memory, if there is an engine; without `kv_cache` only the memory of its weights."""
        if self._sampler is not None:
            self._on_device().wake(kv_cache=kv_cache)

    # ------------------------------------------------------------ device transfer, called by the trainer's rank 0

    def transfer(self, verb: TransferVerb, info: object) -> None:
        """Run one step of vLLM's weight transfer."""
        self._on_device().transfer(verb, info)

    def check_probes(self, probes: Probes) -> None:
        """Raise SamplingError if the engine's weights differ from the sent weights."""
        self._on_device().check_probes(probes)

    def adopt(self, version: int) -> None:
        """Set the version of the weights that were transferred."""
        self._on_device().adopt(version)
        self._has_weights = True

    def stop(self) -> None:
        """Shut the engine down, with the processes that it may have started for tensor parallelism."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None
