"""A tiny Llama and samples of every kind for it: 10 rows of different lengths from a fixed generator."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.config.models import InitModel
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.initialize import initialize_llama, train_tokenizer
from rlhf_core.types import PreferenceSample, RewardPair, TokenSample
from tests.support.samples import PolicySample, ValueSample

TEXTS = [
    "What is 12 + 30? It is 42.",
    "Name a colour. Blue is a colour.",
    "Say hello to the reader. Hello, reader!",
] * 5
TINY = InitModel(vocab_size=320, hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=128, max_positions=64)
LENGTHS = (5, 17, 9, 12, 8, 21, 17, 6, 14, 11)


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    train_tokenizer(TEXTS, vocab_size=320, folder=folder)
    initialize_llama(TINY, folder, seed=7)
    return folder


@pytest.fixture
def policy_spec(policy_folder: Path) -> ModelSpec:
    return ModelSpec(path=str(policy_folder), head="lm", lora=None, seed=3)


@pytest.fixture
def score_spec(policy_folder: Path) -> ModelSpec:
    return ModelSpec(path=str(policy_folder), head="score", lora=None, seed=3)


@pytest.fixture
def value_spec(policy_folder: Path) -> ModelSpec:
    return ModelSpec(path=str(policy_folder), head="value", lora=None, seed=3)


@pytest.fixture
def optimizer() -> OptimizerConfig:
    return OptimizerConfig(learning_rate=1e-3, weight_decay=0.01)


@pytest.fixture
def token_samples() -> list[TokenSample]:
    generator = random.Random(11)
    return [
        TokenSample(tuple(generator.randrange(10, 320) for _ in range(length)), (0, 0, *(1,) * (length - 2)))
        for length in LENGTHS
    ]


@pytest.fixture
def reward_pairs(token_samples: list[TokenSample]) -> list[RewardPair]:
    sides = [sample.token_ids for sample in token_samples]
    return [RewardPair(one, other, 0.1) for one, other in zip(sides, sides[1:] + sides[:1], strict=True)]


@pytest.fixture
def preference_samples(token_samples: list[TokenSample]) -> list[PreferenceSample]:
    # Reversed, so that the two sides' gradients do not cancel over the batch.
    rejected = [replace(sample, token_ids=sample.token_ids[::-1]) for sample in token_samples[1:] + token_samples[:1]]
    return [
        PreferenceSample(one, other, -5.7 * sum(one.loss_mask), -5.8 * sum(other.loss_mask))
        for one, other in zip(token_samples, rejected, strict=True)
    ]


@pytest.fixture
def policy_samples(token_samples: list[TokenSample]) -> list[PolicySample]:
    """Old, sampler's and reference's log-probs that differ from each other and from the model's."""
    generator = random.Random(12)

    def row(sample: TokenSample, low: float, high: float) -> tuple[float, ...]:
        return tuple(generator.uniform(low, high) if masked else 0.0 for masked in sample.loss_mask)

    return [
        PolicySample(s.token_ids, s.loss_mask, row(s, -7, -5), row(s, -6, -5.5), row(s, -6, -5.5), row(s, -1, 1))
        for s in token_samples
    ]


@pytest.fixture
def value_samples(token_samples: list[TokenSample]) -> list[ValueSample]:
    generator = random.Random(13)
    return [
        ValueSample(
            sample.token_ids,
            sample.loss_mask,
            tuple(generator.uniform(-0.1, 0.1) for _ in sample.token_ids),
            tuple(generator.uniform(-1, 1) for _ in sample.token_ids),
        )
        for sample in token_samples
    ]
