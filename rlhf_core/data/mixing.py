"""Assign rows to tables, mix sources, and order rows by epochs, each shuffled differently.

Order is a pure function of the seed and the step: the step alone determines the position in the data, so a resumed run
needs no cursor.
"""

import hashlib
import math
import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Literal, TypeVar, get_args

from rlhf_core.config.data import Use
from rlhf_core.data.cleaning import exact
from rlhf_core.data.formats import Example
from rlhf_core.data.turns import Turns
from rlhf_core.types import derive_seed

Table = Literal[
    "demonstrations",
    "preferences",
    "prompts",
    "eval_prompts",
    "steps",
    "eval_demonstrations",
    "eval_preferences",
    "eval_steps",
]
TABLES: tuple[Table, ...] = get_args(Table)  # in the order of their shares: a new one goes last, or rows would move

T = TypeVar("T")


def place(prompt: Turns, salt: str) -> float:
    """Hash the content with `salt` to a number in [0, 1), so that equal prompts get equal numbers."""
    digest = hashlib.sha256(f"{salt}\0{exact(prompt).casefold()}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / (1 << 56)  # 56 bits, more than a float's 53, fill [0, 1) evenly


def table_of(example: Example, use: Use) -> Table | None:
    """The table that the example's prompt is assigned to, or None if the shares of `use` leave it out.

    A row without a prompt (running text) is assigned by its answer.
    """
    position = place(example.prompt or example.chosen, "table")  # uniform in [0, 1)
    border = 0.0
    for table in TABLES:
        border += getattr(use, table)
        if position < border:
            return table
    return None


def is_evaluation(example: Example, eval_fraction: float) -> bool:
    """Whether the prompt of a demonstration, a pair or a judged answer is held out for evaluation."""
    return place(example.prompt or example.chosen, "eval") < eval_fraction


def trained(table: str) -> str:
    """The training table for `table`, which is either that table or its held-out part.

    >>> trained("eval_steps"), trained("steps")
    ('steps', 'steps')
    """
    return table.removeprefix("eval_")


def misfit(example: Example, table: str) -> str | None:
    """The reason why `example` cannot be used in `table`, or None if it can."""
    kind = trained(table)
    prompt, chosen, rejected, steps = example.prompt, example.chosen, example.rejected, example.steps
    if kind != "demonstrations" and any(message.tool_fields for message in (*prompt, *chosen, *rejected)):
        return "tool calls: only demonstrations can hold them"
    if kind == "demonstrations" and not chosen:
        return "no good answer: demonstrations need one"
    if kind == "preferences" and not (chosen and rejected) and not example.judged:
        return "no pair of answers: preferences need a good and a bad one, or one that is labeled good or bad"
    if kind == "prompts" and not prompt:
        return "no prompt"
    if kind == "steps" and not (prompt and steps):
        return "no judged steps: a prompt, completions and their labels are needed"
    return "blank step" if kind == "steps" and not all(map(str.strip, steps)) else None


def mix(rows: Mapping[str, Sequence[T]], weights: Mapping[str, float], *, seed: int) -> list[T]:
    """Mix and shuffle the rows of all sources in the proportions of `weights`.

    The source with the fewest rows for its weight sets the size. Each source contributes a random subset of its rows,
    without repetition.

    >>> len(mix({"a": range(10), "b": range(100)}, {"a": 1.0, "b": 3.0}, seed=0))
    40
    """
    present = {name: list(found) for name, found in rows.items() if found}
    if not present:
        return []
    scale = min(len(found) / weights[name] for name, found in present.items())  # rows per unit of weight
    rng = random.Random(seed)
    mixed: list[T] = []
    for name, found in present.items():
        mixed += rng.sample(found, k=min(len(found), max(1, round(scale * weights[name]))))
    rng.shuffle(mixed)
    return mixed


def shuffled(rows: Sequence[T], *, seed: int) -> list[T]:
    """The rows in a random order determined by `seed`."""
    return random.Random(seed).sample(rows, k=len(rows))


# ---------------------------------------------------------------- order


def rows_at(step: int, rows: Sequence[T], *, count: int, seed: int) -> list[T]:
    """Draw `count` rows for `step`. An epoch may span several steps."""
    return rows_from(step * count, rows, count=count, seed=seed)


def rows_from(first: int, rows: Sequence[T], *, count: int, seed: int, shuffles: bool = True) -> list[T]:
    """Draw `count` rows (at least one) from position `first` of the endless sequence of epochs.

    With `shuffles`, each epoch has another order; otherwise rows keep their order.
    """
    size = len(rows)
    positions = range(first, first + count)
    if not shuffles:
        return [rows[position % size] for position in positions]
    epochs = range(positions[0] // size, positions[-1] // size + 1)
    orders = {epoch: shuffled_indices(size, derive_seed(seed, "prompts", epoch)) for epoch in epochs}
    return [rows[orders[position // size][position % size]] for position in positions]


def mixed_rows(
    first: int,
    rows: Mapping[str, Sequence[T]],
    shares: Mapping[str, float],
    *,
    count: int,
    block: int,
    seed: int,
    shuffles: bool = True,
) -> list[T]:
    """Draw `count` rows from position `first` of an endless sequence with fixed shares of the sources per `block`.

    The number of a source in a block differs from its share by less than 1, and is its share on average. Within a
    source, rows come in epochs, as in `rows_from`. The sequence depends only on rows, shares, block and seed.
    """
    found, order = list[T](), partial(rows_from, shuffles=shuffles)
    for number in range(first // block, (first + count - 1) // block + 1):
        taken, upto = (taken_before(one, tuple(shares.items()), block, seed) for one in (number, number + 1))
        drawn = [
            row
            for source, begin, end in zip(shares, taken, upto, strict=True)
            if begin < end
            for row in order(begin, rows[source], count=end - begin, seed=derive_seed(seed, "source", source))
        ]
        found += shuffled(drawn, seed=derive_seed(seed, "block", number))
    begin = first % block
    return found[begin : begin + count]


REMEMBERED_EVERY = 256
"""Number of blocks after which counts are remembered, so that a step does not count all blocks before it."""


@lru_cache(maxsize=4096)
def taken_before(number: int, shares: tuple[tuple[str, float], ...], block: int, seed: int) -> tuple[int, ...]:
    """Count the rows of each source in the blocks before block `number`."""
    first = max(number - 1, 0) // REMEMBERED_EVERY * REMEMBERED_EVERY
    taken = taken_before(first, shares, block, seed) if first else (0,) * len(shares)
    for one in range(first, number):
        counts = apportioned(dict(shares), block, offset=derive_seed(seed, "mixture", one) / 2**31)
        taken = tuple(map(sum, zip(taken, counts.values(), strict=True)))
    return taken


def apportioned(shares: Mapping[str, float], count: int, *, offset: float) -> dict[str, int]:
    """Divide `count` rows among the sources by systematic sampling: equal steps through the shares in order.

    `offset` in [0, 1) is where the steps begin; over all offsets a source has its share exactly.

    >>> apportioned({"a": 0.7, "b": 0.3}, 10, offset=0.5), apportioned({"a": 1.0, "b": 1.0}, 3, offset=0.9)
    ({'a': 7, 'b': 3}, {'a': 1, 'b': 2})
    """
    total, below, counts = sum(shares.values()), 0.0, dict[str, int]()
    for source, share in shares.items():
        upto = below + share
        begin, end = (math.ceil(count * edge / total - offset) for edge in (below, upto))
        counts[source] = end - begin
        below = upto
    counts[source] = count - sum(list(counts.values())[:-1])  # the last edge, which rounding may move
    return counts


@lru_cache(maxsize=8)  # every step of an epoch needs its order, and an order of a million rows takes half a second
def shuffled_indices(count: int, seed: int) -> Sequence[int]:
    """The integers 0 ... count - 1 in a random order determined by `seed`."""
    order = array("q", range(count))
    random.Random(seed).shuffle(order)
    return order


def split_by_prompt(
    rows: Sequence[T], prompt_of: Callable[[T], str], *, fraction: float, seed: int
) -> dict[str, list[T]]:
    """{"train": rows, "eval": rows} with the rows of `held_out` prompts in `eval`: no prompt is in both."""
    evaluation = held_out(map(prompt_of, rows), fraction=fraction, seed=seed)
    return {
        split: [row for row in rows if (prompt_of(row) in evaluation) == (split == "eval")]
        for split in ("train", "eval")
    }


def held_out(prompt_ids: Iterable[str], *, fraction: float, seed: int) -> set[str]:
    """Choose the prompts to hold out: `fraction` of them and at least one, or none for one prompt or a fraction of 0.

    >>> len(held_out(["a", "b", "c"], fraction=0.05, seed=17))
    1
    """
    prompts = sorted(set(prompt_ids), key=lambda prompt: (derive_seed(seed, "eval", prompt), prompt))
    count = max(1, round(fraction * len(prompts))) if fraction and len(prompts) > 1 else 0
    return set(prompts[:count])
