"""Alignment by optimal transport: a loss on distributions of the whole step, made one on pairs before its gradient."""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from rlhf_core.algorithms.preference.base import PairBatch, ReferencedMethod, pair_output
from rlhf_core.algorithms.preference.dpo import smoothed_logistic
from rlhf_core.algorithms.token_math import LossOutput
from rlhf_core.types import PreferenceSample


class AOTLoss(ReferencedMethod):
    """Alignment by optimal transport: the DPO loss between sorted columns of the whole optimizer step.

    Formula: -(1-e) log sigmoid(beta d) - e log sigmoid(-beta d), d the difference of equal ranks of two columns.
    Reference: arXiv 2406.05882.
    """

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
        chosen_B, rejected_B = self.rewards(pairs)  # of pairs that `rearranged` made of the whole step
        loss_B = smoothed_logistic(chosen_B - rejected_B, label_smoothing=self.label_smoothing)
        return pair_output(loss_B, chosen_B, rejected_B, pairs)

    def rearranged(
        self, samples: Sequence[PreferenceSample], chosen: Sequence[float], rejected: Sequence[float]
    ) -> list[PreferenceSample]:
        """Return pairs on which DPO's loss is AOT's: equal ranks of two sorted columns stand together.

        `chosen` and `rejected` are the policy's summed log-probs now. `paired` gives every sample the reference's margin
        of the same rank as its own margin; otherwise the rejected answer whose log-ratio has the rank of the chosen one's.
        """
        if self.paired:
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
