"""Convert samples to a padded or packed batch and back; the only module that handles padding.

Legend: N samples, B rows of the batch, R rows of the layout, L positions, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_core.errors import ConfigError, DataError
from rlhf_core.models.micro_batches import LEAST_SAVED, LONGEST, RowBlock, common_beginnings, cost
from rlhf_core.sequences import ROUTED_EXPERTS, Sequences
from rlhf_core.types import Column, TokenSample, ids


@dataclass(frozen=True)
class TokenBatch:
    """Samples in rows, padded on the right. With packing, several samples share a row.

    `position_ids_BL` restart at 0 with each sample and continue through the padding after the last one, so that a row
    with one sample is plain causal attention without a mask. `rows[n]` is the place of sample n.

    >>> batch = collate([TokenSample((5, 7, 2), (0, 1, 1)), TokenSample((4,), (0,))], pad_id=0)
    >>> batch.token_ids_BL.tolist(), batch.rows
    ([[5, 7, 2], [4, 0, 0]], ((0, 0, 3), (1, 0, 1)))
    """

    token_ids_BL: Tensor
    """int64"""
    position_ids_BL: Tensor
    """int64"""
    segment_ids_BL: Tensor
    """int64: 0 for padding, 1, 2, ... for the samples of the row."""
    loss_mask_BL: Tensor
    """float32"""
    rows: tuple[tuple[int, int, int], ...]
    """(row, start, length) of each sample, in the given order of the samples."""
    fields: dict[str, Tensor]
    """Other per-token values of the samples by field name (`old_logprobs`, `advantages`, ...): float32 BL, padded by 0.
    `routed_experts` are int16 BLW, padded by -1."""
    packed: bool
    """Whether some row holds more than one sample."""
    source: TokenBatch | None = None
    """The batch in host memory from which this one was copied to a device."""

    @property
    def on_host(self) -> TokenBatch:
        """The batch in host memory, for values that Python reads: reading them from a GPU waits for all its work."""
        return self.source or self

    def to(self, device: str | torch.device) -> TokenBatch:
        moved: dict[str, Any] = {
            one.name: to_device(getattr(self, one.name), device) for one in fields(self) if one.name.endswith("_BL")
        }
        further = {name: to_device(value_BL, device) for name, value_BL in self.fields.items()}
        return replace(self, **moved, fields=further, source=self.on_host)

    def masked_positions(self, *, start: int = 0) -> tuple[Tensor, Tensor]:
        """Rows and positions of the tokens that the loss mask selects; positions are counted from `start`.

        With `start = 1` they are the positions t - 1 whose hidden states predict the masked tokens t.
        """
        rows_T, at_T = torch.nonzero(self.on_host.loss_mask_BL[:, start:], as_tuple=True)
        device = self.loss_mask_BL.device
        return to_device(rows_T, device), to_device(at_T, device)


def to_device(x: Tensor, device: str | torch.device) -> Tensor:
    """Copy a tensor in host memory to a device, without waiting for the work that is queued there.

    From memory that is not pinned, CUDA may wait if it is more than 64 KiB. Therefore a pinned copy is sent, which torch
    keeps until it has arrived; `x` may be changed or released at once.
    """
    pinned = x.pin_memory() if torch.device(device).type == "cuda" else x
    return pinned.to(device, non_blocking=True)


def collate(samples: Sequences | Sequence[TokenSample], *, pad_id: int, pack_to: int | None = None) -> TokenBatch:
    """Lay out `samples` in a batch, in order: one per row, or with `pack_to` as many per row as fit in that length.

    Packing is first-fit and depends only on the order of the samples. Raises DataError for an empty list, and for a sample
    that is empty, longer than `pack_to` or trained at its first token.
    """
    sequences = samples if isinstance(samples, Sequences) else Sequences.of(samples)
    _check(sequences, pack_to)
    lengths = sequences.lengths.tolist()
    rows = _first_fit(lengths, pack_to) if pack_to else tuple((row, 0, length) for row, length in enumerate(lengths))
    count = 1 + max(row for row, _, _ in rows)
    width = max(start + length for _, start, length in rows)
    # Where each of the S tokens goes in the flat batch [B * L].
    begins_N = np.array([row * width + start for row, start, _ in rows]) - sequences.offsets[:-1]
    places_S = np.arange(len(sequences.token_ids)) + np.repeat(begins_N, lengths)

    def padded(values_S: Any, kind: type[Any], fill: int = 0) -> Tensor:
        values_BL = np.full((count * width, *values_S.shape[1:]), fill, kind)
        values_BL[places_S] = values_S
        return torch.from_numpy(values_BL.reshape(count, width, *values_S.shape[1:]))

    def padded_field(name: str, values_S: NDArray[Any]) -> Tensor:
        return padded(values_S, np.int16, -1) if name == ROUTED_EXPERTS else padded(values_S, np.float32)

    position_ids_BL = torch.arange(width).repeat(count, 1)
    segments_N, used = [], [0] * count
    for row, start, _ in rows:
        used[row] += 1
        segments_N.append(used[row])
        position_ids_BL[row, start:] = torch.arange(width - start)
    return TokenBatch(
        token_ids_BL=padded(sequences.token_ids, np.int64, pad_id),
        position_ids_BL=position_ids_BL,
        segment_ids_BL=padded(np.repeat(segments_N, lengths), np.int64),
        loss_mask_BL=padded(sequences.loss_mask, np.float32),
        rows=rows,
        fields={name: padded_field(name, values_S) for name, values_S in sequences.fields.items()},
        packed=count < len(rows),
    )


def unpack_rows(x_BL: Tensor, batch: TokenBatch) -> list[Tensor]:
    """Extract each sample's span of `x_BL` without padding, in the given order of the samples."""
    return [x_BL[row, start : start + length] for row, start, length in batch.rows]


