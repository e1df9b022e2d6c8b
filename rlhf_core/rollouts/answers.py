"""Sample the answers of a step: whole, in parts, or ahead of the training.

With an agent, an answer is an episode: turns of the policy with the environment's observations between them. Prompts of
different sources may have different agents, or none.

Partial rollouts sample in rounds of so many tokens per answer and end, for a step, with the round after which its
groups are whole. Unfinished answers stay in the pool and continue with the weights of the next step, so that no step
waits for the longest answer.

Sampling ahead, one thread loads weights and samples for later steps while the caller trains. Step s trains on answers
sampled with the weights of step max(0, s - staleness). This is a fixed schedule: which weights answer which prompts
with which seeds does not depend on timing, so a resumed run has the same bytes, with overlap too. On Ray the thread
only waits for other processes; a sampler in this process shares its cores with the training. Scoring waits for the
step, since the trainers' workers do it.
"""

import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

from rlhf_core.agents.episodes import Episode, play_episodes
from rlhf_core.agents.process import Environments
from rlhf_core.config.agents import AgentsBySource
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.schedule import Scheduled, SchedulePart, scheduled
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.mixing import apportioned, mixed_rows, rows_from, shuffled
from rlhf_core.data.shards import POOL, Drawn, Pool, RolloutLog, read_drawn, read_pool, write_drawn, write_pool
from rlhf_core.errors import DataError, SamplingError
from rlhf_core.interfaces import Metrics, Sampler, SleepingSampler, Weights
from rlhf_core.rollouts.prompts import BandOrder
from rlhf_core.stage.context import StageContext
from rlhf_core.types import (
    ActionSpan,
    Column,
    Completion,
    Generation,
    Prompt,
    SamplingRequest,
    chunks,
    derive_seed,
    floats,
    ids,
)

T = TypeVar("T")
DrawAnswers = Callable[[int, Pool], tuple[list[Generation], Pool]]
"""(step, pool of unfinished answers) -> the answers of the step, and the pool that is left."""


def expect_weights(engine: Sampler) -> None:
    """Note that the engine receives new weights before it samples again."""
    if isinstance(engine, SleepingSampler):
        engine.expect_weights()


class OnPolicySampler:
    """Samples each step on request, with the weights that were loaded last: `load_weights` before each `generate`.

    After a killed run, a step that the same policy (by digest) has sampled is read from the log. With `once`, each set
    of weights samples one step, and only `generate` samples that step.
    """

    def __init__(
        self, engine: Sampler, log: RolloutLog, draw: DrawAnswers, *, band: BandOrder | None = None, once: bool = False
    ) -> None:
        self._engine = engine
        self._once = once
        self._band = band
        self._log = log
        self._draw = draw
        self._policy = ""
        self._pool = Pool()

    @property
    def ahead(self) -> int:
        """Always 0: no later step is sampled."""
        return 0

    def load_weights(self, weights: Callable[[], Weights], *, version: int) -> None:
        """Send `weights()` to the engine."""
        sent = weights()
        self._engine.load_weights(sent, version=version)
        self._policy = sent.digest

    def generate(self, step: int) -> Drawn:
        """Sample the answers of `step`, or read them from the log if it has them."""
        kept = self._log.read(step, policy=self._policy)
        if kept is not None:
            self._pool = kept.pool
            generations = [Generation(one.prompt, one.prompt_ids, one.completion) for one in kept.rollouts]
            note_drawn(self._band, step, generations)
        else:
            generations, self._pool = self._draw(step, self._pool)
        if self._once:
            self.expect_weights()
        return Drawn(self._policy, generations, self._pool)

    def borrow(self, weights: Callable[[], Weights], *, version: int, job: Callable[[], T]) -> T:
        """Send `weights()` to the engine and return the result of `job`."""
        self._engine.load_weights(weights(), version=version)
        result = job()
        self.expect_weights()
        return result

    def expect_weights(self) -> None:
        """Note that new weights are loaded before the next sampling, so engines may drop theirs while models train."""
        expect_weights(self._engine)

    def save(self, folder: Path) -> None:
        """Write the pool of unfinished answers."""
        write_pool(folder / POOL, self._pool)

    def load(self, folder: Path, step: int) -> None:
        """Read the state of `save`."""
        self._pool = read_pool(folder / POOL)


def note_drawn(band: BandOrder | None, step: int, generations: Sequence[Generation]) -> None:
    """Tell the order of the prompts which prompts a step has drawn if that step is not sampled again."""
    if band is not None:
        band.note_drawn(step, [one.prompt for one in generations])


