"""Drive one episode: observations become sampling requests, completions become calls of the environment's session.

`EnvironmentDriver` is for environments: the driver writes the conversation. `ProgramDriver` is for programs: they write
it, and the driver checks that it holds exactly the sampled tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rlhf_core.agents.conversation import EpisodeResult, Transcript, turn_seed
from rlhf_core.agents.environment import StepResult
from rlhf_core.agents.programs import Answer, Ask, EpisodeFailed, ProgramResult
from rlhf_core.config.agents import EpisodeLimits
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.types import Column, Completion, FinishReason, Message, Prompt, SamplingRequest, ids, label_fields

CallOut = tuple[str, tuple[Any, ...]]
"""A verb of the episode's session with its arguments."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that all episodes of a call share."""

    chat: ChatTemplate
    limits: EpisodeLimits
    sampling: SamplingConfig


class EnvironmentDriver:
    """One attempt at an episode in an environment with `reset` and `step`."""

    def __init__(self, prompt: Prompt, prompt_ids: Column[int], seed: int, rules: Rules) -> None:
        self._prompt = prompt
        self._seed = seed
        self._chat = rules.chat
        self._limits = rules.limits
        self._max_tokens = rules.sampling.max_tokens
        self._text = Transcript(prompt_ids, seed=seed, limit=rules.limits.max_episode_tokens)
        self._cut = self._ended = False
        self.finished: FinishReason | None = None
        """Set when the episode is over."""

    def on_observation(self, kind: str, value: Any) -> SamplingRequest | None:
        """Take `observed` (the addition of `reset` to the prompt) or `stepped` (a StepResult).

        Returns the next request, or None at the end. Raises EpisodeFailed.
        """
        if kind == "observed":
            return self._begun(value)
        return self._stepped(value)

    def on_completion(self, completion: Completion) -> CallOut:
        """Append the turn; return the call of `step`."""
        self._text.add_action(completion)
        self._cut = completion.finish_reason == "length"
        self._ended = completion.token_ids[-1] == self._chat.eos_id
        return "step", (completion.text, {"turn": self._text.turns - 1, "truncated": self._cut})

    def result(self, failure: str = "") -> EpisodeResult:
        """The episode up to its last sampled token."""
        return self._text.result(self._chat.decode, finish_reason=self.finished or "stop", failure=failure)

    def _begun(self, added: str | None) -> SamplingRequest:
        if added:
            prompt_ids = self._chat.prompt_ids(with_added(self._prompt.messages, added))
            self._text = Transcript(prompt_ids, seed=self._seed, limit=self._limits.max_episode_tokens)
        if self._text.room < 1:
            tokens, limit = len(self._text.prompt_ids), self._limits.max_episode_tokens
            raise EpisodeFailed(
                f"its prompt has {tokens} tokens, and max_episode_tokens = {limit} leaves none to sample"
            )
        return self._text.request(self._max_tokens)

    def _stepped(self, result: StepResult) -> SamplingRequest | None:
        self._text.earn(result.reward)
        self._text.note(result.extras)
        if self._cut or result.done:
            self.finished = "length" if self._cut else "stop"
            return None
        if self._text.turns >= self._limits.max_turns or not self._text.add_text(self._next_turn(result)):
            self.finished = "length"
            return None
        return self._text.request(self._max_tokens)

    def _next_turn(self, result: StepResult) -> Column[int]:
        said = result.observation
        turns = [Message("user", said)] if isinstance(said, str) else [Message(t["role"], t["content"]) for t in said]
        # A turn may have ended with another of the policy's stop tokens; the template expects its own.
        return ids(() if self._ended else (self._chat.eos_id,)) + self._chat.turn_ids(turns)


