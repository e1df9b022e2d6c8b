"""Serve a reward over HTTP with OpenRLHF's protocol: `/get_reward` (and `/`), `/health`, `/metrics`.

Requests that arrive within `max_wait_s` of each other are scored as one batch. A separate thread scores one batch at a
time, so health and metrics respond meanwhile. If a batch fails, each of its requests is scored alone, so a bad request
does not affect other clients. Requests from web pages are rejected.
"""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from rlhf_core.errors import RewardError, RlhfError
from rlhf_core.http.door import Door, health_alone
from rlhf_core.http.serving import BodyLimits, BodyRefused, read_body
from rlhf_core.interfaces import Trainer
from rlhf_core.rewards.batches import Logs, Reward, RewardOutcome
from rlhf_core.types import Column, Generation, Message, Prompt, answered, encodable

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # bounds of the histogram in /metrics


@dataclass(frozen=True, slots=True)
class Query:
    """One answer to score. `text` is prompt and answer; with an empty `prompt`, all of it is the answer."""

    text: str
    prompt: str
    label: str

    @property
    def answer(self) -> str:
        """The text after the prompt.

        >>> Query("2+2? 4", "2+2? ", "4").answer
        '4'
        """
        return self.text.removeprefix(self.prompt)


Score = Callable[[Sequence[Query]], RewardOutcome]
"""Scores a batch; blocks, and is called by one thread at a time."""


@dataclass(frozen=True)
class ServerLimits:
    """Batching and limits of requests."""

    max_batch: int = 256
    """Maximum number of answers scored at a time; a larger request is a separate batch."""
    max_wait_s: float = 0.01
    """Seconds that a request waits for others."""
    body: BodyLimits = BodyLimits()


