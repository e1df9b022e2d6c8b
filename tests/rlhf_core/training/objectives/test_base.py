"""Losses of whole models against loops of plain Python."""

import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.algorithms.policy.clip import ClipLoss, GSPOLoss
from rlhf_core.algorithms.policy.weighted import CISPOLoss
from rlhf_core.algorithms.preference.dpo import (
    DPOLoss,
    ORPOLoss,
    SimPOLoss,
)
from rlhf_core.algorithms.token_math import CorrectionConfig, LossOutput
from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.errors import DataError
from rlhf_core.interfaces import ModelSpec, Objective
from rlhf_core.models.batches import collate
from rlhf_core.models.forward import sequence_scores, step_scores
from rlhf_core.models.loading import load_model
from rlhf_core.sequences import Sequences
from rlhf_core.training.batching import reduce
from rlhf_core.training.objectives.base import (
    BradleyTerryObjective,
    PlacedModel,
    PolicyObjective,
    SftObjective,
    StepObjective,
    ValueObjective,
)
from rlhf_core.training.objectives.preference import PairObjective
from rlhf_core.training.trainer import LocalTrainer
from rlhf_core.types import StepSample, TokenSample
from tests.rlhf_core.training.conftest import TINY
from tests.support.samples import PolicySample
from tests.support.tolerances import near, of_model

CPU = torch.device("cpu")
POLICY = PolicyObjective(
    loss=ClipLoss(dual_clip=3.0),
    max_length=24,
    temperature=0.7,
    kl_coef=0.1,
    entropy_coef=0.01,
    correction=CorrectionConfig(),
)
DPO = PairObjective(loss=DPOLoss(beta=0.1), nll_coef=0.3, length_alpha=1.0)
SIMPO = SimPOLoss(beta=2.0, gamma=0.5)


def model_of(spec: ModelSpec) -> nn.Module:
    return load_model(spec, dtype="float32", attention="sdpa", gradient_checkpointing=False, device="cpu")


def computed(objective: Objective, model: nn.Module, samples: Sequence[Any], pad_id: int = 0) -> LossOutput:
    return objective.compute(PlacedModel(model, pad_id, CPU), samples, objective.denominators(samples))


def own_logprobs(model: Any, sample: TokenSample | PolicySample, temperature: float) -> Tensor:
    """log p of the masked tokens by the model's own forward pass, one sample at a time."""
    ids = torch.tensor([sample.token_ids])
    logits = model(input_ids=ids).logits[0, :-1] / temperature
    logprobs = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]
    return logprobs[torch.tensor(sample.loss_mask[1:]) == 1]


def gradients(objective: Objective, model: nn.Module, batches: list[list[Any]], pad_id: int = 0) -> Tensor:
    samples = [sample for batch in batches for sample in batch]
    denominators = objective.denominators(samples)
    model.zero_grad()
    for batch in batches:
        objective.compute(PlacedModel(model, pad_id, CPU), batch, denominators).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max())


def test_the_sft_loss_is_the_mean_of_the_models_own_token_losses(policy_spec, token_samples):
    model = model_of(policy_spec)
    own = torch.cat([own_logprobs(model, sample, 1.0) for sample in token_samples])
    # LENGTHS sum to 120, and two tokens of each of the ten are not trained on
    assert SftObjective(pack_to=None).denominators(token_samples) == {"tokens": 100.0}
    output = computed(SftObjective(pack_to=None), model, token_samples)
    assert output.loss.item() == pytest.approx(-own.mean().item(), rel=1e-5)
    assert float(output.metrics["loss"]) == float(output.metrics["nll"]) == output.loss.item()


def test_a_step_without_a_token_to_train_on_is_refused():
    with pytest.raises(DataError, match="an optimizer step needs at least one token to train on"):
        SftObjective(pack_to=None).denominators([TokenSample((1, 2), (0, 0))])


def test_the_reward_loss_is_that_of_the_classifiers_own_scores(score_spec, reward_pairs):
    model: Any = model_of(score_spec)

    def score(ids: tuple[int, ...]) -> float:
        return model(input_ids=torch.tensor([ids])).logits.item()

    terms = []
    for pair in reward_pairs:
        chosen, rejected = score(pair.chosen_ids), score(pair.rejected_ids)
        terms.append(math.log1p(math.exp(-(chosen - rejected - 0.1))) + 0.01 * (chosen + rejected) ** 2)
    output = computed(BradleyTerryObjective(centering_coef=0.01), model, reward_pairs)
    assert output.loss.item() == pytest.approx(sum(terms) / 10, rel=1e-5)


