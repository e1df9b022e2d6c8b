"""Padding, packing and the way back, position by position."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.errors import DataError
from rlhf_core.models.batches import collate, unpack
from rlhf_core.types import PolicySample, TokenSample, ValueSample

A = TokenSample((5, 7, 2), (0, 1, 1))
B = TokenSample((4,), (0,))
C = TokenSample((8, 9), (0, 1))


def test_samples_get_one_row_each_padded_on_the_right() -> None:
    batch = collate([A, B], pad_id=99)
    assert batch.token_ids_BL.tolist() == [[5, 7, 2], [4, 99, 99]]
    assert batch.segment_ids_BL.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.loss_mask_BL.tolist() == [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    assert batch.rows == ((0, 0, 3), (1, 0, 1))
    assert not batch.packed


def test_positions_count_through_the_padding_so_that_a_row_is_plain_causal() -> None:
    assert collate([A, B], pad_id=0).position_ids_BL.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_packing_puts_each_sample_into_the_first_row_with_room() -> None:
    # A (3) opens row 0 of 4; C (2) does not fit, opens row 1; B (1) goes back to row 0; C again fits row 1.
    batch = collate([A, C, B, C], pad_id=0, pack_to=4)
    assert batch.rows == ((0, 0, 3), (1, 0, 2), (0, 3, 1), (1, 2, 2))
    assert batch.token_ids_BL.tolist() == [[5, 7, 2, 4], [8, 9, 8, 9]]
    assert batch.position_ids_BL.tolist() == [[0, 1, 2, 0], [0, 1, 0, 1]]
    assert batch.segment_ids_BL.tolist() == [[1, 1, 1, 2], [1, 1, 2, 2]]
    assert batch.packed


def test_rows_are_no_wider_than_the_fullest_one() -> None:
    assert collate([A, B], pad_id=0, pack_to=100).token_ids_BL.shape == (1, 4)


def test_unpack_returns_the_samples_in_their_order() -> None:
    batch = collate([A, C, B, C], pad_id=0, pack_to=4)
    assert [ids.tolist() for ids in unpack(batch.token_ids_BL, batch)] == [[5, 7, 2], [8, 9], [4], [8, 9]]


def test_policy_fields_are_laid_out_like_the_tokens() -> None:
    sample = PolicySample((5, 7), (0, 1), (0.0, -1.5), (0.0, -1.25), (0.0, -2.0), (0.0, 3.0))
    longer = PolicySample((1, 2, 3), (0, 0, 1), (0.0, 0.0, -1.0), (0.0, 0.0, -1.0), (0.0, 0.0, -1.0), (0.0, 0.0, 0.5))
    batch = collate([sample, longer], pad_id=0)
    assert set(batch.fields) == {"rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages"}
    assert batch.fields["old_logprobs"].tolist() == [[0.0, -1.25, 0.0], [0.0, 0.0, -1.0]]
    assert batch.fields["advantages"].tolist() == [[0.0, 3.0, 0.0], [0.0, 0.0, 0.5]]
    assert all(value_BL.dtype == torch.float32 for value_BL in batch.fields.values())


def test_a_field_that_all_samples_leave_empty_is_not_there_and_one_that_some_do_is_an_error() -> None:
    bare = PolicySample((5, 7), (0, 1), (0.0, -1.5), (0.0, -1.25), (), (0.0, 3.0))
    full = PolicySample((5, 7), (0, 1), (0.0, -1.5), (0.0, -1.25), (0.0, -2.0), (0.0, 3.0))
    assert set(collate([bare, bare], pad_id=0).fields) == {"rollout_logprobs", "old_logprobs", "advantages"}
    with pytest.raises(DataError, match=r"samples\.ref_logprobs = 1: is empty in 1 of 2 samples"):
        collate([bare, full], pad_id=0)
    with pytest.raises(ValueError, match="every field has one entry per token"):
        PolicySample((5, 7), (0, 1), (), (0.0, -1.25), (0.0, -2.0), (0.0, 3.0))


def test_value_fields_are_laid_out_like_the_tokens() -> None:
    batch = collate([ValueSample((5, 7), (0, 1), (0.0, 0.5), (0.0, 1.0))], pad_id=0)
    assert batch.fields["returns"].tolist() == [[0.0, 1.0]]
    assert batch.fields["old_values"].tolist() == [[0.0, 0.5]]


def test_moving_a_batch_keeps_every_field() -> None:
    batch = collate([ValueSample((5, 7), (0, 1), (0.0, 0.5), (0.0, 1.0))], pad_id=0).to("meta")
    assert batch.token_ids_BL.device.type == batch.fields["returns"].device.type == "meta"
    assert batch.rows == ((0, 0, 2),)


@pytest.mark.parametrize(
    ("samples", "pack_to", "message"),
    [
        ([], None, "at least one sample"),
        ([A, ValueSample((1,), (0,), (0.0,), (0.0,))], None, "one type of sample"),
        ([TokenSample((), ())], None, r"samples\[0\].token_ids = \(\): must not be empty"),
        ([B, TokenSample((1, 2), (1, 1))], None, r"samples\[1\].loss_mask\[0\] = 1"),
        ([A], 2, r"samples\[0\] length = 3: must be <= pack_to = 2"),
    ],
)
def test_what_cannot_be_collated_is_named(samples: list[TokenSample], pack_to: int | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        collate(samples, pad_id=0, pack_to=pack_to)
