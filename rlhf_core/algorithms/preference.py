"""Preference optimisation: DPO and its kin, from summed log-probabilities of the two answers of each pair.

With a = log pi(y_c) - log pi_ref(y_c), b likewise for y_r, and h = a - b. The losses without a reference
(`reference_free`) and those on single answers (`unpaired`) are offered here too. `pairs` counts the whole optimizer
step; None says that this call is the step. Metrics are those of `pair_output`, with rewards beta a and beta b.
"""

# Shape legend: B pairs of a batch, L positions. Tensors are [B] unless said; log-probs are sums over the answer.

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.algorithms.output import LossOutput
from rlhf_core.algorithms.pair_output import pair_output
from rlhf_core.algorithms.reference_free import orpo_loss, simpo_loss
from rlhf_core.algorithms.token_math import bounded, masked
from rlhf_core.algorithms.unpaired import kto_kl, kto_loss
from rlhf_core.errors import ConfigError, explain

__all__ = [
    "dpo_loss",
    "robust_dpo_loss",
    "ipo_loss",
    "hinge_loss",
    "apo_zero_loss",
    "apo_down_loss",
    "sppo_loss",
    "nca_loss",
    "exo_loss",
    "aot_loss",
    "discopop_loss",
    "length_desensitised",
    "simpo_loss",
    "orpo_loss",
    "kto_loss",
    "kto_kl",
]


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of -(1-e) log sigmoid(beta h) - e log sigmoid(-beta h) over `pairs`; h = log-ratio(c) - log-ratio(r).

    arXiv 2305.18290 eq. 7; with label smoothing e > 0 it is conservative DPO (Mitchell, "A note on DPO with noisy
    preferences", 2023).
    """
    reward_chosen_B = beta * (chosen_logprobs - ref_chosen_logprobs)
    reward_rejected_B = beta * (rejected_logprobs - ref_rejected_logprobs)
    loss_B = _smoothed_logistic(reward_chosen_B - reward_rejected_B, label_smoothing=label_smoothing)
    return pair_output(loss_B, reward_chosen_B, reward_rejected_B, chosen_logprobs, rejected_logprobs, pairs=pairs)


def robust_dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    label_smoothing: float,
    pairs: float | None = None,
) -> LossOutput:
    """Return the unbiased DPO loss under labels flipped with probability e = `label_smoothing` < 0.5.

    [-(1-e) log sigmoid(beta h) + e log sigmoid(-beta h)] / (1 - 2e): arXiv 2403.00409.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(
            explain("label_smoothing", label_smoothing, "must be in [0, 0.5)", "0.5 means that labels carry nothing")
        )
    reward_chosen_B = beta * (chosen_logprobs - ref_chosen_logprobs)
    reward_rejected_B = beta * (rejected_logprobs - ref_rejected_logprobs)
    logit_B = reward_chosen_B - reward_rejected_B
    likely_B = -(1 - label_smoothing) * logsigmoid(logit_B)
    flipped_B = label_smoothing * logsigmoid(-logit_B)
    loss_B = (likely_B + flipped_B) / (1 - 2 * label_smoothing)
    return pair_output(loss_B, reward_chosen_B, reward_rejected_B, chosen_logprobs, rejected_logprobs, pairs=pairs)


def ipo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    length_average: bool,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of (h - 1/(2 beta))^2 over `pairs`: arXiv 2310.12036 eq. 17 (their tau is `beta`).

    The paper's h is a difference of sums; `length_average` divides each answer's log-ratio by its token count first.
    The lengths are needed only then: without them it raises ConfigError.
    """
    ratio_chosen_B = chosen_logprobs - ref_chosen_logprobs
    ratio_rejected_B = rejected_logprobs - ref_rejected_logprobs
    if length_average:
        if chosen_lengths is None or rejected_lengths is None:
            rule = "the mean over tokens needs chosen_lengths and rejected_lengths"
            raise ConfigError(explain("length_average", True, rule, "give both, or set length_average = false"))
        ratio_chosen_B = ratio_chosen_B / chosen_lengths
        ratio_rejected_B = ratio_rejected_B / rejected_lengths
    loss_B = (ratio_chosen_B - ratio_rejected_B - 1 / (2 * beta)).square()
    rewards = (beta * ratio_chosen_B, beta * ratio_rejected_B)
    return pair_output(loss_B, *rewards, chosen_logprobs, rejected_logprobs, pairs=pairs)


def hinge_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of max(0, 1 - beta h) over `pairs`: the hinge of RSO, arXiv 2309.06657 (SLiC, 2305.10425)."""
    reward_chosen_B = beta * (chosen_logprobs - ref_chosen_logprobs)
    reward_rejected_B = beta * (rejected_logprobs - ref_rejected_logprobs)
    loss_B = torch.relu(1 - (reward_chosen_B - reward_rejected_B))
    return pair_output(loss_B, reward_chosen_B, reward_rejected_B, chosen_logprobs, rejected_logprobs, pairs=pairs)


def apo_zero_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of 1 - sigmoid(beta a) + sigmoid(beta b) over `pairs`: arXiv 2408.06266 eq. 7.

    Raises chosen answers and lowers rejected ones: for chosen answers better than the model's own.
    """
    reward_chosen_B = beta * (chosen_logprobs - ref_chosen_logprobs)
    reward_rejected_B = beta * (rejected_logprobs - ref_rejected_logprobs)
    # sigmoid(-x) for 1 - sigmoid(x), which cancels where x is large.
    loss_B = torch.sigmoid(-reward_chosen_B) + torch.sigmoid(reward_rejected_B)
    return pair_output(loss_B, reward_chosen_B, reward_rejected_B, chosen_logprobs, rejected_logprobs, pairs=pairs)


def apo_down_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of sigmoid(beta a) + 1 - sigmoid(beta h) over `pairs`: arXiv 2408.06266 eq. 8.

    Lowers both answers, the rejected one more: for a model better than the chosen answers.
    """
    reward_chosen_B = beta * (chosen_logprobs - ref_chosen_logprobs)
    reward_rejected_B = beta * (rejected_logprobs - ref_rejected_logprobs)
    loss_B = torch.sigmoid(reward_chosen_B) + torch.sigmoid(reward_rejected_B - reward_chosen_B)
    return pair_output(loss_B, reward_chosen_B, reward_rejected_B, chosen_logprobs, rejected_logprobs, pairs=pairs)


def sppo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of (a - 1/(2 beta))^2 + (b + 1/(2 beta))^2 over `pairs`: arXiv 2405.00675 eq. 4.7, hard form.

    The paper's win probability is taken as 1 for the chosen answer and 0 for the rejected one; its eta is 1 / beta.
    """
    ratio_chosen_B = chosen_logprobs - ref_chosen_logprobs
    ratio_rejected_B = rejected_logprobs - ref_rejected_logprobs
    target = 1 / (2 * beta)
    loss_B = (ratio_chosen_B - target).square() + (ratio_rejected_B + target).square()
    rewards = (beta * ratio_chosen_B, beta * ratio_rejected_B)
    return pair_output(loss_B, *rewards, chosen_logprobs, rejected_logprobs, pairs=pairs)


def nca_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of -log sig(beta a) - log sig(-beta a) / 2 - log sig(-beta b) / 2 over `pairs`: arXiv 2402.05369.

    Noise contrastive alignment for pairs: unlike DPO it keeps the chosen answer's likelihood from falling.
    """
    reward_chosen_B = beta * (chosen_logprobs - ref_chosen_logprobs)
    reward_rejected_B = beta * (rejected_logprobs - ref_rejected_logprobs)
    noise_B = logsigmoid(-reward_chosen_B) + logsigmoid(-reward_rejected_B)
    loss_B = -logsigmoid(reward_chosen_B) - noise_B / 2
    return pair_output(loss_B, reward_chosen_B, reward_rejected_B, chosen_logprobs, rejected_logprobs, pairs=pairs)


def exo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    label_smoothing: float,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of KL((sig(beta h), sig(-beta h)) || (1 - e, e)) over `pairs`: arXiv 2402.00856 eq. 16.

    The reverse KL of the pair, where DPO has the forward one. e = `label_smoothing` in (0, 1); the paper has 1e-3. At 0
    the divergence is infinite: ConfigError.
    """
    if not 0 < label_smoothing < 1:
        raise ConfigError(
            explain("label_smoothing", label_smoothing, "exo needs a label in (0, 1)", "the paper has 1e-3")
        )
    reward_chosen_B = beta * (chosen_logprobs - ref_chosen_logprobs)
    reward_rejected_B = beta * (rejected_logprobs - ref_rejected_logprobs)
    logit_B = reward_chosen_B - reward_rejected_B
    won_B = torch.sigmoid(logit_B) * (logsigmoid(logit_B) - math.log1p(-label_smoothing))
    lost_B = torch.sigmoid(-logit_B) * (logsigmoid(-logit_B) - math.log(label_smoothing))
    rewards = (reward_chosen_B, reward_rejected_B)
    return pair_output(won_B + lost_B, *rewards, chosen_logprobs, rejected_logprobs, pairs=pairs)


def aot_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    paired: bool = True,
    pairs: float | None = None,
) -> LossOutput:
    """Return the DPO loss between sorted columns: alignment by optimal transport, arXiv 2406.05882.

    `paired` sorts the policy's margins and the reference's, else the chosen answers' log-ratios and the rejected ones':
    the distribution of the one is to dominate that of the other. The sort is over the rows of this call, so alone among
    the losses it depends on how the step is cut: it means something for micro-batches of many rows.
    """
    if paired:
        above_B, below_B = chosen_logprobs - rejected_logprobs, ref_chosen_logprobs - ref_rejected_logprobs
    else:
        above_B, below_B = chosen_logprobs - ref_chosen_logprobs, rejected_logprobs - ref_rejected_logprobs
    logit_B = beta * (above_B.sort().values - below_B.sort().values)
    loss_B = _smoothed_logistic(logit_B, label_smoothing=label_smoothing)
    rewards = (beta * (chosen_logprobs - ref_chosen_logprobs), beta * (rejected_logprobs - ref_rejected_logprobs))
    return pair_output(loss_B, *rewards, chosen_logprobs, rejected_logprobs, pairs=pairs)


def discopop_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    tau: float = 0.05,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of -(1-m) log sigmoid(beta h) + m exp(-beta h), m = sigmoid(beta h / tau): arXiv 2406.08414 eq. 5.

    The log-ratio modulated loss that the paper's search found. The exponent is bounded at +-20; m is 0 long before.
    """
    reward_chosen_B = beta * (chosen_logprobs - ref_chosen_logprobs)
    reward_rejected_B = beta * (rejected_logprobs - ref_rejected_logprobs)
    logit_B = reward_chosen_B - reward_rejected_B
    exponential_B = torch.sigmoid(logit_B / tau) * bounded(-logit_B).exp()
    loss_B = exponential_B - torch.sigmoid(-logit_B / tau) * logsigmoid(logit_B)
    return pair_output(loss_B, reward_chosen_B, reward_rejected_B, chosen_logprobs, rejected_logprobs, pairs=pairs)


def length_desensitised(logprobs_tokens_BL: Tensor, mask_BL: Tensor, other_mask_BL: Tensor, *, alpha: float) -> Tensor:
    """Return summed log-probs [B] in which tokens beyond the other answer's length count `alpha`: arXiv 2409.06411.

    `other_mask_BL` is the mask of the pair's other answer, of any width. `alpha` 1 is the plain sum of DPO, 0 drops the
    excess. Apply it to the policy's and the reference's log-probs of both answers alike.
    """
    trained_BL = mask_BL != 0
    other_length_B1 = (other_mask_BL != 0).sum(dim=-1, keepdim=True)
    excess_BL = trained_BL.cumsum(dim=-1) > other_length_B1
    logprobs_BL = masked(logprobs_tokens_BL, mask_BL)
    return torch.where(excess_BL, alpha * logprobs_BL, logprobs_BL).sum(dim=-1)


def _smoothed_logistic(logit_B: Tensor, *, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * logsigmoid(logit_B) - label_smoothing * logsigmoid(-logit_B)
