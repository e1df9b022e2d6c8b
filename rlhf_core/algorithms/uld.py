"""Universal logit distillation (ULD): a student and a teacher whose tokenizers and vocabularies differ.

ULD (Boizard et al., arXiv 2402.12030) compares the two distributions by their sorted probabilities, whatever the tokens
are called. With P the student, Q the teacher, both sorted in decreasing order and padded with zeros to equal length, its
Wasserstein distance has a closed form:

    W_1(t) = sum_i |P_(i)(t) - Q_(i)(t)|

The paper compares the t-th token of one with the t-th token of the other. Here t is a group: the fewest tokens of each
model that spell the same piece of the answer, as in TRL's GOLD ("Unlocking On-Policy Distillation for Any Model Family",
2025). The probability of a group's text x_1 ... x_n is the product over its tokens. Its outcomes are what a model may write
instead: the whole text, or the first i - 1 tokens and then another token y than x_i:

    P(text) = prod_i p(x_i | x_<i)          P(leave at i to y) = p(y | x_<i) prod_(j<i) p(x_j | x_<j),  y != x_i

They add up to 1 for any n. For groups of one token on both sides the outcomes are the vocabularies, and the loss is the
paper's. (GOLD has one outcome for each first token and multiplies all of them by prod_(j>1) p(x_j): they add up to less than
1, so that a student which gives every text the teacher's probability still has a loss.)

Kinds: `uld` is W_1 over all outcomes. Sorted probabilities do not say which token is meant, therefore the paper adds the
cross-entropy. `uld_text` compares the one outcome that both models have, the text, with itself and sorts the others,
|P(text) - Q(text)| + sum_i |P_(i) - Q_(i)|: at least `uld`, and it says of each text whether it should be likelier.

With `k` > 0 only the k likeliest other outcomes count one by one and the rest as one more: a lower bound. The loss is
between 0 and 2, without a unit. Only the student's outcomes have a gradient.
"""

# Shape legend: T selected tokens, K likeliest other tokens, G groups, S tokens of a group, N outcomes besides the text.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.output import LossOutput
from rlhf_core.algorithms.token_math import at_least_fp32

UldKind: TypeAlias = Literal["uld", "uld_text"]


def other_tokens(logprobs_TV: Tensor, own_ids_T: Tensor, *, k: int) -> Tensor:
    """Return the log-probs [T, K] of the `k` likeliest tokens besides the text's own, decreasing; 0 returns all."""
    others_TV = logprobs_TV.scatter(1, own_ids_T.unsqueeze(1), -math.inf)
    return others_TV.topk(k or logprobs_TV.shape[1] - 1, dim=1).values


def group_outcomes(
    own_T: Tensor, others_TK: Tensor, spans: Sequence[tuple[int, int]], *, k: int
) -> tuple[Tensor, Tensor]:
    """Return the log-probs `text_G` of the groups' texts, and the probabilities [G, N] of other outcomes, decreasing.

    `own_T` are the log-probs of the text's tokens, `others_TK` those of the likeliest other tokens (`other_tokens` with
    the same `k`), `spans` the tokens [start, end) of each group. N is `k`; for 0 all outcomes, padded with zeros.
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
    """Return the sum of the distances between the outcomes of student and teacher, divided by `groups`.

    The inputs are those of `group_outcomes` with the same `k`. `groups` counts the groups of the whole optimizer step;
    None says that this call is the step. Metrics: `loss`, `logprob_gap` (mean |log P(text) - log Q(text)|, in nats).
    """
    count = max(float(len(text_G)), 1.0) if groups is None else groups
    text_G, others_GN = at_least_fp32(text_G), at_least_fp32(others_GN)
    teacher_text_G, teacher_others_GN = at_least_fp32(teacher_text_G.detach()), teacher_others_GN.detach()
    width = max(others_GN.shape[1], teacher_others_GN.shape[1])
    student_GN = torch.cat([text_G.exp().unsqueeze(1), _padded(others_GN, width)], dim=1)
    teacher_GN = torch.cat([teacher_text_G.exp().unsqueeze(1), _padded(teacher_others_GN, width)], dim=1)
    if kind == "uld":
        kept = k or width + 1  # of k other outcomes and the text, the k likeliest are those of all outcomes
        student_GN, teacher_GN = (
            x_GN.sort(dim=1, descending=True).values[:, :kept] for x_GN in (student_GN, teacher_GN)
        )
    distance = (student_GN - teacher_GN).abs().sum()
    if k:
        distance = distance + (student_GN.sum(dim=1) - teacher_GN.sum(dim=1)).abs().sum()  # of what is left of 1
    metrics = {"loss": distance / count, "logprob_gap": (text_G - teacher_text_G).abs().sum() / count}
    return LossOutput(distance / count, {name: value.detach() for name, value in metrics.items()})


def _padded(x_GN: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(x_GN, (0, width - x_GN.shape[1]))