class ProgramDriver:
    """One attempt at an episode that a program drives."""

    def __init__(self, prompt_ids: Column[int], seed: int, rules: Rules) -> None:
        self._prompt_ids = prompt_ids
        self._seed = seed
        self._chat = rules.chat
        self._limits = rules.limits
        self._max_tokens = rules.sampling.max_tokens
        self._asked = ids(())
        self._turns: list[tuple[Column[int], Completion]] = []
        self._text: Transcript | None = None
        self.finished: FinishReason | None = None

    def on_observation(self, kind: str, value: Any) -> SamplingRequest | CallOut | None:
        """Take `asks` (an Ask) or `finished` (a ProgramResult); return a request, a call, or None at the end."""
        if kind == "finished":
            self._end(value)
            return None
        return self._ask(value)

    def on_completion(self, completion: Completion) -> CallOut:
        """Keep the turn; return the call of `answer`."""
        self._turns.append((self._asked, completion))
        turn = Answer(
            tuple(completion.token_ids),
            tuple(completion.logprobs),
            completion.text,
            completion.finish_reason,
            completion.policy_version,
        )
        return "answer", (turn,)

    def result(self, failure: str = "") -> EpisodeResult:
        """The result of the episode; if it failed, only with the turns that continue each other."""
        text = self._text or self._conversation(self._turns, strict=False)
        return text.result(self._chat.decode, finish_reason=self.finished or "stop", failure=failure)

    def _ask(self, ask: Ask) -> SamplingRequest | CallOut:
        room = self._limits.max_episode_tokens - len(ask.prompt_ids)
        if len(self._turns) >= self._limits.max_turns:
            return "answer", (f"max_turns = {self._limits.max_turns} turns were taken",)
        if room < 1:
            return "answer", (f"{len(ask.prompt_ids)} tokens leave none of max_episode_tokens to sample",)
        self._asked = ids(ask.prompt_ids)
        most = min(self._max_tokens, room, ask.max_tokens or room)
        return SamplingRequest(self._asked, turn_seed(self._seed, len(self._turns)), most)

    def _end(self, result: ProgramResult) -> None:
        turns = self._chosen(result) if result.actions else self._turns
        if not turns:
            raise EpisodeFailed("it ended without a turn of the policy")
        if len(result.rewards) > len(turns):
            raise EpisodeFailed(f"it returned {len(result.rewards)} rewards for {len(turns)} turns")
        text = self._conversation(turns, strict=True)
        if len(result.rewards) == len(turns):
            for turn, reward in enumerate(result.rewards):
                text.earn(reward, turn=turn)
        elif result.rewards:
            text.earn(sum(result.rewards))
        text.note(result.extras)
        text.score = result.score
        self._text = text
        self.finished = "length" if result.truncated else "stop"

    def _chosen(self, result: ProgramResult) -> list[tuple[Column[int], Completion]]:
        """Find the turns that the result names by their ranges.

        Raises EpisodeFailed if one was not sampled like that.
        """
        chosen = []
        for start, end in result.actions:
            found = [
                (prompt_ids, said)
                for prompt_ids, said in self._turns
                if len(prompt_ids) == start and prompt_ids + said.token_ids == result.token_ids[:end]
            ]
            if not found:
                raise EpisodeFailed(
                    f"tokens {start} to {end} of the conversation it returned are not as they were sampled"
                )
            chosen.append(found[-1])
        return chosen

    def _conversation(self, turns: list[tuple[Column[int], Completion]], *, strict: bool) -> Transcript:
        prompt_ids = turns[0][0] if turns else self._prompt_ids
        text = Transcript(prompt_ids, seed=self._seed, limit=self._limits.max_episode_tokens)
        so_far = prompt_ids
        for number, (prompt_ids, said) in enumerate(turns):
            if prompt_ids[: len(so_far)] != so_far:
                if strict:
                    raise EpisodeFailed(
                        f"turn {number + 1} was requested with another history than the conversation before it"
                    )
                break
            text.add_text(prompt_ids[len(so_far) :])
            text.add_action(said)
            so_far = prompt_ids + said.token_ids
        return text


EpisodeDriver: TypeAlias = EnvironmentDriver | ProgramDriver


def with_added(messages: tuple[Message, ...], added: str) -> tuple[Message, ...]:
    """Add a text to the last user turn of `messages`, after an empty line.

    >>> with_added((Message("user", "Guess."),), "From 1 to 9.")[-1].content
    'Guess.\\n\\nFrom 1 to 9.'
    """
    if not messages or messages[-1].role != "user":
        return (*messages, Message("user", added))
    return (*messages[:-1], Message("user", f"{messages[-1].content}\n\n{added}"))


def prompt_columns(prompt: Prompt, text: str) -> Mapping[str, Any]:
    """The columns of a prompt that an environment receives; `text` is the rendered prompt.

    >>> prompt_columns(Prompt("q", (Message("user", "Hi"),), '{"secret": 4}', "test"), "")["secret"]
    4
    """
    own = {
        "id": prompt.id,
        "messages": [{"role": message.role, "content": message.content} for message in prompt.messages],
        "label": prompt.label,
        "source": prompt.source,
        "text": text,
    }
    return label_fields(prompt.label) | own
