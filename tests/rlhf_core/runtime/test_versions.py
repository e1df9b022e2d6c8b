from __future__ import annotations

import torch

from rlhf_core.config.engines import TrainerConfig
from rlhf_core.runtime.connection import trainer_versions


def test_versions_name_only_the_engines_of_the_config() -> None:
    assert set(trainer_versions(TrainerConfig(engine="torch"))) == {"torch", "transformers"}
    assert trainer_versions(TrainerConfig(engine="torch"))["torch"] == torch.__version__