@dataclass(frozen=True)
class OpenEnvironments:
    """The environments of the agents by their keys, and the keys by source (`AgentsBySource.agent_keys`)."""

    by_key: Mapping[str, Environments]
    keys: Mapping[str, str]

    def key_of(self, prompt: Prompt) -> str:
        """The key of the agent that plays a prompt, "" for an answer of one turn."""
        return self.keys.get(prompt.source, self.keys[""])

    def templates(self, chat: ChatTemplate) -> Callable[[Prompt], ChatTemplate]:
        """The template of each prompt: `chat`, with the tools of the prompt's agent."""
        shown = {key: chat.with_tools(opened.tools) for key, opened in self.by_key.items()}
        return lambda prompt: shown.get(self.key_of(prompt), chat)


SINGLE_TURN = OpenEnvironments({}, {"": ""})
"""No environments: every answer has one turn."""


@dataclass(frozen=True, kw_only=True)
class AnswerDraw:
    """Inputs and sizes of a step's sampling: engine, prompts, groups and answers per prompt."""

    engine: Sampler
    chat: ChatTemplate
    prompts: Sequence[Prompt]
    mixture: Mapping[str, float] = field(default_factory=dict)
    """Share of each source in the prompts; if empty, their order is unchanged."""
    sampling: SamplingConfig
    groups: int
    """Number of prompts of a step."""
    group_size: int
    """Number of answers to each."""
    seed: int
    shuffles: bool = True
    """Whether each epoch of the prompts has another order."""
    schedule: Sequence[SchedulePart] = ()
    """Changes of `mixture` and `sampling` during the training."""

    def at(self, step: int) -> Scheduled:
        """The sampling and the mixture of a step."""
        return scheduled(self.schedule, step, self.sampling, self.mixture)

    def drawn(
        self, first: int, count: int, seed: int, mixture: Mapping[str, float] | None = None, since: int = 0
    ) -> list[Prompt]:
        """`count` prompts from position `first` of the endless sequence that the steps draw from.

        A `mixture` of a schedule begins with another sequence, at the step `since`.
        """
        shares = dict(sorted((self.mixture if mixture is None else mixture).items()))  # keys are in no order
        if since:
            first, seed = first - since * self.groups, derive_seed(seed, "schedule", since)
        if not shares:
            return rows_from(first, self.prompts, count=count, seed=seed, shuffles=self.shuffles)
        return mixed_rows(
            first, self.by_source, shares, count=count, block=self.groups, seed=seed, shuffles=self.shuffles
        )

    def drawn_in_band(self, band: BandOrder, step: int, mixture: Mapping[str, float]) -> list[Prompt]:
        """The prompts of a step by `order = "band"`, of each source its share."""
        if not mixture:
            return band.drawn(step, {"": self.groups})
        offset = derive_seed(self.seed, "mixture", step) / 2**31
        found = band.drawn(step, apportioned(dict(sorted(mixture.items())), self.groups, offset=offset))
        return shuffled(found, seed=derive_seed(self.seed, "block", step))

    @cached_property
    def by_source(self) -> dict[str, list[Prompt]]:
        """The prompts by source."""
        found: defaultdict[str, list[Prompt]] = defaultdict(list)
        for one in self.prompts:
            found[one.source].append(one)
        return found


@dataclass(frozen=True, kw_only=True)
class WholeAnswers(AnswerDraw):
    """Draws the prompts of a step and samples their answers whole: a `DrawAnswers` without a pool."""

    environments: OpenEnvironments = SINGLE_TURN
    band: BandOrder | None = None
    """The order of `order = "band"`, in place of the others."""
    routed_experts: bool = False
    """Whether the sampler records the experts of each token."""

    def __call__(self, step: int, pool: Pool) -> tuple[list[Generation], Pool]:
        """Sample the answers of `step`; the pool is returned unchanged."""
        return self.sample_round(step, 0), pool

    def sample_round(self, step: int, number: int) -> list[Generation]:
        """Sample the answers of round `number` of `step`, answers to a prompt together; each has its own seed.

        Each round has other prompts and seeds. A prompt that occurs twice in it continues to number its answers.
        """
        seed = derive_seed(self.seed, "round", number) if number else self.seed
        sampling, mixture, since = self.at(step)
        chat_of = self.environments.templates(self.chat)
        work: list[Episode] = []
        drawn: Counter[str] = Counter()
        if self.band is not None:
            prompts = self.drawn_in_band(self.band, step, mixture)
        else:
            prompts = self.drawn(step * self.groups, self.groups, seed, mixture, since)
        for prompt in prompts:
            ids = chat_of(prompt).prompt_ids(prompt.messages)
            numbers = range(drawn[prompt.id], drawn[prompt.id] + self.group_size)
            work += [Episode(prompt, ids, derive_seed(seed, "ppo", step, prompt.id, i)) for i in numbers]
            drawn[prompt.id] += self.group_size
        made = answers(self.engine, self.chat, work, sampling, self.environments, routed_experts=self.routed_experts)
        return [Generation(one.prompt, ids, completion) for one, (ids, completion) in zip(work, made, strict=True)]


