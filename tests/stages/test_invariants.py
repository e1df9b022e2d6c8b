"""Invariants of the whole loop that no single module owns; the others are listed in docs/algorithms.md."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
from rlhf_core.config.policy import LoopConfig
from rlhf_core.interfaces import ModelSpec, Sampler, Trainer, logprob_rows
from rlhf_core.rewards.model import Contract, score_with_reward_model
from rlhf_core.types import Completion, Generation, Message, PolicyRef, Prompt, SamplingRequest, TokenSample
from stages.ppo import PPOConfig
from stages.reward_model import RewardModelConfig
from tests.support.policies import SHAPE
from tests.support.tolerances import near, of_model
from tests.support.training import preferences, prompts, untimed
from tests.support.workshop import workshop

FAST = OptimizerConfig(learning_rate=3e-3, schedule="constant")
SYNCS = 4


@contextmanager
def engines(folder: Path, tmp_path: Path) -> Iterator[tuple[Trainer, Sampler]]:
    shop = workshop(tmp_path)
    spec = ModelSpec(path=str(folder), head="lm", lora=None, seed=1)
    with shop.runtime.trainer("policy", spec, FAST) as trainer, shop.runtime.sampler(folder) as sampler:
        yield trainer, sampler


def mismatch(trainer: Trainer, sampler: Sampler) -> list[float]:
    """Return log pi_old - log mu of every token that the sampler draws from fixed seeds."""
    requests = [SamplingRequest((5, 6, 7, 8), seed=seed) for seed in range(8)]
    completions = sampler.generate(requests, SamplingConfig(max_tokens=8))
    samples = [
        TokenSample(r.prompt_ids + c.token_ids, (0,) * len(r.prompt_ids) + (1,) * len(c.token_ids))
        for r, c in zip(requests, completions, strict=True)
    ]
    rows = logprob_rows(trainer, samples)
    return [
        ours - theirs
        for row, completion in zip(rows, completions, strict=True)
        for ours, theirs in zip(row[4:], completion.logprobs, strict=True)
    ]


def test_at_learning_rate_0_nothing_drifts_however_often_the_weights_are_synced(tmp_path, policy):
    from rlhf_core.training.objectives.base import SftObjective

    with engines(policy, tmp_path) as (trainer, sampler):
        rows = [TokenSample((5, 6, 7, 8, 9), (0, 1, 1, 1, 1))]
        seen = []
        for version in range(SYNCS):
            sampler.load_weights(trainer.weights(), version=version)
            seen.append(mismatch(trainer, sampler))
            trainer.forward_backward(rows, SftObjective(pack_to=None))
            trainer.optim_step(learning_rate=0.0)
    assert max(abs(value) for value in seen[0]) < of_model(SHAPE) * math.log(SHAPE.vocab_size)
    assert all(values == seen[0] for values in seen)


def test_every_tensor_of_the_policy_arrives_in_the_sampler(tmp_path, policy):
    from rlhf_core.training.objectives.base import SftObjective

    with engines(policy, tmp_path) as (trainer, sampler):
        trainer.forward_backward([TokenSample((5, 6, 7, 8, 9), (0, 1, 1, 1, 1))], SftObjective(pack_to=None))
        trainer.optim_step(learning_rate=1e-2)
        weights = trainer.weights()
        sampler.load_weights(weights, version=1)
        made: Any = sampler
        served = made._model.state_dict()
    assert weights.payload.keys() <= served.keys()
    assert all(torch.equal(served[name], tensor) for name, tensor in weights.payload.items())


def test_twin_runs_have_identical_curves(tmp_path, policy):
    settings = PPOConfig.model_validate(
        {
            "steps": 3,
            "prompts_per_step": 4,
            "sampling": {"max_tokens": 6},
            "rewards": {
                "terms": {"short": {"type": "function", "function": "tests.support.token_rewards:small_is_good"}}
            },
            "optimizer": FAST,
            "value": {"optimizer": FAST},
        }
    )
    curves = []
    for name in ("one", "other"):
        shop = workshop(tmp_path / name)
        base = shop.store.external(PolicyRef, policy)
        data = prompts(shop.store, tmp_path / name)
        inputs = {"policy": base, "reference": base, "prompts": data, "reward_models": {}}
        shop.run("ppo", settings, inputs)
        curves.append(untimed(shop.tracker.points))
    assert len(curves[0]) == 3
    assert curves[0] == curves[1]


def test_a_reward_model_scores_alike_in_training_in_transformers_and_as_a_reward(tmp_path, policy):
    from transformers import AutoModelForSequenceClassification

    from rlhf_core.data.chat import ChatTemplate

    shop = workshop(tmp_path)
    inputs = {"policy": shop.store.external(PolicyRef, policy), "preferences": preferences(shop.store, tmp_path)}
    config = RewardModelConfig(max_length=48, loop=LoopConfig(batch_size=4, epochs=1), optimizer=FAST)
    ref, _ = shop.run("reward_model", config, inputs)
    folder = shop.store.path(ref)
    contract, chat = Contract.read(folder), ChatTemplate.load(folder)
    prompt = Prompt("q", (Message("user", "What is 3?"),), "", "test")
    ids = chat.prompt_ids(prompt.messages)
    # Ended, cut off without an end token, one token alone, and longer than the model reads: padded to four lengths.
    answers = [(20, 21, 22, chat.eos_id), (20, 21, 22), (23,), tuple(range(20, 80))]
    generations = [
        Generation(prompt, ids, Completion(answer, (0.0,) * len(answer), "", "stop", 0, 0)) for answer in answers
    ]
    spec = ModelSpec(path=str(folder), head="score", lora=None, seed=1)
    with shop.runtime.trainer("reward_model", spec, None) as trainer:
        rewards = score_with_reward_model(trainer, chat, generations, max_length=contract.max_length)
        probes = trainer.scores(contract.probe)
    assert tuple(probes) == near(contract.probe_scores, of_model(SHAPE))
    assert len({round(reward, 4) for reward in rewards}) == len(rewards)

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for answer, reward in zip(answers, rewards, strict=True):
        with torch.no_grad():
            alone = model(torch.tensor([(ids + answer)[: contract.max_length]])).logits.item()
        assert alone == near(reward, of_model(SHAPE))
