"""Token sequences as flat arrays: joining, selecting, views, and the way through pickle."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from rlhf_core.errors import DataError
from rlhf_core.models.batches import collate
from rlhf_core.sequences import ROUTED_EXPERTS, Sequences, Subset, take
from rlhf_core.types import Completion, Generation, Message, Prompt, StepSample, TokenSample

SAMPLES = [TokenSample(range(at, at + 3 + at), (0, *[1] * (2 + at))) for at in range(5)]


def rows(one: Sequences) -> list[list[int]]:
    return [row.tolist() for row in one.split(one.token_ids)]


def test_samples_are_joined_in_their_order_with_the_type_of_each_array():
    made = Sequences.of([StepSample((5, 7, 2), (0, 1, 1), (0.0, 1.0, 0.3)), StepSample((4,), (0,), (0.0,))])
    assert (made.token_ids.tolist(), made.loss_mask.tolist(), made.offsets.tolist()) == (
        [5, 7, 2, 4],
        [0, 1, 1, 0],
        [0, 3, 4],
    )
    types = [values.dtype for values in (made.token_ids, made.loss_mask, made.offsets, made.fields["labels"])]
    assert types == [np.int32, np.uint8, np.int64, np.float32]
    assert (len(made), made.lengths.tolist(), len(Sequences.of([]))) == (2, [3, 1], 0)
    assert len(Sequences.of_answers([])) == 0


def test_samples_with_different_fields_are_an_error_that_names_the_row_and_the_field():
    judged = StepSample((5, 7), (0, 1), (0.0, 1.0))
    rule = "only some of the samples have the field labels; give all of them the same fields"
    for samples, row, kind in (
        ([SAMPLES[0], SAMPLES[1], judged], 2, "StepSample"),
        ([judged, SAMPLES[1]], 1, "TokenSample"),
    ):
        with pytest.raises(DataError, match=rf"^samples\[{row}\] = '{kind}': {rule}$"):
            Sequences.of(samples)


def test_a_field_with_another_number_of_entries_than_tokens_is_an_error_that_names_it():
    made = Sequences.of(SAMPLES)
    with pytest.raises(ValueError, match=r"'token_ids': 25, 'loss_mask': 25, 'returns': 24.*every field has one entry"):
        made.with_fields(returns=np.zeros(24, np.float32))
    for offsets in ([1, 25], [0, 24], [0, 20, 15, 25], [0, 26]):
        with pytest.raises(ValueError, match=rf"offsets from {offsets[0]} to {offsets[-1]}: offsets increase"):
            replace(made, offsets=np.array(offsets))
    for count in (24, 26):
        with pytest.raises(ValueError, match=rf"^{count} values for rows of 25 in all; give each row its values$"):
            made.split(np.zeros(count, np.float32))


def test_selected_rows_come_in_the_asked_order_and_may_repeat():
    made = Sequences.of(SAMPLES)
    some = made.with_fields(advantages=made.token_ids.astype(np.float32)).select([4, 0, 0])
    assert rows(some) == [[*SAMPLES[4].token_ids], [*SAMPLES[0].token_ids], [*SAMPLES[0].token_ids]]
    assert some.fields["advantages"].tolist() == some.token_ids.tolist()
    assert take(SAMPLES, [4, 0]) == [SAMPLES[4], SAMPLES[0]] and len(made.select([])) == 0
    assert rows(made.select((4, 0))) == rows(made.select([4, 0])) and len(made.select(())) == 0


def test_negative_rows_count_from_the_end_and_others_that_do_not_exist_are_an_error():
    made = Sequences.of(SAMPLES)
    assert rows(made.select([-1, -5])) == [[*SAMPLES[4].token_ids], [*SAMPLES[0].token_ids]]
    assert rows(Subset(made, np.array([-2])).copy()) == [[*SAMPLES[3].token_ids]]
    for row in (5, -6):
        with pytest.raises(IndexError, match=f"index {row} is out of bounds"):
            made.select([0, row])


def test_a_selection_has_the_lengths_of_its_rows_and_copies_the_fields_that_it_names():
    made = Sequences.of(SAMPLES).with_fields(
        returns=np.arange(25, dtype=np.float32), old_values=np.zeros(25, np.float32)
    )
    some = Subset(made.select_fields("returns", "advantages"), np.array([3, 1]))
    assert (len(some), some.lengths.tolist()) == (2, [6, 4])
    assert rows(some.copy()) == [[*SAMPLES[3].token_ids], [*SAMPLES[1].token_ids]]
    assert {name: values.tolist() for name, values in some.copy().fields.items()} == {
        "returns": [12, 13, 14, 15, 16, 17, 3, 4, 5, 6]
    }


def test_the_experts_of_answers_are_one_row_per_token_and_those_without_a_record_are_left_to_the_routers():
    prompt = Prompt("p", (Message("user", "Hi"),), "", "test")
    routed = Completion((5,), (-0.5,), "a", "stop", 0, 1, routed_experts=(3, 0, 1, 2, -1, -1))
    plain = Completion((6, 2), (-0.5, -0.1), "b", "stop", 0, 1)
    made = Sequences.of_answers([Generation(prompt, (1, 2), routed), Generation(prompt, (1,), plain)])
    experts = made.fields[ROUTED_EXPERTS]
    assert experts.dtype == np.int16
    assert experts.tolist() == [[3, 0], [1, 2], [-1, -1], *[[-1, -1]] * 3]
    assert made.select([1, 0]).fields[ROUTED_EXPERTS][3:].tolist() == [[3, 0], [1, 2], [-1, -1]]
    padded_BLW = collate(made, pad_id=0, pack_to=8).fields[ROUTED_EXPERTS]
    assert padded_BLW.tolist() == [experts.tolist()]


def test_pickle_moves_every_array_as_a_buffer():
    made = Sequences.of(SAMPLES).with_fields(returns=np.zeros(25, np.float32))
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(made, protocol=5, buffer_callback=buffers.append)
    assert (len(buffers), sum(one.raw().nbytes for one in buffers)) == (4, 25 * (4 + 1 + 4) + 6 * 8)
    again = pickle.loads(head, buffers=buffers)
    assert len(head) < 1000 and np.shares_memory(again.token_ids, made.token_ids)
