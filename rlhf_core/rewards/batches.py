"""Call a reward in batches: on several workers, with retries, and bisect batches that fail."""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate

from rlhf_core.config.rewards import Compares, OnFailure
from rlhf_core.errors import RewardError
from rlhf_core.rewards.cache import ResultCache
from rlhf_core.rewards.outcomes import BatchFailed, RewardOutcome, joined_scores, merged_logs, reason_of, screened
from rlhf_core.types import Generation

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
FAILED_CALLS = 48
"""After so many failed calls for one batch what is left of it fails as a whole: each may have cost a deadline. Enough for
four bad answers among a thousand."""

Ask = Callable[[Sequence[Generation]], RewardOutcome]


class BatchedReward:
    """A `Reward` that puts batches to `workers`, each of which answers one batch at a time.

    A batch that fails is tried `retries` times more, after pauses that double. Then RewardError for `fail`; for `invalid`
    it is halved, and its halves, down to the generations that fail alone: those become failures, the others are scored.
    What is compared is not parted: a group fails as a whole, and so does a batch.
    Generations that the `cache` knows are not asked about, and those that are alike are asked about once. The values of a
    batch are kept as soon as it is settled: neither a kill nor a batch that fails later makes them be paid for again.
    """

    def __init__(
        self,
        name: str,
        workers: Sequence[Ask],
        *,
        batch_size: int,
        retries: int,
        on_failure: OnFailure,
        compares: Compares = "nothing",
        failed_calls: int = FAILED_CALLS,
        cache: ResultCache | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._name = name
        self._free: queue.SimpleQueue[Ask] = queue.SimpleQueue()
        for ask in workers:
            self._free.put(ask)
        self._workers = len(workers)
        self._batch_size = batch_size
        self._retries = retries
        self.on_failure: OnFailure = on_failure
        self._compares: Compares = compares
        self._failed_calls = failed_calls
        self._cache = cache
        self._pause = pause

    def __call__(self, generations: Sequence[Generation]) -> RewardOutcome:
        """Return one value per generation; those that failed, with their reasons, only for `on_failure = "invalid"`."""
        if self._cache is None:
            return self._scored(generations)
        keys = [self._cache.key(generation) for generation in generations]
        new = {key: at for at, key in enumerate(keys) if not self._cache.known(key)}  # one of those that are alike
        outcome = self._scored([generations[at] for at in new.values()])
        failures = {key: outcome.failures[at] for at, key in enumerate(new) if at in outcome.failures}
        scores = tuple(None if key in failures else self._cache.score(key) for key in keys)
        return RewardOutcome(
            tuple(None if key in failures else self._cache.value(key) for key in keys),
            {at: failures[key] for at, key in enumerate(keys) if key in failures},
            outcome.logs,
            scores if any(score is not None for score in scores) else (),
        )

    def _scored(self, generations: Sequence[Generation]) -> RewardOutcome:
        if not generations:
            return RewardOutcome(())
        size = self._batch_size or -(-len(generations) // self._workers)
        batches = cut(generations, size, compares=self._compares)
        if self._workers == 1:
            return joined([self._settled(batch) for batch in batches])
        with ThreadPoolExecutor(self._workers, thread_name_prefix=f"reward-{self._name}") as pool:
            return joined(list(pool.map(self._settled, batches)))

    def _settled(self, batch: Sequence[Generation]) -> RewardOutcome:
        ask = self._free.get()
        try:
            outcome = self._tried(partial(self._screened, ask), batch)
        finally:
            self._free.put(ask)
        if self._cache is not None:
            settled = {self._cache.key(one): at for at, one in enumerate(batch) if at not in outcome.failures}
            self._cache.add(
                {key: outcome.values[at] for key, at in settled.items()},
                {key: outcome.scores[at] for key, at in settled.items()} if outcome.scores else {},
            )
        return outcome

    def _screened(self, ask: Ask, batch: Sequence[Generation]) -> RewardOutcome:
        return screened(self._name, ask(batch), batch, on_failure=self.on_failure)

    def _tried(self, ask: Ask, batch: Sequence[Generation]) -> RewardOutcome:
        for attempt in range(self._retries + 1):
            try:
                return ask(batch)
            except RewardError as error:
                if attempt < self._retries and isinstance(error, BatchFailed) and error.divisible:
                    pause = min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S)
                    logger.warning("%s; retrying in %g s (retry %d of %d)", error, pause, attempt + 1, self._retries)
                    self._pause(pause)
                    continue
                if self.on_failure == "fail":
                    raise
                logger.warning("%s; searching for the answers that cause it", error)
                parts = cut(batch, 1, compares=self._compares)
                return bisect_failures(ask, batch, error, parts=parts, failed_calls=self._failed_calls)
        raise AssertionError("the last try returns or raises")


def cut(generations: Sequence[Generation], size: int, *, compares: Compares) -> list[Sequence[Generation]]:
    """Return batches of `size` generations; where they are compared, of at least that many, and nothing is parted."""
    if compares == "batch":
        return [generations]
    if compares == "group":
        return whole_groups(generations, at_least=size)
    return [generations[start : start + size] for start in range(0, len(generations), size)]


def whole_groups(rows: Sequence[Generation], *, at_least: int) -> list[Sequence[Generation]]:
    """Return the rows cut into pieces of `at_least` rows, or more: the answers to a prompt that follow each other stay
    together, for rewards that are normalized among them or compare them."""
    pieces, start = [], 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or (end - start >= at_least and rows[end].prompt.id != rows[end - 1].prompt.id):
            pieces.append(rows[start:end])
            start = end
    return pieces


def bisect_failures(
    ask: Ask,
    batch: Sequence[Generation],
    error: RewardError,
    *,
    parts: Sequence[Sequence[Generation]],
    failed_calls: int,
) -> RewardOutcome:
    """Return the outcome of a batch that failed with `error`: its parts are halved until one that fails stands alone."""
    starts = [0, *accumulate(map(len, parts))]
    values: list[float | None] = [None] * len(batch)
    scores: list[float | None] = [None] * len(batch)
    failures: dict[int, str] = {}
    logs = []
    waiting: deque[tuple[int, int, RewardError]] = deque([(0, len(parts), error)])
    while waiting:
        first, last, error = waiting.popleft()
        whole = isinstance(error, BatchFailed) and not error.divisible
        if last - first == 1 or whole or failed_calls <= 0:
            failures |= dict.fromkeys(range(starts[first], starts[last]), reason_of(error))
            continue
        middle = (first + last) // 2
        for begin, end in ((first, middle), (middle, last)):
            low, high = starts[begin], starts[end]
            try:
                outcome = ask(batch[low:high])
            except RewardError as inner:
                failed_calls -= 1
                waiting.append((begin, end, inner))
            else:
                values[low:high] = outcome.values
                scores[low:high] = outcome.scores or (None,) * (high - low)
                failures |= {low + at: reason for at, reason in outcome.failures.items()}
                logs.append(outcome.logs)
    given = any(score is not None for score in scores)
    return RewardOutcome(tuple(values), failures, merged_logs(logs), tuple(scores) if given else ())


def joined(outcomes: Sequence[RewardOutcome]) -> RewardOutcome:
    """Return the outcomes of consecutive batches as one."""
    values: list[float | None] = []
    failures: dict[int, str] = {}
    for outcome in outcomes:
        failures |= {len(values) + at: reason for at, reason in outcome.failures.items()}
        values += outcome.values
    return RewardOutcome(
        tuple(values), failures, merged_logs([outcome.logs for outcome in outcomes]), joined_scores(outcomes)
    )
