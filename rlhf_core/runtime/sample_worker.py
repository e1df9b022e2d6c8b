"""The Ray actor that samples: one engine per process, kept warm between leases."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config.engines import AnySamplerConfig, HFSamplerConfig, SamplingConfig, VllmSamplerConfig
from rlhf_core.interfaces import Weights
from rlhf_core.runtime.devices import check_gpus
from rlhf_core.runtime.priority import at_low_priority
from rlhf_core.runtime.weights import unpack
from rlhf_core.sampling.vllm_sampler import TransferVerb
from rlhf_core.types import Completion, SamplingRequest


class SampleWorker:
    """Hosts one sampler. `open` reuses the engine if only the weights of the policy differ, else replaces it."""

    def __init__(self, config: AnySamplerConfig, threads: int, *, gpus_per_engine: float = 0.0) -> None:
        self._config = config
        self._gpus_per_engine = gpus_per_engine
        self._threads = threads
        self._sampler: Any = None

    def warm(self) -> None:
        """Import the engine, while others compute."""
        at_low_priority(self._import_engine)

    def _import_engine(self) -> None:
        if isinstance(self._config, VllmSamplerConfig):
            from rlhf_core.sampling.vllm_sampler import prepare_environment

            prepare_environment(self._config, threads=self._threads)
            import vllm

            _ = vllm.LLM  # lazily imported, most of the start-up time
        elif isinstance(self._config, HFSamplerConfig):
            import rlhf_core.sampling.hf_sampler
        else:
            import rlhf_core.sampling.vllm_server_sampler  # noqa: F401

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    def gpus(self) -> list[str]:
        """Return the GPUs that Ray gave this process, as `node:index`."""
        from rlhf_core.runtime.cluster import own_gpus

        return own_gpus()

    def open(self, policy: Path, transfer: str) -> dict[str, str]:
        """Serve `policy` from version 0; return the versions of the engines that do so.

        `transfer` names vLLM's weight transfer backend, "" for host memory; it is the same in every call.
        Raises ConfigError if the engine would not compute on the GPUs that were reserved for it.
        """
        from rlhf_core.runtime.samplers import reopen_sampler
        from rlhf_core.runtime.versions import sampler_versions

        self._check_gpus()
        warm, self._sampler = self._sampler, None  # not kept if opening fails
        self._sampler = reopen_sampler(warm, policy, self._config, threads=self._threads, transfer=transfer)
        return sampler_versions(self._config, self._sampler)

    def _check_gpus(self) -> None:
        if self._gpus_per_engine == 0:
            return
        built_for = ""
        if isinstance(self._config, VllmSamplerConfig):
            self._import_engine()
            from vllm.platforms import current_platform

            built_for = str(current_platform.device_type)
        check_gpus("runtime.gpus_per_engine", self._gpus_per_engine, self.gpus(), built_for=built_for)

    def generate(self, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> list[Completion]:
        """Return one completion per request, in order."""
        completions: list[Completion] = self._sampler.generate(requests, sampling)
        return completions

    def advance(
        self, new: Sequence[tuple[int, SamplingRequest]], sampling: SamplingConfig
    ) -> list[tuple[int, Completion]]:
        """Add requests and run the engine until one has finished; return those that have, none if none is being sampled."""
        finished: list[tuple[int, Completion]] = self._sampler.advance(new, sampling)
        return finished

    def load_weights(self, weights: Weights, version: int) -> None:
        """Read the weights from the object store (shared memory on this node) and load them into the engine."""
        import ray

        tensors: dict[str, Any] = {}
        for bucket in ray.get(list(weights.payload.refs)):
            tensors |= unpack(bucket)
        self._sampler.load_weights(Weights(payload=tensors, digest=weights.digest), version=version)

    # ------------------------------------------------------------ a GPU that is shared

    def sleep(self) -> None:
        """Give the engine's memory back, if there is an engine."""
        if self._sampler is not None:
            self._sampler.sleep()

    def wake(self) -> None:
        """Take the engine's memory again."""
        if self._sampler is not None:
            self._sampler.wake()

    # ------------------------------------------------------------ device transfer, called by the trainer's rank 0

    def transfer(self, verb: TransferVerb, info: dict[str, Any]) -> None:
        """Take one step of vLLM's weight transfer."""
        self._sampler.transfer(verb, info)

    def check_probes(self, probes: Any) -> None:
        """Raise SamplingError if the engine holds other values than were sent."""
        self._sampler.check_probes(probes)

    def adopt(self, version: int) -> None:
        """Name the weights that were transferred."""
        self._sampler.version = version

    def stop(self) -> None:
        """Shut the engine down, with the processes that it may have started for tensor parallelism."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None
