"""Tensor parallelism by DeepSpeed's AutoTP: the ranks of a group each hold a part of every attention and MLP weight.

Every rank of a group gets the same samples. Embeddings, norms and the LM head stay whole on every rank, and the gradients
of those are the same on all of them: between a split layer and the next one lie nothing but a rank's own heads, and what
comes in and goes out of that region is summed over the group. A whole parameter *inside* the region is another matter:
each rank has the gradient of its own heads only. Qwen3 and Gemma 3 have such, the norms of queries and keys over the width
of one head; their gradients are summed over the group too. A model with any other is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from rlhf_core.errors import ConfigError, explain

KEY = "runtime.trainer.tensor_parallel"
SPLIT = {"column": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "row": ("o_proj", "down_proj")}
HEAD_NORMS = ("q_norm", "k_norm")
"""Norms over the width of one head, the same for all heads of a layer."""
PROVEN = frozenset(
    {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "smollm3",
        "olmo",
        "stablelm",
        "cohere",
        "cohere2",
        "helium",
    }
)
"""`model_type` of the architectures of which a test shows that two ranks are one."""


def check_partition(module: nn.Module, size: int, world: int) -> None:
    """Raise ConfigError unless `size` divides the ranks and the heads, and the architecture is one that can be split."""
    any_module: Any = module
    config = any_module.config.get_text_config()
    if config.model_type not in PROVEN:
        rule = (
            f"the architecture {config.model_type!r} is not known to train alike in parts ({', '.join(sorted(PROVEN))})"
        )
        raise ConfigError(explain(KEY, size, rule, "set it to 1, and zero_stage to 3 where memory is short"))
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
    head_norms(module)


def head_norms(module: nn.Module) -> list[nn.Parameter]:
    """Return the whole parameters that see a rank's own heads only, in the order of the layers.

    Raises ConfigError if there are others than the norms over one head beside the layers that are split.
    """
    any_module: Any = module
    config = any_module.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    split = {name for names in SPLIT.values() for name in names}
    norms = []
    for path, layer in module.named_modules():
        if not any(name in split for name, _ in layer.named_children()):
            continue
        for name, parameter in layer.named_parameters():
            child = name.split(".", 1)[0]
            if child in split:
                continue
            if child not in HEAD_NORMS or parameter.shape != (width,):
                rule = f"{path}.{name} is whole on every rank, which would see its own heads only"
                raise ConfigError(explain(KEY, ">= 2", rule, "set it to 1 for this architecture"))
            norms.append(parameter)
    return norms


def sum_head_norms(module: nn.Module, group: Any) -> None:
    """Make every backward pass sum the gradients of the norms over one head over the ranks of `group`.

    Each rank has the sum over its own heads, and together they have all. All ranks of the group run the same graph, so
    they come by here in the same order.
    """

    def summed(grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=group)
        return grad

    for parameter in head_norms(module):
        parameter.register_hook(summed)


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
