"""Open the `Runtime` that a `RuntimeConfig` describes."""

from __future__ import annotations

from rlhf_core.config.engines import RuntimeConfig
from rlhf_core.interfaces import Runtime


def open_runtime(config: RuntimeConfig) -> Runtime:
    """Return the runtime that `config.type` names. Nothing starts before the first lease or `prewarm`."""
    if config.type == "local":
        from rlhf_core.runtime.local_runtime import LocalRuntime

        return LocalRuntime(config)
    from rlhf_core.runtime.ray_runtime import RayRuntime

    return RayRuntime(config)
