"""Invariants of the whole loop with its real engines: two DeepSpeed ranks under ZeRO 2 and vLLM, in Ray's workers.

test_invariants.py has them for the plain engine and transformers. One runtime for most tests of this file.
"""

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
from rlhf_core.config.models import InitModel, LoraConfig
from rlhf_core.errors import SamplingError
from rlhf_core.interfaces import ModelSpec, Sampler, Trainer, Weights, logprob_rows
from rlhf_core.models.initialize import initialize_llama, train_tokenizer
from rlhf_core.models.lora import weights_digest
from rlhf_core.runtime.ray_runtime import RayRuntime
from rlhf_core.runtime.weight_sync import StoredWeights
from rlhf_core.runtime.weights import pack_weights, unpack_weights
from rlhf_core.training.objectives.base import SftObjective
from rlhf_core.types import PolicyRef, SamplingRequest, TokenSample
from stages.ppo import PPOConfig
from tests.support.policies import TWO_RANKS, make_mixture_of_experts
from tests.support.sharing import SharedRay
from tests.support.training import prompts, series, shop_and_inputs, stopped_and_resumed, untimed
from tests.support.workshop import workshop

pytestmark = [pytest.mark.engine, pytest.mark.slow]
pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

FAST = OptimizerConfig(learning_rate=3e-3, schedule="constant")
# Heads of 64: narrower ones vLLM's CPU kernels do not have.
SHAPE = InitModel(
    vocab_size=320, hidden_size=128, layers=1, heads=2, kv_heads=2, intermediate_size=192, max_positions=96
)
LORA = LoraConfig(rank=8, alpha=16.0, target_modules="all-linear")
ALONE = {"lora_sync": "adapter", "max_lora_rank": 8}
REQUESTS = [SamplingRequest((5, 6, 7, 8 + index), seed=index) for index in range(8)]
ROWS = [TokenSample((5, 6, 7, 8, 9), (0, 1, 1, 1, 1)), TokenSample((9, 8, 7, 6), (0, 1, 1, 1))]
SFT = SftObjective(pack_to=None)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    train_tokenizer(["What is 12 + 30? It is 42."] * 5, vocab_size=320, folder=folder)
    initialize_llama(SHAPE, folder, seed=7)
    return folder


@pytest.fixture(scope="module")
def runtime(shared_ray: SharedRay) -> RayRuntime:
    runtime = shared_ray.runtime(TWO_RANKS)
    runtime.prewarm(trainer=True, sampler=True)
    return runtime


def sampled(sampler: Sampler) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Return what the sampler draws from fixed seeds, with its log-probs."""
    completions = sampler.generate(REQUESTS, SamplingConfig(max_tokens=8))
    return [(completion.token_ids, completion.logprobs) for completion in completions]


def received(weights: Weights) -> dict[str, torch.Tensor]:
    """Return the tensors that a train worker put into Ray's object store."""
    import ray

    return {
        name: tensor
        for bucket in ray.get(list(weights.payload.refs))
        for name, tensor in unpack_weights(bucket).items()
    }


def sent(tensors: dict[str, torch.Tensor]) -> Weights:
    """Return `tensors` as a train worker hands them out."""
    import ray

    return Weights(payload=StoredWeights((ray.put(pack_weights(tensors)),)), digest=weights_digest(tensors))


def mismatch(trainer: Trainer, sampler: Sampler) -> list[float]:
    """Return log pi_old - log mu of every token that the sampler draws from fixed seeds."""
    drawn = sampled(sampler)
    samples = [
        TokenSample(request.prompt_ids + tokens, (0,) * len(request.prompt_ids) + (1,) * len(tokens))
        for request, (tokens, _) in zip(REQUESTS, drawn, strict=True)
    ]
    rows = logprob_rows(trainer, samples)
    return [
        ours - theirs
        for row, (_, logprobs) in zip(rows, drawn, strict=True)
        for ours, theirs in zip(row[4:], logprobs, strict=True)
    ]


