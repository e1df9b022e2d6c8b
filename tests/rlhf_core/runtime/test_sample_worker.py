"""The worker as a plain object; on Ray, with vLLM, it is tested by `test_ray_runtime`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config.engines import HFSamplerConfig, SamplingConfig
from rlhf_core.errors import ConfigError
from rlhf_core.runtime.sample_worker import SampleWorker
from rlhf_core.types import SamplingRequest


def test_a_worker_recovers_from_a_policy_that_cannot_be_opened(policies: tuple[Path, Path], tmp_path: Path) -> None:
    worker = SampleWorker(HFSamplerConfig(), threads=1)
    worker.open(policies[0], "")
    with pytest.raises(ConfigError, match=r"config\.json"):
        worker.open(tmp_path, "")
    assert set(worker.open(policies[1], "")) == {"torch", "transformers"}
    (completion,) = worker.generate([SamplingRequest((10, 11), seed=1)], SamplingConfig(max_tokens=3))
    assert completion.policy_version == 0
    worker.stop()
    worker.stop()  # a second time does nothing
