"""Run episodes: the sampler generates the policy's turns, environments in other processes answer them.

In **lockstep** the turns of all live episodes are sampled in one batch, then all environments step: the same requests
make the same batches, so a restart gives the same bytes. In **continuous** mode a turn is sampled as soon as its
environment has answered, while others are still being sampled.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf_core.agents.conversation import EpisodeResult
from rlhf_core.agents.drivers import EnvironmentDriver, EpisodeDriver, ProgramDriver, Rules, prompt_columns
from rlhf_core.agents.process import Environments, Event
from rlhf_core.agents.programs import EpisodeFailed
from rlhf_core.config.agents import EpisodeLimits
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.interfaces import Sampler
from rlhf_core.types import Column, Completion, Prompt, SamplingRequest, plain_text

LOOK_EVERY_S = 0.2
"""Seconds between two checks for hung processes while waiting."""
GATHER_S = 0.02
"""Seconds that an idle engine waits for more requests after the first. Requests that begin together make full
batches."""


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode to run: `prompt_ids` is the rendered prompt, all its samples derive from `seed`."""

    prompt: Prompt
    prompt_ids: Column[int]
    seed: int


def play_episodes(
    sampler: Sampler,
    chat: ChatTemplate,
    episodes: Sequence[Episode],
    environments: Environments,
    config: EpisodeLimits,
    sampling: SamplingConfig,
) -> list[EpisodeResult]:
    """Run the episodes and collect their results, in order. A failed one has the reason in `completion.failure`."""
    pool = _EpisodePool(environments, Rules(chat, config, sampling))
    slots = [pool.add(episode) for episode in episodes]
    if config.scheduling == "lockstep":
        _in_lockstep(sampler, pool, sampling)
    else:
        _continuously(sampler, pool, sampling)
    return [slot.result for slot in slots if slot.result is not None]


def _in_lockstep(sampler: Sampler, pool: _EpisodePool, sampling: SamplingConfig) -> None:
    while pool.live:
        while pool.waiting_for_environments():
            pool.receive(LOOK_EVERY_S)
        requesting = pool.requesting()
        requests = [slot.take_request() for slot in requesting]
        if requests:
            for slot, completion in zip(requesting, sampler.generate(requests, sampling), strict=True):
                pool.deliver(slot, completion)


def _continuously(sampler: Sampler, pool: _EpisodePool, sampling: SamplingConfig) -> None:
    numbers = itertools.count()
    sampled: dict[int, tuple[_Slot, EpisodeDriver]] = {}
    while pool.live:
        new = []
        for slot in pool.requesting():
            sampled[number := next(numbers)] = (slot, slot.driver)
            new.append((number, slot.take_request()))
        if sampled:
            for number, completion in sampler.advance(new, sampling):
                slot, driver = sampled.pop(number)
                # Otherwise the episode was restarted, or has failed, in the meantime.
                if slot.driver is driver and slot.result is None:
                    pool.deliver(slot, completion)
        elif pool.receive(LOOK_EVERY_S):
            until = time.monotonic() + GATHER_S
            while pool.waiting_for_environments() and (left := until - time.monotonic()) > 0:
                pool.receive(left)
        while pool.receive(0.0):
            continue


@dataclass
class _Slot:
    """A place for one episode: its current attempt, then its result."""

    episode: Episode
    driver: EpisodeDriver
    ticket: int
    request: SamplingRequest | None = None
    sampling: bool = False
    failures: int = 0
    seconds: float = 0.0
    """Seconds that the environment took in this attempt."""
    result: EpisodeResult | None = field(default=None)

    def take_request(self) -> SamplingRequest:
        """Take the request, which is being sampled from now on."""
        assert self.request is not None
        request, self.request, self.sampling = self.request, None, True
        return request