@pytest.mark.smoke
def test_at_learning_rate_0_nothing_drifts_however_often_the_weights_are_synced(runtime, policy):
    """Weights exactly; what vLLM and the trainer say of them to the rounding of float32, whatever batches vLLM forms."""
    spec = ModelSpec(str(policy), "lm", None, 1)
    with runtime.trainer("policy", spec, FAST) as trainer, runtime.sampler(policy) as sampler:
        seen, digests = [], []
        for version in range(3):
            weights = trainer.weights()
            digests.append(weights.digest)
            sampler.load_weights(weights, version=version)
            seen.append(mismatch(trainer, sampler))
            trainer.forward_backward(ROWS, SFT)
            trainer.optim_step(learning_rate=0.0)
    assert runtime.engines().keys() == {"deepspeed", "ray", "torch", "transformers", "vllm"}
    assert len(set(digests)) == 1
    # A log-prob of about -6 from two programs: some tens of roundings of 3e-7 each.
    assert max(abs(value) for values in seen for value in values) < 1e-4
    for values in seen:
        assert values == pytest.approx(seen[0], abs=1e-5)


def test_every_tensor_of_the_policy_arrives_in_the_sampler(runtime, policy):
    """vLLM fuses and renames tensors, so what arrives is told by what it computes: each tensor alone changes that."""
    spec = ModelSpec(str(policy), "lm", None, 1)
    with runtime.trainer("policy", spec, FAST) as trainer, runtime.sampler(policy) as sampler:
        trainer.forward_backward(ROWS, SFT)
        trainer.optim_step(learning_rate=1e-2)
        weights = trainer.weights()
        sampler.load_weights(weights, version=1)
        trained = sampled(sampler)
        assert max(abs(value) for value in mismatch(trainer, sampler)) < 1e-4
        tensors, silent = received(weights), []
        for version, name in enumerate(tensors, start=2):
            generator = torch.Generator().manual_seed(version)
            noise = torch.randn(tensors[name].shape, generator=generator)
            sampler.load_weights(sent(tensors | {name: tensors[name] + 0.1 * noise}), version=version)
            if largest_change(sampled(sampler), trained) < 1e-3:
                silent.append(name)
        sampler.load_weights(weights, version=100)
        assert largest_change(sampled(sampler), trained) < 1e-5
    assert silent == []
    # The embeddings, which are the head too, two norms and seven matrices of the layer, and the last norm.
    assert len(tensors) == 11


def largest_change(
    one: list[tuple[tuple[int, ...], tuple[float, ...]]], other: list[tuple[tuple[int, ...], tuple[float, ...]]]
) -> float:
    """Return the largest difference of the log-probs of two draws, up to where their tokens part; the first is always there."""
    changes = []
    for (tokens, logprobs), (others, theirs) in zip(one, other, strict=True):
        for token, another, mine, its in zip(tokens, others, logprobs, theirs, strict=False):
            if token != another:
                changes.append(1.0)
                break
            changes.append(abs(mine - its))
    return max(changes)


