"""A sampler, a trainer and a chat template that compute nothing, for tests of who asks whom for what and when."""

from collections.abc import Callable, Sequence
from typing import Any

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.interfaces import Weights
from rlhf_core.stage.failures import Counts
from rlhf_core.types import Completion, Generation, Message, Prompt, Rollout, SamplingRequest

PROMPTS = [Prompt(f"p{i}", (Message("user", str(i)),), "", "test") for i in range(7)]
PROMPT_LENGTH = 2


class FakeChat:
    """A prompt has two tokens: 9 and its number."""

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return (9, int(messages[0].content))

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class FakeSampler:
    """Answers with tokens that say the version; `length(prompt, answer so far)` is how long the whole answer gets.

    It refuses to sample between `expect_weights` and `load_weights`, as an engine that has dropped its weights.
    """

    def __init__(self, length: Callable[[SamplingRequest], int] = lambda request: 1) -> None:
        self.version = -1
        self.batches: list[tuple[int, list[SamplingRequest]]] = []
        self.expects_weights = False
        self._length = length

    def generate(self, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> list[Completion]:
        assert not self.expects_weights
        self.batches.append((self.version, list(requests)))
        return [self._answer(request, sampling.max_tokens) for request in requests]

    def load_weights(self, weights: Weights, *, version: int) -> None:
        assert weights.digest == f"policy {version}"
        self.version, self.expects_weights = version, False

    def advance(self, new: Any, sampling: SamplingConfig) -> Any:
        raise NotImplementedError

    def expect_weights(self) -> None:
        self.expects_weights = True

    def _answer(self, request: SamplingRequest, most: int) -> Completion:
        left = self._length(request) - (len(request.prompt_ids) - PROMPT_LENGTH)
        tokens = min(left, most)
        ids, logprobs = (100 + self.version,) * tokens, (-1.0 - self.version,) * tokens
        return Completion(ids, logprobs, "", "stop" if left <= most else "length", self.version, request.seed)


class FakeTrainer:
    """A policy that is known by the number of its updates."""

    def __init__(self) -> None:
        self.version = 0

    def weights(self) -> Weights:
        return Weights(payload=None, digest=f"policy {self.version}")


class FakeScorer:
    """Scores with the number of tokens; its state counts what it scored."""

    def __init__(self) -> None:
        self.scored = 0
        self.step = -1

    def at_step(self, step: int) -> None:
        self.step = step

    def __call__(self, generations: Sequence[Generation]) -> list[Rollout]:
        self.scored += len(generations)
        return [
            Rollout(one.prompt, one.prompt_ids, one.completion, float(len(one.completion.token_ids)), {})
            for one in generations
        ]

    def failed(self) -> Counts:
        return {}

    def state(self) -> dict[str, Any]:
        return {"scored": self.scored}

    def restore(self, state: dict[str, Any]) -> None:
        self.scored = state["scored"]