def test_the_dpo_loss_adds_the_token_mean_of_the_chosen_answers(policy_spec, preference_samples):
    model = model_of(policy_spec)
    terms, chosen_total = [], 0.0
    for sample in preference_samples:
        chosen = own_logprobs(model, sample.chosen, 1.0).sum().item()
        rejected = own_logprobs(model, sample.rejected, 1.0).sum().item()
        h = (chosen - sample.ref_chosen_logprob) - (rejected - sample.ref_rejected_logprob)
        terms.append(math.log1p(math.exp(-0.1 * h)))
        chosen_total += chosen
    # every sample is chosen once: 100 tokens
    assert DPO.denominators(preference_samples) == {"pairs": 10.0, "tokens": 100.0}
    output = computed(DPO, model, preference_samples)
    assert output.loss.item() == pytest.approx(sum(terms) / 10 - 0.3 * chosen_total / 100, rel=1e-5)
    assert float(output.metrics["loss"]) == output.loss.item()
    assert "nll" not in computed(replace(DPO, nll_coef=0.0), model, preference_samples).metrics


def test_the_policy_loss_is_that_of_a_loop_over_the_tokens(policy_spec, policy_samples):
    model = model_of(policy_spec)
    policy_loss = kl = 0.0
    for sample in policy_samples:
        logprobs = own_logprobs(model, sample, 0.7).tolist()
        actions = [t for t, masked in enumerate(sample.loss_mask) if masked]
        for t, logprob in zip(actions, logprobs, strict=True):
            rho = math.exp(logprob - sample.old_logprobs[t])
            weight = min(math.exp(sample.old_logprobs[t] - sample.rollout_logprobs[t]), 2.0)
            advantage = sample.advantages[t]
            term = min(rho * advantage, min(max(rho, 0.8), 1.2) * advantage)
            policy_loss -= weight * (max(term, 3.0 * advantage) if advantage < 0 else term)
            kl += min(weight * rho, 2.0) * (logprob - sample.ref_logprobs[t]) ** 2 / 2
    output = computed(POLICY, model, policy_samples)
    metrics = {name: float(value) for name, value in output.metrics.items()}
    assert metrics["policy_loss"] == pytest.approx(policy_loss / 100, rel=1e-4)
    assert metrics["kl_loss"] == pytest.approx(kl / 100, rel=1e-4)
    expected = metrics["policy_loss"] + 0.1 * metrics["kl_loss"] - 0.01 * metrics["entropy"]
    assert metrics["loss"] == pytest.approx(expected, rel=1e-6)
    # the model is nearly uniform over 320 tokens: log 320 = 5.77
    assert 5.0 < metrics["entropy"] <= math.log(320)
    assert 0.0 < metrics["correction_fraction"] < 1.0


def test_entropy_and_kl_to_the_reference_are_measured_where_they_are_not_in_the_loss(policy_spec, policy_samples):
    model = model_of(policy_spec)
    output = computed(
        replace(POLICY, kl_coef=0.0, entropy_coef=0.0, correction=CorrectionConfig(level="off")), model, policy_samples
    )
    assert float(output.metrics["loss"]) == float(output.metrics["policy_loss"])
    assert {"entropy", "ref_kl", "correction_fraction"} <= output.metrics.keys()
    assert float(output.metrics["correction_fraction"]) == 0.0


def test_samples_without_a_reference_have_the_same_loss_and_no_distance_to_it(policy_spec, policy_samples):
    free = replace(POLICY, kl_coef=0.0)
    bare = Sequences.of(policy_samples).select_fields("rollout_logprobs", "old_logprobs", "advantages")
    model = model_of(policy_spec)
    with_reference, without = computed(free, model, policy_samples), computed(free, model, bare)
    assert torch.equal(with_reference.loss, without.loss)
    assert set(with_reference.metrics) - set(without.metrics) == {"ref_kl"}
    with pytest.raises(DataError, match=r"kl_coef = 0\.1: the samples have no log-probs of the reference"):
        computed(POLICY, model, bare)


def test_the_value_loss_is_half_the_squared_error_of_the_models_own_values(value_spec, value_samples):
    model: Any = model_of(value_spec)
    total = 0.0
    for sample in value_samples:
        after = model(input_ids=torch.tensor([sample.token_ids]))[0].tolist()
        for t, masked in enumerate(sample.loss_mask):
            if masked:
                old = sample.old_values[t]
                clipped = old + min(max(after[t - 1] - old, -0.2), 0.2)
                total += 0.5 * max((after[t - 1] - sample.returns[t]) ** 2, (clipped - sample.returns[t]) ** 2)
    output = computed(ValueObjective(clip=0.2), model, value_samples)
    assert output.loss.item() == pytest.approx(total / 100, rel=1e-4)


