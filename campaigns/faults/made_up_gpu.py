"""Define a train worker for GPUs that Ray counts but that do not exist."""

from __future__ import annotations

from rlhf_core.config.engines import TrainerConfig
from rlhf_core.runtime.train_worker import TrainWorker


class TrainWorkerOnCpu(TrainWorker):
    """Computes on the CPU. A regular worker refuses this if a GPU was reserved for it."""

    def __init__(self, world: int, threads: int, config: TrainerConfig, *, gpus_per_worker: float) -> None:
        super().__init__(world, threads, config)