def open_environments(
    config: AgentsBySource, policy: Path, leases: ExitStack, context: StageContext
) -> OpenEnvironments:
    """Start the processes of the agents, which end with `leases`. `policy` is the policy's folder."""
    opened = {
        key: leases.enter_context(
            Environments(
                agent,
                tokenizer=str(policy),
                functions=context.functions,
                files=context.files,
                notes=context.notes,
                key=key,
            )
        )
        for key, agent in config.by_key.items()
    }
    return OpenEnvironments(opened, config.agent_keys())


def answers(
    sampler: Sampler,
    chat: ChatTemplate,
    work: Sequence[Episode],
    sampling: SamplingConfig,
    environments: OpenEnvironments,
    *,
    routed_experts: bool = False,
) -> list[tuple[Column[int], Completion]]:
    """Sample one completion per prompt of `work`, in one turn, or played with its agent; also the prompt's tokens.

    The answers of one turn are sampled together, with their `routed_experts` if asked, then the episodes of each agent.
    """
    places: defaultdict[str, list[int]] = defaultdict(list)
    for at, one in enumerate(work):
        places[environments.key_of(one.prompt)].append(at)
    made: dict[int, tuple[Column[int], Completion]] = {}
    for key, found in sorted(places.items()):  # the key of answers of one turn is ""
        own = [work[at] for at in found]
        if key:
            opened = environments.by_key[key]
            played = play_episodes(sampler, chat.with_tools(opened.tools), own, opened, opened.config, sampling)
            drawn = [(one.prompt_ids, one.completion) for one in played]
        else:
            requests = [SamplingRequest(one.prompt_ids, one.seed, routed_experts=routed_experts) for one in own]
            completions = sampler.generate(requests, sampling)
            drawn = [(one.prompt_ids, completion) for one, completion in zip(own, completions, strict=True)]
        made |= zip(found, drawn, strict=True)
    return [made[at] for at in range(len(work))]


def episode_metrics(completions: Sequence[Completion]) -> Metrics:
    """Count turns and failures, and average the environments' reports; {} for answers that are no episodes."""
    episodes = [completion for completion in completions if completion.spans or completion.failure]
    if not episodes:
        return {}
    extras: defaultdict[str, list[float]] = defaultdict(list)
    for completion in episodes:
        for name, value in completion.extras.items():
            extras[name].append(value)
    return {
        "rollout/turns": fmean(len(completion.spans) for completion in episodes),
        "rollout/failed_episodes": fmean(bool(completion.failure) for completion in episodes),
        **{f"episode/{name}": fmean(values) for name, values in sorted(extras.items())},
    }


# ---------------------------------------------------------------- partial


