"""Check that a worker can compute on the GPUs that Ray reserved for it."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.errors import ConfigError, explain

NODE_CHARACTERS = 8
"""Number of characters shown of a Ray node id, which has 56."""


def check_gpus(key: str, value: float, reserved: Sequence[str], *, built_for: str = "") -> None:
    """Raise ConfigError if `reserved` GPUs (as `node:index`) would idle while this worker computes on the CPU.

    `built_for` is the platform of the worker's engine if the engine does not use torch's. Every worker of `key` calls
    this before it loads a model.
    """
    import torch  # is for workers; the driver imports this module too

    if not reserved:
        return
    blind = "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"
    if built_for == "cpu":
        blind = "vLLM was built for CPUs"
    if blind:
        rule = f"Ray reserved GPU {', '.join(_short(gpu) for gpu in reserved)}, but {blind}"
        raise ConfigError(
            explain(key, value, rule, "install the GPU build of torch (and vLLM) and the driver, or set it to 0")
        )


def _short(gpu: str) -> str:
    node, _, index = gpu.rpartition(":")
    return f"{node[:NODE_CHARACTERS]}:{index}"
