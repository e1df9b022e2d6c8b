"""Sums of three or four numbers, worked out one step per line, with occasional wrong steps.

    What is 7 + 5 + 2?
    7 + 5 = 12
    12 + 2 = 14

A writer who slips continues from the wrong result. Every later line may be correct by itself, but the answer is wrong:
labels are 0 from the first error on (arXiv 2305.20050 section 2.4), and a judge of steps must look back.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rlhf_contrib.worlds.arithmetic_phrases import HELD_OUT, SOURCE, WORDINGS
from rlhf_core.config.data import ArithmeticWorld
from rlhf_core.data.tables import Demonstration, Preference, SteppedAnswer, Tables, content_id
from rlhf_core.types import Message, Prompt, derive_seed

SIZES = (3, 4)  # numbers in a sum
TRIES = 200  # maximum draws per requested question: small numbers make few different questions


@dataclass(frozen=True, slots=True)
class WorkedSum:
    """Numbers to add up, with the wording of the question.

    >>> WorkedSum((7, 5, 2), "What is {}?").written(None, 0)[0]
    ('7 + 5 = 12', '12 + 2 = 14')
    """

    numbers: tuple[int, ...]
    wording: str

    @property
    def question(self) -> tuple[Message, ...]:
        """The prompt."""
        return (Message("user", self.wording.format(" + ".join(map(str, self.numbers)))),)

    def written(self, wrong: int | None, error: int) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """The steps and their labels; the result of step `wrong` (from 0) is off by `error`, and later steps use it."""
        total, lines = self.numbers[0], []
        for step, number in enumerate(self.numbers[1:]):
            result = total + number + (error if step == wrong else 0)
            lines.append(f"{total} + {number} = {result}")
            total = result
        right = len(lines) if wrong is None else wrong
        return tuple(lines), (1.0,) * right + (0.0,) * (len(lines) - right)


def worked_tables(config: ArithmeticWorld, *, seed: int) -> tuple[Tables, dict[str, float]]:
    """Build the tables of a world of worked sums (without steps), and the fraction of correct demonstrations."""
    writer = _Writer(config, random.Random(derive_seed(seed, "worked writer")), seed=seed)
    demonstrations = [writer.demonstration(held_out=False) for _ in range(config.demonstrations)]
    tables = Tables(
        demonstrations=tuple(row for row, _ in demonstrations),
        eval_demonstrations=tuple(writer.demonstration(held_out=True)[0] for _ in range(config.eval_demonstrations)),
        preferences=tuple(writer.preference(held_out=False) for _ in range(config.preferences)),
        eval_preferences=tuple(writer.preference(held_out=True) for _ in range(config.eval_preferences)),
        prompts=writer.prompts(config.prompts, held_out=False),
        eval_prompts=writer.prompts(config.eval_prompts, held_out=True),
    )
    return tables, {"gold/demonstrations_right": sum(right for _, right in demonstrations) / len(demonstrations)}


def step_tables(config: ArithmeticWorld, *, seed: int) -> tuple[tuple[SteppedAnswer, ...], tuple[SteppedAnswer, ...]]:
    """Write the judged answers for training and for evaluation, from a separate random stream."""
    writer = _Writer(config, random.Random(derive_seed(seed, "steps")), seed=seed)
    train = tuple(writer.stepped(held_out=False) for _ in range(config.steps))
    return train, tuple(writer.stepped(held_out=True) for _ in range(config.eval_steps))


class _Writer:
    """Draws questions of one split, and careless answers to them."""

    def __init__(self, config: ArithmeticWorld, rng: random.Random, *, seed: int) -> None:
        self._config = config
        self._rng = rng
        self._seed = seed

    def demonstration(self, *, held_out: bool) -> tuple[Demonstration, bool]:
        """Write a conversation; the second result is whether its answer is correct."""
        asked = self._draw(held_out=held_out)
        steps, labels = self._answer(asked)
        messages = (*asked.question, Message("assistant", "\n".join(steps)))
        return Demonstration(content_id(SOURCE, messages), messages, SOURCE), labels[-1] == 1.0

    def preference(self, *, held_out: bool) -> Preference:
        """Write a correct answer and a wrong one."""
        asked = self._draw(held_out=held_out)
        chosen, rejected = (
            (Message("assistant", "\n".join(steps)),) for steps in (asked.written(None, 0)[0], self._wrong(asked)[0])
        )
        return Preference(
            content_id(SOURCE, asked.question, chosen, rejected), asked.question, chosen, rejected, 0.0, SOURCE
        )

    def stepped(self, *, held_out: bool) -> SteppedAnswer:
        """Write an answer with judged steps."""
        asked = self._draw(held_out=held_out)
        steps, labels = self._answer(asked)
        return SteppedAnswer(content_id(SOURCE, asked.question, steps), asked.question, steps, labels, SOURCE)

    def prompts(self, count: int, *, held_out: bool) -> tuple[Prompt, ...]:
        """Draw `count` different questions with their answers; fewer if the numbers allow no more."""
        found: dict[str, Prompt] = {}
        for _ in range(count * TRIES):
            if len(found) == count:
                break
            asked = self._draw(held_out=held_out)
            name = content_id(SOURCE, asked.question)
            found[name] = Prompt(name, asked.question, str(sum(asked.numbers)), SOURCE)
        return tuple(found.values())

    def _draw(self, *, held_out: bool) -> WorkedSum:
        while True:
            size = self._rng.choice(SIZES)
            numbers = tuple(self._rng.randint(0, self._config.largest) for _ in range(size))
            asked = WorkedSum(numbers, self._rng.choice(WORDINGS))
            # The question determines its split, not the draw, so all tables of a split share the same questions.
            if (derive_seed(self._seed, "held out", asked.question[0].content) % HELD_OUT == 0) == held_out:
                return asked

    def _answer(self, asked: WorkedSum) -> tuple[tuple[str, ...], tuple[float, ...]]:
        if self._rng.random() >= self._config.error_probability:
            return asked.written(None, 0)
        return self._wrong(asked)

    def _wrong(self, asked: WorkedSum) -> tuple[tuple[str, ...], tuple[float, ...]]:
        wrong = self._rng.randrange(len(asked.numbers) - 1)
        so_far = sum(asked.numbers[: wrong + 2])
        error = self._rng.choice([error for error in (-10, -2, -1, 1, 2, 10) if so_far + error >= 0])
        return asked.written(wrong, error)
