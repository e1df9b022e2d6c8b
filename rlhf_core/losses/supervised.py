"""Supervised fine-tuning: imitate the masked tokens."""

# Shape legend: B rows of a batch, L positions.

from __future__ import annotations

from torch import Tensor

from rlhf_core.losses.output import LossOutput
from rlhf_core.token_math import masked_sum


def sft_loss(logprobs_BL: Tensor, loss_mask_BL: Tensor, *, tokens: float) -> LossOutput:
    """Return -sum of log pi(y_t) over masked tokens, divided by `tokens`, the masked tokens of the whole step.

    The token mean of InstructGPT's supervised step (arXiv 2203.02155, section 3.5), in nats per token.
    """
    loss = -masked_sum(logprobs_BL, loss_mask_BL) / tokens
    return LossOutput(loss, {"nll": loss.detach()})