def test_twin_runs_have_identical_curves(runtime, tmp_path, policy):
    settings = PPOConfig.model_validate(
        {
            "steps": 2,
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
        shop = workshop(tmp_path / name, runtime=runtime)
        base = shop.store.external(PolicyRef, policy)
        data = prompts(shop.store, tmp_path / name)
        shop.run("ppo", settings, {"policy": base, "reference": base, "prompts": data, "reward_models": {}})
        curves.append(untimed(shop.tracker.points))
    assert len(curves[0]) == 2
    assert curves[0] == curves[1]


HOST, EXPERTS = "an engine of two, ZeRO 3 with states on the host", "a mixture of experts"
REPLAY = "a mixture of experts whose routing is replayed"


@pytest.fixture
def runtime_of(variant: str, request: pytest.FixtureRequest, shared_ray: SharedRay) -> Iterator[RayRuntime]:
    if variant == EXPERTS:  # of another shape: a new engine in the same workers
        yield request.getfixturevalue("runtime")
        return
    trainer = TWO_RANKS.trainer.model_copy(update={"zero_stage": 3, "offload_optimizer": True})
    options = {"tensor_parallel": 2} | (ALONE if variant == "adapters alone" else {})
    if variant == REPLAY:
        trainer, options = TWO_RANKS.trainer, {"routed_experts": True}
    sampler = TWO_RANKS.sampler.model_copy(update=options)
    with closing(RayRuntime(TWO_RANKS.model_copy(update={"trainer": trainer, "sampler": sampler}))) as runtime:
        yield runtime


@pytest.mark.parametrize("variant", [EXPERTS, REPLAY, HOST, pytest.param("adapters alone", marks=pytest.mark.full)])
def test_after_an_update_the_sampler_says_what_the_trainer_says(tmp_path, policy, variant, runtime_of):
    folder = tmp_path / "policy"
    shutil.copytree(policy, folder)
    if variant in (EXPERTS, REPLAY):
        make_mixture_of_experts(folder)
    shop, inputs = shop_and_inputs(tmp_path, folder)
    shop.runtime = runtime_of
    terms = {"short": {"type": "function", "function": "tests.support.token_rewards:small_is_good"}}
    settings = {"steps": 3, "prompts_per_step": 4, "samples_per_prompt": 2, "sampling": {"max_tokens": 6}}
    settings |= {"advantage": {"type": "grpo"}, "optimizer": FAST, "rewards": {"terms": terms}, "kl": {"coef": 0.0}}
    settings |= {"lora": LORA} if variant == "adapters alone" else {}
    settings |= {"router_replay": True} if variant == REPLAY else {}  # experts of other tokens would be seen below
    shop.run("ppo", PPOConfig.model_validate(settings), inputs)
    moved = [values["ppo/policy/grad_norm"] for _, values in shop.tracker.points if "ppo/policy/grad_norm" in values]
    assert len(moved) == 3 and min(moved) > 0
    # As above: some tens of roundings. A step of 3e-3 moves log-probs by hundredths.
    assert max(series(shop, "mismatch/log_q_max")) < 1e-4


@pytest.fixture(scope="module")
def alone(shared_ray: SharedRay) -> Iterator[RayRuntime]:
    """Two engines that are sent the adapters of a policy without its other weights."""
    sampler = TWO_RANKS.sampler.model_copy(update=ALONE | {"engines": 2})
    with closing(RayRuntime(TWO_RANKS.model_copy(update={"sampler": sampler}))) as runtime:
        yield runtime


def test_a_resumed_run_with_adapters_alone_repeats_the_whole_one(alone, tmp_path, policy):
    terms = {"short": {"type": "function", "function": "tests.support.token_rewards:small_is_good"}}
    settings = {"steps": 3, "prompts_per_step": 4, "samples_per_prompt": 2, "sampling": {"max_tokens": 6}}
    settings |= {"advantage": {"type": "grpo"}, "optimizer": FAST, "rewards": {"terms": terms}}
    settings |= {"kl": {"in": "loss", "coef": 0.1}, "lora": LORA}  # the reference is the policy without its adapters
    config = PPOConfig.model_validate(settings | {"checkpoint_every": 1})
    made = []
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
        shop, inputs = shop_and_inputs(tmp_path / name, policy)
        shop.runtime = alone
        if name == "whole":
            ref, _ = shop.run("ppo", config, inputs)
            assert max(series(shop, "mismatch/log_q_max")) < 1e-4
        else:
            ref, step = stopped_and_resumed(shop, "ppo", config, inputs, at=2)
            assert step == 2
        made.append((ref.digest, untimed(shop.tracker.points)))
    assert made[0] == made[1]


def test_every_adapter_arrives_in_every_sampler_and_changes_nothing_that_was_sent(alone, policy):
    spec = ModelSpec(str(policy), "lm", LORA, 1)
    with alone.trainer("policy", spec, FAST) as trainer, alone.sampler(policy) as sampler:
        base = sampled(sampler)
        sampler.load_weights(trainer.weights(), version=0)
        assert largest_change(sampled(sampler), base) < 1e-5  # B is 0
        for version in (1, 2):
            trainer.forward_backward(ROWS, SFT)
            trainer.optim_step(learning_rate=1e-2)
            weights = trainer.weights()
            sampler.load_weights(weights, version=version)
            assert max(abs(value) for value in mismatch(trainer, sampler)) < 1e-4  # as with merged weights
        trained, tensors, silent = sampled(sampler), received(weights), []
        assert {name.split(".")[-2] for name in tensors} == {"lora_A", "lora_B"}
        for version, name in enumerate(tensors, start=3):
            changed = tensors | {name: tensors[name] + 0.3}
            sampler.load_weights(replace(sent(changed), adapters=weights.adapters), version=version)
            if largest_change(sampled(sampler), trained) < 1e-3:
                silent.append(name)
        sampler.load_weights(weights, version=100)
        assert sampled(sampler) == trained
        assert {one.policy_version for one in sampler.generate(REQUESTS, SamplingConfig(max_tokens=2))} == {100}
        assert silent == []
        assert len(tensors) == 14  # A and B of the seven matrices of the layer
        # Last: an error of one of several engines ends them all.
        head = {"base_model.model.lm_tail.lora_A.weight": torch.ones(8, 128)}
        with pytest.raises(
            SamplingError, match=r"lora_sync = 'adapter': vLLM has no adapters for 1 modules .*lm_tail; leave"
        ):
            sampler.load_weights(replace(sent(tensors | head), adapters=weights.adapters), version=101)
