"""Call a reward in batches: on several workers, with retries, and bisect batches that fail.

Cache the values of a reward by the content of the scored answers, so that no answer is paid for twice.

The cache file lies next to the shards or checkpoints of an attempt, so a resumed stage reads it again.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rlhf_core.errors import RewardError, explain
from rlhf_core.http.retries import retried
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.types import Generation, chunks, encodable

if TYPE_CHECKING:  # the process of a reward function starts sooner without the models of the configuration
    from rlhf_core.config.rewards import Compares, OnFailure

# ---------------------------------------------------------------- outcomes

LARGEST_REWARD = 1e6
"""A larger reward counts as a bug: it would dominate every other sample of its batch."""
LONGEST_REASON = 200  # characters: a reason is kept with each rollout that failed

Logs = Mapping[str, tuple[float, int]]
"""Name -> sum and count of a quantity that is logged as a mean."""


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """One value per generation; None where the reward does not apply or failed. `failures`: position -> why it failed.

    `scores`: optional per-generation scores for dynamic sampling; None where the reward gives none, empty if it gives
    none at all.

    >>> RewardOutcome((1.0, None, None), failures={2: "took longer than 5 s"}).failures[2]
    'took longer than 5 s'
    """

    values: tuple[float | None, ...]
    failures: Mapping[int, str] = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    scores: tuple[float | None, ...] = ()
    asked: int | None = None
    """Number of generations that the reward was shown, if not all."""

    @property
    def of(self) -> int:
        """The number of generations that the reward was shown."""
        return len(self.values) if self.asked is None else self.asked

    def row(self, at: int) -> RewardOutcome:
        """The outcome of one generation, without logs.

        >>> RewardOutcome((1.0, None), failures={1: "late"}).row(1)
        RewardOutcome(values=(None,), failures={0: 'late'}, logs={}, scores=(), asked=None)
        """
        failures = {0: self.failures[at]} if at in self.failures else {}
        return RewardOutcome(self.values[at : at + 1], failures, scores=self.scores[at : at + 1])


@dataclass(frozen=True, slots=True)
class NoReward:
    """A function's value for an answer whose reward could not be computed: the answer is invalid, and counted as a failure."""

    reason: str


Reward = Callable[[Sequence[Generation]], RewardOutcome]
"""Anything that scores generations: a model, a function in its process, a server, a judge."""


class Worker:
    """Scores generations with a process or with connections. Close it, or use it in a `with` block."""

    def close(self) -> None:
        """Release everything."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BatchFailed(RewardError):
    """A batch has no rewards. `reason` is one line; a smaller batch may do where it is `divisible`."""

    def __init__(self, message: str, *, reason: str, divisible: bool = True) -> None:
        super().__init__(message)
        self.reason = shortened(reason)
        self.divisible = divisible


def check_length(name: str, outcome: RewardOutcome, generations: Sequence[Generation]) -> None:
    """Raise BatchFailed unless there is one value per generation: otherwise it is unknown which one is missing."""
    if len(outcome.values) != len(generations):
        problem = f"values for {len(generations)} generations"
        message = explain(f"rewards.{name}", len(outcome.values), problem, "return one for each")
        raise BatchFailed(message, reason=f"returned {len(outcome.values)} {problem}", divisible=False)


def screened(
    name: str, outcome: RewardOutcome, generations: Sequence[Generation], *, on_failure: OnFailure
) -> RewardOutcome:
    """Make every value of `outcome` that is no valid reward (NaN or absurd) a failure; RewardError for `fail`."""
    check_length(name, outcome, generations)
    bad = {i: value for i, value in enumerate(outcome.values) if value is not None and not _is_reward(value)}
    if not bad:
        return outcome
    rule = f"must be finite and within +-{LARGEST_REWARD:g}"
    if on_failure == "fail":
        position, value = next(iter(bad.items()))
        generation = generations[position]
        key = f"rewards.{name}[prompt {generation.prompt.id}]"
        answer = generation.completion.text[:LONGEST_REASON]
        raise RewardError(key, value, rule, f"fix the reward; the answer was {answer!r}")
    values = tuple(None if i in bad else value for i, value in enumerate(outcome.values))
    failures = {**outcome.failures, **{i: f"returned {value}: {rule}" for i, value in bad.items()}}
    return RewardOutcome(values, failures, outcome.logs, outcome.scores)


def reason_of(error: RewardError) -> str:
    """The cause of a batch's failure, in one line that can be stored with a rollout."""
    return error.reason if isinstance(error, BatchFailed) else shortened(str(error))


