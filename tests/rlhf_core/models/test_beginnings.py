"""Blocks of sequences that begin alike save as many tokens as any division can, within their limit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from os.path import commonpath
from pathlib import PurePosixPath

import pytest

from rlhf_core.models.beginnings import LEAST_SHARED, Block, common_beginnings

Sequences = list[tuple[int, ...]]


def groups(*prompts: tuple[int, int, int], seed: int = 0) -> Sequences:
    """Return `count` sequences for each (tokens of the prompt, count, most tokens after it)."""
    draw = random.Random(seed)
    made = []
    for length, count, most in prompts:
        prompt = tuple(draw.randrange(1, 150_000) for _ in range(length))
        made += [prompt + tuple(draw.randrange(1, 150_000) for _ in range(draw.randint(1, most))) for _ in range(count)]
    draw.shuffle(made)
    return made


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for partition in partitions(rest):
        yield [[first], *partition]
        for i in range(len(partition)):
            yield [*partition[:i], [first, *partition[i]], *partition[i + 1 :]]


def prefix_of(sequences: Sequences) -> int:
    if len(sequences) == 1:
        return 0
    paths = ["/".join(["", *map(str, one)]) for one in sequences]  # an implementation that is not ours
    return len(PurePosixPath(commonpath(paths)).parts) - 1


def saved(sequences: Sequences, limit: int) -> int:
    """Return the tokens that one block saves; 0 if it is none."""
    prefix = prefix_of(sequences)
    total = sum(map(len, sequences))
    gain = prefix * (len(sequences) - 1)
    return gain if total - gain <= limit and gain >= LEAST_SHARED * total else 0


@pytest.mark.parametrize("seed", range(12))
def test_no_division_saves_more(seed: int) -> None:
    draw = random.Random(seed)
    sequences = [tuple(draw.randrange(2) for _ in range(draw.randint(1, 9))) for _ in range(7)]
    limit = draw.choice([12, 20, 100])
    most = max(
        sum(saved([sequences[i] for i in part], limit) for part in partition)
        for partition in partitions(range(len(sequences)))
    )
    blocks = common_beginnings(sequences, limit=limit)
    assert sum(map(len, sequences)) - sum(block.length for block in blocks) == most
    assert sorted(index for block in blocks for index in block.samples) == list(range(7))


def test_a_block_is_what_it_says() -> None:
    sequences = groups((40, 8, 30), (3, 5, 60), (90, 2, 10))
    for block in common_beginnings(sequences):
        inside = [sequences[i] for i in block.samples]
        assert block.prefix == prefix_of(inside)
        assert block.length == sum(map(len, inside)) - block.prefix * (len(inside) - 1)


def test_the_answers_to_a_prompt_are_a_block_and_a_template_is_none() -> None:
    template = (1, 2, 3)
    prompts = [[template + one for one in groups((20, 4, 9), seed=seed)] for seed in range(3)]
    sequences = [one for answers in prompts for one in answers]
    blocks = common_beginnings(sequences)
    assert sorted(sorted(block.samples) for block in blocks) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_sequences_that_share_little_are_alone() -> None:
    sequences = [(1, 2, *range(10 * i, 10 * i + 30)) for i in range(3, 9)]
    assert [block.samples for block in common_beginnings(sequences)] == [(0,), (1,), (2,), (3,), (4,), (5,)]


def test_a_block_keeps_the_limit_and_a_long_sequence_is_alone() -> None:
    sequences = groups((100, 9, 100), seed=4)
    blocks = common_beginnings(sequences, limit=350)
    assert all(block.length <= 350 for block in blocks)
    assert max(len(block.samples) for block in blocks) > 1
    assert common_beginnings([tuple(range(900))]) == [Block((0,), 0, 900)]


def test_the_order_of_the_sequences_does_not_matter() -> None:
    sequences = groups((15, 6, 12), (8, 3, 40), seed=2)
    turned = sequences[::-1]

    def contents(of: Sequences) -> list[list[tuple[int, ...]]]:
        return [[of[i] for i in block.samples] for block in common_beginnings(of)]

    assert contents(sequences) == contents(turned)


def test_equal_sequences_and_beginnings_of_others_share_all_they_have() -> None:
    (block,) = common_beginnings([(7, 8, 9), (7, 8), (7, 8, 9), (7, 8)])
    assert (block.prefix, block.length) == (2, 4)
    assert common_beginnings([]) == []