def create_app(score: Score, *, name: str, token: str, limits: ServerLimits = ServerLimits()) -> Door:
    """Build the application. With a `token`, all routes except `/health` require it; else it serves only this user."""
    service = _Service(score, name=name, limits=limits)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        with ThreadPoolExecutor(1, thread_name_prefix="score") as thread:
            task = asyncio.create_task(service.score_batches(thread))
            yield
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    routes = [
        Route("/get_reward", service.get_reward, methods=["POST"]),
        Route("/", service.get_reward, methods=["POST"]),
        Route("/health", service.health),
        Route("/metrics", service.metrics),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    return Door(app, authorization=f"Bearer {token}" if token else "", open_to=health_alone, key=token)


def read_request(body: bytes) -> list[Query]:
    """Parse the queries of a request; ValueError explains an invalid one. Text must be encodable as UTF-8.

    >>> read_request(b'{"query": ["2+2? 4"], "prompts": ["2+2? "], "labels": [null]}')
    [Query(text='2+2? 4', prompt='2+2? ', label='')]
    """
    content = json.loads(body)
    texts = content.get("query") if isinstance(content, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("query must be a list of texts")
    columns = {}
    for key in ("prompts", "labels"):
        values = content.get(key) or [""] * len(texts)
        if not isinstance(values, list) or len(values) != len(texts):
            raise ValueError(f"{key} must be a list with an entry for each of the {len(texts)} queries")
        columns[key] = [_as_text(value) for value in values]
    for key, column in (("query", texts), *columns.items()):
        for index, text in enumerate(column):
            if text != encodable(text):
                raise ValueError(
                    f"{key}[{index}] holds half of a surrogate pair, which no text file and no tokenizer can encode"
                )
    rows = zip(texts, columns["prompts"], columns["labels"], strict=True)
    return [Query(text, prompt, label) for text, prompt, label in rows]


# ---------------------------------------------------------------- private


@dataclass
class _Waiting:
    """A request that waits for its rewards."""

    queries: list[Query]
    rewards: asyncio.Future[RewardOutcome] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class _Service:
    def __init__(self, score: Score, *, name: str, limits: ServerLimits) -> None:
        self._score = score
        self._name = name
        self._limits = limits
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._left_over: _Waiting | None = None
        self._registry = CollectorRegistry()
        self._requests = Counter("reward_requests", "Requests by status", ["status"], registry=self._registry)
        self._samples = Counter("reward_samples", "Answers that were scored", registry=self._registry)
        queued = Gauge("reward_queued_requests", "Requests behind the batch at work", registry=self._registry)
        queued.set_function(self._queue.qsize)
        self._errors = Counter("reward_errors", "Batches that could not be scored", registry=self._registry)
        self._batches = Histogram(
            "reward_batch_size", "Answers per batch", buckets=BATCH_SIZES, registry=self._registry
        )
        self._seconds = Histogram("reward_request_seconds", "From request to answer", registry=self._registry)

    # ------------------------------------------------------------ routes

    async def get_reward(self, request: Request) -> Response:
        started = time.monotonic()
        response = await self._answer(request)
        self._requests.labels(str(response.status_code)).inc()
        self._seconds.observe(time.monotonic() - started)
        return response

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "serves": self._name})

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(generate_latest(self._registry).decode())

    async def _answer(self, request: Request) -> Response:
        try:
            queries = read_request(await read_body(request, self._limits.body))
        except BodyRefused as refused:
            return _problem(refused.status, str(refused))
        except (ValueError, RecursionError) as error:
            return _problem(422, str(error))
        if not queries:
            return JSONResponse({"rewards": [], "scores": [], "extra_logs": {}})
        waiting = _Waiting(queries)
        await self._queue.put(waiting)
        try:
            outcome = await waiting.rewards
        except RlhfError as error:
            return _problem(500, str(error))
        means = {name: total / count for name, (total, count) in outcome.logs.items()}
        return JSONResponse({"rewards": outcome.values, "scores": outcome.values, "extra_logs": means})

    # ------------------------------------------------------------ batches

    async def score_batches(self, thread: ThreadPoolExecutor) -> None:
        """Score the queued requests, batch by batch, until cancelled."""
        while True:
            requests = await self._gather()
            try:
                await self._settle(requests, thread)
            except Exception as error:  # the waiting clients get the error, and the next batch is served
                logger.exception("could not score a batch")
                for one in requests:
                    if not one.rewards.done():
                        one.rewards.set_exception(RlhfError(f"the reward failed: {error!r}"))

    async def _gather(self) -> list[_Waiting]:
        """The next request and the requests that follow within `max_wait_s`, up to `max_batch` answers."""
        first = self._left_over or await self._queue.get()
        self._left_over = None
        requests, size = [first], len(first.queries)
        deadline = time.monotonic() + self._limits.max_wait_s
        while size < self._limits.max_batch:
            try:
                following = self._queue.get_nowait()
            except asyncio.QueueEmpty:
                try:
                    following = await asyncio.wait_for(self._queue.get(), max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    break
            if size + len(following.queries) > self._limits.max_batch:
                self._left_over = following
                break
            requests.append(following)
            size += len(following.queries)
        return requests

    async def _settle(self, requests: Sequence[_Waiting], thread: ThreadPoolExecutor) -> None:
        """Set the rewards of every request, or the error of scoring it alone."""
        queries = [query for one in requests for query in one.queries]
        self._batches.observe(len(queries))
        try:
            outcome = await asyncio.get_running_loop().run_in_executor(thread, self._score, queries)
        except Exception as error:  # from the reward or this server; scoring requests alone finds the one at fault
            self._errors.inc()
            if isinstance(error, RlhfError):
                logger.warning("%s", error)
            else:
                logger.exception("could not score a batch")
            if len(requests) == 1:
                failure = error if isinstance(error, RlhfError) else RlhfError(f"the reward failed: {error!r}")
                if not requests[0].rewards.done():  # the client may have gone
                    requests[0].rewards.set_exception(failure)
                return
            for one in requests:
                await self._settle([one], thread)
            return
        self._samples.inc(len(queries))
        start = 0
        for one in requests:
            end = start + len(one.queries)
            if not one.rewards.done():
                one.rewards.set_result(RewardOutcome(outcome.values[start:end], logs=_as_logs(outcome.logs)))
            start = end


def _as_logs(logs: Logs) -> Logs:
    return {name: (total, count) for name, (total, count) in logs.items() if count}


def _as_text(value: Any) -> str:
    """Convert a label to text. OpenRLHF sends it as in the data, so it may be a number or a table."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _problem(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status_code=status)


# ---------------------------------------------------------------- served

Encode = Callable[[Query], Column[int]]


def function_score(reward: Reward) -> Score:
    """Build a scorer from `reward`: each prompt is sent as one user message, and token ids are unknown."""

    def score(queries: Sequence[Query]) -> RewardOutcome:
        outcome = reward([_generation(number, query) for number, query in enumerate(queries)])
        return _checked(outcome, len(queries))

    return score


def reward_model_score(trainer: Trainer, encode: Encode, *, max_length: int) -> Score:
    """Build a scorer from a reward model that reads `encode(query)`, truncated to `max_length` tokens."""

    def score(queries: Sequence[Query]) -> RewardOutcome:
        sequences = [encode(query)[:max_length] for query in queries]
        if not all(sequences):
            raise RewardError("query", "", "has no tokens to read a score from", "send prompt and answer")
        return _checked(RewardOutcome(tuple(trainer.scores(sequences))), len(queries))

    return score


def as_it_stands(tokenize: Callable[[str], Column[int]]) -> Encode:
    """Build an encoder for queries that are already rendered, with special tokens as text, as OpenRLHF sends them.

    Nothing is added: the template contains the begin token, and truncated answers have no end token.
    """
    return lambda query: tokenize(query.text)


def rendered(tokens_of: Callable[[str, str], Column[int]]) -> Encode:
    """Build an encoder for plain queries: the prompt as one user message in the template, the answer, end of turn.

    `tokens_of(prompt, answer)` returns these tokens in the format that the reward model was trained on.
    """

    def encode(query: Query) -> Column[int]:
        if not query.prompt or not query.text.startswith(query.prompt):
            raise RewardError(
                "prompts", query.prompt[:80], "the query does not begin with it", "send both, or no --render"
            )
        return tokens_of(query.prompt, query.answer)

    return encode


def _generation(number: int, query: Query) -> Generation:
    return answered(Prompt(str(number), (Message("user", query.prompt),), query.label, "http"), query.answer)


def _checked(outcome: RewardOutcome, count: int) -> RewardOutcome:
    """Raise RewardError unless the outcome has `count` finite values, because JSON has no NaN."""
    if len(outcome.values) != count:
        raise RewardError("rewards", len(outcome.values), f"for {count} answers", "fix the reward")
    for position, value in enumerate(outcome.values):
        if value is not None and not math.isfinite(value):
            raise RewardError(f"rewards[{position}]", value, "is not a finite number", "fix the reward")
    return outcome
