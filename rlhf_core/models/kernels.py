"""Use faster kernels if they are installed: FlashAttention 2 and Liger (arXiv 2410.10989). They are optional."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn
from transformers.utils import is_flash_attn_2_available

from rlhf_core.errors import ConfigError, explain
from rlhf_core.models.architecture import backbone_of

LIGER = "liger_kernel"


def check_kernels(attention: str, *, liger: bool, device: str) -> None:
    """Raise ConfigError for kernels that are not installed or do not run on `device`, a torch device type."""
    if attention == "flash_attention_2" and not (device == "cuda" and is_flash_attn_2_available()):
        rule, remedy = (
            f"FlashAttention 2 is not available (device {device})",
            "use sdpa, or install flash-attn on a GPU",
        )
        raise ConfigError(explain("runtime.trainer.attention", attention, rule, remedy))
    if liger and not (device == "cuda" and find_spec(LIGER) is not None):
        rule, remedy = (
            f"Liger kernels are not available (device {device})",
            "remove it, or install liger-kernel on a GPU",
        )
        raise ConfigError(explain("runtime.trainer.liger", liger, rule, remedy))


def use_liger(model: nn.Module) -> None:
    """Replace the norms, rotations and MLPs of `model` with Liger's kernels, but not its losses.

    Raises ConfigError for an architecture that Liger does not support, which it would leave unchanged silently.
    """
    any_model: Any = model
    patches = import_module(f"{LIGER}.transformers.monkey_patch")
    kind = any_model.config.get_text_config().model_type
    if kind not in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
        rule = f"Liger does not support the architecture {kind!r}"
        raise ConfigError(explain("runtime.trainer.liger", True, rule, "remove it"))
    patches._apply_liger_kernel_to_instance(
        model=backbone_of(model), cross_entropy=False, fused_linear_cross_entropy=False
    )
