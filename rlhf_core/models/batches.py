"""Convert samples to a padded or packed batch and back; the only module that handles padding.

Legend: N samples, B rows, L positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rlhf_core.errors import DataError, explain
from rlhf_core.types import PolicySample, StepSample, TokenSample, ValueSample

Sample = TokenSample | StepSample | PolicySample | ValueSample


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

    Fields that are empty in the samples are left out."""

    @property
    def packed(self) -> bool:
        """Whether some row holds more than one sample."""
        return any(start > 0 for _, start, _ in self.rows)

    def to(self, device: str | torch.device) -> TokenBatch:
        """Return the batch on `device`."""
        return TokenBatch(
            token_ids_BL=self.token_ids_BL.to(device),
            position_ids_BL=self.position_ids_BL.to(device),
            segment_ids_BL=self.segment_ids_BL.to(device),
            loss_mask_BL=self.loss_mask_BL.to(device),
            rows=self.rows,
            fields={name: value_BL.to(device) for name, value_BL in self.fields.items()},
        )


def collate(samples: Sequence[Sample], *, pad_id: int, pack_to: int | None = None) -> TokenBatch:
    """Return the batch of `samples` in order: one per row, or with `pack_to` as many per row as fit in that length.

    Packing is first-fit and depends only on the order of the samples. Raises DataError for an empty list, samples of
    different types, an empty sample, a sample longer than `pack_to` or trained at its first token, and a field that
    only some of the samples have.
    """
    _check(samples, pack_to)
    rows = _one_row_each(samples) if pack_to is None else _first_fit(samples, pack_to)
    count = 1 + max(row for row, _, _ in rows)
    width = max(start + length for _, start, length in rows)
    names = _filled_fields(samples)

    token_ids_BL = torch.full((count, width), pad_id, dtype=torch.int64)
    position_ids_BL = torch.arange(width).repeat(count, 1)
    segment_ids_BL = torch.zeros((count, width), dtype=torch.int64)
    loss_mask_BL = torch.zeros((count, width), dtype=torch.float32)
    extra = {name: torch.zeros((count, width), dtype=torch.float32) for name in names}
    segments = [0] * count
    for sample, (row, start, length) in zip(samples, rows, strict=True):
        segments[row] += 1
        span = slice(start, start + length)
        token_ids_BL[row, span] = torch.tensor(sample.token_ids, dtype=torch.int64)
        position_ids_BL[row, start:] = torch.arange(width - start)
        segment_ids_BL[row, span] = segments[row]
        loss_mask_BL[row, span] = torch.tensor(sample.loss_mask, dtype=torch.float32)
        for name in names:
            extra[name][row, span] = torch.tensor(getattr(sample, name), dtype=torch.float32)
    return TokenBatch(token_ids_BL, position_ids_BL, segment_ids_BL, loss_mask_BL, rows, extra)


def unpack(x_BL: Tensor, batch: TokenBatch) -> list[Tensor]:
    """Return each sample's span of `x_BL` without padding, in the given order of the samples."""
    return [x_BL[row, start : start + length] for row, start, length in batch.rows]


def _filled_fields(samples: Sequence[Sample]) -> tuple[str, ...]:
    names = []
    for name in (field.name for field in fields(samples[0]) if field.name not in ("token_ids", "loss_mask")):
        filled = sum(bool(getattr(sample, name)) for sample in samples)
        if 0 < filled < len(samples):
            rule = f"is empty in {len(samples) - filled} of {len(samples)} samples"
            raise DataError(explain(f"samples.{name}", filled, rule, "set it in all samples or in none"))
        names += [name] * bool(filled)
    return tuple(names)


def _one_row_each(samples: Sequence[Sample]) -> tuple[tuple[int, int, int], ...]:
    return tuple((row, 0, len(sample.token_ids)) for row, sample in enumerate(samples))


def _first_fit(samples: Sequence[Sample], pack_to: int) -> tuple[tuple[int, int, int], ...]:
    used: list[int] = []
    places = []
    for sample in samples:
        length = len(sample.token_ids)
        row = next((row for row, filled in enumerate(used) if filled + length <= pack_to), len(used))
        if row == len(used):
            used.append(0)
        places.append((row, used[row], length))
        used[row] += length
    return tuple(places)


def _check(samples: Sequence[Sample], pack_to: int | None) -> None:
    if not samples:
        raise DataError(explain("samples", 0, "a batch needs at least one sample", "skip the empty batch"))
    types = {type(sample).__name__ for sample in samples}
    if len(types) > 1:
        raise DataError(
            explain("samples", sorted(types), "a batch must contain one type of sample", "collate each type separately")
        )
    for index, sample in enumerate(samples):
        length = len(sample.token_ids)
        if length == 0:
            raise DataError(explain(f"samples[{index}].token_ids", (), "must not be empty", "drop the sample"))
        if sample.loss_mask[0] != 0:
            raise DataError(
                explain(
                    f"samples[{index}].loss_mask[0]",
                    sample.loss_mask[0],
                    "nothing predicts the first token, so it cannot be trained on",
                    "set it to 0",
                )
            )
        if pack_to is not None and length > pack_to:
            raise DataError(
                explain(
                    f"samples[{index}] length",
                    length,
                    f"must be <= pack_to = {pack_to}",
                    "truncate it or raise pack_to",
                )
            )