@pytest.mark.parametrize(
    "kind", ["sft", "reward", "dpo", "ld-dpo", "simpo", "orpo", "policy", "gspo", "cispo", "value"]
)
def test_the_gradient_depends_neither_on_micro_batches_nor_on_padding(kind, request):
    objective, fixture, spec = {
        "sft": (SftObjective(pack_to=None), "token_samples", "policy_spec"),
        "reward": (BradleyTerryObjective(centering_coef=0.01), "reward_pairs", "score_spec"),
        "dpo": (DPO, "preference_samples", "policy_spec"),
        "simpo": (PairObjective(loss=SIMPO, nll_coef=0.1, length_alpha=1.0), "preference_samples", "policy_spec"),
        "orpo": (PairObjective(loss=ORPOLoss(), nll_coef=0.0, length_alpha=1.0), "preference_samples", "policy_spec"),
        "ld-dpo": (replace(DPO, length_alpha=0.3), "preference_samples", "policy_spec"),
        "gspo": (replace(POLICY, loss=GSPOLoss()), "policy_samples", "policy_spec"),
        "cispo": (replace(POLICY, loss=CISPOLoss()), "policy_samples", "policy_spec"),
        "policy": (POLICY, "policy_samples", "policy_spec"),
        "value": (ValueObjective(clip=0.2), "value_samples", "value_spec"),
    }[kind]
    model = model_of(request.getfixturevalue(spec))
    samples = request.getfixturevalue(fixture)
    whole = gradients(objective, model, [samples])
    # Sizes 1, 4, 2, 3 in another order: rows are padded to other widths, with another token.
    order = [samples[i] for i in (5, 0, 9, 3, 7, 1, 2, 8, 4, 6)]
    parts = [order[:1], order[1:5], order[5:7], order[7:]]
    assert difference(whole, gradients(objective, model, parts, pad_id=9)) < of_model(TINY)


def test_an_objective_travels_to_a_worker_unchanged():
    assert pickle.loads(pickle.dumps(POLICY)) == POLICY


SAMPLES = [
    StepSample((5, 9, 30, 41, 7), (0, 0, 1, 0, 1), (0.0, 0.0, 1.0, 0.0, 0.0)),
    StepSample((6, 9, 30), (0, 0, 1), (0.0, 0.0, 0.3)),
    StepSample((8, 9, 60, 44, 7, 12, 90), (0, 1, 1, 0, 0, 0, 1), (0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)),
]


def unlabelled(sample: StepSample) -> TokenSample:
    return TokenSample(sample.token_ids, sample.loss_mask)


def prefixes(sample: StepSample) -> list[tuple[int, ...]]:
    return [sample.token_ids[: place + 1] for place, mask in enumerate(sample.loss_mask) if mask]


def trainer_of(spec: ModelSpec, *, rows: int = 2) -> LocalTrainer:
    return LocalTrainer(spec, OptimizerConfig(), TrainerConfig(engine="torch", micro_batch=rows))


def test_a_step_is_scored_as_the_sequence_that_ends_there(score_spec):
    trainer = trainer_of(score_spec)
    found = trainer.step_scores([unlabelled(sample) for sample in SAMPLES])
    for sample, scores in zip(SAMPLES, found, strict=True):
        assert scores == near(tuple(trainer.scores(prefixes(sample))), of_model(TINY))
    assert [len(scores) for scores in found] == [2, 1, 3]


def test_padding_and_packing_change_no_step_score(score_spec):
    model = load_model(score_spec, dtype="float32", attention="sdpa", gradient_checkpointing=False, device="cpu")
    batches = [collate(SAMPLES, pad_id=0), collate(SAMPLES, pad_id=0, pack_to=16)]
    assert batches[1].packed
    with torch.no_grad():
        padded, packed = (step_scores(model, batch)[batch.loss_mask_BL != 0] for batch in batches)
        alone = [
            sequence_scores(model, collate([TokenSample(ids, (0,) * len(ids))], pad_id=0))
            for ids in prefixes(SAMPLES[2])
        ]
    torch.testing.assert_close(padded, packed, atol=of_model(TINY), rtol=0)
    torch.testing.assert_close(padded[-3:], torch.cat(alone), atol=of_model(TINY), rtol=0)


def test_the_loss_is_the_mean_cross_entropy_over_the_steps_of_all_micro_batches(score_spec):
    trainer = trainer_of(score_spec)
    metrics = trainer.loss(SAMPLES, StepObjective())
    logits = [score for scores in trainer.step_scores([unlabelled(sample) for sample in SAMPLES]) for score in scores]
    labels = [1.0, 0.0, 0.3, 1.0, 1.0, 0.0]
    p = [1 / (1 + math.exp(-logit)) for logit in logits]
    terms = [-y * math.log(x) - (1 - y) * math.log(1 - x) for x, y in zip(p, labels, strict=True)]
    assert metrics["loss"] == pytest.approx(sum(terms) / 6, abs=1e-6)
    assert metrics["positive_fraction"] == pytest.approx(3 / 6)


def test_micro_batches_and_ranks_do_not_change_the_gradient(score_spec):
    objective, whole = StepObjective(), trainer_of(score_spec, rows=8)
    expected = whole.forward_backward(SAMPLES, objective) | whole.optim_step(learning_rate=0.0)
    pieces = trainer_of(score_spec, rows=1)
    counts = objective.denominators(SAMPLES)
    assert counts == {"steps": 6.0}
    parts = [pieces.forward_backward(SAMPLES[rank::2], objective, counts) for rank in range(2)]
    found = reduce(parts) | pieces.optim_step(learning_rate=0.0)
    assert found == pytest.approx(expected, rel=1e-5)
