"""Score answers with a language model as the judge, at an OpenAI-compatible endpoint."""

import json
import re
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Self, TypeVar

import httpx

from rlhf_core.config.rewards import (
    ChatServer,
    GenerativeReward,
    JsonVerdict,
    JudgedTerm,
    JudgeReward,
    PatternVerdict,
)
from rlhf_core.errors import RewardError
from rlhf_core.http.client import post, shown_body
from rlhf_core.http.retries import retried
from rlhf_core.rewards.batches import FIRST_PAUSE_S, LONGEST_PAUSE_S, Logs, RewardOutcome, shortened
from rlhf_core.rewards.protocols import prompt_text
from rlhf_core.rewards.rubrics import Criterion, read_rubric, shown, weighted_share
from rlhf_core.schema.secrets import bearer, resolved
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.types import Generation, Message, Prompt, derive_seed

T = TypeVar("T")

# ---------------------------------------------------------------- chat

_FINAL = frozenset({400, 401, 403, 404, 405, 413, 422})
"""Statuses that the same question gets again."""


class ChatFailed(Exception):
    """The server did not answer a question, after all retries or because it never will; the message holds no secret."""


class ChatEndpoint:
    """The model that `config` names, at its server; threads may share it.

    Requests are retried with exponential backoff. `key` is the place of `config` in the profile, for messages.
    """

    def __init__(
        self,
        key: str,
        config: ChatServer,
        *,
        pause: Callable[[float], Any] = time.sleep,
    ) -> None:
        self._config = config
        self._pause = pause
        limits = httpx.Limits(max_connections=config.concurrency)
        self._address = str(resolved(config.url, f"{key}.url")).rstrip("/")
        self._client = httpx.Client(headers=bearer(f"{key}.token_env", config.token_env), limits=limits)

    def ask(self, messages: Sequence[Message]) -> str:
        """Return the model's reply to a conversation; errors are those of `reply`."""
        return self.reply(messages)[0]

    def reply(self, messages: Sequence[Message], *, seed: int | None = None) -> tuple[str, bool]:
        """Return the model's reply to a conversation, by a `seed` if there is one, and whether `max_tokens` cut it off.

        Raises ChatFailed if the server gives none, and ValueError if it answers with something other than a reply.
        """
        try:
            return retried(
                lambda: self._said(messages, seed),
                retries=self._config.retries,
                again=_may_pass,
                first_s=FIRST_PAUSE_S,
                longest_s=LONGEST_PAUSE_S,
                pause=self._pause,
            )
        except _Answered as error:
            problem = f"{self._config.url} answered {error.status}"
        except httpx.HTTPError as error:
            problem = f"{self._config.url}: {error!r}"
        raise ChatFailed(without_secrets(problem))

    def close(self) -> None:
        self._client.close()

    def _said(self, messages: Sequence[Message], seed: int | None) -> tuple[str, bool]:
        """Return the reply, and whether it was cut off; httpx.HTTPError for a fault, _Answered for a status other than 200."""
        config = self._config
        body = {
            "model": config.model,
            "messages": [{"role": one.role, "content": one.content} for one in messages],
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
        } | ({} if seed is None else {"seed": seed})
        url = f"{self._address}/chat/completions"
        status, answer = post(self._client, url, body, timeout_s=config.timeout_s, connect_s=config.timeout_s)
        if status != 200:
            raise _Answered(status)
        return _content(answer)


