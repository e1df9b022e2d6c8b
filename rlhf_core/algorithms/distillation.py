"""Knowledge distillation: a student matched to a teacher's distribution at every trained token.

Kinds, with P the teacher and Q the student: `forward` KL(P || Q) covers the teacher's modes; `reverse` KL(Q || P) seeks
one; `jsd` is the generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649 eq. 1),
b KL(P || M) + (1-b) KL(Q || M) with M = b P + (1-b) Q. As in TRL, b = 0 means the forward and b = 1 the reverse KL,
to which the divergence is proportional there, and not the 0 that the formula gives.

Only selected positions come in: pick the trained tokens first. No factor temperature^2 is applied: the loss is the
divergence itself. `tokens` counts the positions of the whole optimizer step; None says that this call is the step.
"""

# Shape legend: T selected tokens, V vocabulary, K the teacher's likeliest tokens, C classes (V, or K and the rest).

from __future__ import annotations

import math
from typing import Literal, TypeAlias, assert_never

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.output import LossOutput
from rlhf_core.algorithms.token_math import at_least_fp32
from rlhf_core.errors import ConfigError, explain

DivergenceKind: TypeAlias = Literal["forward", "reverse", "jsd"]
REST_FLOOR = 1e-12
"""Least probability of the teacher's rest bucket: of a rest of 0, or of less by rounding, there is no logarithm."""


def distillation_loss(
    logits_TV: Tensor,
    teacher_logits_TV: Tensor,
    *,
    kind: DivergenceKind,
    jsd_beta: float = 0.5,
    temperature: float = 1.0,
    tokens: float | None = None,
) -> LossOutput:
    """Return the sum of the divergence over the full vocabulary, divided by `tokens`; in nats per token.

    Both distributions are softmax(logits / temperature); the teacher's is detached. Logits must be finite.
    Metrics: `loss`, `agreement` (same likeliest token).
    """
    student_TV = torch.nn.functional.log_softmax(at_least_fp32(logits_TV) / temperature, dim=-1)
    teacher_TV = torch.nn.functional.log_softmax(at_least_fp32(teacher_logits_TV.detach()) / temperature, dim=-1)
    agrees_T = student_TV.argmax(dim=-1) == teacher_TV.argmax(dim=-1)
    return _output(student_TV, teacher_TV, agrees_T, kind=kind, jsd_beta=jsd_beta, tokens=tokens)


def topk_distillation_loss(
    logits_TV: Tensor,
    teacher_logprobs_TK: Tensor,
    teacher_ids_TK: Tensor,
    *,
    kind: DivergenceKind,
    jsd_beta: float = 0.5,
    temperature: float = 1.0,
    tokens: float | None = None,
) -> LossOutput:
    """Return the divergence of distributions over the teacher's K likeliest tokens and one bucket for all the others.

    A lower bound of the full divergence (merging classes never raises it), and equal to it at K = V - 1. The teacher's
    log-probs are those of its full softmax at the same `temperature`, not renormalized over the K; `teacher_ids_TK`
    must not repeat an id within a row. Logits must be finite. Metrics as `distillation_loss`. Raises ConfigError where
    K leaves no rest.
    """
    if teacher_ids_TK.shape[1] >= logits_TV.shape[1]:
        rule = f"the vocabulary has {logits_TV.shape[1]} tokens, and the bucket for the rest needs one of them"
        raise ConfigError(explain("top_k", teacher_ids_TK.shape[1], rule, "lower it, or distill the full vocabulary"))
    scaled_TV = at_least_fp32(logits_TV) / temperature
    log_norm_T1 = scaled_TV.logsumexp(dim=-1, keepdim=True)
    # Summed over the others rather than 1 - the K: the difference would cancel where the K have nearly all.
    rest_T1 = scaled_TV.scatter(1, teacher_ids_TK, -math.inf).logsumexp(dim=-1, keepdim=True) - log_norm_T1
    student_TC = torch.cat([scaled_TV.gather(1, teacher_ids_TK) - log_norm_T1, rest_T1], dim=1)

    teacher_TK = at_least_fp32(teacher_logprobs_TK.detach())
    teacher_rest_T1 = (1 - teacher_TK.exp().sum(dim=1, keepdim=True)).clamp(min=REST_FLOOR).log()
    teacher_TC = torch.cat([teacher_TK, teacher_rest_T1], dim=1)
    likeliest_T = teacher_ids_TK.gather(1, teacher_TK.argmax(dim=1, keepdim=True)).squeeze(1)
    agrees_T = scaled_TV.argmax(dim=-1) == likeliest_T
    return _output(student_TC, teacher_TC, agrees_T, kind=kind, jsd_beta=jsd_beta, tokens=tokens)


def _output(
    student_TC: Tensor,
    teacher_TC: Tensor,
    agrees_T: Tensor,
    *,
    kind: DivergenceKind,
    jsd_beta: float,
    tokens: float | None,
) -> LossOutput:
    count = max(float(len(student_TC)), 1.0) if tokens is None else tokens
    loss = _divergence(student_TC, teacher_TC, kind=kind, jsd_beta=jsd_beta).sum() / count
    metrics = {
        "loss": loss,
        "agreement": agrees_T.float().sum() / count,
    }
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


def _divergence(student_TC: Tensor, teacher_TC: Tensor, *, kind: DivergenceKind, jsd_beta: float) -> Tensor:
    """Return the divergence [T] of log-probs over C classes."""
    match kind:
        case "forward":
            return _kl(teacher_TC, student_TC)
        case "reverse":
            return _kl(student_TC, teacher_TC)
        case "jsd" if jsd_beta == 0:
            return _kl(teacher_TC, student_TC)
        case "jsd" if jsd_beta == 1:
            return _kl(student_TC, teacher_TC)
        case "jsd":
            mixture_TC = torch.logaddexp(teacher_TC + math.log(jsd_beta), student_TC + math.log1p(-jsd_beta))
            return jsd_beta * _kl(teacher_TC, mixture_TC) + (1 - jsd_beta) * _kl(student_TC, mixture_TC)
        case _:
            assert_never(kind)


def _kl(p_TC: Tensor, q_TC: Tensor) -> Tensor:
    return (p_TC.exp() * (p_TC - q_TC)).sum(dim=-1)
