"""What a worker leaves in a piece is what the driver and other workers read, and nothing is copied into a pickle."""

import gc
import pickle
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rlhf_core.columns import Column, Runs
from rlhf_core.errors import WorkerLostError
from rlhf_core.rows import Columns, Rows, Shared, chosen, held_lengths, holds, ones
from rlhf_core.runtime.pieces import Packed, RayPiece, leave, opened, packed
from rlhf_core.runtime.ray_settings import ray
from rlhf_core.types import Completion, Prompt, Rollout, TokenSample, floats, ids, joined, mask

SAMPLES = [TokenSample(range(at, at + 3 + at), (0, *[1] * (2 + at))) for at in range(5)]
COMPLETIONS = [Completion((at, 7), (-0.5, -at / 8), f"text {at}", "stop", 0, at) for at in range(3)]


@dataclass(frozen=True, slots=True)
class Single:
    number: int


def left(value: Any) -> Any:
    """Return what the driver has of a worker's result; the piece is here, where Ray would map it."""
    made, array = leave(value, at_least=0)
    piece = RayPiece(None)
    piece._bytes = array
    return opened(made, piece)


def arrived(value: Any) -> Any:
    """Return what another worker has of the driver's argument."""
    message = packed(value)
    again = Packed(pickle.loads(pickle.dumps(message.value)), message.pieces)
    assert len(message.value) < 600, "places, and no numbers"
    return opened(again)


def test_samples_travel_as_places_and_are_made_where_somebody_looks_at_them():
    rows = left(SAMPLES)
    assert (
        isinstance(rows, Rows) and list(rows) == SAMPLES and rows[3] == SAMPLES[3] and list(rows[1:3]) == SAMPLES[1:3]
    )
    some = chosen(rows, [4, 0, 2])
    assert isinstance(some, Rows) and list(some) == [SAMPLES[4], SAMPLES[0], SAMPLES[2]] == arrived(some)
    assert (held_lengths(rows), ones(rows)) == ([3, 4, 5, 6, 7], 20) == (held_lengths(rows), ones(SAMPLES))
    assert pickle.loads(pickle.dumps(rows)) == SAMPLES, "whoever knows nothing of pieces gets the numbers"


def test_columns_of_several_ranks_come_back_in_the_order_of_the_samples():
    numbers = [floats([at / 4] * (at + 1)) for at in range(6)]
    parts = [left([numbers[at] for at in share]) for share in ([5, 0], [2], [1, 4, 3])]
    merged = Columns.merged(parts, [5, 0, 2, 1, 4, 3])
    assert list(merged) == numbers == arrived(merged) and len(merged.pieces) == 3
    assert list(chosen(merged, [2, 2])) == [numbers[2], numbers[2]] and len(merged.take([2]).pieces) == 1


def test_other_values_keep_their_columns_elsewhere_and_refer_to_pieces_that_they_were_in():
    made = left((COMPLETIONS, {"metric": 1.0}))
    assert made == (COMPLETIONS, {"metric": 1.0}) and holds(made) and not holds(COMPLETIONS)
    again = left([TokenSample(one.token_ids, mask(Runs("B", 2, ((1, 2),)).read())) for one in made[0]])
    assert [one.token_ids.source.piece for one in again] == [one.token_ids.source.piece for one in made[0]]
    assert [one.loss_mask for one in arrived(again)] == [(0, 1)] * 3


def test_what_several_workers_get_is_pickled_once_and_finds_its_pieces_beside_those_of_others():
    prompt, other = Prompt("p", (), "", ""), left([ids((8, 9))])
    made = [Rollout(prompt, ids((1,)), one, 0.5, {}) for one in left(COMPLETIONS)]
    rollouts = Shared(made)
    assert opened(packed((rollouts,))) == (made,)
    first = rollouts.packed
    again = opened(packed((other, rollouts, left(SAMPLES))))
    assert again == ([ids((8, 9))], made, SAMPLES) and rollouts.packed is first
    assert again[1][0].prompt is again[1][2].prompt, "a prompt is there once, however many answers it has"


@pytest.mark.parametrize(
    "value",
    [
        [],
        [(1, COMPLETIONS[0]), (2, COMPLETIONS[1])],
        [(1,), (1, 2)],
        [(), ()],
        [Single(7), Single(8)],
        COMPLETIONS[:1] * 2,
        [1.5],
        [Single(7)],
        [TokenSample((1, 2), (0, 1)), 7],
        {"columns": ids((1, 2))},
        [ids((1, 2)), mask((0, 1))],
    ],
)
def test_what_is_small_or_of_other_kinds_comes_as_it_is(value):
    made, array = leave(value, at_least=2**17)
    assert made is value and array is None and opened(value) is value
    assert left(value) == value


def test_a_column_counts_and_measures_what_it_does_not_read():
    class Nobody:
        def bytes(self) -> np.ndarray:
            raise AssertionError("nobody is to read this")

    rows = left(SAMPLES)
    unread = Rows(
        TokenSample, {name: Columns(each.kind, (Nobody(),), each.places) for name, each in rows.columns.items()}
    )
    assert (ones(unread), held_lengths(unread)) == (20, [3, 4, 5, 6, 7])
    sample = unread[2]
    assert (len(sample.token_ids + sample.token_ids), sample.loss_mask.count(1)) == (10, 4)
    assert len(Column.elsewhere(Runs("f", 9))) == 9


def test_an_answer_may_grow_in_any_number_of_parts():
    (part,) = left([ids((4, 9))])
    grown, expected = ids(()), []
    for _ in range(2000):
        grown, expected = grown + part, [*expected, 4, 9]
    assert opened(packed(grown)) == expected == left((grown,))[0]
    assert len(joined(ids((1,)), grown[1:])) == 4000


def test_what_was_packed_is_freed_without_the_collector_of_cycles():
    gc.disable()
    try:
        rows = left(SAMPLES)
        piece = weakref.ref(rows.columns["token_ids"].pieces[0])
        assert opened(packed(rows)) == list(left(list(rows))) and piece() is not None
        del rows
        assert piece() is None
    finally:
        gc.enable()


def test_nobody_reads_a_piece_after_ray_has_ended_and_none_is_started_for_it(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(WorkerLostError, match=r"columns = 'of a step': Ray holds them no more; run again"):
        RayPiece(None).bytes()
