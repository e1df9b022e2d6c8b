"""The worker as a plain object; on Ray it is tested by `test_ray_runtime` and `test_handles`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config.engines import TrainerConfig
from rlhf_core.errors import TrainingError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.runtime.train_worker import TrainWorker
from rlhf_core.types import TokenSample

SAMPLE = TokenSample((10, 11, 12), (0, 1, 1))


def test_one_worker_hosts_several_roles_until_they_are_released(policies: tuple[Path, Path]) -> None:
    worker = TrainWorker(0, 1, 1, TrainerConfig(engine="torch"))
    for lease, folder in zip(("policy-1", "reference-2"), policies, strict=True):
        assert set(worker.open(lease, ModelSpec(str(folder), "lm", None, 0), None)) == {"torch", "transformers"}
    policy, reference = (worker.logprobs(lease, [SAMPLE], 1.0) for lease in ("policy-1", "reference-2"))
    assert policy != reference
    worker.release("policy-1")
    assert worker.logprobs("reference-2", [SAMPLE], 1.0) == reference
    with pytest.raises(TrainingError, match=r"lease = 'policy-1': is not open"):
        worker.logprobs("policy-1", [SAMPLE], 1.0)


def test_only_the_newest_staged_weights_can_be_sent(policies: tuple[Path, Path]) -> None:
    worker = TrainWorker(0, 1, 1, TrainerConfig(engine="torch"))
    worker.open("policy-1", ModelSpec(str(policies[0]), "lm", None, 0), None)
    first, second = worker.stage_weights("policy-1"), worker.stage_weights("policy-1")
    assert first is not None and second is not None
    assert (first[0], second[0]) == (1, 2)
    assert first[1] == second[1]  # the same weights have the same digest
    with pytest.raises(TrainingError, match="weights = 1: is not the newest staged, 2"):
        worker.send_weights(1, [], "nccl", 1)
