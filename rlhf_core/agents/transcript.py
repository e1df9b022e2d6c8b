"""Keep the tokens of an episode exactly as they were sampled: the policy's turns are never tokenized again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf_core.types import ActionSpan, Completion, FinishReason, SamplingRequest, derive_seed


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """A finished episode. `prompt_ids` differ from the prompt's own where the environment added to it."""

    prompt_ids: tuple[int, ...]
    completion: Completion


class Transcript:
    """Prompt, turns and the environment's text so far, within a budget of tokens.

    >>> text = Transcript((1, 2), seed=7, limit=10)
    >>> text.request(4)
    SamplingRequest(prompt_ids=(1, 2), seed=7, max_tokens=4)
    """

    def __init__(self, prompt_ids: tuple[int, ...], *, seed: int, limit: int) -> None:
        """Start with the prompt; `limit` bounds the tokens of prompt, turns and text together."""
        self.prompt_ids = prompt_ids
        self._seed = seed
        self._limit = limit
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[ActionSpan] = []
        self.extras: dict[str, float] = {}
        self.score: float | None = None
        """What the agent gave for dynamic sampling to go by."""

    @property
    def room(self) -> int:
        """Return how many tokens still fit."""
        return self._limit - len(self.prompt_ids) - len(self._token_ids)

    @property
    def turns(self) -> int:
        """Return how many turns were sampled."""
        return len(self._spans)

    def request(self, max_tokens: int) -> SamplingRequest:
        """Return the request for the next turn, of at most `max_tokens` tokens and of what fits.

        The first turn has the episode's seed, so that an episode of one turn says what plain sampling says.
        """
        return SamplingRequest(
            self.prompt_ids + tuple(self._token_ids), turn_seed(self._seed, self.turns), min(max_tokens, self.room)
        )

    def add_action(self, turn: Completion) -> None:
        """Append a sampled turn as it is."""
        start = len(self._token_ids)
        self._token_ids += turn.token_ids
        self._logprobs += turn.logprobs
        self._spans.append(ActionSpan(start, len(self._token_ids), turn.policy_version))

    def add_text(self, token_ids: Sequence[int]) -> bool:
        """Append the environment's tokens; return whether they fit and leave room for a token to sample."""
        if len(token_ids) >= self.room:
            return False
        self._token_ids += token_ids
        self._logprobs += [0.0] * len(token_ids)
        return True

    def earn(self, reward: float, *, turn: int = -1) -> None:
        """Put `reward` at a turn, the last one unless told; ValueError if it is not finite."""
        if not math.isfinite(reward):
            raise ValueError(f"the reward is {reward}, and must be finite")
        self._spans[turn] = replace(self._spans[turn], reward=reward)

    def note(self, extras: Mapping[str, float]) -> None:
        """Keep figures to log."""
        self.extras |= {str(name): float(value) for name, value in extras.items()}

    def result(
        self, decode: Callable[[Sequence[int]], str], *, finish_reason: FinishReason, failure: str = ""
    ) -> EpisodeResult:
        """Return the episode up to its last sampled token."""
        end = self._spans[-1].end if self._spans else 0
        completion = Completion(
            token_ids=tuple(self._token_ids[:end]),
            logprobs=tuple(self._logprobs[:end]),
            text=decode(self._token_ids[:end]),
            finish_reason=finish_reason,
            policy_version=self._spans[-1].policy_version if self._spans else 0,
            seed=self._seed,
            spans=tuple(self._spans),
            failure=failure,
            extras=dict(self.extras),
            score=self.score,
        )
        return EpisodeResult(self.prompt_ids, completion)


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn of an episode; the first one's is the episode's own.

    >>> turn_seed(7, 0)
    7
    """
    return derive_seed(seed, "turn", turn) if turn else seed
