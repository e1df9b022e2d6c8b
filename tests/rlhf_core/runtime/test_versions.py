from __future__ import annotations

from importlib.metadata import version

import torch

from rlhf_core.config.engines import HFSamplerConfig, TrainerConfig
from rlhf_core.runtime.versions import sampler_versions, trainer_versions


def test_versions_name_only_the_engines_of_the_config() -> None:
    assert set(trainer_versions(TrainerConfig(engine="torch"))) == {"torch", "transformers"}
    assert trainer_versions(TrainerConfig(engine="torch"))["torch"] == torch.__version__
    assert sampler_versions(HFSamplerConfig(), None)["transformers"] == version("transformers")
