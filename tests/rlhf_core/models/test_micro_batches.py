"""Blocks of sequences that begin alike save as much as any division can."""

import random
import time
from collections.abc import Iterator
from itertools import pairwise, product
from os.path import commonpath
from pathlib import PurePosixPath

import pytest

from rlhf_core.models.micro_batches import LEAST_SAVED, LONGEST, RowBlock, common_beginnings, cost

Sequences = list[tuple[int, ...]]
H = 64


def groups(*prompts: tuple[int, int, int], seed: int = 0) -> Sequences:
    """Return `count` sequences for each (tokens of the prompt, count, most tokens after it)."""
    draw = random.Random(seed)
    made = []
    for length, count, most in prompts:
        prompt = tuple(draw.randrange(1, 150_000) for _ in range(length))
        made += [prompt + tuple(draw.randrange(1, 150_000) for _ in range(draw.randint(1, most))) for _ in range(count)]
    draw.shuffle(made)
    return made


def divisions(items: Sequences) -> Iterator[list[Sequences]]:
    """Yield every division of `items` into stretches."""
    for cuts in product((False, True), repeat=len(items) - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [len(items)]
        yield [items[start:end] for start, end in pairwise([0, *ends])]


def prefix_of(sequences: Sequences) -> int:
    if len(sequences) == 1:
        return 0
    paths = ["/".join(["", *map(str, one)]) for one in sequences]  # an implementation that is not ours
    return len(PurePosixPath(commonpath(paths)).parts) - 1


def saved(sequences: Sequences, hidden: int) -> int:
    """Return what one block saves; 0 if it is none."""
    prefix = prefix_of(sequences)
    apart = sum(cost(len(one), hidden) for one in sequences)
    gain = apart - cost(sum(map(len, sequences)) - prefix * (len(sequences) - 1), hidden)
    return gain if prefix and gain >= LEAST_SAVED * apart else 0


@pytest.mark.parametrize("seed", range(12))
def test_no_division_of_the_sorted_sequences_saves_more(seed):
    draw = random.Random(seed)
    hidden = draw.choice([1, 3, 100])
    sequences = list({tuple(draw.randrange(2) for _ in range(draw.randint(1, 9))): None for _ in range(9)})[:7]
    apart = sum(cost(len(one), hidden) for one in sequences)
    most = max(sum(saved(part, hidden) for part in division) for division in divisions(sorted(sequences)))
    blocks = common_beginnings(sequences, hidden=hidden)
    assert apart - sum(cost(block.length, hidden) for block in blocks) == most
    assert sorted(index for block in blocks for index in block.samples) == list(range(len(sequences)))


def test_a_block_is_what_it_says():
    sequences = groups((40, 8, 30), (3, 5, 60), (90, 2, 10))
    for block in common_beginnings(sequences, hidden=H):
        inside = [sequences[i] for i in block.samples]
        assert block.prefix == prefix_of(inside)
        assert block.length == sum(map(len, inside)) - block.prefix * (len(inside) - 1)


def test_the_answers_to_a_prompt_are_a_block_and_a_template_is_none():
    template = (1, 2, 3)
    prompts = [[template + one for one in groups((20, 4, 9), seed=seed)] for seed in range(3)]
    sequences = [one for answers in prompts for one in answers]
    blocks = common_beginnings(sequences, hidden=H)
    assert sorted(sorted(block.samples) for block in blocks) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_sequences_that_share_little_are_alone():
    sequences = [(1, 2, *range(10 * i, 10 * i + 30)) for i in range(3, 9)]
    assert [block.samples for block in common_beginnings(sequences, hidden=H)] == [(0,), (1,), (2,), (3,), (4,), (5,)]


def test_a_block_is_no_longer_than_attention_pays_for():
    sequences = groups((100, 9, 100), seed=4)
    narrow, wide = (common_beginnings(sequences, hidden=hidden) for hidden in (8, 4096))
    assert max(len(block.samples) for block in narrow) < max(len(block.samples) for block in wide) == 9
    assert common_beginnings([tuple(range(9000))], hidden=H) == [RowBlock((0,), 0, 9000)]
    long = [(*range(3000), i, *range(50)) for i in range(40)]
    assert all(block.length <= LONGEST for block in common_beginnings(long, hidden=8192))


def test_the_order_of_the_sequences_does_not_matter():
    sequences = groups((15, 6, 12), (8, 3, 40), seed=2)
    turned = sequences[::-1]

    def contents(of: Sequences) -> list[list[tuple[int, ...]]]:
        return [[of[i] for i in block.samples] for block in common_beginnings(of, hidden=H)]

    assert contents(sequences) == contents(turned)


def test_equal_sequences_count_once():
    (block,) = common_beginnings([(7, 8, 9), (7, 8), (7, 8, 9), (7, 8)], hidden=H)
    assert block == RowBlock((1, 3, 0, 2), 2, 3)
    assert common_beginnings([(4, 4)] * 3, hidden=H) == [RowBlock((0, 1, 2), 0, 2)]
    assert common_beginnings([], hidden=H) == []


def test_thousands_of_samples_take_no_time_to_speak_of():
    began = time.process_time()
    common_beginnings([tuple(range(39))] * 4000, hidden=H)
    common_beginnings([(*range(200), i) for i in range(4000)], hidden=H)
    assert time.process_time() - began < 10  # 0.5 s; a search without a bound took minutes
