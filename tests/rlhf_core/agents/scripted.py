"""A sampler that says what a test tells it to, and keeps what it was asked; and a chat template without a model."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlhf_core.agents.conversation import EpisodeResult
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.types import Completion, Message, Prompt, SamplingRequest, derive_seed

WORLDS = str(Path(__file__).with_name("worlds.py"))
TEXTS = ["What is 12 + 30? It is 42.", "turn 0 turn 1 turn 2 the number is"] * 5


@lru_cache(maxsize=1)
def chat_folder() -> str:
    """Return the folder of a byte-level tokenizer with the project's own template."""
    import tempfile

    from rlhf_core.models.initialize import train_tokenizer

    folder = Path(tempfile.mkdtemp(prefix="chat"))
    train_tokenizer(TEXTS, vocab_size=320, folder=folder)
    return str(folder)


def chat() -> ChatTemplate:
    return ChatTemplate.load(Path(chat_folder()))


def prompt(number: int, label: str) -> Prompt:
    return Prompt(f"q{number}", (Message("user", f"What is {number}?"),), label, "test")


class ScriptedSampler:
    """Says `script(request, turn)`, whose tokens are one per character where it can be, and the end token."""

    def __init__(self, template: ChatTemplate, script: Callable[[SamplingRequest, int], str]) -> None:
        self._template = template
        self._script = script
        self.batches: list[tuple[SamplingRequest, ...]] = []
        self.said: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Prompt -> what was sampled after it."""

    def generate(self, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> list[Completion]:
        self.batches.append(tuple(requests))
        return [self._complete(request, sampling) for request in requests]

    def advance(
        self, new: Sequence[tuple[int, SamplingRequest]], sampling: SamplingConfig
    ) -> list[tuple[int, Completion]]:
        completions = self.generate([request for _, request in new], sampling)
        return [(number, completion) for (number, _), completion in zip(new, completions, strict=True)]

    def load_weights(self, weights: Any, *, version: int) -> None:
        raise AssertionError("nothing is trained here")

    def _complete(self, request: SamplingRequest, sampling: SamplingConfig) -> Completion:
        before = [asked for asked in self.said if len(asked) < len(request.prompt_ids)]
        turn = sum(request.prompt_ids[: len(asked)] == asked for asked in before)
        text = self._script(request, turn)
        ids = [
            one for letter in text for one in self._template.tokenizer(letter, add_special_tokens=False)["input_ids"]
        ]
        most = min(request.max_tokens or sampling.max_tokens, sampling.max_tokens)
        ids = [*ids, self._template.eos_id][:most]
        self.said[request.prompt_ids] = tuple(ids)
        return Completion(
            token_ids=tuple(ids),
            logprobs=tuple(-((derive_seed(request.seed, i) % 100) + 1) / 50 for i in range(len(ids))),
            text=self._template.decode(ids),
            finish_reason="stop" if ids[-1] == self._template.eos_id else "length",
            policy_version=5,
            seed=request.seed,
        )


def sampled_as_it_stands(episodes: list[EpisodeResult], sampler: ScriptedSampler) -> bool:
    """Whether every turn of every episode was sampled after exactly the tokens that stand before it."""
    turns = []
    for episode in episodes:
        whole = episode.prompt_ids + episode.completion.token_ids
        for span in episode.completion.spans:
            start, end = (len(episode.prompt_ids) + bound for bound in (span.start, span.end))
            turns.append(sampler.said[whole[:start]] == whole[start:end])
    return bool(turns) and all(turns)
