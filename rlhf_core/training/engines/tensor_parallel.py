"""Use DeepSpeed's tensor parallelism (AutoTP), which splits every attention and MLP weight over the ranks of a group.

Every rank of a group gets the same samples. Embeddings, norms and the LM head stay whole on every rank, and their
gradients are the same on all ranks: between two split layers a rank sees only its own heads, and the inputs and
outputs of that region are summed over the group. For a whole parameter *inside* the region, each rank has the gradient
of its own heads only. Qwen3 and Gemma 3 have such parameters, the norms of queries and keys over the width of one head,
and their gradients are summed over the group too. A model with any other such parameter is refused.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from rlhf_core.errors import ConfigError

KEY = "runtime.trainer.tensor_parallel"
SPLIT = {"column": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "row": ("o_proj", "down_proj")}
HEAD_NORMS = ("q_norm", "k_norm")
"""Names of norms over the width of one head, shared by all heads of a layer."""
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
"""`model_type` of the architectures for which a test shows that two ranks give the same result as one."""


def check_partition(module: nn.Module, size: int, world: int) -> None:
    """Raise ConfigError unless `size` divides the ranks and the heads, and the architecture can be split."""
    any_module: Any = module
    config = any_module.config.get_text_config()
    if config.model_type not in PROVEN:
        rule = f"the architecture {config.model_type!r} is not known to train identically when it is split (supported: {', '.join(sorted(PROVEN))})"
        raise ConfigError(KEY, size, rule, "set it to 1, and zero_stage to 3 if memory is short")
    counts = {
        "train workers": world,
        "attention heads": config.num_attention_heads,
        "key heads": config.num_key_value_heads,
    }
    for name, count in counts.items():
        if count % size != 0:
            raise ConfigError(KEY, size, f"does not divide the {count} {name}", "use a divisor of them")
    linear = {name.rsplit(".", 1)[-1] for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    missing = sorted({name for names in SPLIT.values() for name in names} - linear)
    if missing:
        rule = f"{type(module).__name__} has no layers {missing}"
        raise ConfigError(KEY, size, rule, "set it to 1 for this architecture")
    head_norms(module)


def head_norms(module: nn.Module) -> list[nn.Parameter]:
    """Find the whole parameters that see only a rank's own heads, in the order of the layers.

    Raises ConfigError if parameters other than norms over one head are next to the split layers.
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
                rule = f"{path}.{name} is not split, and each rank would see only its own heads"
                raise ConfigError(KEY, ">= 2", rule, "set it to 1 for this architecture")
            norms.append(parameter)
    return norms


def sum_head_norms(module: nn.Module, group: Any) -> None:
    """Register hooks that sum the gradients of the norms over one head over the ranks of `group`.

    Each rank has the sum over its own heads, so the sum over ranks covers all heads. All ranks of the group run the
    same graph, so the hooks run in the same order on each.
    """

    def summed(grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=group)
        return grad

    for parameter in head_norms(module):
        parameter.register_hook(summed)


def partition_settings(size: int) -> dict[str, Any]:
    """DeepSpeed settings for groups of `size` consecutive ranks."""
    specs = [
        {"patterns": [rf".*\.({'|'.join(names)})\.(weight|bias)$"], "partition_type": kind}
        for kind, names in SPLIT.items()
    ]
    return {"autotp_size": size, "partition_config": {"use_default_specs": False, "layer_specs": specs}}


@contextmanager
def whole_layers(module: nn.Module, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Gather on every rank, inside this context, all parts of the layers of `module` with one of `tensors`."""
    parts = []
    wanted = {id(tensor) for tensor in tensors}
    layers: list[Any] = list(module.modules())  # layers of AutoTP have `gather_params`
    for layer in layers:
        own = list(layer.parameters(recurse=False))
        if hasattr(layer, "gather_params") and not wanted.isdisjoint(map(id, own)):
            parts += [(parameter, parameter.data) for parameter in own]
            layer.gather_params(own)
    try:
        yield
    finally:
        # Restore the same tensor objects, because ZeRO updates them through the buffers that they are views of.
        for parameter, part in parts:
            parameter.data = part
