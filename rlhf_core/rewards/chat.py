"""Ask a language model at an OpenAI-compatible chat endpoint, and find a verdict in its reply."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from rlhf_core.config.annotators import JudgeAnnotator
from rlhf_core.config.rewards import JsonVerdict, JudgeReward, PatternVerdict
from rlhf_core.rewards.batches import FIRST_PAUSE_S, LONGEST_PAUSE_S
from rlhf_core.schema.secrets import bearer, resolved
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.types import Message

_FINAL = frozenset({400, 401, 403, 404, 405, 413, 422})
"""Statuses that the same question gets again."""


class ChatFailed(Exception):
    """The server did not answer a question, after all retries or because it never will; the message holds no secret."""


class ChatEndpoint:
    """The model that `config` names, at its server; threads may share it.

    A question is asked again after a fault of the network or the server, with pauses that double. `key` is the place of
    `config` in the profile, for messages.
    """

    def __init__(
        self, key: str, config: JudgeReward | JudgeAnnotator, *, pause: Callable[[float], Any] = time.sleep
    ) -> None:
        self._config = config
        self._pause = pause
        limits = httpx.Limits(max_connections=config.concurrency)
        self._address = str(resolved(config.url, f"{key}.url")).rstrip("/")
        self._client = httpx.Client(headers=bearer(f"{key}.token_env", config.token_env), limits=limits)

    def ask(self, messages: Sequence[Message]) -> str:
        """Return the model's reply to a conversation.

        Raises ChatFailed if the server gives none, and ValueError if it answers with something other than a reply.
        """
        problem = ""
        for attempt in range(self._config.retries + 1):
            if attempt:
                self._pause(min(FIRST_PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S))
            try:
                return self._said(messages)
            except httpx.HTTPStatusError as error:
                problem = f"{self._config.url} answered {error.response.status_code}"
                if error.response.status_code in _FINAL:
                    break
            except httpx.HTTPError as error:
                problem = f"{self._config.url}: {error!r}"
        raise ChatFailed(without_secrets(problem))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _said(self, messages: Sequence[Message]) -> str:
        """Return the reply; httpx.HTTPError for a fault, ReadTimeout after the deadline of the whole answer."""
        config = self._config
        body = {
            "model": config.model,
            "messages": [{"role": one.role, "content": one.content} for one in messages],
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
        }
        deadline = time.monotonic() + config.timeout_s
        url = f"{self._address}/chat/completions"
        received = b""
        with self._client.stream("POST", url, json=body, timeout=config.timeout_s) as response:
            response.raise_for_status()
            for piece in response.iter_bytes():  # the timeout of httpx is for each piece, not for all of them
                received += piece
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout(f"took longer than {config.timeout_s:g} s")
        return _content(received)


def find_verdict(text: str, verdict: PatternVerdict | JsonVerdict) -> Any:
    """Return what the last match of the pattern holds, or the field of the last JSON object that has it; None without.

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
        text = without_secrets(received.decode(errors="replace"))[:80]
        raise ValueError(f"the judge's server answered with no chat completion: {text!r}") from None
    if not isinstance(content, str):
        raise ValueError("the judge said nothing")
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
