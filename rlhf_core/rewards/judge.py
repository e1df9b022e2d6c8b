"""Score answers with a language model as the judge, at an OpenAI-compatible endpoint."""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

import httpx

from rlhf_core.config.rewards import ChatServer, GenerativeReward, JudgedTerm, JudgeReward
from rlhf_core.errors import ConfigError, explain
from rlhf_core.http.client import post, shown_body
from rlhf_core.http.retries import retried
from rlhf_core.rewards.batches import FIRST_PAUSE_S, LONGEST_PAUSE_S, BatchFailed, RewardOutcome, Worker, shortened
from rlhf_core.rewards.protocols import prompt_text
from rlhf_core.rewards.rubrics import Criterion, read_rubric, shown, weighted_share
from rlhf_core.rewards.verdicts import read_score, read_scores
from rlhf_core.schema.secrets import bearer, resolved
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.types import Generation, Message, Prompt, derive_seed

T = TypeVar("T")

# ---------------------------------------------------------------- chat

_FINAL = frozenset({400, 401, 403, 404, 405, 413, 422})
"""Statuses that the same question gets again."""
_CUT = re.compile(
    r"length|max|filter|limit|abort|error|safety|incomplete|cancel|interrupt|insufficient|recitation", re.IGNORECASE
)
"""Finish reasons of servers for an incomplete reply; OpenAI's are `length` and `content_filter`."""
LONGEST_WAIT_S = 600.0
"""Longest `Retry-After` of a server that is waited for."""


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

    def reply(self, messages: Sequence[Message], *, seed: int | None = None) -> tuple[str, bool]:
        """Request the model's reply to a conversation, with a `seed` if given; also whether `max_tokens` cut it off.

        Raises ChatFailed if the server sends none.
        """
        try:
            return retried(
                lambda: self._said(messages, seed),
                retries=self._config.retries,
                again=_may_pass,
                first_s=FIRST_PAUSE_S,
                longest_s=LONGEST_PAUSE_S,
                pause=self._pause,
                least=lambda error: error.after_s if isinstance(error, _Answered) else 0.0,
            )
        except _Answered as error:
            problem = f"{self._config.url} answered {error}"
        except httpx.HTTPError as error:
            problem = f"{self._config.url}: {error!r}"
        raise ChatFailed(without_secrets(problem))

    def close(self) -> None:
        self._client.close()

    def _said(self, messages: Sequence[Message], seed: int | None) -> tuple[str, bool]:
        """Request a reply, and whether it was cut off; httpx.HTTPError for a fault, _Answered for another answer."""
        config = self._config
        body = {
            "model": config.model,
            "messages": [{"role": one.role, "content": one.content} for one in messages],
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
        } | ({} if seed is None else {"seed": seed})
        url = f"{self._address}/chat/completions"
        answer = post(self._client, url, body, timeout_s=config.timeout_s, connect_s=config.timeout_s)
        if answer.status != 200:
            said = f": {said}" if (said := shown_body(answer.content, 300).strip()) else ""
            waits = f", to ask again in {answer.after_s:g} s" if answer.after_s > LONGEST_WAIT_S else ""
            raise _Answered(f"{answer.status}{waits}{said}", answer.status, answer.after_s)
        content, ended = _content(answer.content)
        if not content.strip() and not ended:  # as some servers answer under load, or with an error and status 200
            raise _Answered("with an empty reply", 200, 0.0)
        return content, ended


class _Answered(Exception):
    def __init__(self, said: str, status: int, after_s: float) -> None:
        super().__init__(said)
        self.status = status
        self.after_s = after_s


def _may_pass(error: Exception) -> bool:
    """True if the same request may succeed later."""
    if isinstance(error, _Answered):
        return error.status not in _FINAL and error.after_s <= LONGEST_WAIT_S
    return isinstance(error, httpx.HTTPError)


def _content(received: bytes) -> tuple[str, bool]:
    """The text of a reply, which some servers send in parts, and whether a limit or a filter cut it off."""
    try:
        choice = json.loads(received)["choices"][0]
        content, cut = choice["message"].get("content"), bool(_CUT.search(f"{choice.get('finish_reason')}"))
        if isinstance(content, list):
            content = "".join(part.get("text") or "" for part in content)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise _Answered(f"with no chat completion: {shown_body(received, 80)!r}", 200, 0.0) from None
    return content if isinstance(content, str) else "", cut


# ---------------------------------------------------------------- judge

CORRECTION = "Your reply holds no verdict in the requested form. Give only the verdict, in that form."
_PLACE = re.compile(r"\{(prompt|completion|label|rubric|criterion|answers)\}")


