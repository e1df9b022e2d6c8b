"""The models that a train worker hosts, one per lease. Imports torch and transformers, which the driver does not need."""

import gc
import os
from collections import deque
from collections.abc import Iterator

import torch
import transformers

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.errors import TrainingError
from rlhf_core.interfaces import ModelSpec, RankTrainer
from rlhf_core.runtime.weights import PackedTensor, buckets, pack_weights
from rlhf_core.training.engines.offload import release_cached
from rlhf_core.training.trainer import LocalTrainer


class HostedModels:
    """The trainers of one process, by lease; `TrainWorker` documents the methods."""

    def __init__(self, config: TrainerConfig, *, adapters_alone: bool = False) -> None:
        self._config = config
        self._adapters_alone = adapters_alone
        self._trainers: dict[str, RankTrainer] = {}

    def warm(self, threads: int) -> None:
        """Fix the number of threads and the kernels, and import the model libraries."""
        torch.set_num_threads(threads)
        # On a GPU some kernels have no deterministic form: they warn instead of failing a long run. cuBLAS kernels have
        # one if this is set before its first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        _ = transformers.AutoModelForCausalLM  # imported lazily; most of the start-up time

    def open(self, lease: str, model: ModelSpec, optimizer: OptimizerConfig | None) -> None:
        self._trainers[lease] = LocalTrainer(model, optimizer, self._config, adapters_alone=self._adapters_alone)

    def trainer(self, lease: str) -> RankTrainer:
        """Look up the trainer of `lease`. Raises TrainingError if it does not exist."""
        if lease not in self._trainers:
            raise TrainingError("lease", lease, "is not open on this worker", "take a new lease")
        return self._trainers[lease]

    def release(self, lease: str) -> None:
        self._trainers.pop(lease).close()
        gc.collect()

    def rest(self, offload: bool) -> int:
        moved = sum(trainer.rest() for trainer in self._trainers.values()) if offload else 0
        release_cached()
        return moved

    def wake(self) -> None:
        for trainer in self._trainers.values():
            trainer.wake()

    def packed(self, lease: str, *, keep: bool) -> Iterator[list[PackedTensor]]:
        """Yield the weights of `lease`, packed for the object store; without `keep`, nothing: others gather them."""
        stream = self.trainer(lease).stream()
        if not keep:
            deque(stream, maxlen=0)
            return iter(())
        return map(
            pack_weights, buckets(stream)
        )  # not a generator expression: its variable would keep a bucket too long
