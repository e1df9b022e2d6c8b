"""Read the log-probability of a drawn token, and the entropy of the distribution it was drawn from, off its logits.

With a large vocabulary, the time goes into matrices of [tokens, vocabulary] that are written once and read once. The
formulas of autograd write one for each of their steps. Here the forward pass keeps one, and needs another one for the
entropy; the backward pass adds one, or two where the entropy has a gradient.

Legend: C tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def logprobs_and_entropy(
    logits_CV: Tensor, targets_C: Tensor, *, temperature: float, with_entropy: bool, entropy_gradient: bool
) -> Tensor:
    """Return [C, 2]: log p(target) under softmax(logits / temperature) in nats, and its entropy (0 without `with_entropy`).

    The entropy has a gradient only with `entropy_gradient`. The gradient has none of its own.
    """
    logprobs_C, entropy_C = _DrawnTokens.apply(logits_CV, targets_C, temperature, with_entropy)
    if not (with_entropy and entropy_gradient):
        entropy_C = entropy_C.detach()
    return torch.stack([logprobs_C, entropy_C], dim=1)


class _DrawnTokens(torch.autograd.Function):
    """With s = logits / temperature, p = softmax(s) and H its entropy: d log p(target) / ds = onehot - p, and
    dH / ds = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits_CV: Tensor, targets_C: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        every_CV = torch.log_softmax(logits_CV if temperature == 1 else logits_CV / temperature, dim=-1)
        logprobs_C = every_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1)
        entropy_C = torch.zeros_like(logprobs_C)
        if with_entropy:
            entropy_C = -every_CV.exp().mul_(every_CV).sum(-1)  # a product of matrices would be bfloat16 under autocast
        ctx.save_for_backward(every_CV, targets_C, entropy_C)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs_C, entropy_C

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, of_logprobs_C: Tensor | None, of_entropy_C: Tensor | None) -> tuple[Tensor | None, ...]:
        every_CV, targets_C, entropy_C = ctx.saved_tensors
        of_logprobs_C = torch.zeros_like(entropy_C) if of_logprobs_C is None else of_logprobs_C
        gradient_CV = every_CV.exp()
        if of_entropy_C is None:
            gradient_CV.mul_(-of_logprobs_C.unsqueeze(-1))
        else:
            slope_CV = (every_CV + entropy_C.unsqueeze(-1)).mul_(-of_entropy_C.unsqueeze(-1))
            gradient_CV.mul_(slope_CV.sub_(of_logprobs_C.unsqueeze(-1)))
        gradient_CV.scatter_add_(-1, targets_C.unsqueeze(-1), of_logprobs_C.unsqueeze(-1))
        if ctx.temperature != 1:
            gradient_CV.div_(ctx.temperature)
        return gradient_CV, None, None, None