@dataclass(eq=False)
class Judge(Worker):
    """A `Reward` that sends one request per generation, criterion or group; `BatchedReward` runs `concurrency` at a time.

    Requests are retried with exponential backoff, and after a reply without a score, or with one outside of the range,
    the model is asked for one. Raises BatchFailed for an answer or a group that never gets a score. The order in which
    a group is shown follows from `seed` and the prompt.
    """

    name: str
    config: JudgeReward
    _: KW_ONLY
    seed: int = 0
    pause: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self._endpoint = ChatEndpoint(f"rewards.{self.name}", self.config, pause=self.pause)

    def outcome(self, generations: Sequence[Generation]) -> RewardOutcome:
        """Score each generation; if answers are compared, all are answers to one prompt."""
        try:
            if self.config.compares == "group":
                return self._compared(generations, shown(self._rubric(generations[0].prompt)))
            return RewardOutcome(tuple(map(self._verdict, generations)))
        except ConfigError:  # of a rubric
            raise
        except (ChatFailed, ValueError) as error:
            key = f"rewards.{self.name}[prompt {generations[0].prompt.id}]"
            reason = shortened(str(error))
            message = explain(key, reason, "the judge gave no score", "fix the template or the server")
            raise BatchFailed(message, reason=reason) from None

    def close(self) -> None:
        self._endpoint.close()

    def _verdict(self, generation: Generation) -> float:
        config, criteria = self.config, self._rubric(generation.prompt)
        read = partial(read_score, verdict=config.verdict, low=config.low, high=config.high)
        asked = questions(config, generation, criteria)
        scores = [ask_for(self._endpoint, one, read, corrections=config.corrections) for one in asked]
        return joint_score(config, criteria, scores)

    def _compared(self, group: Sequence[Generation], rubric: str) -> RewardOutcome:
        """Mean score of each answer over all orders, and how far the scores of the orders differ."""
        config, prompt = self.config, group[0].prompt
        rows = []
        for order in orders_of(len(group), config.orders, seed=derive_seed(self.seed, "judge", prompt.id)):
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
        logs = {"order_gap": (sum(gaps), len(gaps))} if len(rows) > 1 else {}
        return RewardOutcome(tuple(map(fmean, columns)), logs=logs)

    def _rubric(self, prompt: Prompt) -> tuple[Criterion, ...]:
        return read_rubric(self.config, self.name, prompt)


def questions(config: JudgedTerm, generation: Generation, criteria: Sequence[Criterion]) -> list[str]:
    """The questions that the judge is asked about an answer: a single one, or one for each criterion."""
    rubric = shown(criteria)
    if not config.by_criterion:
        return [filled(config.template, generation, rubric=rubric)]
    return [filled(config.template, generation, rubric=rubric, criterion=one.text) for one in criteria]


def joint_score(
    config: JudgeReward | GenerativeReward, criteria: Sequence[Criterion], scores: Sequence[float]
) -> float:
    """Combine the scores of the `questions` about an answer into one reward."""
    if not config.by_criterion:
        return scores[0]
    return weighted_share(criteria, [(score - config.low) / (config.high - config.low) for score in scores])


def ask_for(endpoint: ChatEndpoint, question: str, read: Callable[[str], T], *, corrections: int) -> T:
    """Ask a question and parse the reply with `read`; if it raises ValueError, the model gets a correction.

    Raises ChatFailed if the server gives no reply, and the last ValueError after `corrections` of them.
    """
    messages = [Message("user", question)]
    for left in range(corrections, -1, -1):
        reply, cut = endpoint.reply(messages)
        try:
            if cut:
                raise ValueError(f"the judge's reply was cut off: ...{reply[-80:]!r}; raise max_tokens")
            return read(reply)
        except ValueError:
            if not left:
                raise
            messages += [Message("assistant", reply), Message("user", CORRECTION)]
    raise AssertionError("the last reply returns or raises")


def filled(template: str, generation: Generation, **parts: str) -> str:
    """Fill prompt, completion, label and `parts` into the template; placeholders inside them are not replaced."""
    known = {
        "prompt": prompt_text(generation.prompt.messages),
        "completion": generation.completion.text,
        "label": generation.prompt.label,
    } | parts
    return _PLACE.sub(lambda place: known.get(place.group(1), place.group()), template)


def orders_of(count: int, number: int, *, seed: int) -> list[list[int]]:
    """`number` orders of `count` answers: a shuffled one, its reverse, both rotated by one, and so on.

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
