from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.loading import check_kernels, load_model, use_liger


def test_what_is_always_there_is_not_asked_about() -> None:
    for attention in ("sdpa", "eager"):
        check_kernels(attention, liger=False, device="cpu")


def test_kernels_for_gpus_are_refused_on_a_cpu() -> None:
    with pytest.raises(
        ConfigError, match=r"attention = 'flash_attention_2': FlashAttention 2 is not available \(device cpu\)"
    ):
        check_kernels("flash_attention_2", liger=False, device="cpu")
    with pytest.raises(ConfigError, match=r"liger = True: Liger kernels are not available .*install liger-kernel"):
        check_kernels("sdpa", liger=True, device="cpu")


@pytest.mark.parametrize("head", ["lm", "value"])
def test_liger_gets_the_backbone_and_leaves_losses_alone(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, head: Any
) -> None:
    asked: list[dict[str, Any]] = []
    package: Any = ModuleType("liger_kernel.transformers.monkey_patch")
    package.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
    package._apply_liger_kernel_to_instance = lambda **arguments: asked.append(arguments)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    spec = ModelSpec(str(tiny_llama), head, None, 5)
    model: Any = load_model(spec, dtype="float32", attention="sdpa", gradient_checkpointing=False, device="cpu")
    use_liger(model)
    assert type(asked[0].pop("model")).__name__ == "LlamaModel"
    assert asked == [{"cross_entropy": False, "fused_linear_cross_entropy": False}]
    package.MODEL_TYPE_TO_APPLY_LIGER_FN = {}
    with pytest.raises(ConfigError, match="Liger does not support the architecture 'llama'"):
        use_liger(model)