def shortened(text: str) -> str:
    """`text` as one line of at most 200 characters, with secrets removed.

    >>> shortened("KeyError:\\n  'x'")
    "KeyError: 'x'"
    """
    line = " ".join(without_secrets(encodable(text)).split())
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 4] + " ..."


def merged_logs(parts: Sequence[Logs]) -> dict[str, tuple[float, int]]:
    """Sum the sums and counts of all parts.

    >>> merged_logs([{"hits": (1.0, 2)}, {"hits": (3.0, 2)}])
    {'hits': (4.0, 4)}
    """
    merged: dict[str, tuple[float, int]] = {}
    for part in parts:
        for name, (total, count) in part.items():
            before, seen = merged.get(name, (0.0, 0))
            merged[name] = (before + total, seen + count)
    return merged


def logged(name: str, value: Any, count: int) -> Logs:
    """Sum and count of a number, which stands for all `count` answers, or of a list; {} for other values.

    >>> logged("hits", [1, None, float("nan")], 3), logged("size", 2.0, 3), logged("unit", "apples", 3)
    ({'hits': (1.0, 1)}, {'size': (6.0, 3)}, {})
    """
    listed = plain_list(value)
    numbers = [read_number(one) for one in (listed * count if len(listed) == 1 else listed)]
    finite = [one for one in numbers if one is not None and math.isfinite(one)]
    # A plain name: another process that reads it cannot import an enum of the function's module.
    return {str(name): (math.fsum(finite), len(finite))} if finite else {}