def _first_fit(lengths: Sequence[int], pack_to: int) -> tuple[tuple[int, int, int], ...]:
    used: list[int] = []
    places = []
    for length in lengths:
        row = next((row for row, filled in enumerate(used) if filled + length <= pack_to), len(used))
        if row == len(used):
            used.append(0)
        places.append((row, used[row], length))
        used[row] += length
    return tuple(places)


def _check(sequences: Sequences, pack_to: int | None) -> None:
    if not len(sequences):
        raise DataError("samples", 0, "a batch needs at least one sample", "skip the empty batch")
    for index, (start, length) in enumerate(zip(sequences.offsets.tolist(), sequences.lengths.tolist(), strict=False)):
        if length == 0:
            raise DataError(f"samples[{index}].token_ids", (), "must not be empty", "drop the sample")
        if sequences.loss_mask[start] != 0:
            rule = "nothing predicts the first token, so it cannot be trained on"
            raise DataError(f"samples[{index}].loss_mask[0]", 1, rule, "set it to 0")
        if pack_to is not None and length > pack_to:
            rule = f"must be <= pack_to = {pack_to}"
            raise DataError(f"samples[{index}] length", length, rule, "truncate it or raise pack_to")


# ---------------------------------------------------------------- shared rows

# Restarting position IDs separate samples only if all exchange between positions is attention under transformers' own
# causal masks. Convolutions, recurrent states and other masks or positions leak silently. Packing is therefore refused
# for an architecture that is not known to be separable, and its rows are not shared. Shared rows compute the same values
# with less padding.
#
# Samples that begin with the same tokens (the answers to a prompt, the two sides of a pair) can also share those: they
# are computed once, and each sample continues from there. This needs a custom mask, so it is done only under sdpa and
# without attention windows.

# fmt: off
SEPARABLE = frozenset({
    "apertus", "arcee", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe",
    "exaone4", "flex_olmo", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode",
    "gpt_neox", "granite", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "llama", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "nemotron", "olmo", "olmo2",
    "olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2",
})
"""`model_type` of the architectures known to separate samples by position IDs, with and without attention windows.
`python -m benchmarks.separable` proves each of them and tries all architectures of transformers."""
# fmt: on
LAYERS = frozenset({"full_attention", "sliding_attention"})
"""`layer_types` known to separate samples. Some models of an architecture may have other types."""
LAYERS_WITHOUT_WINDOWS = frozenset({"full_attention"})
WORTHWHILE = 1 - LEAST_SAVED
"""Maximum cost of a layout, relative to the one without it: a mask is slower than plain causal attention."""
LARGEST_MASK = 2**26
"""Maximum number of pairs of positions in a custom mask: 64 MiB."""


