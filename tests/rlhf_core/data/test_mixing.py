"""Shares, weights, the order of epochs, and prompts that are held out."""

import random
from collections import Counter

import pytest

from rlhf_core.config.data import Use
from rlhf_core.data import mixing
from rlhf_core.data.formats import Example
from rlhf_core.data.limits import Origin
from rlhf_core.data.mixing import (
    apportioned,
    held_out,
    is_evaluation,
    misfit,
    mix,
    mixed_rows,
    place,
    rows_at,
    rows_from,
    shuffled,
    shuffled_indices,
    table_of,
)
from rlhf_core.training.fit import batch_at
from rlhf_core.types import Message

# ---------------------------------------------------------------- mixing


def example(prompt: str, *, chosen: str = "", rejected: str = "") -> Example:
    def turns(role: str, text: str) -> tuple[Message, ...]:
        return (Message(role, text),) if text else ()

    sides = (turns("assistant", chosen), turns("assistant", rejected))
    return Example(turns("user", prompt), *sides, "", 0.0, "s", Origin("f", 1))


def test_a_prompt_has_one_place_whatever_its_answer_case_and_spaces():
    assert place(example("A b", chosen="x").prompt, "s") == place(example(" a  B").prompt, "s")
    assert place(example("a b").prompt, "s") != place(example("a b").prompt, "t")


def test_shares_are_met():
    use = Use(demonstrations=0.5, preferences=0.25, eval_prompts=0.15)
    found = Counter(table_of(example(f"prompt {number}"), use) for number in range(4000))
    # four standard deviations of a share of 4000 are at most 0.032
    for table, share in (("demonstrations", 0.5), ("preferences", 0.25), ("eval_prompts", 0.15), (None, 0.1)):
        assert found[table] / 4000 == pytest.approx(share, abs=0.032)
    assert found["prompts"] == 0


def test_the_evaluation_split_does_not_follow_the_table():
    rows = [example(f"prompt {number}") for number in range(4000)]
    first_half = [row for row in rows if table_of(row, Use(demonstrations=0.5)) == "demonstrations"]
    share = sum(is_evaluation(row, 0.2) for row in first_half) / len(first_half)
    assert share == pytest.approx(0.2, abs=0.04)


def test_rows_that_cannot_serve_a_table_say_why():
    assert misfit(example("p"), "demonstrations") == "no good answer: demonstrations need one"
    assert misfit(example("p", chosen="a"), "demonstrations") is None
    assert (
        misfit(example("p", chosen="a"), "preferences")
        == "no pair of answers: preferences need a good and a bad one, or one that is labeled good or bad"
    )
    assert misfit(example("p", chosen="a", rejected="b"), "preferences") is None
    assert misfit(example("", chosen="a"), "prompts") == "no prompt"


def test_the_scarcest_source_sets_the_size_and_no_row_is_repeated():
    rows = {"a": [f"a{n}" for n in range(10)], "b": [f"b{n}" for n in range(100)], "c": []}
    mixed = mix(rows, {"a": 1.0, "b": 3.0, "c": 9.0}, seed=1)
    assert Counter(row[0] for row in mixed) == {"a": 10, "b": 30}
    assert len(set(mixed)) == 40


def test_a_mixture_belongs_to_its_seed():
    rows = {"a": list(range(50)), "b": list(range(50, 100))}
    weights = {"a": 1.0, "b": 0.5}
    assert mix(rows, weights, seed=1) == mix(rows, weights, seed=1) != mix(rows, weights, seed=2)
    assert shuffled(range(9), seed=1) == shuffled(range(9), seed=1) != shuffled(range(9), seed=2)


def test_nothing_mixes_to_nothing():
    assert mix({"a": []}, {"a": 1.0}, seed=0) == []


# ---------------------------------------------------------------- order

ROWS = ["a", "b", "c", "d", "e"]


def test_rows_come_epoch_by_epoch_each_once():
    taken = [row for step in range(5) for row in rows_at(step, ROWS, count=2, seed=3)]
    assert sorted(taken[:5]) == sorted(taken[5:]) == ROWS
    assert taken[:5] != taken[5:]


def test_the_order_of_an_epoch_is_drawn_once(monkeypatch):
    drawn = []

    class Counted(random.Random):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            drawn.append(seed)

    monkeypatch.setattr(random, "Random", Counted)
    shuffled_indices.cache_clear()
    for step in range(4):  # rows 0 to 15, of four epochs
        rows_at(step, ROWS, count=4, seed=3)
        batch_at(step, ROWS, batch_size=2, seed=3)
    assert len(drawn) == len(set(drawn)) == 4 + 2


