"""Score answers with a language model as the judge, at an OpenAI-compatible endpoint."""

import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import httpx

from rlhf_core.config.annotators import ChatServer, JudgeAnnotator
from rlhf_core.config.rewards import JsonVerdict, JudgeReward, PatternVerdict
from rlhf_core.errors import RewardError
from rlhf_core.http.client import post, shown_body
from rlhf_core.http.retries import retried
from rlhf_core.rewards.batches import FIRST_PAUSE_S, LONGEST_PAUSE_S, RewardOutcome, shortened
from rlhf_core.rewards.protocols import prompt_text
from rlhf_core.schema.secrets import bearer, resolved
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.types import Generation, Message

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
        config: JudgeReward | JudgeAnnotator | ChatServer,
        *,
        pause: Callable[[float], Any] = time.sleep,
    ) -> None:
        self._config = config
        self._pause = pause
        limits = httpx.Limits(max_connections=config.concurrency)
        self._address = str(resolved(config.url, f"{key}.url")).rstrip("/")
        self._client = httpx.Client(headers=bearer(f"{key}.token_env", config.token_env), limits=limits)

    def ask(self, messages: Sequence[Message], *, seed: int | None = None) -> str:
        """Return the model's reply to a conversation, by a `seed` if there is one.

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

    def _said(self, messages: Sequence[Message], seed: int | None) -> str:
        """Return the reply; httpx.HTTPError for a fault, _Answered for a status other than 200."""
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


def _content(received: bytes) -> str:
    try:
        content = json.loads(received)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise ValueError(f"the judge's server answered with no chat completion: {shown_body(received, 80)!r}") from None
    if not isinstance(content, str):
        raise ValueError("the judge's answer is empty")
    return content


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

_PLACE = re.compile(r"\{(prompt|completion|label)\}")


class Judge:
    """A `Reward` that sends one request per generation; `BatchedReward` sends `concurrency` of them at a time.

    Requests are retried with exponential backoff. An answer without a score, or with one outside of the range, is a
    failure of that generation. RewardError for `on_failure = "fail"`.
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
            raise RewardError(key, reason, "the judge gave no score", "fix the template or the server")
        values = tuple(None if isinstance(verdict, str) else verdict for verdict in verdicts)
        return RewardOutcome(values, failures)

    def close(self) -> None:
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
    """Return the template with prompt, completion and label filled in; placeholders in them stay as they are."""
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
