"""Define the value model, a backbone with a scalar head saved as safetensors, and heads that compute in float32.

Legend: B rows, L positions, H hidden.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rlhf_core.errors import ConfigError, explain

VALUE_HEAD_FILE = "value_head.safetensors"


class Float32Linear(nn.Linear):
    """A linear layer whose products are float32 numbers, whatever the precision of its weight, its input or autocast.

    A bfloat16 number above 8 is a multiple of 0.0625, so that close scores would be equal.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden @ weight.T + bias in float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight.float(), None if self.bias is None else self.bias.float())


def compute_in_float32(head: nn.Module) -> None:
    """Turn a linear head into a `Float32Linear` with the same weight, which may be tied. Raises ConfigError for others."""
    if type(head).forward is not nn.Linear.forward:
        rule = f"the LM head is a {type(head).__name__}, not a linear layer alone"
        raise ConfigError(explain("fp32_lm_head", True, rule, "set it to false, or leave the head out of the adapters"))
    head.__class__ = Float32Linear


class ValueModel(nn.Module):
    """A model that computes V(state) = w . hidden, or the score of a text where transformers has no class for it.

    `rlhf_core.models.forward.token_values` shifts the values so that values[t] is *before* token t. The head has no
    bias, like that of a reward model, so that it can start from one.
    """

    def __init__(self, backbone: nn.Module, head_1H: Tensor) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = Float32Linear(head_1H.shape[1], 1, bias=False)
        self.value_head.weight = nn.Parameter(head_1H.detach().clone())

    @property
    def base_model(self) -> nn.Module:
        """The backbone, under the name that transformers models use."""
        return self.backbone

    @property
    def score(self) -> nn.Module:
        """The head, under the name that sequence classifiers of transformers use."""
        return self.value_head

    @property
    def config(self) -> Any:
        """The backbone's configuration."""
        return self.backbone.config

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return values_BL of the states *after* each token."""
        hidden_BLH = self.backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return self.value_head(hidden_BLH).squeeze(-1)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        """Recompute the backbone's activations in the backward pass."""
        backbone: Any = self.backbone
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs=gradient_checkpointing_kwargs)

    def save(self, folder: Path) -> None:
        """Write the backbone in Hugging Face layout and the head beside it."""
        backbone: Any = self.backbone
        backbone.save_pretrained(folder)
        save_file({"weight": self.value_head.weight.detach().cpu().contiguous()}, folder / VALUE_HEAD_FILE)


def initial_head(hidden_size: int, *, seed: int) -> Tensor:
    """Return head_1H drawn from N(0, 1/(hidden + 1)) (arXiv 2009.01325), independent of the global random state."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, hidden_size), generator=generator) / (hidden_size + 1) ** 0.5


def read_head(folder: Path) -> Tensor | None:
    """Return the scalar head_1H of a value model or reward model in a folder, or None for the folder of a causal LM."""
    if (folder / VALUE_HEAD_FILE).is_file():
        return _read(folder / VALUE_HEAD_FILE, "weight")
    for file in sorted(folder.glob("*.safetensors")):
        head_1H = _read(file, "score.weight")
        if head_1H is not None:
            return head_1H
    return None


def _read(file: Path, name: str) -> Tensor | None:
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name) if name in tensors.keys() else None  # noqa: SIM118
