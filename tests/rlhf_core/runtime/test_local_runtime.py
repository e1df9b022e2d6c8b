from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config.engines import HFSamplerConfig, OptimizerConfig, RuntimeConfig, SamplingConfig, TrainerConfig
from rlhf_core.errors import SamplingError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.runtime.local_runtime import LocalRuntime
from rlhf_core.training.objectives.base import SftObjective
from rlhf_core.types import SamplingRequest, TokenSample

CONFIG = RuntimeConfig(type="local", trainer=TrainerConfig(engine="torch"), sampler=HFSamplerConfig())
REQUESTS = [SamplingRequest((10, 11, 12), seed=seed) for seed in range(4)]
SAMPLES = [TokenSample(tuple(range(10, 30)), (0,) * 4 + (1,) * 16)]


def test_a_trained_policy_is_sampled_with_its_new_weights_and_version(
    policies: tuple[Path, Path], tmp_path: Path
) -> None:
    runtime = LocalRuntime(CONFIG)
    spec = ModelSpec(str(policies[0]), "lm", None, 0)
    sampling = SamplingConfig(max_tokens=8)
    with runtime.trainer("policy", spec, OptimizerConfig()) as trainer, runtime.sampler(policies[0]) as sampler:
        before = sampler.generate(REQUESTS, sampling)
        for _ in range(5):
            trainer.forward_backward(SAMPLES, SftObjective(pack_to=None))
            trainer.optim_step(learning_rate=1e-2)
        sampler.load_weights(trainer.weights(), version=5)
        after = sampler.generate(REQUESTS, sampling)
        trainer.export(tmp_path / "policy")
    with runtime.sampler(tmp_path / "policy") as sampler:
        exported = sampler.generate(REQUESTS, sampling)
    assert [c.token_ids for c in after] == [c.token_ids for c in exported] != [c.token_ids for c in before]
    assert ({c.policy_version for c in after}, {c.policy_version for c in exported}) == ({5}, {0})
    assert set(runtime.engines()) == {"torch", "transformers"}
    runtime.close()


def test_two_sampler_leases_at_once_are_refused(policies: tuple[Path, Path]) -> None:
    runtime = LocalRuntime(CONFIG)
    with (
        runtime.sampler(policies[0]),
        pytest.raises(SamplingError, match="already leased"),
        runtime.sampler(policies[1]),
    ):
        pass
    with runtime.sampler(policies[1]) as sampler:  # the first lease was given back
        assert len(sampler.generate(REQUESTS, SamplingConfig(max_tokens=2))) == 4