class _EpisodePool:
    """All running episodes of a call to `play_episodes`, and their environments."""

    def __init__(self, environments: Environments, rules: Rules) -> None:
        self._environments = environments
        self._rules = rules
        self._config = rules.limits
        self._by_ticket: dict[int, _Slot] = {}

    @property
    def live(self) -> bool:
        """Whether any episode is still running."""
        return bool(self._by_ticket)

    def add(self, episode: Episode) -> _Slot:
        slot = _Slot(episode, self._new_driver(episode), -1)
        self._begin(slot)
        return slot

    def requesting(self) -> list[_Slot]:
        """The episodes that wait for a turn of the policy, in order of their tickets."""
        return [slot for _, slot in sorted(self._by_ticket.items()) if slot.request is not None]

    def waiting_for_environments(self) -> bool:
        """Whether any environment has not answered yet."""
        return any(slot.request is None and not slot.sampling for slot in self._by_ticket.values())

    def receive(self, timeout_s: float) -> bool:
        """Handle the events of environments, waiting up to `timeout_s` for one. True if there was any."""
        events = self._environments.events(timeout_s=timeout_s)
        for event in events:
            slot = self._by_ticket.get(event.ticket)
            if slot is not None:
                self._take(slot, event)
        return bool(events)

    def deliver(self, slot: _Slot, completion: Completion) -> None:
        """Send a completion to the environment of its episode."""
        slot.sampling = False
        self._call(slot, *slot.driver.on_completion(completion))

    def _take(self, slot: _Slot, event: Event) -> None:
        slot.seconds += event.seconds
        if event.kind == "lost" and not event.blamed:
            self._restart(slot)
            return
        problem = _problem(event, self._config)
        try:
            if problem:
                raise EpisodeFailed(problem)
            answer = slot.driver.on_observation(event.kind, event.value)
        except EpisodeFailed as failure:
            self._failed(slot, str(failure), lost=event.kind == "lost")
            return
        if isinstance(answer, SamplingRequest):
            slot.request = answer
        elif answer is not None:
            self._call(slot, *answer)
        else:
            self._leave(slot)
            slot.result = slot.driver.result()

    def _call(self, slot: _Slot, verb: str, arguments: tuple[object, ...]) -> None:
        left = self._config.episode_timeout_s - slot.seconds
        timeout_s = max(min(self._config.step_timeout_s, left), 0.0)
        self._environments.call(slot.ticket, verb, *arguments, timeout_s=timeout_s)

    def _failed(self, slot: _Slot, reason: str, *, lost: bool) -> None:
        slot.failures += 1
        if not lost:
            self._environments.end(slot.ticket)
        if slot.failures <= self._config.retries:
            self._restart(slot)
            return
        del self._by_ticket[slot.ticket]
        failure = plain_text(f"the environment failed {slot.failures} times: {reason}")
        slot.result = slot.driver.result(failure)

    def _restart(self, slot: _Slot) -> None:
        """Restart the episode with the same seeds."""
        del self._by_ticket[slot.ticket]
        slot.driver = self._new_driver(slot.episode)
        slot.request, slot.sampling, slot.seconds = None, False, 0.0
        self._begin(slot)

    def _begin(self, slot: _Slot) -> None:
        prompt = slot.episode.prompt
        text = self._rules.chat.prompt_text(prompt.messages)
        columns = {**prompt_columns(prompt, text), "sampling": self._rules.sampling.model_dump()}
        timeout_s = min(self._config.step_timeout_s, self._config.episode_timeout_s)
        slot.ticket = self._environments.begin(columns, slot.episode.seed, timeout_s=timeout_s)
        self._by_ticket[slot.ticket] = slot

    def _leave(self, slot: _Slot) -> None:
        del self._by_ticket[slot.ticket]
        self._environments.end(slot.ticket)

    def _new_driver(self, episode: Episode) -> EpisodeDriver:
        if self._environments.programs:
            return ProgramDriver(episode.prompt_ids, episode.seed, self._rules)
        return EnvironmentDriver(episode.prompt, episode.prompt_ids, episode.seed, self._rules)


def _problem(event: Event, config: EpisodeLimits) -> str:
    match event.kind:
        case "raised":
            return f"it raised\n{event.value}"
        case "late":
            limits = f"step_timeout_s = {config.step_timeout_s:g} or episode_timeout_s = {config.episode_timeout_s:g}"
            return f"it took {event.seconds:.1f} s, and {limits} was over"
        case "lost":
            return str(event.value)
    return ""
