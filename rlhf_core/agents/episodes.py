"""Plays episodes: the sampler says the policy's turns, environments in other processes answer them.

In **lockstep** the turns of all live episodes are sampled in one batch, then all environments step: the same requests make
the same batches, so a restart gives the same bytes. In **continuous** mode a turn is sampled as soon as its environment
has answered, while others go on being sampled.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf_core.agents.games import AnyGame, EpisodeFailed, Game, ProgramGame, Rules, prompt_columns
from rlhf_core.agents.process import Environments, Event
from rlhf_core.agents.transcript import Played
from rlhf_core.config.agents import EpisodeLimits
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.interfaces import Sampler
from rlhf_core.types import Completion, Prompt, SamplingRequest, plain_text

LOOK_EVERY_S = 0.2
"""How often a wait looks for processes that hang."""


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode to play: `prompt_ids` is the rendered prompt, `seed` decides all that is drawn in it."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    seed: int


def play(
    sampler: Sampler,
    chat: ChatTemplate,
    episodes: Sequence[Episode],
    environments: Environments,
    config: EpisodeLimits,
    sampling: SamplingConfig,
) -> list[Played]:
    """Return the episodes as they were played, in order; one that failed says so in `completion.failure`."""
    table = _Table(environments, Rules(chat, config, sampling))
    seats = [table.seat(episode) for episode in episodes]
    if config.scheduling == "lockstep":
        _in_lockstep(sampler, table, sampling)
    else:
        _continuously(sampler, table, sampling)
    return [seat.played for seat in seats if seat.played is not None]


def _in_lockstep(sampler: Sampler, table: _Table, sampling: SamplingConfig) -> None:
    while table.live:
        while table.waiting_for_environments():
            table.listen(LOOK_EVERY_S)
        asking = table.asking()
        requests = [seat.taken_request() for seat in asking]
        if requests:
            for seat, completion in zip(asking, sampler.generate(requests, sampling), strict=True):
                table.say(seat, completion)


def _continuously(sampler: Sampler, table: _Table, sampling: SamplingConfig) -> None:
    numbers = itertools.count()
    sampled: dict[int, tuple[_Seat, AnyGame]] = {}
    while table.live:
        new = []
        for seat in table.asking():
            sampled[number := next(numbers)] = (seat, seat.game)
            new.append((number, seat.taken_request()))
        if sampled:
            for number, completion in sampler.advance(new, sampling):
                seat, game = sampled.pop(number)
                if seat.game is game and seat.played is None:  # else it was begun anew, or has failed, in the meantime
                    table.say(seat, completion)
        else:
            table.listen(LOOK_EVERY_S)
        while table.listen(0.0):
            continue


@dataclass
class _Seat:
    """An episode with its current attempt."""

    episode: Episode
    game: AnyGame
    ticket: int
    request: SamplingRequest | None = None
    sampling: bool = False
    failures: int = 0
    seconds: float = 0.0
    """What the environment took in this attempt."""
    played: Played | None = field(default=None)

    def taken_request(self) -> SamplingRequest:
        """Return the request, which is being sampled from now on."""
        assert self.request is not None
        request, self.request, self.sampling = self.request, None, True
        return request


class _Table:
    """All episodes of a call, and their environments."""

    def __init__(self, environments: Environments, rules: Rules) -> None:
        self._environments = environments
        self._rules = rules
        self._config = rules.limits
        self._by_ticket: dict[int, _Seat] = {}

    @property
    def live(self) -> bool:
        """Whether any episode goes on."""
        return bool(self._by_ticket)

    def seat(self, episode: Episode) -> _Seat:
        """Begin an episode."""
        seat = _Seat(episode, self._new_game(episode), -1)
        self._begin(seat)
        return seat

    def asking(self) -> list[_Seat]:
        """Return the episodes that wait for a turn of the policy, in order of their tickets."""
        return [seat for _, seat in sorted(self._by_ticket.items()) if seat.request is not None]

    def waiting_for_environments(self) -> bool:
        """Whether an environment has yet to answer."""
        return any(seat.request is None and not seat.sampling for seat in self._by_ticket.values())

    def listen(self, timeout_s: float) -> bool:
        """Take what environments said, waiting for up to `timeout_s`; say whether there was anything."""
        events = self._environments.events(timeout_s=timeout_s)
        for event in events:
            seat = self._by_ticket.get(event.ticket)
            if seat is not None:
                self._take(seat, event)
        return bool(events)

    def say(self, seat: _Seat, completion: Completion) -> None:
        """Tell an environment what the policy said."""
        seat.sampling = False
        self._tell(seat, *seat.game.said(completion))

    def _take(self, seat: _Seat, event: Event) -> None:
        seat.seconds += event.seconds
        if event.kind == "lost" and not event.blamed:
            self._again(seat)
            return
        problem = _problem(event, self._config)
        try:
            if problem:
                raise EpisodeFailed(problem)
            answer = seat.game.heard(event.kind, event.value)
        except EpisodeFailed as failure:
            self._failed(seat, str(failure), lost=event.kind == "lost")
            return
        if isinstance(answer, SamplingRequest):
            seat.request = answer
        elif answer is not None:
            self._tell(seat, *answer)
        else:
            self._leave(seat)
            seat.played = seat.game.played()

    def _tell(self, seat: _Seat, verb: str, arguments: tuple[object, ...]) -> None:
        left = self._config.episode_timeout_s - seat.seconds
        timeout_s = max(min(self._config.step_timeout_s, left), 0.0)
        self._environments.tell(seat.ticket, verb, *arguments, timeout_s=timeout_s)

    def _failed(self, seat: _Seat, reason: str, *, lost: bool) -> None:
        seat.failures += 1
        if not lost:
            self._environments.end(seat.ticket)
        if seat.failures <= self._config.retries:
            self._again(seat)
            return
        del self._by_ticket[seat.ticket]
        failure = plain_text(f"the environment failed {seat.failures} times: {reason}")
        seat.played = seat.game.played(failure)

    def _again(self, seat: _Seat) -> None:
        """Play the episode anew, with the same seeds."""
        del self._by_ticket[seat.ticket]
        seat.game = self._new_game(seat.episode)
        seat.request, seat.sampling, seat.seconds = None, False, 0.0
        self._begin(seat)

    def _begin(self, seat: _Seat) -> None:
        prompt = seat.episode.prompt
        text = self._rules.chat.prompt_text(prompt.messages)
        columns = {**prompt_columns(prompt, text), "sampling": self._rules.sampling.model_dump()}
        timeout_s = min(self._config.step_timeout_s, self._config.episode_timeout_s)
        seat.ticket = self._environments.begin(columns, seat.episode.seed, timeout_s=timeout_s)
        self._by_ticket[seat.ticket] = seat

    def _leave(self, seat: _Seat) -> None:
        del self._by_ticket[seat.ticket]
        self._environments.end(seat.ticket)

    def _new_game(self, episode: Episode) -> AnyGame:
        if self._environments.programs:
            return ProgramGame(episode.prompt_ids, episode.seed, self._rules)
        return Game(episode.prompt, episode.prompt_ids, episode.seed, self._rules)


def _problem(event: Event, config: EpisodeLimits) -> str:
    """Return what is wrong with an event, "" if nothing is."""
    match event.kind:
        case "raised":
            return f"it raised\n{event.value}"
        case "late":
            limits = f"step_timeout_s = {config.step_timeout_s:g} or episode_timeout_s = {config.episode_timeout_s:g}"
            return f"it took {event.seconds:.1f} s, and {limits} was over"
        case "lost":
            return str(event.value)
    return ""
