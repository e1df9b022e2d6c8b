"""A world with a verifiable reward: additions and subtractions, checked exactly.

    What is 7 + 5?
    7 + 5 = 12

The writer of demonstrations is careless: some answers contain a slip, so a policy that imitates them is wrong about
as often, and reinforcement learning on the exact reward can improve it. Training prompts also carry the correct answer
as their label, because the reward only compares with it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhf_contrib.worlds.arithmetic_phrases import HELD_OUT, SOURCE, WORDINGS
from rlhf_contrib.worlds.worked_sums import step_tables, worked_tables
from rlhf_core.config.data import ArithmeticWorld
from rlhf_core.data.tables import Demonstration, Preference, Tables, content_id
from rlhf_core.errors import RewardError, explain
from rlhf_core.types import Generation, Message, Prompt, derive_seed


@dataclass(frozen=True, slots=True)
class Problem:
    """Two numbers and an operation, with the wording of the question.

    >>> Problem(7, "+", 5, "What is {}?").answer
    12
    """

    left: int
    sign: str
    right: int
    wording: str

    @property
    def answer(self) -> int:
        """The correct result."""
        return self.left + self.right if self.sign == "+" else self.left - self.right

    @property
    def question(self) -> str:
        """The text of the prompt."""
        return self.wording.format(f"{self.left} {self.sign} {self.right}")

    def written(self, result: int) -> str:
        """The text of a reply that claims `result`."""
        return f"{self.left} {self.sign} {self.right} = {result}"


def exact_match(generations: Sequence[Generation]) -> list[float]:
    """Score 1.0 if the reply ends in `= <label>`, else 0.0; RewardError if the prompt has no label."""
    rewards = []
    for row in generations:
        if not row.prompt.label:
            raise RewardError(
                explain(f"prompt[{row.prompt.id}].label", "", "has no answer to check", "use labelled prompts")
            )
        claimed = re.search(r"=\s*(-?\d+)\s*\.?\s*$", row.completion.text)
        rewards.append(1.0 if claimed is not None and int(claimed[1]) == int(row.prompt.label) else 0.0)
    return rewards


def make_tables(config: ArithmeticWorld, *, seed: int) -> tuple[Tables, dict[str, float]]:
    """Build all tables, and the fraction of correct demonstrations; no training table has an evaluation question.

    Judged steps come from a separate random stream, so that requesting them changes no other row.
    """
    tables, facts = worked_tables(config, seed=seed) if config.worked else _plain_tables(config, seed=seed)
    if config.steps:
        steps, eval_steps = step_tables(config, seed=seed)
        tables = replace(tables, steps=steps, eval_steps=eval_steps)
    return tables, facts


def _plain_tables(config: ArithmeticWorld, *, seed: int) -> tuple[Tables, dict[str, float]]:
    problems = _problems(config.largest)
    random.Random(derive_seed(seed, "problems")).shuffle(problems)
    border = max(1, len(problems) // HELD_OUT)
    held_out, train = problems[:border], problems[border:]
    rng = random.Random(derive_seed(seed, "writer"))
    demonstrations = [_demonstration(problem, config, rng) for problem in _draw(train, config.demonstrations, rng)]
    tables = Tables(
        demonstrations=tuple(row for row, _ in demonstrations),
        eval_demonstrations=tuple(
            _demonstration(problem, config, rng)[0] for problem in _draw(held_out, config.eval_demonstrations, rng)
        ),
        preferences=tuple(_preference(problem, rng) for problem in _draw(train, config.preferences, rng)),
        eval_preferences=tuple(_preference(problem, rng) for problem in _draw(held_out, config.eval_preferences, rng)),
        prompts=tuple(_prompt(problem) for problem in _distinct(train, config.prompts, rng)),
        eval_prompts=tuple(_prompt(problem) for problem in _distinct(held_out, config.eval_prompts, rng)),
    )
    return tables, {"gold/demonstrations_right": sum(right for _, right in demonstrations) / len(demonstrations)}


def slip(problem: Problem, rng: random.Random) -> int:
    """Draw a wrong result as people make them: off by one or ten, or the result of the other operation."""
    other = problem.left - problem.right if problem.sign == "+" else problem.left + problem.right
    near = [problem.answer + step for step in (-10, -1, 1, 10)]
    return rng.choice([result for result in (*near, other) if result >= 0 and result != problem.answer])


# ---------------------------------------------------------------- private


def _problems(largest: int) -> list[Problem]:
    pairs = [(left, right) for left in range(largest + 1) for right in range(largest + 1)]
    signed = [(left, "+", right) for left, right in pairs]
    signed += [(left, "-", right) for left, right in pairs if left >= right]
    return [Problem(*terms, wording) for terms in signed for wording in WORDINGS]


def _draw(problems: Sequence[Problem], count: int, rng: random.Random) -> list[Problem]:
    """Draw `count` problems; all occur equally often, up to a difference of one."""
    drawn: list[Problem] = []
    while len(drawn) < count:
        drawn += rng.sample(problems, k=min(len(problems), count - len(drawn)))
    return drawn


def _distinct(problems: Sequence[Problem], count: int, rng: random.Random) -> list[Problem]:
    # A prompt's id is its content, so tables have no duplicate prompts; small worlds yield fewer rows.
    return rng.sample(problems, k=min(count, len(problems)))


def _demonstration(problem: Problem, config: ArithmeticWorld, rng: random.Random) -> tuple[Demonstration, bool]:
    right = rng.random() >= config.error_probability
    result = problem.answer if right else slip(problem, rng)
    messages = (Message("user", problem.question), Message("assistant", problem.written(result)))
    return Demonstration(content_id(SOURCE, messages), messages, SOURCE), right


def _preference(problem: Problem, rng: random.Random) -> Preference:
    chosen, rejected = problem.written(problem.answer), problem.written(slip(problem, rng))
    return Preference(
        content_id(SOURCE, problem.question, chosen, rejected),
        (Message("user", problem.question),),
        (Message("assistant", chosen),),
        (Message("assistant", rejected),),
        0.0,
        SOURCE,
    )


def _prompt(problem: Problem) -> Prompt:
    messages = (Message("user", problem.question),)
    return Prompt(content_id(SOURCE, messages), messages, str(problem.answer), SOURCE)
