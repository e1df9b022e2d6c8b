from __future__ import annotations

from rlhf_core.config.engines import HFSamplerConfig, RuntimeConfig
from rlhf_core.runtime.factory import open_runtime
from rlhf_core.runtime.local_runtime import LocalRuntime
from rlhf_core.runtime.ray_runtime import RayRuntime


def test_the_type_chooses_the_runtime_and_nothing_has_served_yet() -> None:
    local = open_runtime(RuntimeConfig(type="local", sampler=HFSamplerConfig()))
    on_ray = open_runtime(RuntimeConfig(type="ray"))
    assert isinstance(local, LocalRuntime)
    assert isinstance(on_ray, RayRuntime)
    assert local.engines() == on_ray.engines() == {}
    on_ray.close()  # nothing was started, so nothing is stopped
