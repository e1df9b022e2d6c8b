"""Call reward servers by OpenRLHF's contract: POST `query`, `prompts`, `labels`; the response has `rewards`.

    {"query": ["2+2? 4"], "prompts": ["2+2? "], "labels": ["4"]}  ->  {"rewards": [1.0], "extra_logs": {"hits": 1.0}}

`scores` in the answer are used by dynamic sampling, and logged with `extra_logs`; a reward that is null does not apply.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import httpx

from rlhf_core.errors import explain
from rlhf_core.http.client import TooLarge, post, shown_body
from rlhf_core.http.retries import pause_before
from rlhf_core.rewards.batches import BatchFailed, RewardOutcome, Worker
from rlhf_core.rewards.protocols import prompt_text, read_result
from rlhf_core.schema.secrets import bearer, resolved
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.types import Generation

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0
"""Before the second try and at most; it doubles, and it is the same in every run."""
COOL_DOWN_S = 10.0
"""Seconds for which a failed URL is used only if all others failed as well."""
REFUSED_FOR_GOOD = (401, 403, 404, 405)
"""No second try and no smaller batch will help."""

QueryText = Callable[[Generation], str]


def plain_query(generation: Generation) -> str:
    """Prompt and answer as text, without a chat template."""
    return prompt_text(generation.prompt.messages) + generation.completion.text


@dataclass(eq=False)
class RemoteRewardClient(Worker):
    """A `Reward` from servers at `urls`: batches go to them in turn, and from a failed one to the next. Threads may share it.

    `timeout_s` is for one try; connecting has a separate limit of 5 s, and the last read of an answer that arrives
    slowly may be late by as much again. So a batch has an answer or fails within (retries + 1) * (2 * timeout_s + 13
    s), mostly far sooner. BatchFailed names URL, status and prompts. `query` makes the text that is sent: for a server
    that scores with a model, prompt and answer rendered as that model reads them. Close it, or use it in a `with`
    block.
    """

    name: str
    urls: Sequence[str]
    _: KW_ONLY
    timeout_s: float
    retries: int
    token_env: str
    query: QueryText = plain_query

    def __post_init__(self) -> None:
        self._turns = _Rotation(self.urls)
        self._addresses = {url: str(resolved(url, f"rewards.{self.name}.urls")) for url in self.urls}
        self._client = httpx.Client(headers=bearer(f"rewards.{self.name}.token_env", self.token_env))

    def close(self) -> None:
        self._client.close()

    def __call__(self, batch: Sequence[Generation]) -> RewardOutcome:
        """One value per generation, None for null, and the server's logs."""
        body = {
            "query": [self.query(one) for one in batch],
            "prompts": [prompt_text(one.prompt.messages) for one in batch],
            "labels": [one.prompt.label for one in batch],
        }
        problems: dict[str, _NoRewards] = {}
        for attempt in range(self.retries + 1):
            url = self._turns.next(avoid=[url for url, problem in problems.items() if problem.final])
            if url is None:
                break
            if url in problems:  # another one is tried at once; the same one after a while
                least = problems[url].after_s
                time.sleep(max(least, pause_before(attempt, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)))
            try:
                outcome = read_answer(self._post(url, body), len(batch))
            except _NoRewards as problem:
                problems[url] = problem
                self._turns.cool(url)
                logger.warning("rewards.%s: %s %s", self.name, url, problem.reason)
            else:
                self._turns.answered(url)
                return outcome
        raise self._failure(batch, problems)

    def _post(self, url: str, body: Mapping[str, Any]) -> Any:
        """Post `body` to `url` and decode the JSON answer; _NoRewards if it does not arrive within the deadline."""
        try:
            answer = post(self._client, self._addresses[url], body, timeout_s=self.timeout_s)
        except httpx.TimeoutException:
            raise _NoRewards(f"took longer than {self.timeout_s:g} s") from None
        except TooLarge as error:
            raise _NoRewards(str(error)) from None
        except httpx.HTTPError as error:
            raise _NoRewards(f"cannot be reached: {error!r}") from None
        if answer.status != 200:
            reason = f"returned status {answer.status}: {shown_body(answer.content, 300)}"
            raise _NoRewards(reason, final=answer.status in REFUSED_FOR_GOOD, after_s=answer.after_s)
        try:
            return json.loads(answer.content)
        except (ValueError, RecursionError):
            raise _NoRewards(f"returned invalid JSON: {shown_body(answer.content, 100)!r}") from None

    def _failure(self, batch: Sequence[Generation], problems: Mapping[str, _NoRewards]) -> BatchFailed:
        reasons = "; ".join(f"{url} {problem.reason}" for url, problem in problems.items())
        ids = f"prompts {batch[0].prompt.id} to {batch[-1].prompt.id}"
        message = explain(f"rewards.{self.name}", ids, reasons, "fix the server, or raise timeout_s or retries")
        return BatchFailed(message, reason=reasons, divisible=not any(problem.final for problem in problems.values()))


def read_answer(answer: Any, count: int) -> RewardOutcome:
    """Parse the rewards and logs of a server's answer; _NoRewards if the rewards are not `count` numbers or nulls."""
    if not isinstance(answer, dict) or not isinstance(answer.get("rewards"), list):
        raise _NoRewards(f"returned no list of rewards: {without_secrets(str(answer))[:100]}")
    values = [_number(value) for value in answer["rewards"]]
    if len(values) != count:
        raise _NoRewards(f"returned {len(values)} rewards for {count} answers")
    extra = answer.get("extra_logs")
    return read_result(answer | {"rewards": values, "extra_logs": extra if isinstance(extra, dict) else {}}, count)


# ---------------------------------------------------------------- private


class _NoRewards(Exception):
    """One try failed. The server asks for a pause of `after_s` seconds."""

    LONGEST_WAIT_S = 600.0

    def __init__(self, reason: str, *, final: bool = False, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.final = final
        self.after_s = min(after_s, self.LONGEST_WAIT_S)


@dataclass
class _Health:
    failures: int = 0
    cool_until: float = 0.0


class _Rotation:
    """The URLs in turn, recently failed ones last. Several threads use it."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._health = {url: _Health() for url in urls}
        self._turn = 0
        self._lock = threading.Lock()

    def next(self, *, avoid: Collection[str]) -> str | None:
        """The next URL; None if all are to be avoided."""
        with self._lock:
            urls = list(self._health)
            turn = [url for url in urls[self._turn :] + urls[: self._turn] if url not in avoid]
            if not turn:
                return None
            now = time.monotonic()
            chosen = min(turn, key=lambda url: max(0.0, self._health[url].cool_until - now))  # the first of equals
            self._turn = (urls.index(chosen) + 1) % len(urls)
            return chosen

    def cool(self, url: str) -> None:
        with self._lock:
            health = self._health[url]
            health.failures += 1
            health.cool_until = time.monotonic() + COOL_DOWN_S * min(2 ** (health.failures - 1), 8)  # 10 to 80 s

    def answered(self, url: str) -> None:
        with self._lock:
            self._health[url] = _Health()


def _number(value: Any) -> float | None:
    """Parse a number, also alone in a list, as OpenRLHF's server answers for some models."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _NoRewards(f"returned the reward {value!r}, which is not a finite number")
    return float(value)