@dataclass(frozen=True)
class SharedRows:
    """A layout of a batch in fewer rows, with the place of each position of the batch."""

    token_ids_RL: Tensor
    position_ids_RL: Tensor
    gone_to: Tensor
    """[B * L]: flat index into the shared rows of each position of the batch. Padding has none and reads the first."""
    mask_R1LL: Tensor | None = None
    """Whether a position (third dimension) attends to another (fourth); None if `position_ids_RL` define it."""

    def restore(self, hidden_RLH: Tensor, batch: TokenBatch) -> Tensor:
        """Restore the hidden states to the rows of the batch. Values at padding are meaningless."""
        return hidden_RLH.flatten(0, 1)[self.gone_to].reshape(*batch.token_ids_BL.shape, -1)


def keeps_apart(config: Any) -> bool:
    """Whether a model of this transformers configuration is known to keep the samples of a row separate."""
    types = getattr(config.get_text_config(), "layer_types", None) or ()
    return config.model_type in SEPARABLE and LAYERS.issuperset(types)


def prefix_width(config: Any) -> int:
    """Hidden size of a model in which samples may share their first tokens, and 0 for any other."""
    shares = keeps_apart(config) and sees_whole_rows(config) and config._attn_implementation == "sdpa"
    return int(config.get_text_config().hidden_size) if shares else 0


def sees_whole_rows(config: Any) -> bool:
    """True if no layer uses sliding-window attention. Our block mask would override the window.

    Some architectures use `layer_types`, others `sliding_window` alone, regardless of the rest of the configuration.
    """
    text = config.get_text_config()
    types = getattr(text, "layer_types", None) or ()
    return not getattr(text, "sliding_window", None) and LAYERS_WITHOUT_WINDOWS.issuperset(types)


def check_packing(config: Any) -> None:
    """Raise ConfigError if a model of this transformers configuration is not known to keep packed samples separate."""
    if not keeps_apart(config):
        rule = f"a model of type {config.model_type} is not known to keep packed samples separate"
        raise ConfigError("packing", True, rule, "train without packing (packing = false)")


def shared_rows(batch: TokenBatch, *, prefixes_of: int = 0) -> SharedRows | None:
    """Lay out `batch` in fewer rows, or None if that is impossible or not worthwhile.

    `prefixes_of` is the `prefix_width` of the model. Blocks are placed first-fit from the longest down, so the layout
    depends only on the tokens and their order. Use it only for a model for which `keeps_apart` is true.
    """
    count, length = batch.token_ids_BL.shape
    if batch.packed or count == 1 or length > LONGEST:
        return None
    rows, places = _first_fit_blocks([RowBlock((row,), 0, taken) for row, _, taken in batch.rows], length)
    if rows > WORTHWHILE * count:
        rows = count
    if prefixes_of:
        rows_BL = batch.on_host.token_ids_BL.int().numpy()
        sequences = [ids(row_L[:taken]) for row_L, (_, _, taken) in zip(rows_BL, batch.rows, strict=True)]
        blocks = common_beginnings(sequences, hidden=prefixes_of)
        longest = max(length, *(block.length for block in blocks))
        block_rows, block_places = _first_fit_blocks(blocks, longest)
        paid = block_rows * cost(longest, prefixes_of) / (rows * cost(length, prefixes_of))
        if len(blocks) < count and paid <= WORTHWHILE and block_rows * longest**2 <= LARGEST_MASK:
            return _with_prefixes(batch, sequences, blocks, block_places, block_rows, longest)
    return _lay(batch, places, rows, length) if rows < count else None


