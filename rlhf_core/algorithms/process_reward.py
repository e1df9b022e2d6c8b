"""Process reward models: judge every step of an answer at the token that ends it, and one score from the steps'."""

# Shape legend: S steps of a batch, or of one answer.

from __future__ import annotations

from typing import Literal, TypeAlias, assert_never

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.output import LossOutput
from rlhf_core.algorithms.token_math import at_least_fp32
from rlhf_core.errors import DataError, explain

StepReduction: TypeAlias = Literal["min", "mean", "last", "product"]


def step_loss(logits_S: Tensor, labels_S: Tensor, *, steps: float | None = None) -> LossOutput:
    """Return the sum of -y log sigmoid(x) - (1-y) log sigmoid(-x) over `steps`, the steps of the whole optimizer step.

    `logits_S` are the model's outputs at the step-end tokens of all answers, `labels_S` hard (PRM800K, arXiv
    2305.20050) or soft in [0, 1] (the share of rollouts that end right: Math-Shepherd, arXiv 2312.08935).
    `steps` None says that this call is the whole step. Metrics: `loss`, `accuracy` (a logit of 0 is never right),
    `positive_fraction` of the labels, both with the label rounded at 0.5. Raises DataError for a label outside [0, 1].
    """
    logits_S, labels_S = at_least_fp32(logits_S), at_least_fp32(labels_S)
    if bool(((labels_S < 0) | (labels_S > 1) | labels_S.isnan()).any()):
        rule = "a label is the probability that the step is right"
        raise DataError(explain("labels", labels_S.tolist()[:8], rule, "scale them to [0, 1]"))
    count = max(float(len(logits_S)), 1.0) if steps is None else steps
    loss = (
        -(
            labels_S * torch.nn.functional.logsigmoid(logits_S)
            + (1 - labels_S) * torch.nn.functional.logsigmoid(-logits_S)
        ).sum()
        / count
    )
    positive_S = labels_S > 0.5
    right_S = (positive_S & (logits_S > 0)) | (~positive_S & (logits_S < 0))
    metrics = {
        "loss": loss,
        "accuracy": right_S.float().sum() / count,
        "positive_fraction": positive_S.float().sum() / count,
    }
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


def reduce_steps(probs: Tensor, *, how: StepReduction) -> Tensor:
    """Return one score from the step probabilities [S] of an answer (or [..., S], over the last dimension).

    `min` and `product`: arXiv 2305.20050 section 2.6 and arXiv 2312.08935; `last` reads the model as an outcome reward
    model. Raises DataError for an answer without steps.
    """
    if probs.shape[-1] == 0:
        raise DataError(explain("steps", 0, "an answer without steps has no step scores", "check the step separator"))
    match how:
        case "min":
            return probs.amin(dim=-1)
        case "mean":
            return probs.mean(dim=-1)
        case "last":
            return probs[..., -1]
        case "product":
            return probs.prod(dim=-1)
        case _:
            assert_never(how)