@dataclass(frozen=True, kw_only=True)
class PartialAnswers(AnswerDraw):
    """Samples answers in rounds and takes the groups that are whole: a `DrawAnswers` with a pool."""

    tokens: int
    """Number of tokens per answer and round; the answers' `max_tokens` are a multiple of it."""
    in_flight_groups: int
    """Number of groups that are sampled at once, at least `groups`."""

    def __call__(self, step: int, pool: Pool) -> tuple[list[Generation], Pool]:
        """Sample until the `groups` oldest groups are whole; also the remaining pool.

        First new groups fill the pool up to `in_flight_groups`. After max_tokens / tokens rounds all of it is whole,
        and it holds at least `groups` groups: so this ends for answers of any length.
        """
        size = self.group_size
        missing = self.in_flight_groups - len(pool.samples) // size
        samples = [*pool.samples, *self._begun(pool.begun, missing)]
        for _ in range(self.sampling.max_tokens // self.tokens):
            samples = self._after_a_round(samples)
            groups = chunks(samples, size)
            whole = [number for number, group in enumerate(groups) if all(map(self._is_finished, group))]
            if len(whole) >= self.groups:
                taken = whole[: self.groups]
                left = [one for number, group in enumerate(groups) if number not in taken for one in group]
                return [one for number in taken for one in groups[number]], Pool(pool.begun + missing, tuple(left))
        rule = f"the sampler ended answers early: {len(whole)} of {self.groups} groups are whole"
        raise SamplingError("ppo.ahead.tokens", self.tokens, rule, "please report this as a bug")

    def _begun(self, first: int, count: int) -> list[Generation]:
        """Begin the samples of `count` new groups, from number `first` on, without tokens; each has its own seed."""
        samples = []
        for number, prompt in enumerate(self.drawn(first, count, self.seed), start=first):
            asked = self.chat.prompt_ids(prompt.messages)
            for member in range(self.group_size):
                own = derive_seed(self.seed, "ppo", "group", number, prompt.id, member)
                samples.append(Generation(prompt, asked, Completion(ids(()), floats(()), "", "length", 0, own)))
        return samples

    def _after_a_round(self, samples: Sequence[Generation]) -> list[Generation]:
        """Sample at most `tokens` more tokens for each unfinished sample, in one batch. Samples stay in order.

        A segment's seed derives from its sample's seed and its number, so a restart draws the same.
        """
        unfinished = [number for number, one in enumerate(samples) if not self._is_finished(one)]
        requests = [
            SamplingRequest(
                one.prompt_ids + one.completion.token_ids,
                derive_seed(one.completion.seed, "segment", len(one.completion.spans)),
            )
            for one in (samples[number] for number in unfinished)
        ]
        segments = self.engine.generate(requests, self.sampling.model_copy(update={"max_tokens": self.tokens}))
        after = list(samples)
        for number, segment in zip(unfinished, segments, strict=True):
            one = samples[number]
            after[number] = Generation(one.prompt, one.prompt_ids, _longer(one.completion, segment, self.chat))
        return after

    def _is_finished(self, sample: Generation) -> bool:
        """Whether an answer ended by itself or has `max_tokens` tokens."""
        made = sample.completion
        return made.finish_reason == "stop" or len(made.token_ids) >= self.sampling.max_tokens


def _longer(completion: Completion, segment: Completion, chat: ChatTemplate) -> Completion:
    """Append a segment to the completion: a separate span, with the version that sampled it."""
    token_ids = completion.token_ids + segment.token_ids
    span = ActionSpan(len(completion.token_ids), len(token_ids), segment.policy_version)
    return Completion(
        token_ids=token_ids,
        logprobs=completion.logprobs + segment.logprobs,
        text=chat.decode(token_ids),  # of all of it: a character may lie across the border
        finish_reason=segment.finish_reason,
        policy_version=segment.policy_version,
        seed=completion.seed,
        spans=(*completion.spans, span),
    )


# ---------------------------------------------------------------- ahead

LOOK_EVERY_S = 1.0
"""Seconds between checks that a job's thread is alive."""
INTERRUPT_PATIENCE_S = 5.0
"""Seconds that an interrupted stage waits for the running job, which cannot be stopped."""


class AheadSampler:
    """Samples up to `staleness` steps ahead, with the `inner` sampler in a thread.

    >>> with AheadSampler(inner, staleness=1, steps=100, group_size=8) as sampler:   # doctest: +SKIP
    ...     sampler.load_weights(policy.weights, version=0)
    """

    def __init__(
        self, inner: OnPolicySampler, *, staleness: int, steps: int, group_size: int, band: BandOrder | None = None
    ) -> None:
        self._inner = inner
        self._band = band
        self._staleness = staleness
        self._steps = steps
        self._group_size = group_size
        self._jobs = Background("sampling")
        self._loaded: Future[None] | None = None
        self._drawn: dict[int, Future[Drawn]] = {}
        """Step -> its answers, requested and not taken yet."""
        self._requested = 0
        """All steps below this one were requested."""

    @property
    def ahead(self) -> int:
        """Number of steps that are requested and not taken yet."""
        return len(self._drawn)

    def load_weights(self, weights: Callable[[], Weights], *, version: int) -> None:
        """Request with these weights all steps up to `version + staleness` that were not requested yet.

        Near the end of the training no step is left, and the weights are not sent.
        """
        end = min(version + self._staleness + 1, self._steps)
        if self._requested >= end:
            return
        if self._loaded is not None:
            # Only the newest weights can be sent from a GPU, and no more than two sets are kept waiting anywhere.
            self._jobs.result(self._loaded)
        sent = weights()  # here and not in the thread: the training changes them
        self._loaded = self._jobs.submit(partial(self._inner.load_weights, lambda: sent, version=version))
        for step in range(self._requested, end):
            self._drawn[step] = self._jobs.submit(partial(self._inner.generate, step))
        self._requested = end
        self._jobs.submit(self._inner.expect_weights)

    def generate(self, step: int) -> Drawn:
        """Wait for the answers of `step`; raise any error of sampling ahead."""
        return self._jobs.result(self._drawn.pop(step))

    def borrow(self, weights: Callable[[], Weights], *, version: int, job: Callable[[], T]) -> T:
        """Run `job` in the thread after all requested steps, with `weights()` in the engine; return its result."""
        if self._loaded is not None:
            self._jobs.result(self._loaded)
        sent = weights()
        return self._jobs.result(self._jobs.submit(partial(self._inner.borrow, lambda: sent, version=version, job=job)))

    def save(self, folder: Path) -> None:
        """Wait for all requested steps and write those not taken yet: newer weights could not sample them again."""
        write_drawn(folder, {step: self._jobs.result(drawn) for step, drawn in self._drawn.items()})
        self._inner.save(folder)

    def load(self, folder: Path, step: int) -> None:
        """Continue at `step` from the state of `save`. DataError if rollouts are missing that older weights sampled.

        A step in which every group has a failed episode is sampled again, and so are those after it, by the current weights.
        """
        kept = read_drawn(folder)
        if step == 0 and not kept:
            return  # nothing was requested before the first step
        end = min(step + self._staleness, self._steps)
        if sorted(kept) != list(range(step, end)):
            rule = f"rollouts of the steps {step} to {end - 1} should be here, but found those of {sorted(kept)}"
            raise DataError("checkpoint.rollouts", str(folder), rule, "start the stage over with --force")
        usable = dict(takewhile(lambda one: self._has_whole_group(one[1].generations), sorted(kept.items())))
        self._drawn = {number: _completed(drawn) for number, drawn in usable.items()}
        for number, drawn in usable.items():
            note_drawn(self._band, number, drawn.generations)
        self._requested = step + len(self._drawn)
        self._inner.load(folder, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._jobs.close(interrupted=kind is not None and not issubclass(kind, Exception))

    def _has_whole_group(self, generations: list[Generation]) -> bool:
        starts = range(0, len(generations), self._group_size)
        groups = [generations[start : start + self._group_size] for start in starts]
        return any(not any(one.completion.failure for one in group) for group in groups)


StepSampler: TypeAlias = OnPolicySampler | AheadSampler
"""The sampler of each step of policy optimization."""


class Background:
    """One thread for all jobs. After a job has failed, no other runs: every later call raises its error.

    The jobs' own calls into workers have deadlines, so a wait for a job ends: with its result, its failure, or the end of
    the thread.

    >>> jobs = Background("sampling")
    >>> jobs.result(jobs.submit(lambda: 42))
    42
    >>> jobs.close(interrupted=False)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._closing = False
        # A daemon: an interrupted process must not wait for a job that was left behind.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Append a job to the queue."""
        self._check()
        made: Future[T] = Future()

        def run() -> None:
            if self._closing or self._failure is not None:
                made.set_exception(self._failure or CancelledError())
                return
            try:
                made.set_result(job())
            except BaseException as error:
                self._failure = error  # before the future is done, so that no caller sees it done without the failure
                made.set_exception(error)

        self._jobs.put(run)
        return made

    def result(self, job: Future[T]) -> T:
        """Wait for the job and return its result; raise its error or the error of an earlier job."""
        while not wait([job], timeout=LOOK_EVERY_S).done:
            if not self._thread.is_alive():
                rule = "the sampling thread ended before it had finished"
                raise SamplingError("rollouts", self._name, rule, "run again")
        self._check()
        return job.result()

    def close(self, *, interrupted: bool) -> None:
        """Drop the waiting jobs, and wait for the running one; for a few seconds only when `interrupted`."""
        self._closing = True
        self._jobs.put(None)
        if interrupted:
            self._thread.join(INTERRUPT_PATIENCE_S)
            return
        while self._thread.is_alive():
            self._thread.join(LOOK_EVERY_S)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _completed(drawn: Drawn) -> Future[Drawn]:
    future: Future[Drawn] = Future()
    future.set_result(drawn)
    return future
