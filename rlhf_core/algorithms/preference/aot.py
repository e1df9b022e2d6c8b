"""Alignment by optimal transport: the DPO loss between sorted columns of the whole optimizer step.

Formula: -(1-e) log sigmoid(beta d) - e log sigmoid(-beta d), d the difference of equal ranks of two columns.
Reference: arXiv 2406.05882.
"""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from rlhf_core.algorithms.lazy_torch import Tensor
from rlhf_core.algorithms.preference.base import PairBatch, ReferencedMethod, pair_output
from rlhf_core.algorithms.preference.dpo import dpo_loss, smoothed_logistic
from rlhf_core.algorithms.token_math import LossOutput
from rlhf_core.types import PreferenceSample


class AOTLoss(ReferencedMethod):
    """Stochastic dominance over the whole optimizer step: arXiv 2406.05882."""

    type: Literal["aot"] = "aot"
    paired: bool = True
    """Compare the distribution of h with the reference's; False: that of chosen with that of rejected rewards."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)

    looks_ahead: ClassVar[bool] = True

    @property
    def sums_logprobs(self) -> bool:
        """Return False: the pairs of the loss are not those of the data."""
        return False

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Return `dpo_loss` of pairs that `rearranged` made of the whole step: it is `aot_loss` of the step."""
        return dpo_loss(*pairs.logprobs, beta=self.beta, label_smoothing=self.label_smoothing, pairs=pairs.pairs)

    def rearranged(
        self, samples: Sequence[PreferenceSample], chosen: Sequence[float], rejected: Sequence[float]
    ) -> list[PreferenceSample]:
        """Return the pairs of the sorted columns: see `matched`."""
        return matched(samples, chosen, rejected, paired=self.paired)


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
    # arXiv 2406.05882: the differences of equal ranks
    logit_B = beta * (above_B.sort().values - below_B.sort().values)
    loss_B = smoothed_logistic(logit_B, label_smoothing=label_smoothing)
    rewards = (beta * (chosen_logprobs - ref_chosen_logprobs), beta * (rejected_logprobs - ref_rejected_logprobs))
    return pair_output(loss_B, *rewards, chosen_logprobs, rejected_logprobs, pairs=pairs)


def matched(
    samples: Sequence[PreferenceSample], chosen: Sequence[float], rejected: Sequence[float], *, paired: bool
) -> list[PreferenceSample]:
    """Return pairs on which DPO's loss is AOT's (arXiv 2406.05882): equal ranks of two sorted columns stand together.

    `chosen` and `rejected` are the policy's summed log-probs now. `paired` gives every sample the reference's margin of
    the same rank as its own margin; otherwise the rejected answer whose log-ratio has the rank of the chosen one's.
    """
    if paired:
        margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
        reference = sorted(sample.ref_chosen_logprob - sample.ref_rejected_logprob for sample in samples)
        rank = {index: position for position, index in enumerate(_order(margins))}
        return [
            replace(sample, ref_chosen_logprob=reference[rank[index]] + sample.ref_rejected_logprob)
            for index, sample in enumerate(samples)
        ]
    up = _order([c - sample.ref_chosen_logprob for c, sample in zip(chosen, samples, strict=True)])
    down = _order([r - sample.ref_rejected_logprob for r, sample in zip(rejected, samples, strict=True)])
    return [
        replace(samples[i], rejected=samples[j].rejected, ref_rejected_logprob=samples[j].ref_rejected_logprob)
        for i, j in zip(up, down, strict=True)
    ]


def _order(values: Sequence[float]) -> list[int]:
    """Return the indices of `values` from the smallest to the largest; equal ones keep their order."""
    return sorted(range(len(values)), key=lambda index: values[index])