class _Answered(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def _may_pass(error: Exception) -> bool:
    """Return whether the same request may succeed later."""
    return isinstance(error, httpx.HTTPError) or (isinstance(error, _Answered) and error.status not in _FINAL)


def find_verdict(text: str, verdict: PatternVerdict | JsonVerdict) -> Any:
    """Return the group of the last match of the pattern, or the field of the last JSON object that has it, or None.

    >>> find_verdict("Score: 3. No, Score: 4", PatternVerdict())
    '4'
    """
    if isinstance(verdict, JsonVerdict):
        return _last_field(text, verdict.field)
    found = re.findall(verdict.pattern, text)
    return found[-1] if found else None


def _content(received: bytes) -> tuple[str, bool]:
    try:
        choice = json.loads(received)["choices"][0]
        content, cut = choice["message"]["content"], choice.get("finish_reason") == "length"
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise ValueError(f"the judge's server answered with no chat completion: {shown_body(received, 80)!r}") from None
    if not isinstance(content, str):
        raise ValueError("the judge's answer is empty")
    return content, cut


def _last_field(text: str, field: str) -> Any:
    """Return the field of the last JSON object in `text` that has it."""
    decoder = json.JSONDecoder()
    for start in reversed([match.start() for match in re.finditer(r"\{", text)]):
        try:
            value, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if field in value:
            return value[field]
    return None


# ---------------------------------------------------------------- judge

CORRECTION = "Your reply holds no verdict in the requested form. Give only the verdict, in that form."
_PLACE = re.compile(r"\{(prompt|completion|label|rubric|criterion|answers)\}")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Judge:
    """A `Reward` that sends one request per generation, criterion or group; `BatchedReward` runs `concurrency` at a time.

    Requests are retried with exponential backoff, and a reply without a score, or with one outside of the range, is answered
    with a request for one. What stays without is a failure: of that generation, or of the group that was compared.
    RewardError for `on_failure = "fail"`. The order in which a group is shown follows from `seed` and the prompt.
    """

    def __init__(
        self, name: str, config: JudgeReward, *, seed: int = 0, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self._name = name
        self._config = config
        self._seed = seed
        self._endpoint = ChatEndpoint(f"rewards.{name}", config, pause=pause)

    def outcome(self, generations: Sequence[Generation]) -> RewardOutcome:
        """Return the score of each generation; where answers are compared, all are answers to one prompt."""
        logs: Logs = {}
        failures: dict[int, str] = {}
        values: tuple[float | None, ...]
        if self._config.compares == "group":
            rubric = shown(self._rubric(generations[0].prompt))
            try:
                values, logs = self._compared(generations, rubric)
            except (ChatFailed, ValueError) as error:
                values = (None,) * len(generations)
                failures = dict.fromkeys(range(len(generations)), shortened(str(error)))
        else:
            verdicts = [self._verdict(generation) for generation in generations]
            failures = {at: verdict for at, verdict in enumerate(verdicts) if isinstance(verdict, str)}
            values = tuple(None if isinstance(verdict, str) else verdict for verdict in verdicts)
        if failures and self._config.on_failure == "fail":
            at, reason = next(iter(failures.items()))
            key = f"rewards.{self._name}[prompt {generations[at].prompt.id}]"
            raise RewardError(key, reason, "the judge gave no score", "fix the template or the server")
        return RewardOutcome(values, failures, logs)

    def close(self) -> None:
        self._endpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _verdict(self, generation: Generation) -> float | str:
        """Return the score, or why there is none."""
        config, criteria = self._config, self._rubric(generation.prompt)
        try:
            scores = [self._score(question) for question in questions(config, generation, criteria)]
        except (ChatFailed, ValueError) as error:
            return shortened(str(error))
        return joint_score(config, criteria, scores)

    def _score(self, question: str) -> float:
        config = self._config
        return ask_for(
            self._endpoint,
            question,
            lambda reply: read_score(reply, config.verdict, low=config.low, high=config.high),
            corrections=config.corrections,
        )

    def _compared(self, group: Sequence[Generation], rubric: str) -> tuple[tuple[float, ...], Logs]:
        """Return the mean score of each answer over all orders, and how far the scores of the orders differ."""
        config, prompt = self._config, group[0].prompt
        rows = []
        for order in orders_of(len(group), config.orders, seed=derive_seed(self._seed, "judge", prompt.id)):
            answers = "\n\n".join(f"Answer {n}:\n{group[at].completion.text}" for n, at in enumerate(order, start=1))
            scores = ask_for(
                self._endpoint,
                filled(config.template, group[0], rubric=rubric, answers=answers),
                lambda reply: read_scores(reply, config.verdict, count=len(group), low=config.low, high=config.high),
                corrections=config.corrections,
            )
            by_answer = dict(zip(order, scores, strict=True))
            rows.append([by_answer[at] for at in range(len(group))])
        columns = list(zip(*rows, strict=True))
        gaps = [max(column) - min(column) for column in columns]
        return tuple(map(fmean, columns)), {"order_gap": (sum(gaps), len(gaps))} if len(rows) > 1 else {}

    def _rubric(self, prompt: Prompt) -> tuple[Criterion, ...]:
        return read_rubric(self._config, self._name, prompt)


def questions(config: JudgedTerm, generation: Generation, criteria: Sequence[Criterion]) -> list[str]:
    """Return what is asked about an answer: one question, or one for each criterion."""
    rubric = shown(criteria)
    if not config.by_criterion:
        return [filled(config.template, generation, rubric=rubric)]
    return [filled(config.template, generation, rubric=rubric, criterion=one.text) for one in criteria]


def joint_score(
    config: JudgeReward | GenerativeReward, criteria: Sequence[Criterion], scores: Sequence[float]
) -> float:
    """Return the reward of the scores that the `questions` about an answer got."""
    if not config.by_criterion:
        return scores[0]
    return weighted_share(criteria, [(score - config.low) / (config.high - config.low) for score in scores])


def ask_for(endpoint: ChatEndpoint, question: str, read: Callable[[str], T], *, corrections: int) -> T:
    """Return what `read` finds in the reply to a question; one for which it raises ValueError is answered with a correction.

    Raises ChatFailed if the server gives no reply, and the last ValueError after `corrections` of them.
    """
    messages = [Message("user", question)]
    for left in range(corrections, -1, -1):
        reply = endpoint.ask(messages)
        try:
            return read(reply)
        except ValueError:
            if not left:
                raise
            messages += [Message("assistant", reply), Message("user", CORRECTION)]
    raise AssertionError("the last reply returns or raises")


def filled(template: str, generation: Generation, **parts: str) -> str:
    """Return the template with prompt, completion, label and `parts` filled in; placeholders in them stay as they are."""
    known = {
        "prompt": prompt_text(generation.prompt.messages),
        "completion": generation.completion.text,
        "label": generation.prompt.label,
    } | parts
    return _PLACE.sub(lambda place: known.get(place.group(1), place.group()), template)


def orders_of(count: int, number: int, *, seed: int) -> list[list[int]]:
    """Return `number` orders of `count` answers: a shuffled one, the same reversed, both turned on, and so on.

    So the places of an answer in an order and in the reversed one add up to the same for all answers.

    >>> orders_of(3, 2, seed=7)
    [[1, 0, 2], [2, 0, 1]]
    """
    first = sorted(range(count), key=lambda at: derive_seed(seed, at))
    pairs = -(-number // 2)  # rounded up
    found = []
    for at in range(number):
        turn = at // 2 * count // pairs
        order = first[turn:] + first[:turn]
        found.append(order[::-1] if at % 2 else order)
    return found


def read_score(text: str, verdict: PatternVerdict | JsonVerdict, *, low: float, high: float) -> float:
    """Return the score that a judge's answer holds; ValueError if there is none between `low` and `high`.

    >>> read_score("Clear and right. Score: 8", PatternVerdict(), low=0, high=10)
    8.0
    """
    return _checked_score(_found(text, verdict), low, high)


def read_scores(
    text: str, verdict: PatternVerdict | JsonVerdict, *, count: int, low: float, high: float
) -> list[float]:
    """Return the scores of `count` answers, in the order shown; ValueError if there are others, or one out of range.

    >>> read_scores('The second is wrong. {"scores": [8, 1.5]}', JsonVerdict(field="scores"), count=2, low=0, high=10)
    [8.0, 1.5]
    """
    found = _found(text, verdict)
    given = _NUMBER.findall(found) if isinstance(found, str) else found
    if not isinstance(given, list) or len(given) != count:
        raise ValueError(f"the judge's scores {str(found)[:80]!r} are not one for each of the {count} answers")
    return [_checked_score(one, low, high) for one in given]


def _found(text: str, verdict: PatternVerdict | JsonVerdict) -> Any:
    found = find_verdict(text, verdict)
    if found is None:
        raise ValueError(f"the judge's answer holds no score: {text[-80:]!r}")
    return found


def _checked_score(found: Any, low: float, high: float) -> float:
    try:
        score = float(found)
    except (TypeError, ValueError):
        raise ValueError(f"the judge's score {found!r} is not a number") from None
    if not low <= score <= high:  # NaN too
        raise ValueError(f"the judge's score {score:g} is not between {low:g} and {high:g}")
    return score