def _first_fit_blocks(blocks: Sequence[RowBlock], length: int) -> tuple[int, dict[int, int]]:
    """Place the blocks first-fit: the number of rows, and the flat place of each block by its first sample."""
    ordered = sorted(blocks, key=lambda block: -block.length)
    places = _first_fit([block.length for block in ordered], length)
    flat = {block.samples[0]: row * length + start for block, (row, start, _) in zip(ordered, places, strict=True)}
    return 1 + max(row for row, _, _ in places), flat


def _lay(batch: TokenBatch, places: Mapping[int, int], rows: int, length: int) -> SharedRows:
    comes_from = torch.zeros(rows * length, dtype=torch.int64)
    positions = torch.zeros_like(comes_from)
    gone_to = torch.zeros(batch.token_ids_BL.numel(), dtype=torch.int64)
    # In the order of places, each sample numbers the positions to the end of its row, and the next one overwrites them.
    for row, _, taken in sorted(batch.rows, key=lambda span: places[span[0]]):
        place = places[row]
        end = (place // length + 1) * length
        comes_from[place : place + taken] = torch.arange(row * length, row * length + taken)
        positions[place:end] = torch.arange(end - place)
        gone_to[row * length : row * length + taken] = torch.arange(place, place + taken)
    return _laid(batch, comes_from, positions, gone_to, rows)


def _with_prefixes(
    batch: TokenBatch,
    sequences: Sequence[Column[int]],
    blocks: Sequence[RowBlock],
    places: Mapping[int, int],
    rows: int,
    length: int,
) -> SharedRows:
    width = batch.token_ids_BL.shape[1]
    comes_from = torch.zeros(rows * length, dtype=torch.int64)
    positions = torch.zeros_like(comes_from)
    gone_to = torch.zeros(batch.token_ids_BL.numel(), dtype=torch.int64)
    # Padding is a separate block in each row.
    block_ids = torch.zeros_like(comes_from)
    sample_ids = torch.zeros_like(comes_from)
    for number, block in enumerate(blocks, start=1):
        begin, prefix = places[block.samples[0]], block.prefix
        free = begin + prefix
        first = block.samples[0] * width
        comes_from[begin:free] = torch.arange(first, first + prefix)
        positions[begin:free] = torch.arange(prefix)
        block_ids[begin : begin + block.length] = number
        begun: dict[bytes, int] = {}  # where each sequence continues after the prefix; equal ones are one
        for sample, row in enumerate(block.samples, start=1):
            taken, content = len(sequences[row]), sequences[row].data.tobytes()
            if content not in begun:
                end = free + taken - prefix
                comes_from[free:end] = torch.arange(row * width + prefix, row * width + taken)
                positions[free:end] = torch.arange(prefix, taken)
                sample_ids[free:end] = sample
                begun[content], free = free, end
            place = begun[content]
            gone_to[row * width : row * width + prefix] = torch.arange(begin, begin + prefix)
            gone_to[row * width + prefix : row * width + taken] = torch.arange(place, place + taken - prefix)
    device = batch.token_ids_BL.device
    block_RL, sample_RL = (to_device(one.reshape(rows, length), device) for one in (block_ids, sample_ids))
    mask_RLL = sample_RL[:, :, None] == sample_RL[:, None, :]
    mask_RLL |= (sample_RL == 0)[:, None, :]
    mask_RLL &= block_RL[:, :, None] == block_RL[:, None, :]
    mask_RLL.tril_()
    return _laid(batch, comes_from, positions, gone_to, rows, mask_RLL[:, None])


def _laid(
    batch: TokenBatch,
    comes_from: Tensor,
    positions: Tensor,
    gone_to: Tensor,
    rows: int,
    mask_R1LL: Tensor | None = None,
) -> SharedRows:
    device = batch.token_ids_BL.device
    token_ids = batch.on_host.token_ids_BL.flatten()[comes_from]
    token_ids_RL, positions_RL = (to_device(one.reshape(rows, -1), device) for one in (token_ids, positions))
    return SharedRows(token_ids_RL, positions_RL, to_device(gone_to, device), mask_R1LL)
