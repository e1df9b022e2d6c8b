"""Distillation from several teachers with the student's vocabulary: the weighted sum of the divergences from each.

    L = sum_m w_m D(P_m, Q),    w_m = weight_m / sum of the weights

with P_m the teachers and Q the student. Soft targets of an ensemble are an arithmetic or a geometric mean of its members'
distributions (Hinton et al., arXiv 1503.02531, section 1), and the sum is both, up to a term without Q:

    forward   sum_m w_m KL(P_m || Q) = KL(A || Q) + const,   A = sum_m w_m P_m             the mixture, arithmetic
    reverse   sum_m w_m KL(Q || P_m) = KL(Q || G) + const,   G = prod_m P_m^w_m / Z        what all agree on, geometric

`jsd` is the weighted sum itself. Why the sum and not the divergence from A: the likeliest tokens of a mixture are not known
from the likeliest of each teacher, while each term here is a lower bound with that teacher's own top k; and it is the only
form in which teachers may have other tokenizers (`rlhf_core.algorithms.uld`).
"""

# Shape legend: T selected tokens, V vocabulary, K a teacher's likeliest tokens.

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhf_core.algorithms.distillation import DivergenceKind, distillation_loss, topk_distillation_loss
from rlhf_core.algorithms.lazy_torch import Tensor
from rlhf_core.algorithms.output import LossOutput


def normalized_weights(weights: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Return the weights of teachers by name, divided by their sum, which must be positive.

    >>> normalized_weights({"sft": 1.0, "ppo": 3.0})
    (('sft', 0.25), ('ppo', 0.75))
    """
    total = sum(weights.values())
    return tuple((name, weight / total) for name, weight in weights.items())


def multi_teacher_loss(
    logits_TV: Tensor,
    teachers: Sequence[tuple[Tensor, Tensor]],
    weights: Sequence[tuple[str, float]],
    *,
    kind: DivergenceKind,
    jsd_beta: float,
    temperature: float,
    tokens: float | None = None,
) -> LossOutput:
    """Return the weighted sum of the divergences from the teachers, divided by `tokens`; in nats per token.

    A teacher is (log-probs of its full softmax at `temperature` [T, K], their ids [T, K]), or [T, V] and [T, 0] for the
    whole vocabulary. `weights` are (name, weight) in the order of the teachers. Metrics: `loss`, `agreement` (weighted),
    and with several teachers `divergence/<name>` of each; a weight of 0 only measures.
    """
    losses, metrics = [], dict[str, Tensor]()
    agreements = []
    for (logprobs_TK, ids_TK), (name, weight) in zip(teachers, weights, strict=True):
        if ids_TK.shape[1] == 0:
            # The softmax of log-probs is their distribution, and the loss divides by the temperature again.
            output = distillation_loss(
                logits_TV,
                logprobs_TK * temperature,
                kind=kind,
                jsd_beta=jsd_beta,
                temperature=temperature,
                tokens=tokens,
            )
        else:
            output = topk_distillation_loss(
                logits_TV, logprobs_TK, ids_TK, kind=kind, jsd_beta=jsd_beta, temperature=temperature, tokens=tokens
            )
        agreements.append(weight * output.metrics["agreement"])
        if weight:  # left out instead of multiplied by 0, because 0 times infinity would make the gradient NaN
            losses.append(weight * output.loss)
        if len(weights) > 1:
            metrics[f"divergence/{name}"] = output.metrics["loss"]
    loss = sum(losses[1:], start=losses[0])
    metrics |= {"loss": loss.detach(), "agreement": sum(agreements[1:], start=agreements[0])}
    return LossOutput(loss, metrics)