def test_an_order_holds_every_position_once_and_depends_on_the_seed():
    assert sorted(shuffled_indices(50, 1)) == list(range(50))
    assert shuffled_indices(50, 1) != shuffled_indices(50, 2)
    expected = list(range(50))
    random.Random(1).shuffle(expected)
    assert list(shuffled_indices(50, 1)) == expected


# ---------------------------------------------------------------- holdout

NAMES = [f"p{i}" for i in range(40)]


@pytest.mark.parametrize(("count", "fraction", "expected"), [(40, 0.05, 2), (40, 0.01, 1), (40, 0.0, 0), (1, 0.5, 0)])
def test_a_fraction_is_held_out_and_at_least_one(count, fraction, expected):
    assert len(held_out(NAMES[:count], fraction=fraction, seed=17)) == expected


def test_it_depends_on_the_seed_and_not_on_order_or_repetition():
    chosen = held_out(NAMES, fraction=0.25, seed=17)
    assert held_out(NAMES[::-1] * 2, fraction=0.25, seed=17) == chosen
    assert held_out(NAMES, fraction=0.25, seed=18) != chosen


# ---------------------------------------------------------------- mixtures

OF_SOURCES = {"a": [f"a{i}" for i in range(7)], "b": [f"b{i}" for i in range(3)], "c": [f"c{i}" for i in range(50)]}


@pytest.mark.parametrize(
    "shares", [{"a": 0.7, "b": 0.3}, {"a": 1.0, "b": 2.0, "c": 0.01}, {"b": 1.0}, {"a": 1.0, "b": 0.0}]
)
@pytest.mark.parametrize("block", [1, 3, 10])
def test_every_block_has_the_shares_and_every_source_its_epochs(shares, block):
    total, blocks = sum(shares.values()), 400
    rows = mixed_rows(0, OF_SOURCES, shares, count=blocks * block, block=block, seed=5)
    for number in range(blocks):
        counts = Counter(row[0] for row in rows[number * block : (number + 1) * block])
        assert all(abs(counts[name] - block * share / total) < 1 for name, share in shares.items())
    for name, share in shares.items():
        own = [row for row in rows if row[0] == name]
        deviation = 4 * (blocks * 0.25) ** 0.5  # of a sum of `blocks` draws, each of variance at most 1/4
        assert abs(len(own) - blocks * block * share / total) <= deviation
        seen = Counter(own)  # blocks shuffle rows of at most two epochs among each other
        assert max(seen.values(), default=0) - min(seen[row] for row in OF_SOURCES[name]) <= 2


@pytest.mark.parametrize(("first", "count"), [(0, 1), (3, 9), (17, 4), (30, 10)])
def test_a_mixture_can_be_continued_anywhere(first, count):
    whole = mixed_rows(0, OF_SOURCES, {"a": 0.6, "c": 0.4}, count=60, block=8, seed=1)
    assert (
        mixed_rows(first, OF_SOURCES, {"a": 0.6, "c": 0.4}, count=count, block=8, seed=1)
        == whole[first : first + count]
    )
    assert mixed_rows(0, OF_SOURCES, {"a": 0.6, "c": 0.4}, count=60, block=8, seed=2) != whole


def test_rows_keep_their_order_if_asked():
    assert rows_from(3, ROWS, count=4, seed=1, shuffles=False) == ["d", "e", "a", "b"]
    rows = mixed_rows(0, OF_SOURCES, {"a": 1.0, "b": 1.0}, count=40, block=4, seed=1, shuffles=False)
    for number in range(10):  # two rows of each source
        found = sorted(row for row in rows[4 * number : 4 * number + 4] if row[0] == "a")
        assert found == sorted(f"a{at % 7}" for at in (2 * number, 2 * number + 1))


def test_steps_do_not_count_all_blocks_before_them_again(monkeypatch):
    counted: list[int] = []

    def counting(shares, count, *, offset):
        counted.append(count)
        return apportioned(shares, count, offset=offset)

    monkeypatch.setattr(mixing, "apportioned", counting)
    mixing.taken_before.cache_clear()
    for step in range(9000, 9100):
        mixed_rows(step * 8, OF_SOURCES, {"a": 0.6, "c": 0.4}, count=8, block=8, seed=1)
    assert len(counted) < 9000 + 101 * mixing.REMEMBERED_EVERY  # 9,000 once, which would be 100 times as many


def test_shares_that_cannot_be_written_in_binary_fill_a_block_exactly():
    for offset in (0.0, 0.1, 0.999999):
        assert sum(apportioned({"a": 0.1, "b": 0.2, "c": 0.7}, 10, offset=offset).values()) == 10
        assert min(apportioned({"a": 0.1, "b": 0.2, "c": 0.7}, 10, offset=offset).values()) >= 1
