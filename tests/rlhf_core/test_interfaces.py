"""Implementations fit the seams: every method of a protocol is there, under the same parameter names."""

import inspect

import pytest

from rlhf_contrib.vllm_server.sampler import VllmServerSampler
from rlhf_core import interfaces
from rlhf_core.runtime.handles import RaySampler, RayTrainer
from rlhf_core.runtime.local_runtime import LocalRuntime
from rlhf_core.runtime.ray_runtime import RayRuntime
from rlhf_core.sampling.hf_sampler import HFSampler
from rlhf_core.sampling.vllm_sampler import VllmSampler
from rlhf_core.tracking.memory import MemoryStageTracker
from rlhf_core.tracking.mlflow import MlflowStageTracker
from rlhf_core.training.distillation_trainer import DistillationTrainer
from rlhf_core.training.trainer import LocalTrainer


@pytest.mark.parametrize(
    ("implementation", "protocol"),
    [
        (LocalTrainer, interfaces.Trainer),
        (RayTrainer, interfaces.Trainer),
        (LocalTrainer, interfaces.RankTrainer),
        (DistillationTrainer, interfaces.Trainer),
        (HFSampler, interfaces.EngineSampler),
        (VllmSampler, interfaces.DeviceSampler),
        (VllmServerSampler, interfaces.EngineSampler),
        (RaySampler, interfaces.Sampler),
        (LocalRuntime, interfaces.Runtime),
        (RayRuntime, interfaces.Runtime),
        (MemoryStageTracker, interfaces.StageTracker),
        (MlflowStageTracker, interfaces.StageTracker),
    ],
)
def test_an_implementation_has_the_methods_of_its_protocol(implementation, protocol):
    methods = inspect.getmembers(protocol, inspect.isfunction)  # those that it inherits too
    wanted = {name: method for name, method in methods if name[0] != "_"}
    assert wanted
    for name, method in wanted.items():
        theirs = list(inspect.signature(getattr(implementation, name)).parameters)
        ours = list(inspect.signature(method).parameters)
        assert theirs[: len(ours)] == ours, f"{implementation.__name__}.{name}"
