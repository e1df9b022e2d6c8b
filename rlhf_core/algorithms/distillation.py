"""Knowledge distillation: a student matched to a teacher's distribution at every trained token.

Kinds, with P the teacher and Q the student: `forward` KL(P || Q) covers the teacher's modes; `reverse` KL(Q || P) seeks
one; `jsd` is the generalized Jensen-Shannon divergence of GKD (arXiv 2306.13649 eq. 1), b KL(P || M) + (1-b) KL(Q || M)
with M = b P + (1-b) Q. As in TRL, b = 0 means the forward and b = 1 the reverse KL, to which the divergence is
proportional there, and not the 0 that the formula gives.

Only selected positions come in: pick the trained tokens first. No factor temperature^2 is applied: the loss is the
divergence itself. `tokens`: number of positions in the optimizer step (default: the positions of this call).

Universal logit distillation (ULD): a student and a teacher whose tokenizers and vocabularies differ.

ULD (Boizard et al., arXiv 2402.12030) compares the two distributions by their sorted probabilities, independent of the
names of tokens. With P the student, Q the teacher, both sorted in decreasing order and padded with zeros to equal
length, its Wasserstein distance has a closed form:

    W_1(t) = sum_i |P_(i)(t) - Q_(i)(t)|

The paper compares the t-th token of one with the t-th token of the other. Here t is a group: the fewest tokens of each
model that spell the same piece of the answer, as in TRL's GOLD ("Unlocking On-Policy Distillation for Any Model
Family", 2025). The probability of a group's text x_1 ... x_n is the product over its tokens. Its outcomes are the
continuations that a model may write: the whole text, or the first i - 1 tokens and then another token y than x_i:

    P(text) = prod_i p(x_i | x_<i)          P(leave at i to y) = p(y | x_<i) prod_(j<i) p(x_j | x_<j),  y != x_i

They add up to 1 for any n. For groups of one token on both sides the outcomes are the vocabularies, and the loss is the
paper's. (GOLD has one outcome for each first token and multiplies all of them by prod_(j>1) p(x_j): they add up to less
than 1, so that a student which gives every text the teacher's probability still has a loss.)

Kinds: `uld` is W_1 over all outcomes. Sorted probabilities do not identify tokens, therefore the paper adds the
cross-entropy. `uld_text` compares the one outcome that both models have, the text, with itself and sorts the others,
|P(text) - Q(text)| + sum_i |P_(i) - Q_(i)|: at least `uld`, and its sign per text is whether it should be likelier.

With `k` > 0 only the k likeliest other outcomes count one by one and the rest as one more: a lower bound. The loss is
between 0 and 2, without a unit. Only the student's outcomes have a gradient.

Distillation from several teachers with the student's vocabulary: the weighted sum of the divergences from each.

    L = sum_m w_m D(P_m, Q),    w_m = weight_m / sum of the weights

with P_m the teachers and Q the student. Soft targets of an ensemble are an arithmetic or a geometric mean of its
members' distributions (Hinton et al., arXiv 1503.02531, section 1). The sum is both, up to a term without Q:

    forward   sum_m w_m KL(P_m || Q) = KL(A || Q) + const,   A = sum_m w_m P_m             the mixture, arithmetic
    reverse   sum_m w_m KL(Q || P_m) = KL(Q || G) + const,   G = prod_m P_m^w_m / Z        what all agree on, geometric

`jsd` is the weighted sum itself. Why the sum and not the divergence from A: the likeliest tokens of a mixture are not
known from the likeliest of each teacher, while each term here is a lower bound with that teacher's own top k; and it is
the only form in which teachers may have other tokenizers (`rlhf_core.algorithms.distillation`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor

from rlhf_core.algorithms.token_math import LossOutput, at_least_fp32
from rlhf_core.errors import ConfigError

# Shape legend: T selected tokens, V vocabulary, K the teacher's likeliest tokens, C classes (V, or K and the rest).


DivergenceKind: TypeAlias = Literal["forward", "reverse", "jsd"]
REST_FLOOR = 1e-12
"""Least probability of the teacher's rest bucket; the logarithm of a rest of 0 (or less, by rounding) is infinite."""


def distillation_loss(
    logits_TV: Tensor,
    teacher_logits_TV: Tensor,
    *,
    kind: DivergenceKind,
    jsd_beta: float = 0.5,
    temperature: float = 1.0,
    tokens: float | None = None,
) -> LossOutput:
    """Sum of the divergence over the full vocabulary, divided by `tokens`; in nats per token.

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
    """Divergence of distributions over the teacher's K likeliest tokens and one bucket for all other tokens.

    A lower bound of the full divergence (merging classes never raises it), and equal to it at K = V - 1. The teacher's
    log-probs come from its full softmax at the same `temperature`, not renormalized over the K; `teacher_ids_TK` must
    not repeat an id within a row. Logits must be finite. Metrics as `distillation_loss`. Raises ConfigError where K
    leaves no rest.
    """
    if teacher_ids_TK.shape[1] >= logits_TV.shape[1]:
        rule = f"the vocabulary has {logits_TV.shape[1]} tokens, and the bucket for the rest needs one of them"
        raise ConfigError("top_k", teacher_ids_TK.shape[1], rule, "lower it, or distill the full vocabulary")
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
    """The divergence [T] of log-probs over C classes, in nats."""
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


# ---------------------------------------------------------------- uld

# Shape legend: T selected tokens, K likeliest other tokens, G groups, S tokens of a group, N outcomes besides the text.


UldKind: TypeAlias = Literal["uld", "uld_text"]


def other_tokens(logprobs_TV: Tensor, own_ids_T: Tensor, *, k: int) -> Tensor:
    """The log-probs [T, K] of the `k` likeliest tokens besides the text's own, decreasing; 0 returns all."""
    others_TV = logprobs_TV.scatter(1, own_ids_T.unsqueeze(1), -math.inf)
    return others_TV.topk(k or logprobs_TV.shape[1] - 1, dim=1).values


