"""Store frozen weights under adapters in 4 bits (QLoRA, arXiv 2305.14314); the only module to import bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from rlhf_core.errors import ConfigError, explain

QUANTIZER = "bitsandbytes"


def check_quantizer() -> None:
    """Raise ConfigError if bitsandbytes is not installed."""
    if find_spec(QUANTIZER) is None:
        rule = f"needs {QUANTIZER}, which is not installed"
        raise ConfigError(explain("lora.quantise", "nf4", rule, f"install {QUANTIZER}, or remove lora.quantise"))


def quantise(model: nn.Module, names: Iterable[str]) -> None:
    """Replace the linear layers `names` of `model` (full names) with 4-bit layers, and freeze all weights.

    Weights are NF4 in blocks of 64, with quantized scales of the blocks. A weight is rounded when its layer is moved to
    a device.
    """
    bitsandbytes = import_module(QUANTIZER)
    for name in names:
        layer: Any = model.get_submodule(name)
        small = bitsandbytes.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            quant_type="nf4",
            compress_statistics=True,
            device="meta",
        )
        small.weight = bitsandbytes.nn.Params4bit(
            layer.weight.data,
            requires_grad=False,
            quant_type="nf4",
            compress_statistics=True,
            module=small,
        )
        small.bias = layer.bias
        model.set_submodule(name, small.to(layer.weight.device))
    model.requires_grad_(False)


def is_quantized(layer: nn.Module) -> bool:
    """Return whether `layer` was made by `quantise`."""
    return type(layer).__name__ == "Linear4bit"


def whole_weight(layer: nn.Module) -> Tensor:
    """Return the dequantized weight_OI of a layer made by `quantise`, in its original dtype as in the forward pass."""
    any_layer: Any = layer
    functional = import_module(f"{QUANTIZER}.functional")
    weight: Tensor = functional.dequantize_4bit(any_layer.weight.data, any_layer.weight.quant_state)
    return weight
