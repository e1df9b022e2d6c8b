"""Tensor parallelism by DeepSpeed's AutoTP: the ranks of a group each hold a part of every attention and MLP weight.

Every rank of a group gets the same samples. Embeddings, norms and the LM head stay whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from rlhf_core.errors import ConfigError, explain

KEY = "runtime.trainer.tensor_parallel"
SPLIT = {"column": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "row": ("o_proj", "down_proj")}


def check_partition(module: nn.Module, size: int, world: int) -> None:
    """Raise ConfigError unless `size` divides the ranks and the heads, and the model's layers have the names known here."""
    any_module: Any = module
    config = any_module.config.get_text_config()
    counts = {
        "train workers": world,
        "attention heads": config.num_attention_heads,
        "key heads": config.num_key_value_heads,
    }
    for name, count in counts.items():
        if count % size != 0:
            raise ConfigError(explain(KEY, size, f"does not divide the {count} {name}", "use a divisor of them"))
    linear = {name.rsplit(".", 1)[-1] for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    missing = sorted({name for names in SPLIT.values() for name in names} - linear)
    if missing:
        rule = f"{type(module).__name__} has no layers {missing}"
        raise ConfigError(explain(KEY, size, rule, "set it to 1 for this architecture"))


def partition_settings(size: int) -> dict[str, Any]:
    """Return DeepSpeed's settings for groups of `size` neighbouring ranks."""
    specs = [
        {"patterns": [rf".*\.({'|'.join(names)})\.(weight|bias)$"], "partition_type": kind}
        for kind, names in SPLIT.items()
    ]
    return {"autotp_size": size, "partition_config": {"use_default_specs": False, "layer_specs": specs}}


@contextmanager
def whole_layers(module: nn.Module) -> Iterator[None]:
    """Inside, the parts of every weight are together on every rank."""
    parts = []
    for layer in module.modules():
        if hasattr(layer, "gather_params"):
            own = list(layer.parameters(recurse=False))
            parts += [(parameter, parameter.data) for parameter in own]
            layer.gather_params(own)
    try:
        yield
    finally:
        # The very tensors of before: ZeRO updates them through buffers that they are views of.
        for parameter, part in parts:
            parameter.data = part