def plain_list(value: Any) -> list[Any]:
    """Convert a tensor, an array, a list or a single value to a list."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    return list(plain) if isinstance(plain, (list, tuple)) else [plain]


def read_number(value: Any) -> float | None:
    """Parse a number, also if it is alone in a list or a tensor; None for anything else.

    >>> read_number([[1]]), read_number("1"), read_number(True)
    (1.0, None, 1.0)
    """
    while len(listed := plain_list(value)) == 1 and (hasattr(value, "tolist") or isinstance(value, (list, tuple))):
        value = listed[0]
    return float(value) if hasattr(value, "__float__") else None


def read_scores(value: Any, count: int) -> tuple[float | None, ...]:
    """Parse the `scores` of a function or server, if they are one finite number or None for each of `count` answers.

    Empty for anything else, such as one number for all answers, which is only logged.

    >>> read_scores([1, None], 2), read_scores(0.5, 2), read_scores(["good", "bad"], 2)
    ((1.0, None), (), ())
    """
    listed = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(listed, (list, tuple)) or len(listed) != count:
        return ()
    flat = [one[0] if isinstance(one, (list, tuple)) and len(one) == 1 else one for one in listed]
    if not all(one is None or (isinstance(one, (int, float)) and math.isfinite(one)) for one in flat):
        return ()
    return tuple(None if one is None else float(one) for one in flat)


def _is_reward(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= LARGEST_REWARD


def checked(name: str, values: Sequence[float | None], generations: Sequence[Generation]) -> list[float]:
    """Check that `values` has one finite, plausible number per generation; RewardError otherwise."""
    outcome = screened(name, RewardOutcome(tuple(values)), generations, on_failure="fail")
    for value, generation in zip(outcome.values, generations, strict=True):
        if value is None:
            key = f"rewards.{name}[prompt {generation.prompt.id}]"
            raise RewardError(key, None, "the reward function returned None", "return a number for every prompt")
    return [value for value in outcome.values if value is not None]


# ---------------------------------------------------------------- cache


class ResultCache:
    """Content -> value, for one reward. `identity` is its code, arguments and version.

    With a `path` every value is appended to that file, and its values of the same identity are loaded at the start.
    Several threads may add.
    """

    def __init__(self, identity: str, path: Path | None) -> None:
        self._identity = identity
        self._path = path
        self._adding = threading.Lock()
        self.known: dict[str, RewardOutcome] = _read(path) if path is not None and path.is_file() else {}
        """Key -> outcome of one generation; None, does not apply, is a value."""

    def key(self, generation: Generation) -> str:
        """The cache key of a generation: the reward's identity, the prompt with its label, and the answer's content.

        Log-probabilities, seed and policy version do not count: the reward of an answer does not depend on them.
        """
        prompt, completion = generation.prompt, generation.completion
        content = [
            self._identity,
            [prompt.id, prompt.source, prompt.label, [(message.role, message.content) for message in prompt.messages]]
            + ["conversational"] * prompt.conversational,
            [
                completion.text,
                completion.finish_reason,
                completion.token_ids.tolist(),
                sorted(completion.extras.items()),
            ],
            [(span.start, span.end, span.reward) for span in completion.spans],
        ]
        return sha256_text(json.dumps(content, separators=(",", ":")))

    def add(self, generations: Sequence[Generation], outcome: RewardOutcome) -> None:
        """Store the values of an outcome. Failures are not stored, so that they are retried."""
        kept = {self.key(one): outcome.row(at) for at, one in enumerate(generations) if at not in outcome.failures}
        with self._adding:
            self.known.update(kept)
            if self._path is not None and kept:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as stream:
                    # After a kill the last line may be half written: the next entry begins on a new line.
                    rows = ([key, *row.values, *(row.scores or [None])] for key, row in kept.items())
                    stream.write("".join(f"\n{json.dumps(row)}" for row in rows))


def _read(path: Path) -> dict[str, RewardOutcome]:
    """Load the content of a cache file; a truncated line is skipped."""
    known: dict[str, RewardOutcome] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            key, value, *scores = json.loads(line)  # there were no scores once
        except ValueError:
            continue
        known[key] = RewardOutcome((value,), scores=tuple(one for one in scores if one is not None))
    return known


# ---------------------------------------------------------------- batches

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5  # doubles with each retry: 0.5, 1, 2, ...
LONGEST_PAUSE_S = 30.0  # a server that restarts is back by then
FAILED_CALLS = 48
"""Failed calls per batch after which the rest of the batch is marked failed, as each may take a full timeout. Enough to
isolate four bad answers among a thousand."""


@dataclass(eq=False)
class BatchedReward:
    """A `Reward` that puts batches to `workers`, each of which answers one batch at a time.

    A batch that fails is tried `retries` times more, after pauses that double. Then RewardError for `fail`; for `invalid`
    it is halved again and again, down to the generations that fail alone: these become failures, the others are scored.
    Answers that are compared with each other stay together: if one fails, its group (or batch) fails.
    Cached generations are not scored again, and equal ones are scored once. The values of a
    batch are kept once it is settled: neither a kill nor a batch that fails later makes them be paid for again.
    """

    name: str
    workers: Sequence[Reward]
    _: KW_ONLY
    batch_size: int
    """Answers per batch; 0 for one batch per worker."""
    retries: int
    on_failure: OnFailure
    compares: Compares = "nothing"
    failed_calls: int = FAILED_CALLS
    cache: ResultCache | None = None
    pause: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self._free: queue.SimpleQueue[Reward] = queue.SimpleQueue()
        for worker in self.workers:
            self._free.put(worker)

    def __call__(self, generations: Sequence[Generation]) -> RewardOutcome:
        """Score all generations, from the cache where possible."""
        cache = self.cache
        if cache is None:
            return self._scored(generations)
        keys = [cache.key(generation) for generation in generations]
        missing = {key: at for at, key in enumerate(keys) if key not in cache.known}
        outcome = self._scored([generations[at] for at in missing.values()])
        fresh = {key: outcome.row(at) for at, key in enumerate(missing)}
        return replace(joined([fresh.get(key) or cache.known[key] for key in keys]), logs=outcome.logs)

    def _scored(self, generations: Sequence[Generation]) -> RewardOutcome:
        if not generations:
            return RewardOutcome(())
        size = self.batch_size or -(-len(generations) // len(self.workers))  # rounded up: one batch per worker
        batches = cut(generations, size, compares=self.compares)
        if len(self.workers) == 1:
            return joined([self._settled(batch) for batch in batches])
        with ThreadPoolExecutor(len(self.workers), thread_name_prefix=f"reward-{self.name}") as pool:
            return joined(list(pool.map(self._settled, batches)))

    def _settled(self, batch: Sequence[Generation]) -> RewardOutcome:
        ask = self._free.get()
        try:
            outcome = self._tried(lambda rows: screened(self.name, ask(rows), rows, on_failure=self.on_failure), batch)
        finally:
            self._free.put(ask)
        if self.cache is not None:
            self.cache.add(batch, outcome)
        return outcome

    def _tried(self, ask: Reward, batch: Sequence[Generation]) -> RewardOutcome:
        try:
            return retried(
                lambda: ask(batch),
                retries=self.retries,
                again=_may_pass,
                first_s=FIRST_PAUSE_S,
                longest_s=LONGEST_PAUSE_S,
                pause=self.pause,
            )
        except RewardError as error:
            if self.on_failure == "fail":
                raise
            parts = cut(batch, 1, compares=self.compares)
            if len(parts) > 1:
                logger.warning("%s; searching for the answers that cause it", error)
            return bisect_failures(ask, batch, error, parts=parts, failed_calls=self.failed_calls)


def _may_pass(error: Exception) -> bool:
    """True if the same batch may succeed later; the error is logged."""
    passes = isinstance(error, BatchFailed) and error.divisible
    if passes:
        logger.warning("%s; trying again", error)
    return passes


def cut(generations: Sequence[Generation], size: int, *, compares: Compares) -> Sequence[Sequence[Generation]]:
    """Split into batches of `size` generations; if they are compared, of at least that many, with whole groups."""
    if compares == "batch":
        return [generations]
    if compares == "group":
        return whole_groups(generations, at_least=size)
    return chunks(generations, size)


def whole_groups(rows: Sequence[Generation], *, at_least: int) -> list[list[Generation]]:
    """Split the rows into pieces of at least `at_least` rows. Consecutive answers to a prompt stay together, for
    rewards that normalize within them or compare them.
    """
    pieces: list[list[Generation]] = []
    for _, group in groupby(rows, key=lambda one: one.prompt.id):
        if not pieces or len(pieces[-1]) >= at_least:
            pieces.append([])
        pieces[-1] += group
    return pieces


def bisect_failures(
    ask: Reward,
    batch: Sequence[Generation],
    error: RewardError,
    *,
    parts: Sequence[Sequence[Generation]],
    failed_calls: int,
) -> RewardOutcome:
    """The outcome of a batch that failed with `error`: its parts are halved until a failing one stands alone."""
    starts = [0, *accumulate(map(len, parts))]
    found: dict[int, RewardOutcome] = {}
    waiting: deque[tuple[int, int, RewardError]] = deque([(0, len(parts), error)])
    while waiting:
        first, last, error = waiting.popleft()
        whole = isinstance(error, BatchFailed) and not error.divisible
        if last - first == 1 or whole or failed_calls <= 0:
            count = starts[last] - starts[first]
            found[first] = RewardOutcome((None,) * count, dict.fromkeys(range(count), reason_of(error)))
            continue
        middle = (first + last) // 2
        for begin, end in ((first, middle), (middle, last)):
            try:
                found[begin] = ask(batch[starts[begin] : starts[end]])
            except RewardError as inner:
                failed_calls -= 1
                waiting.append((begin, end, inner))
    return joined([found[first] for first in sorted(found)])


def joined(outcomes: Sequence[RewardOutcome]) -> RewardOutcome:
    """Concatenate the outcomes of consecutive batches.

    >>> joined([RewardOutcome((1.0,), scores=(0.5,)), RewardOutcome((None, 2.0), {0: "late"})])
    RewardOutcome(values=(1.0, None, 2.0), failures={1: 'late'}, logs={}, scores=(0.5, None, None), asked=None)
    """
    values: list[float | None] = []
    scores: list[float | None] = []
    failures: dict[int, str] = {}
    for one in outcomes:
        failures |= {len(values) + at: reason for at, reason in one.failures.items()}
        values += one.values
        scores += one.scores or (None,) * len(one.values)
    given = any(one.scores for one in outcomes)
    return RewardOutcome(
        tuple(values), failures, merged_logs([one.logs for one in outcomes]), tuple(scores) if given else ()
    )
