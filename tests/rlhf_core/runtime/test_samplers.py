from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import pytest

from rlhf_core.config.engines import AnySamplerConfig, BaseSamplerConfig, HFSamplerConfig, SamplingConfig
from rlhf_core.interfaces import SamplerEngine
from rlhf_core.runtime.samplers import open_sampler, reopen_sampler
from rlhf_core.types import SamplingRequest

REQUESTS = [SamplingRequest((10, 11, 12), seed=seed) for seed in range(3)]


def test_reopening_serves_the_next_policy_and_frees_the_last(policies: tuple[Path, Path]) -> None:
    config = HFSamplerConfig()
    first = open_sampler(policies[0], config, threads=1, transfer="")
    second = reopen_sampler(first, policies[1], config, threads=1, transfer="")
    direct = open_sampler(policies[1], config, threads=1, transfer="")
    sampling = SamplingConfig(max_tokens=6)
    assert second.generate(REQUESTS, sampling) == direct.generate(REQUESTS, sampling)
    assert first._model is None
    assert direct.versions() == {name: version(name) for name in ("torch", "transformers")}


@pytest.mark.parametrize("config", get_args(AnySamplerConfig))
def test_the_module_of_every_sampler_configuration_has_its_engine(config: type[BaseSamplerConfig]) -> None:
    # In a process of its own: that a module can be imported without vLLM, and what it then opens.
    program = (
        "import importlib, inspect, sys; "
        f"engine = importlib.import_module({config.module!r}).ENGINE; "
        "print(type(engine).__name__, inspect.signature(engine.open).parameters['config'].annotation, 'vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [SamplerEngine.__name__, config.__name__, "False"]