def group_outcomes(
    own_T: Tensor, others_TK: Tensor, spans: Sequence[tuple[int, int]], *, k: int
) -> tuple[Tensor, Tensor]:
    """Compute the log-probs `text_G` of the groups' texts, and the probabilities [G, N] of other outcomes, decreasing.

    `own_T` are the log-probs of the text's tokens, `others_TK` the log-probs of the likeliest other tokens
    (`other_tokens` with the same `k`), `spans` the tokens [start, end) of each group. N is `k`; for 0 all outcomes,
    padded with zeros.
    """
    sizes = [end - start for start, end in spans]
    width = k or max(sizes, default=0) * others_TK.shape[1]
    texts, others, order = [own_T[:0]], [others_TK.new_zeros(0, width)], list[int]()
    for size in sorted(set(sizes)):  # groups of one size at a time: no outcome is computed for padding
        chosen = [group for group, one in enumerate(sizes) if one == size]
        starts_G1 = torch.tensor([[spans[group][0]] for group in chosen], device=own_T.device)
        at_GS = starts_G1 + torch.arange(size, device=own_T.device)
        until_GS = own_T[at_GS].cumsum(dim=1)
        before_GS = torch.cat([torch.zeros_like(until_GS[:, :1]), until_GS[:, :-1]], dim=1)
        leaving_GN = (before_GS.unsqueeze(2) + others_TK[at_GS]).flatten(1)
        kept_GN = leaving_GN.topk(min(width, leaving_GN.shape[1]), dim=1).values.exp()
        texts.append(until_GS[:, -1])
        others.append(_padded(kept_GN, width))
        order += chosen
    place_G = torch.tensor(order, dtype=torch.long, device=own_T.device).argsort()
    return torch.cat(texts)[place_G], torch.cat(others)[place_G]


def uld_loss(
    text_G: Tensor,
    others_GN: Tensor,
    teacher_text_G: Tensor,
    teacher_others_GN: Tensor,
    *,
    kind: UldKind,
    k: int,
    groups: float | None = None,
) -> LossOutput:
    """Sum of the distances between the outcomes of student and teacher, divided by `groups`.

    The inputs are outputs of `group_outcomes` with the same `k`. `groups`: number of groups in the optimizer step
    (default: the groups of this call). Metrics: `loss`, `logprob_gap` (mean |log P(text) - log Q(text)|, in nats).
    """
    count = max(float(len(text_G)), 1.0) if groups is None else groups
    text_G, others_GN = at_least_fp32(text_G), at_least_fp32(others_GN)
    teacher_text_G, teacher_others_GN = at_least_fp32(teacher_text_G.detach()), teacher_others_GN.detach()
    width = max(others_GN.shape[1], teacher_others_GN.shape[1])
    student_GN = torch.cat([text_G.exp().unsqueeze(1), _padded(others_GN, width)], dim=1)
    teacher_GN = torch.cat([teacher_text_G.exp().unsqueeze(1), _padded(teacher_others_GN, width)], dim=1)
    if kind == "uld":
        kept = k or width + 1  # k others and the text contain the k likeliest of all
        student_GN, teacher_GN = (
            x_GN.sort(dim=1, descending=True).values[:, :kept] for x_GN in (student_GN, teacher_GN)
        )
    distance = (student_GN - teacher_GN).abs().sum()
    if k:
        distance = distance + (student_GN.sum(dim=1) - teacher_GN.sum(dim=1)).abs().sum()  # of the remaining mass
    metrics = {"loss": distance / count, "logprob_gap": (text_G - teacher_text_G).abs().sum() / count}
    return LossOutput(distance / count, {name: value.detach() for name, value in metrics.items()})


def _padded(x_GN: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(x_GN, (0, width - x_GN.shape[1]))


# ---------------------------------------------------------------- multi teacher

# Shape legend: T selected tokens, V vocabulary, K a teacher's likeliest tokens.


def normalized_weights(weights: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Divide the weights of teachers by their sum, which must be positive.

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
    """Weighted sum of the divergences from the teachers, divided by `tokens`; in nats per token.

    A teacher is (log-probs of its full softmax at `temperature` [T, K], their ids [T, K]), or [T, V] and [T, 0] for the
    whole vocabulary. `weights` are (name, weight) in the order of the teachers. Metrics: `loss`, `agreement`
    (weighted), and with several teachers `divergence/<name>` of each; a weight of 0 only measures.
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
