"""The runtime in this process, and the sampler that each configuration opens."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
from pydantic import create_model

from rlhf_core.config import runtime as runtime_config
from rlhf_core.config.engines import OptimizerConfig, SamplingConfig, TrainerConfig
from rlhf_core.config.runtime import AnySamplerConfig, HFSamplerConfig, RuntimeConfig
from rlhf_core.data.shards import read_generations
from rlhf_core.data.tables import write_prompts
from rlhf_core.errors import SamplingError
from rlhf_core.interfaces import ModelSpec, SamplerEngine
from rlhf_core.runtime.local_runtime import LocalRuntime, open_runtime
from rlhf_core.runtime.ray_runtime import RayRuntime
from rlhf_core.runtime.samplers import open_sampler, reopen_sampler
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.training.objectives.base import SftObjective
from rlhf_core.types import Message, PolicyRef, Prompt, PromptsRef, SamplingRequest, TokenSample
from stages.generate import GenerateConfig
from tests.support.policies import RUNTIME, make_policy
from tests.support.workshop import Workshop


def test_the_type_chooses_the_runtime_and_nothing_has_served_yet():
    local = open_runtime(RuntimeConfig(type="local", sampler=HFSamplerConfig()))
    on_ray = open_runtime(RuntimeConfig(type="ray"))
    assert isinstance(local, LocalRuntime)
    assert isinstance(on_ray, RayRuntime)
    assert local.engines() == on_ray.engines() == {}
    on_ray.close()  # nothing was started, so nothing is stopped


CONFIG = RuntimeConfig(type="local", trainer=TrainerConfig(engine="torch"), sampler=HFSamplerConfig())
REQUESTS = [SamplingRequest((10, 11, 12), seed=seed) for seed in range(4)]
SAMPLES = [TokenSample(tuple(range(10, 30)), (0,) * 4 + (1,) * 16)]


def test_a_trained_policy_is_sampled_with_its_new_weights_and_version(policies, tmp_path):
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


def test_two_sampler_leases_at_once_are_refused(policies):
    runtime = LocalRuntime(CONFIG)
    with (
        runtime.sampler(policies[0]),
        pytest.raises(SamplingError, match="already leased"),
        runtime.sampler(policies[1]),
    ):
        pass
    with runtime.sampler(policies[1]) as sampler:  # the first lease was given back
        assert len(sampler.generate(REQUESTS, SamplingConfig(max_tokens=2))) == 4


def test_reopening_serves_the_next_policy_and_frees_the_last(policies):
    config = HFSamplerConfig()
    first = open_sampler(policies[0], config, threads=1, transfer="")
    second = reopen_sampler(first, policies[1], config, threads=1, transfer="")
    direct = open_sampler(policies[1], config, threads=1, transfer="")
    sampling = SamplingConfig(max_tokens=6)
    assert second.generate(REQUESTS, sampling) == direct.generate(REQUESTS, sampling)
    assert first._model is None
    assert direct.versions() == {name: version(name) for name in ("torch", "transformers")}


@pytest.mark.parametrize("config", get_args(AnySamplerConfig))
def test_the_module_of_every_sampler_configuration_has_its_engine(config):
    # In a process of its own, to see that the module is imported without vLLM.
    program = (
        "import importlib, inspect, sys; "
        f"engine = importlib.import_module({config.module!r}).ENGINE; "
        "print(type(engine).__name__, 'config' in inspect.signature(engine.open).parameters, 'vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [SamplerEngine.__name__, "True", "False"]


def documented() -> tuple[str, str]:
    """Return the two pieces of code of docs/add_a_sampler.md: the configuration and the module."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "add_a_sampler.md").read_text()
    configuration, module = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    return configuration, module


def test_the_documented_sampler_serves_a_generate_stage(tmp_path, monkeypatch):
    configuration, source = documented()
    names = dict(vars(runtime_config))
    exec(configuration, names)
    monkeypatch.setattr(runtime_config, "FixedSamplerConfig", names["FixedSamplerConfig"], raising=False)
    module = ModuleType("rlhf_core.sampling.fixed_sampler")
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)

    store = ArtifactStore(tmp_path / "store")
    write_prompts(tmp_path / "prompts", [Prompt("p", (Message("user", "What is 12 + 30?"),), "", "test")])
    inputs = {
        "policy": store.external(PolicyRef, make_policy(tmp_path / "policy")),
        "prompts": store.external(PromptsRef, tmp_path / "prompts"),
    }
    with_row = create_model(
        "WithRow", __base__=runtime_config.RuntimeConfig, sampler=(names["FixedSamplerConfig"], ...)
    )
    table = RUNTIME.model_dump() | {"sampler": {"type": "fixed", "text": "It is 12."}}
    runtime = LocalRuntime(with_row.model_validate(table))
    shop = Workshop(store, runtime)
    config = GenerateConfig(samples_per_prompt=2, sampling=SamplingConfig(max_tokens=20))
    ref, _ = shop.run("generate", config, inputs)
    answers = [one.completion for one in read_generations(store.path(ref))]
    assert [(one.text, one.finish_reason, set(one.logprobs)) for one in answers] == [("It is 12.", "stop", {0.0})] * 2
    assert runtime.engines() == {"fixed": "1"}
