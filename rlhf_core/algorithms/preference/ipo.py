"""Identity preference optimization: a squared distance of the margin to a target.

Formula: (h - 1/(2 beta))^2.
Reference: arXiv 2310.12036 eq. 17 (their tau is `beta`).
"""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from typing import Literal

from rlhf_core.algorithms.lazy_torch import Tensor
from rlhf_core.algorithms.preference.base import PairBatch, ReferencedMethod, pair_output
from rlhf_core.algorithms.token_math import LossOutput
from rlhf_core.errors import ConfigError, explain


class IPOLoss(ReferencedMethod):
    """(h - 1/(2 beta))^2: arXiv 2310.12036."""

    type: Literal["ipo"] = "ipo"
    length_average: bool = True
    """Divide each answer's log-ratio by its length (as TRL does; the paper and OpenRLHF use sums)."""

    @property
    def sums_logprobs(self) -> bool:
        """Whether the log-ratios are sums, as in the paper, and not divided by the lengths."""
        return not self.length_average

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Return `ipo_loss` of the pairs."""
        return ipo_loss(
            *pairs.logprobs, **pairs.lengths, beta=self.beta, length_average=self.length_average, pairs=pairs.pairs
        )


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
    # arXiv 2310.12036 eq. 17: (h - 1/(2 beta))^2
    loss_B = (ratio_chosen_B - ratio_rejected_B - 1 / (2 * beta)).square()
    rewards = (beta * ratio_chosen_B, beta * ratio_rejected_B)
    return pair_output(loss_B, *rewards, chosen_logprobs, rejected_logprobs, pairs=pairs)
