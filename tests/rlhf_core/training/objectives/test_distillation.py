"""The teacher's distributions are the model's own, and the student's loss does not depend on how a step is cut."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlhf_core.interfaces import ModelSpec
from rlhf_core.models import forward
from rlhf_core.models.batches import collate
from rlhf_core.models.loading import load_model
from rlhf_core.training.objectives.base import PlacedModel
from rlhf_core.training.objectives.distillation import DistillationObjective, top_logprobs
from rlhf_core.types import DistillationSample, TokenSample, TopLogprobs
from tests.rlhf_core.training.conftest import TINY
from tests.support.tolerances import near, of_model

CPU = torch.device("cpu")
FORWARD = DistillationObjective(kind="forward", jsd_beta=0.5, temperature=0.7, kl_weight=0.6)


@pytest.fixture
def model(policy_spec: ModelSpec) -> nn.Module:
    return load_model(policy_spec, dtype="float32", attention="sdpa", gradient_checkpointing=False, device="cpu")


def own_logits(model: Any, sample: TokenSample | DistillationSample) -> Tensor:
    """The logits [T, V] that predict the masked tokens, one sample at a time."""
    logits = model(input_ids=torch.tensor([sample.token_ids])).logits[0, :-1]
    return logits[torch.tensor(sample.loss_mask[1:]) == 1]


def taught(model: nn.Module, samples: list[TokenSample], k: int) -> list[DistillationSample]:
    """What the model itself says of the samples reversed: a teacher that differs from the student."""
    reversed_ids = [replace(sample, token_ids=sample.token_ids[::-1]) for sample in samples]
    with torch.no_grad():
        tops = top_logprobs(model, collate(reversed_ids, pad_id=0), k=k, temperature=FORWARD.temperature)
    return [DistillationSample(one.token_ids, one.loss_mask, (top,)) for one, top in zip(samples, tops, strict=True)]


def gradients(model: nn.Module, batches: list[list[DistillationSample]]) -> Tensor:
    counts = FORWARD.denominators([sample for batch in batches for sample in batch])
    model.zero_grad()
    for batch in batches:
        FORWARD.compute(PlacedModel(model, 0, CPU), batch, counts).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("k", [0, 5])
def test_the_teachers_rows_are_its_likeliest_tokens_in_the_order_of_the_samples(model, token_samples, k):
    with torch.no_grad():
        tops = top_logprobs(model, collate(token_samples, pad_id=0), k=k, temperature=0.7)
        for sample, top in zip(token_samples, tops, strict=True):
            expected = torch.log_softmax(own_logits(model, sample) / 0.7, -1)
            if k:
                expected = expected.gather(-1, torch.from_numpy(top.ids).long())
                assert expected[:, 0].tolist() == pytest.approx(expected.max(-1).values.tolist(), abs=1e-6)
            assert top.logprobs.shape == (sum(sample.loss_mask), k or 320)
            assert top.ids.shape == (sum(sample.loss_mask), k)
            np.testing.assert_allclose(top.logprobs, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("k", [0, 5])
@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_the_loss_is_that_of_the_two_models_own_distributions(model, token_samples, kind, k):
    samples = taught(model, token_samples, k)
    divergence = nll = agreement = 0.0
    for sample in samples:
        student = own_logits(model, sample).detach()
        targets = torch.tensor(sample.token_ids)[torch.tensor(sample.loss_mask) == 1]
        nll -= torch.log_softmax(student, -1).gather(-1, targets[:, None]).sum().item()
        q = torch.log_softmax(student.double() / 0.7, -1)
        p = torch.from_numpy(sample.teachers[0].logprobs).double()
        likeliest = p.argmax(-1)
        if k:  # the others as one more token
            ids = torch.from_numpy(sample.teachers[0].ids).long()
            likeliest = ids[:, 0]
            rest = (q.exp().sum(-1) - q.exp().gather(-1, ids).sum(-1)).log()
            q_top = torch.cat([q.gather(-1, ids), rest[:, None]], -1)
            p = torch.cat([p, (1 - p.exp().sum(-1, keepdim=True)).log()], -1)
        else:
            q_top = q
        one, other = (p, q_top) if kind == "forward" else (q_top, p)
        divergence += (one.exp() * (one - other)).sum().item()
        agreement += (q.argmax(-1) == likeliest).sum().item()
    # LENGTHS sum to 120, and two tokens of each of the ten are not trained on
    objective = replace(FORWARD, kind=kind)
    output = objective.compute(PlacedModel(model, 0, CPU), samples, objective.denominators(samples))
    assert output.metrics["divergence"].item() == pytest.approx(divergence / 100, rel=1e-5)
    assert output.metrics["nll"].item() == pytest.approx(nll / 100, rel=1e-5)
    assert output.metrics["agreement"].item() == pytest.approx(agreement / 100)
    assert output.loss.item() == pytest.approx((0.4 * nll + 0.6 * divergence) / 100, rel=1e-5)


@pytest.mark.parametrize("k", [0, 5])
def test_the_gradient_depends_neither_on_micro_batches_nor_on_chunks(model, token_samples, k, monkeypatch):
    samples = taught(model, token_samples, k)
    whole = gradients(model, [samples])
    monkeypatch.setattr(forward, "CHUNK_ELEMENTS", 320 * 7)  # seven positions at once
    for other in (gradients(model, [samples]), gradients(model, [[sample] for sample in samples])):
        assert (whole - other).abs().max() / whole.abs().max() < of_model(TINY)


def test_what_the_student_never_trained_on_has_no_weight(model, token_samples):
    """Padding, prompts and the weight of what is left out: only the masked positions count."""
    samples = taught(model, token_samples, 5)
    alone = [FORWARD.compute(PlacedModel(model, 0, CPU), [one], {"tokens": 100.0}).loss.item() for one in samples]
    together = FORWARD.compute(PlacedModel(model, 7, CPU), samples, {"tokens": 100.0}).loss.item()
    assert together == near(sum(alone), of_model(TINY))


def test_a_teacher_with_too_few_rows_is_refused():
    top = TopLogprobs(np.zeros((1, 3), np.float32), np.zeros((1, 3), np.int32), np.zeros(1, np.float32))
    with pytest.raises(ValueError, match="one row per masked token"):
        DistillationSample((1, 2, 3), (0, 1, 1), (top,))
