"""Supervised fine-tuning: imitate the masked tokens."""

# Shape legend: B rows of a batch, L positions.

from __future__ import annotations

from rlhf_core.algorithms.lazy_torch import Tensor
from rlhf_core.algorithms.output import LossOutput
from rlhf_core.algorithms.token_math import masked, masked_count


def sft_loss(
    logprobs_BL: Tensor, loss_mask_BL: Tensor, *, tokens: float | None = None, dft: bool = False
) -> LossOutput:
    """Return -sum of log pi(y_t) over masked tokens, divided by `tokens`, the masked tokens of the whole step.

    The token mean of InstructGPT's supervised step (arXiv 2203.02155, section 3.5), in nats per token. `tokens` None
    says that this call is the whole step. With `dft` each token is weighted by its own probability, detached: dynamic
    fine-tuning, arXiv 2508.05629. The metric `nll` is the unweighted mean in both cases.
    """
    logprobs_BL = masked(logprobs_BL, loss_mask_BL)
    count = masked_count(loss_mask_BL) if tokens is None else tokens
    nll = -logprobs_BL.sum() / count
    loss = -(logprobs_BL.detach().exp() * logprobs_BL).sum() / count if dft else nll
    return LossOutput(loss, {"nll": nll.detach()})
