"""Rows of several samples where a batch has one sample to a row: the backbone computes less padding, and the same values.

Only for architectures in which nothing but attention passes between positions, so that restarting position ids keep the
samples apart (as with packing); others keep their rows.

Legend: B rows of the batch, R rows of the layout, L positions, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.batches import TokenBatch

SEPARABLE = frozenset({"gemma2", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"})
"""`model_type` of the architectures that are known to keep samples apart by their position ids."""
LONGEST = 4096
"""Attention of shared rows needs a mask of L x L; beyond this it costs more than the padding."""
WORTHWHILE = 0.9
"""Rows are shared if at most this part of them remains: a mask is slower than plain causal attention."""


@dataclass(frozen=True)
class SharedRows:
    """Where each position of the fewer rows comes from, and where each of the batch has gone."""

    token_ids_RL: Tensor
    position_ids_RL: Tensor
    gone_to: Tensor
    """[B * L]: the flat place of each position of the batch; padding has none of its own and reads the first."""

    def restore(self, hidden_RLH: Tensor, batch: TokenBatch) -> Tensor:
        """Return the hidden states in the rows of the batch; those of padding mean nothing."""
        return hidden_RLH.flatten(0, 1)[self.gone_to].reshape(*batch.token_ids_BL.shape, -1)


def shared_rows(batch: TokenBatch, *, model_type: str) -> SharedRows | None:
    """Return a layout of `batch` in fewer rows as long as its longest, or None where that is impossible or not worth it.

    First-fit from the longest sample down, so it depends on the lengths and their order alone.
    """
    count, length = batch.token_ids_BL.shape
    if batch.packed or count == 1 or length > LONGEST or model_type not in SEPARABLE:
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
    # In the order of their places: each sample counts on to the end of its row, and the next one takes over.
    for row, _, taken in sorted(batch.rows, key=lambda span: places[span[0]]):
        place = places[row]
        end = (place // length + 1) * length
        comes_from[place : place + taken] = torch.arange(row * length, row * length + taken)
        positions[place:end] = torch.arange(end - place)
        gone_to[row * length : row * length + taken] = torch.arange(place, place + taken)
    device = batch.token_ids_BL.device
    token_ids_RL = batch.token_ids_BL.flatten()[comes_from.to(device)].reshape(len(used), length)
    return SharedRows(token_ids_RL, positions.reshape(len(used), length).to(device), gone_to.to(device))
