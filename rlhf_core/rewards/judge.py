"""Score answers with a language model as the judge, at an OpenAI-compatible endpoint."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Self

from rlhf_core.config.rewards import JsonVerdict, JudgeReward, PatternVerdict
from rlhf_core.errors import RewardError, explain
from rlhf_core.rewards.chat import ChatEndpoint, ChatFailed, find_verdict
from rlhf_core.rewards.outcomes import RewardOutcome, shortened
from rlhf_core.rewards.protocols import prompt_text
from rlhf_core.types import Generation, Message

_PLACE = re.compile(r"\{(prompt|completion|label)\}")


class Judge:
    """A `Reward` that asks about each generation on its own; `BatchedReward` asks `concurrency` of them at a time.

    A question is asked again after a fault of the network or the server, with pauses that double. An answer without a
    score, or with one outside of the range, is a failure of that generation. RewardError for `on_failure = "fail"`.
    """

    def __init__(self, name: str, config: JudgeReward, *, pause: Callable[[float], None] = time.sleep) -> None:
        self._name = name
        self._config = config
        self._endpoint = ChatEndpoint(f"rewards.{name}", config, pause=pause)

    def outcome(self, generations: Sequence[Generation]) -> RewardOutcome:
        """Return the score of each generation."""
        verdicts = [self._verdict(generation) for generation in generations]
        failures = {at: verdict for at, verdict in enumerate(verdicts) if isinstance(verdict, str)}
        if failures and self._config.on_failure == "fail":
            at, reason = next(iter(failures.items()))
            key = f"rewards.{self._name}[prompt {generations[at].prompt.id}]"
            raise RewardError(explain(key, reason, "the judge gave no score", "fix the template or the server"))
        values = tuple(None if isinstance(verdict, str) else verdict for verdict in verdicts)
        return RewardOutcome(values, failures)

    def close(self) -> None:
        """Close the connections."""
        self._endpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _verdict(self, generation: Generation) -> float | str:
        """Return the score, or why there is none."""
        config = self._config
        try:
            text = self._endpoint.ask([Message("user", question(config.template, generation))])
            return read_score(text, config.verdict, low=config.low, high=config.high)
        except (ChatFailed, ValueError) as error:
            return shortened(str(error))


def question(template: str, generation: Generation) -> str:
    """Return the template with prompt, completion and label filled in; what they say is not filled in again."""
    filled = {
        "prompt": prompt_text(generation.prompt.messages),
        "completion": generation.completion.text,
        "label": generation.prompt.label,
    }
    return _PLACE.sub(lambda place: filled[place.group(1)], template)


def read_score(text: str, verdict: PatternVerdict | JsonVerdict, *, low: float, high: float) -> float:
    """Return the score that a judge's answer holds; ValueError if there is none between `low` and `high`.

    >>> read_score("Clear and right. Score: 8", PatternVerdict(), low=0, high=10)
    8.0
    """
    found = find_verdict(text, verdict)
    if found is None:
        raise ValueError(f"the judge's answer holds no score: {text[-80:]!r}")
    try:
        score = float(found)
    except (TypeError, ValueError):
        raise ValueError(f"the judge's score {found!r} is not a number") from None
    if not low <= score <= high:  # NaN too
        raise ValueError(f"the judge's score {score:g} is not between {low:g} and {high:g}")
    return score
