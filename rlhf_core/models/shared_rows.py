"""Compute several samples in shared rows, for architectures that keep the samples of a row separate.

Restarting position IDs separate samples only if all exchange between positions is attention under transformers' own
causal masks. Convolutions, recurrent states and other masks or positions leak silently. Packing is therefore refused
for an architecture that is not known to be separable, and its rows are not shared. Shared rows compute the same values
with less padding.

Legend: B rows of the batch, R rows of the layout, L positions, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_core.errors import ConfigError, explain
from rlhf_core.models.batches import TokenBatch

SEPARABLE = frozenset(
    {
        "apertus",
        "arcee",
        "cohere",
        "cohere2",
        "cwm",
        "deepseek_v2",
        "deepseek_v3",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "flex_olmo",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "granite",
        "granitemoe",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "llama",
        "minimax_m2",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "persimmon",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "solar_open",
        "stablelm",
        "starcoder2",
    }
)
"""`model_type` of the architectures known to separate samples by position IDs, with and without attention windows.
`python -m benchmarks.separable` proves each of them and tries all architectures of transformers."""
LAYERS = frozenset({"full_attention", "sliding_attention"})
"""`layer_types` known to separate samples. Some models of an architecture may have other types."""
LONGEST = 4096
"""Maximum length of shared rows. Their attention needs an L x L mask, which costs more than the padding beyond this."""
WORTHWHILE = 0.9
"""Rows are shared if at most this fraction of them remains, because a mask is slower than plain causal attention."""


@dataclass(frozen=True)
class SharedRows:
    """A layout of a batch in fewer rows, with the place of each position of the batch."""

    token_ids_RL: Tensor
    position_ids_RL: Tensor
    gone_to: Tensor
    """[B * L]: flat index into the shared rows of each position of the batch. Padding has none and reads the first."""

    def restore(self, hidden_RLH: Tensor, batch: TokenBatch) -> Tensor:
        """Return the hidden states in the rows of the batch. Those of padding are meaningless."""
        return hidden_RLH.flatten(0, 1)[self.gone_to].reshape(*batch.token_ids_BL.shape, -1)


def keeps_apart(config: Any) -> bool:
    """Return whether a model of this transformers configuration is known to keep the samples of a row separate."""
    types = getattr(config.get_text_config(), "layer_types", None) or ()
    return config.model_type in SEPARABLE and LAYERS.issuperset(types)


def check_packing(config: Any) -> None:
    """Raise ConfigError if a model of this transformers configuration is not known to keep packed samples separate."""
    if not keeps_apart(config):
        rule = f"a model of type {config.model_type} is not known to keep packed samples separate"
        raise ConfigError(explain("packing", True, rule, "train without packing (packing = false)"))


def shared_rows(batch: TokenBatch) -> SharedRows | None:
    """Return a layout of `batch` in fewer rows of its longest length, or None if that is impossible or not worthwhile.

    Samples are placed first-fit from the longest down, so the layout depends only on the lengths and their order. Use
    it only for a model for which `keeps_apart` is true.
    """
    count, length = batch.token_ids_BL.shape
    if batch.packed or count == 1 or length > LONGEST:
        return None
    used: list[int] = []
    places: dict[int, int] = {}
    for row, _, taken in sorted(batch.rows, key=lambda span: -span[2]):
        shared = next((i for i, filled in enumerate(used) if filled + taken <= length), len(used))
        if shared == len(used):
            used.append(0)
        places[row] = shared * length + used[shared]
        used[shared] += taken
    if len(used) > WORTHWHILE * count:
        return None
    comes_from = torch.zeros(len(used) * length, dtype=torch.int64)
    positions = torch.zeros_like(comes_from)
    gone_to = torch.zeros(count * length, dtype=torch.int64)
    # In the order of places, each sample numbers the positions to the end of its row, and the next one overwrites them.
    for row, _, taken in sorted(batch.rows, key=lambda span: places[span[0]]):
        place = places[row]
        end = (place // length + 1) * length
        comes_from[place : place + taken] = torch.arange(row * length, row * length + taken)
        positions[place:end] = torch.arange(end - place)
        gone_to[row * length : row * length + taken] = torch.arange(place, place + taken)
    device = batch.token_ids_BL.device
    token_ids_RL = batch.token_ids_BL.flatten()[comes_from.to(device)].reshape(len(used), length)
    return SharedRows(token_ids_RL, positions.reshape(len(used), length).to(device), gone_to.to(device))
