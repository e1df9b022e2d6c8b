"""Add low-rank adapters (LoRA, arXiv 2106.09685; rsLoRA, DoRA) and merge them; the only module that imports peft.

Adapters are inserted into the model instead of wrapped around it, so a model with LoRA has the same class, backbone and
head as one without.

The result of a stage is always the merged weights; the adapters are saved beside them for other programs. The next
stage starts from the merged weights with fresh adapters. Adapters are never stacked, loaded again or merged twice.
Within a stage, a checkpoint contains the adapters, and a resumed stage continues with them.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlhf_core.config.engines import LoraConfig
from rlhf_core.errors import ConfigError, explain
from rlhf_core.models.quantised import is_quantized, quantise, whole_weight

logger = logging.getLogger(__name__)

_LAYER = ".base_layer."
_BLOCK_STATE = ".base_layer.weight."
"""Part of the names of the tensors that restore a 4-bit weight."""
_ADAPTER = "default"


def apply_lora(model: nn.Module, config: LoraConfig, *, seed: int) -> nn.Module:
    """Return `model` with trainable adapters and everything else frozen. Its outputs do not change at first.

    A ~ Kaiming-uniform from `seed`, B = 0. With `quantise`, the adapted layers' weights are rounded to 4 bits first.
    Raises ConfigError if no module matches `target_modules`.
    """
    linear = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    targets = [name for name in config.target_modules if name in linear]
    if not targets:
        raise ConfigError(
            explain(
                "lora.target_modules",
                config.target_modules,
                "the model has none of these modules",
                f"choose from {sorted(linear)}",
            )
        )
    if len(targets) < len(config.target_modules):
        logger.warning(
            "lora: %s has no modules named %s", type(model).__name__, sorted(set(config.target_modules) - linear)
        )
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        use_rslora=config.variant == "rslora",
        use_dora=config.variant == "dora",
        target_modules=targets,
        bias="none",
        task_type="CAUSAL_LM",
    )
    any_model: Any = model
    if config.quantise:
        quantise(model, targets)
        any_model.is_loaded_in_4bit = (
            True  # tells peft to adapt 4-bit layers; deleted below, as transformers would refuse to move the model
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = peft.inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
    if config.quantise:
        del any_model.is_loaded_in_4bit
    return adapted


def has_lora(model: nn.Module) -> bool:
    """Return whether `model` has adapters of `apply_lora`."""
    return any(".lora_A." in name for name, _ in model.named_parameters())


def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights under Hugging Face checkpoint names, with adapters merged and without tied duplicates.

    The live model does not change. Tensors are contiguous and on the CPU. Weights without an adapter may share memory
    with a model on the CPU, so use or copy them before the next optimizer step. The merge is V = W + scaling * B A in
    fp32, with every row of V scaled to its learned norm for DoRA, and rounded once to the dtype of W. A 4-bit W is
    dequantized first.
    """
    layers = _adapted_layers(model)
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name or _BLOCK_STATE in name:
            continue
        merged = _merged(tensor, layers.pop(name)) if name in layers else tensor
        state[name.replace(_LAYER, ".")] = merged.detach().cpu().contiguous()
    for name in _tied_duplicates(model):
        state.pop(name, None)
    return _checkpoint_names(model, state)


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write only the adapters in peft's layout, so that `peft.PeftModel.from_pretrained(base, folder)` loads them."""
    any_model: Any = model
    folder.mkdir(parents=True, exist_ok=True)
    weights = peft.get_peft_model_state_dict(model, adapter_name=_ADAPTER)
    named = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = any_model.peft_config[_ADAPTER].to_dict()
    # The folder of the base model is a path on one machine. peft receives the base model when it loads an adapter.
    settings |= {
        "base_model_name_or_path": None,
        "inference_mode": True,
        "target_modules": sorted(settings["target_modules"]),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True, default=str) + "\n")


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers with an adapter, by the name of the weight that it changes."""
    return {
        f"{name}{_LAYER}weight": module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and _ADAPTER in module.lora_A
    }


@torch.no_grad()
def _merged(weight_OI: Tensor, layer: Any) -> Tensor:
    base = layer.get_base_layer()
    if is_quantized(base):
        weight_OI = whole_weight(base)
    a_RI, b_OR = layer.lora_A[_ADAPTER].weight.float(), layer.lora_B[_ADAPTER].weight.float()
    merged_OI = weight_OI.float() + (b_OR @ a_RI) * layer.scaling[_ADAPTER]
    if layer.use_dora[_ADAPTER]:
        norm_O = layer.lora_magnitude_vector[_ADAPTER].weight.float()
        merged_OI = merged_OI * (norm_O / merged_OI.norm(dim=1)).unsqueeze(1)
    return merged_OI.to(weight_OI.dtype)


def _tied_duplicates(model: nn.Module) -> list[str]:
    """Return the names of parameters that duplicate another one (a tied LM head)."""
    duplicates, seen = [], set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            duplicates.append(name.replace(_LAYER, "."))
        seen.add(id(parameter))
    return duplicates


def _checkpoint_names(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo the changes that transformers makes to names and tensors on load (fused experts, for example), as
    `save_pretrained` does."""
    if not isinstance(model, PreTrainedModel):
        return state
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, state).items()}
