"""Score with a policy as judge: the probabilities of its verdicts on an answer, without sampling (arXiv 2408.15240)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_core.config.rewards import GenerativeReward, OnFailure
from rlhf_core.data.chat import UNLIMITED, ChatTemplate
from rlhf_core.errors import RewardError
from rlhf_core.interfaces import Trainer, logprob_rows
from rlhf_core.rewards.batches import RewardOutcome
from rlhf_core.rewards.judge import joint_score, questions
from rlhf_core.rewards.rubrics import read_rubric
from rlhf_core.types import Generation, Message, TokenSample, chunks


@dataclass(frozen=True)
class GenerativeModel:
    """A `Reward` that asks a frozen policy about each answer, and compares the log-probs of the replies in `verdicts`.

    A question that is longer than the `longest` row of the model is a failure of that answer, and RewardError for
    `on_failure = "fail"`. Logs `mass`, the mean over the questions of the probability of all verdicts together: near 0
    the policy would reply something else, and the rewards mean little.
    """

    name: str
    config: GenerativeReward
    trainer: Trainer
    chat: ChatTemplate
    longest: int | None

    @property
    def on_failure(self) -> OnFailure:
        """Treatment of an answer that cannot be judged."""
        return self.config.on_failure

    def __call__(self, generations: Sequence[Generation]) -> RewardOutcome:
        """Score each generation with one value."""
        config, count = self.config, len(self.config.verdicts)
        rubrics = [read_rubric(config, self.name, one.prompt) for one in generations]
        asked = [
            [self._replies(question) for question in questions(config, generation, rubric)]
            for generation, rubric in zip(generations, rubrics, strict=True)
        ]
        failures = {at: why for at, rows in enumerate(asked) if (why := self._too_long(rows, generations[at]))}
        samples = [reply for at, rows in enumerate(asked) if at not in failures for row in rows for reply in row]
        logprobs = [math.fsum(one) for one in logprob_rows(self.trainer, samples)] if samples else []
        verdicts = chunks(logprobs, count)
        scores = iter([expected_value(list(config.verdicts.values()), one) for one in verdicts])
        values = [
            None if at in failures else joint_score(config, rubric, [next(scores) for _ in rows])
            for at, (rows, rubric) in enumerate(zip(asked, rubrics, strict=True))
        ]
        mass = math.fsum(math.exp(one) for one in logprobs)
        return RewardOutcome(tuple(values), failures, {"mass": (mass, len(verdicts))} if verdicts else {})

    def _replies(self, question: str) -> list[TokenSample]:
        """One sample per verdict: the question with that verdict as the reply, whose tokens alone are masked in."""
        ask = [Message("user", question)]
        replies = [
            self.chat.continuation(ask, [Message("assistant", verdict)], max_length=UNLIMITED)
            for verdict in self.config.verdicts
        ]
        return [reply for reply in replies if reply is not None]  # nothing is cut, so there are all of them

    def _too_long(self, rows: Sequence[Sequence[TokenSample]], generation: Generation) -> str:
        """The reason why an answer is too long to be judged, "" if it is not; RewardError for `on_failure = "fail"`."""
        length = max(len(reply.token_ids) for row in rows for reply in row)
        if self.longest is None or length <= self.longest:
            return ""
        rule = f"the judge reads at most {self.longest} tokens"
        if self.on_failure == "fail":
            key, remedy = (
                f"rewards.{self.name}[prompt {generation.prompt.id}]",
                "choose shorter answers or another judge",
            )
            raise RewardError(key, f"a question of {length} tokens", rule, remedy)
        return f"a question of {length} tokens: {rule}"


def expected_value(values: Sequence[float], logprobs: Sequence[float]) -> float:
    """Expected value sum(p * value) / sum(p), with p = exp(logprob).

    >>> expected_value([1.0, 0.0], [-1000.0, -1000.0])
    0.5
    """
    top = max(logprobs)
    weights = [math.exp(logprob - top) for logprob in logprobs]
    return math.fsum(weight * value for weight, value in zip(weights, values, strict=True)) / math.fsum(weights)
