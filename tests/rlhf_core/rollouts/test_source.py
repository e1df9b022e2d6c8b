"""The requests of a step: as many as asked for, each with a seed of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.policy import PPOConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.rollouts.source import sample
from rlhf_core.types import Completion, Message, Prompt, SamplingRequest
from tests.stages.recording import make_policy

PROMPTS = [Prompt(f"p{i}", (Message("user", str(i)),), "", "test") for i in range(5)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


class Echo:
    """A sampler that answers with the seed it was given."""

    def generate(self, requests: Sequence[SamplingRequest], config: SamplingConfig) -> list[Completion]:
        return [Completion((1,), (0.0,), "", "stop", 0, request.seed) for request in requests]

    def load_weights(self, weights: Any, *, version: int) -> None:
        raise AssertionError


def test_a_prompt_that_comes_twice_in_a_step_is_sampled_from_other_seeds(policy: Path) -> None:
    batch = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    made = sample(Echo(), ChatTemplate.load(policy), batch, PPOConfig(samples_per_prompt=2), step=0, seed=3)
    assert [row.prompt.id for row in made] == ["p0", "p0", "p1", "p1", "p0", "p0"]
    assert len({row.completion.seed for row in made}) == 6
    once = sample(Echo(), ChatTemplate.load(policy), batch[:2], PPOConfig(samples_per_prompt=2), step=0, seed=3)
    assert [row.completion.seed for row in made[:4]] == [row.completion.seed for row in once]
