"""What a worker leaves in a piece is what the driver and other workers read, and nothing is copied into a pickle."""

import gc
import pickle
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rlhf_core.columns import Column, Runs
from rlhf_core.errors import WorkerLostError
from rlhf_core.rows import Columns, Rows, Shared, chosen, held_lengths, holds, ones
from rlhf_core.runtime.pieces import Packed, RayPiece, leave, opened, packed
from rlhf_core.runtime.ray_settings import ray
from rlhf_core.types import Completion, Prompt, Rollout, SamplingRequest, TokenSample, floats, ids, joined, mask

SAMPLES = [TokenSample(range(at, at + 3 + at), (0, *[1] * (2 + at))) for at in range(5)]
COMPLETIONS = [Completion((at, 7), (-0.5, -at / 8), f"text {at}", "stop", 0, at) for at in range(3)]


@dataclass(frozen=True, slots=True)
class Single:
    number: int


@dataclass(frozen=True, slots=True)
class Doubling:
    number: int

    def __reduce__(self) -> Any:
        return Doubling, (2 * self.number,)


@dataclass(slots=True)
class Linked:
    next: Any = None
    never: int = field(init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    tokens: Column[int]


@dataclass(frozen=True, slots=True)
class Failed(Exception):
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
    assert pickle.loads(pickle.dumps(rollouts)).packed is None, "whoever knows nothing of pieces gets the numbers, once"
    assert again[1][0].prompt is again[1][2].prompt, "a prompt is there once, however many answers it has"


def test_a_class_with_a_pickle_of_its_own_keeps_it():
    first, second = Linked(), Linked()
    first.next, second.next = second, first
    for way in (left, lambda value: opened(packed(value))):
        assert way([Doubling(1), Doubling(2)]) == [Doubling(2), Doubling(4)]
        assert [one.number for one in way([Failed(1), Failed(2)])] == [1, 2]
        again = way([first, second])
        assert again[0].next is again[1] and again[1].next is again[0]


def test_a_column_of_several_values_is_left_once():
    shared = ids(range(1000))
    requests = [SamplingRequest(shared, seed) for seed in range(8)]
    _, array = leave(requests, at_least=0)
    assert array is not None and array.nbytes == 4000 and left(requests) == requests


@pytest.mark.parametrize(
    "value",
    [
        [],
        [Named(tokens=ids((1,))), Named(tokens=ids((2, 3)))],
        [(1, COMPLETIONS[0]), (2, COMPLETIONS[1])],
        [(1,), (1, 2)],
        [(), (Single(1),), (), (Single(2), Single(3))],
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
