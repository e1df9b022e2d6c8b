"""Base classes of preference losses: their inputs, outputs and properties."""

# Shape legend: B pairs of a batch, L positions. Tensors are [B] unless noted; log-probs are sums over the answer.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.token_math import LossOutput, masked
from rlhf_core.errors import ConfigError, explain
from rlhf_core.schema.base import Config
from rlhf_core.types import PreferenceSample


@dataclass(frozen=True, kw_only=True)
class PairBatch:
    """A micro-batch of pairs: summed log-probs and lengths [B], and the counts of the whole optimizer step.

    Lengths count the trained tokens of an answer. `pairs` are the pairs of the step, `tokens` the trained tokens of its
    chosen answers. `function` is the user's, for the loss of type `custom`.
    """

    chosen_logprobs: Tensor
    rejected_logprobs: Tensor
    ref_chosen_logprobs: Tensor
    ref_rejected_logprobs: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    pairs: float
    tokens: float
    function: Callable[..., Tensor] | None = None

    @property
    def policy_logprobs(self) -> tuple[Tensor, Tensor]:
        """The policy's log-probs of the chosen and of the rejected answers."""
        return self.chosen_logprobs, self.rejected_logprobs

    @property
    def logprobs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The policy's log-probs of the chosen and of the rejected answers, then the reference's."""
        return *self.policy_logprobs, self.ref_chosen_logprobs, self.ref_rejected_logprobs

    @property
    def lengths(self) -> dict[str, Tensor]:
        """The lengths as keyword arguments."""
        return {"chosen_lengths": self.chosen_lengths, "rejected_lengths": self.rejected_lengths}


class PreferenceMethod(Config):
    """A loss on preference data: its options are its fields. A subclass with a `type` in this folder is found by it."""

    if TYPE_CHECKING:
        type: str

    looks_ahead: ClassVar[bool] = False
    """Whether the loss depends on the step as a whole, which is then measured before its gradient."""

    @property
    def uses_reference(self) -> bool:
        """Whether the loss compares with a reference policy."""
        return True

    @property
    def sums_logprobs(self) -> bool:
        """Whether the loss takes the summed log-probs of a pair as they are, so that tokens may be weighed in the sums."""
        return True

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Return the micro-batch's share of the loss and of the metrics of the step; see `pair_output`."""
        raise NotImplementedError

    def rearranged(
        self, samples: Sequence[PreferenceSample], chosen: Sequence[float], rejected: Sequence[float]
    ) -> list[PreferenceSample]:
        """Return the samples to train on in this step, given the policy's summed log-probs of both answers of all of them.

        It is called only for a loss that `looks_ahead`.
        """
        return list(samples)


class ReferencedMethod(PreferenceMethod):
    """A loss that holds the policy near a reference."""

    beta: float = Field(0.1, gt=0)
    """Strength of the pull to the reference (inverse temperature of the implicit reward)."""


class AnswerMethod(ReferencedMethod):
    """A loss on single answers, each labeled desirable or not, that compares them with a number of the whole step."""

    looks_ahead: ClassVar[bool] = True
    asks_strangers: ClassVar[bool] = False
    """Whether that number is measured on answers to other prompts."""

    @property
    def sums_logprobs(self) -> bool:
        """Return False: an answer is judged on its own, and has no other one beside it."""
        return False

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Raise ConfigError: the loss is on single answers, `answer_loss`."""
        raise ConfigError(
            explain("dpo.loss.type", self.type, "trains on single answers", "use its objective on answers")
        )


class ReferenceFreeMethod(PreferenceMethod):
    """A loss without a reference."""

    @property
    def uses_reference(self) -> bool:
        """Return False."""
        return False

    @property
    def sums_logprobs(self) -> bool:
        """Return False: such a loss is on the mean log-probs of answers."""
        return False


def pair_output(
    loss_B: Tensor,
    reward_chosen_B: Tensor,
    reward_rejected_B: Tensor,
    chosen_B: Tensor,
    rejected_B: Tensor,
    *,
    pairs: float | None,
) -> LossOutput:
    """Return sum(`loss`) / `pairs`; `pairs`: number of pairs in the optimizer step (default: the pairs of this call).

    Metrics: `loss`, `rewards/chosen`, `rewards/rejected`, `rewards/margin`, `rewards/accuracy` (margin > 0, strictly),
    `logprobs/chosen`, `logprobs/rejected`.
    """
    count = float(len(loss_B)) if pairs is None else pairs
    margin_B = reward_chosen_B - reward_rejected_B
    loss = loss_B.sum() / count
    metrics = {
        "loss": loss,
        "rewards/chosen": reward_chosen_B.sum() / count,
        "rewards/rejected": reward_rejected_B.sum() / count,
        "rewards/margin": margin_B.sum() / count,
        "rewards/accuracy": (margin_B > 0).float().sum() / count,
        "logprobs/chosen": chosen_B.sum() / count,
        "logprobs/rejected": rejected_B.sum() / count,
    }
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


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
