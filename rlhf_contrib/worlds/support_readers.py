"""Simulated annotators of the support world, who read the customer's message and the reply.

Training prompts carry no facts, so that no stage can train on the gold reward. A reader takes the facts from the
message, as a person would.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlhf_contrib.worlds.support import Facts, gold_components, sum_of
from rlhf_contrib.worlds.support_phrases import PROBLEMS
from rlhf_core.errors import RewardError, explain
from rlhf_core.types import Generation

_PROBLEM_OF = {wording: problem for problem, wordings in PROBLEMS.items() for wording in wordings}
_MESSAGE = re.compile(
    r"(?P<name>[A-Z][a-z]+) writes: my (?P<item>[a-z]+ [a-z]+) (?P<wording>"
    + "|".join(re.escape(wording) for wording in sorted(_PROBLEM_OF, key=len, reverse=True))
    + r")\. Reply to (?:her|him)\."
)


def reader_reward(generations: Sequence[Generation]) -> list[float]:
    """Score each reply by the facts in the customer's message; RewardError for any other message."""
    return [
        sum_of(gold_components(row.completion.text, read_facts(row.prompt.messages[-1].content))) for row in generations
    ]


def read_facts(message: str) -> Facts:
    """Parse the facts in a customer's message; RewardError if it is not a message of this world.

    >>> from rlhf_contrib.worlds.support_phrases import PROBLEMS
    >>> wording = PROBLEMS["broken"][0]
    >>> read_facts(f"Maria writes: my blue kettle {wording}. Reply to her.").problem
    'broken'
    """
    found = _MESSAGE.fullmatch(message.strip())
    if found is None:
        rule = "is not a customer's message of the support world"
        raise RewardError(explain("prompt", message[:80], rule, "read only prompts of this world"))
    return Facts(found["name"], found["item"], _PROBLEM_OF[found["wording"]])
