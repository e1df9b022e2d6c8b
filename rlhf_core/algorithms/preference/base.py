"""Base classes of preference losses: their inputs, outputs and properties."""

# Shape legend: B pairs of a batch, L positions. Tensors are [B] unless noted; log-probs are sums over the answer.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from rlhf_core.algorithms.token_math import LossOutput, Tensor, masked
from rlhf_core.errors import ConfigError
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
    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """The log-ratios to the reference: a of the chosen answers and b of the rejected ones."""
        return self.chosen_logprobs - self.ref_chosen_logprobs, self.rejected_logprobs - self.ref_rejected_logprobs


class PreferenceMethod(Config):
    """A loss on preference data: its options are its fields.

    A subclass in this folder is registered under its `type`.
    """

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
        """Whether the loss takes the summed log-probs of a pair unchanged, so that tokens may be weighted in sums."""
        return True

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Compute the micro-batch's share of the loss and of the metrics of the step; see `pair_output`."""
        raise NotImplementedError

    def rearranged(
        self, samples: Sequence[PreferenceSample], chosen: Sequence[float], rejected: Sequence[float]
    ) -> list[PreferenceSample]:
        """Choose the samples to train on in this step, given the policy's summed log-probs of both answers of each.

        It is called only for a loss that `looks_ahead`.
        """
        return list(samples)


class ReferencedMethod(PreferenceMethod):
    """A loss that holds the policy near a reference."""

    beta: float = Field(0.1, gt=0)
    """Strength of the pull to the reference (inverse temperature of the implicit reward)."""

    def rewards(self, pairs: PairBatch) -> tuple[Tensor, Tensor]:
        """The implicit rewards beta a of the chosen answers and beta b of the rejected ones."""
        chosen_B, rejected_B = pairs.log_ratios
        return self.beta * chosen_B, self.beta * rejected_B

    def term(self, chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
        """The loss of each pair, given the `rewards` of its answers."""
        raise NotImplementedError

    def loss(self, pairs: PairBatch) -> LossOutput:
        chosen_B, rejected_B = self.rewards(pairs)
        return pair_output(self.term(chosen_B, rejected_B), chosen_B, rejected_B, pairs)


class AnswerMethod(ReferencedMethod):
    """A loss on single answers, each labeled desirable or not, that compares them with a number of the whole step."""

    looks_ahead: ClassVar[bool] = True
    needs_mismatches: ClassVar[bool] = False
    """Whether that number is measured on answers to other prompts."""

    @property
    def sums_logprobs(self) -> bool:
        """False, since each answer is judged alone and belongs to no pair."""
        return False

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Raise ConfigError: the loss is on single answers, `answer_loss`."""
        rule = "trains on single answers"
        raise ConfigError("dpo.loss.type", self.type, rule, "use its objective on answers")


class ReferenceFreeMethod(PreferenceMethod):
    """A loss without a reference."""

    @property
    def uses_reference(self) -> bool:
        """False, since the loss has no reference."""
        return False

    @property
    def sums_logprobs(self) -> bool:
        """False, since such a loss is on the mean log-probs of answers."""
        return False


def pair_output(loss_B: Tensor, chosen_B: Tensor, rejected_B: Tensor, pairs: PairBatch) -> LossOutput:
    """Sum the loss over the pairs of the whole optimizer step, with metrics of the rewards of both answers.

    Metrics: `loss`, `rewards/chosen`, `rewards/rejected`, `rewards/margin`, `rewards/accuracy` (margin > 0, strictly),
    `logprobs/chosen`, `logprobs/rejected`.
    """
    margin_B = chosen_B - rejected_B
    terms = {
        "loss": loss_B,
        "rewards/chosen": chosen_B,
        "rewards/rejected": rejected_B,
        "rewards/margin": margin_B,
        "rewards/accuracy": (margin_B > 0).float(),
        "logprobs/chosen": pairs.chosen_logprobs,
        "logprobs/rejected": pairs.rejected_logprobs,
    }
    means = {name: term_B.sum() / pairs.pairs for name, term_B in terms.items()}
    return LossOutput(means["loss"], {name: mean.detach() for name, mean in means.items()})


def length_desensitised(logprobs_tokens_BL: Tensor, mask_BL: Tensor, other_mask_BL: Tensor, *, alpha: float) -> Tensor:
    """Sum log-probs [B] so that tokens beyond the other answer's length count `alpha`: arXiv 2409.06411.

    `other_mask_BL` is the mask of the pair's other answer, of any width. `alpha` 1 is the plain sum of DPO, 0 drops the
    excess. Apply it to the policy's and the reference's log-probs of both answers alike.
    """
    trained_BL = mask_BL != 0
    other_length_B1 = (other_mask_BL != 0).sum(dim=-1, keepdim=True)
    excess_BL = trained_BL.cumsum(dim=-1) > other_length_B1
    logprobs_BL = masked(logprobs_tokens_BL, mask_BL)
    return (alpha * logprobs_BL).where(excess_BL, logprobs_BL).sum(dim=-1)
