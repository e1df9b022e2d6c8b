"""Distill the distributions of a teacher at masked tokens into a student.

Legend: T masked tokens, C those of one chunk, V vocabulary, K the teacher's most likely tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

from rlhf_core.algorithms.distillation import DivergenceKind, distillation_loss, topk_distillation_loss
from rlhf_core.algorithms.output import LossOutput
from rlhf_core.models.batches import TokenBatch, collate
from rlhf_core.models.forward import over_logits
from rlhf_core.training.objectives.base import count_tokens
from rlhf_core.types import DistillationSample, TokenSample, TopLogprobs


@dataclass(frozen=True)
class DistillationObjective:
    """The divergence of a student from its teacher at the masked tokens of `DistillationSample`s, in nats per token.

    loss = (1 - kl_weight) * CE + kl_weight * divergence.
    """

    kind: DivergenceKind
    jsd_beta: float
    temperature: float
    kl_weight: float

    def denominators(self, samples: Sequence[DistillationSample]) -> dict[str, float]:
        """Return the number of masked tokens."""
        return {"tokens": count_tokens(samples)}

    def compute(
        self,
        model: nn.Module,
        samples: Sequence[DistillationSample],
        denominators: Mapping[str, float],
        *,
        pad_id: int,
        device: torch.device,
    ) -> LossOutput:
        """Return the share of `samples` in the loss.

        The metrics are `loss`, `divergence`, `agreement` (same most likely token) and `nll`.
        """
        plain = [TokenSample(sample.token_ids, sample.loss_mask) for sample in samples]
        batch = collate(plain, pad_id=pad_id).to(device)
        teacher_TK = torch.from_numpy(np.concatenate([sample.teacher.logprobs for sample in samples])).to(device)
        ids_TK = torch.from_numpy(np.concatenate([sample.teacher.ids for sample in samples])).long().to(device)
        compute = partial(self._chunk, tokens=denominators["tokens"])
        parts_N3 = over_logits(model, batch, compute, teacher_TK, ids_TK)
        divergence, agreement, nll = parts_N3.sum(0).unbind()
        # Left out instead of weighted with 0, because 0 times infinity would make the gradient NaN.
        loss = self.kl_weight * divergence
        if self.kl_weight != 1:
            loss = loss + (1 - self.kl_weight) * nll
        metrics = {"loss": loss, "divergence": divergence, "agreement": agreement, "nll": nll}
        return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})

    def _chunk(
        self, logits_CV: Tensor, targets_C: Tensor, teacher_CK: Tensor, ids_CK: Tensor, *, tokens: float
    ) -> Tensor:
        """Return divergence, agreement and negative log-likelihood [1, 3] of a chunk, each divided by `tokens`."""
        if ids_CK.shape[1] == 0:
            # The softmax of log-probs is their distribution, and the loss divides by the temperature again.
            output = distillation_loss(logits_CV, teacher_CK * self.temperature, **self._divergence(tokens))
        else:
            output = topk_distillation_loss(logits_CV, teacher_CK, ids_CK, **self._divergence(tokens))
        nll = cross_entropy(logits_CV, targets_C, reduction="sum") / tokens
        return torch.stack([output.loss, output.metrics["agreement"], nll]).unsqueeze(0)

    def _divergence(self, tokens: float) -> _Divergence:
        return {"kind": self.kind, "jsd_beta": self.jsd_beta, "temperature": self.temperature, "tokens": tokens}


class _Divergence(TypedDict):
    kind: DivergenceKind
    jsd_beta: float
    temperature: float
    tokens: float


def top_logprobs(model: nn.Module, batch: TokenBatch, *, k: int, temperature: float) -> list[TopLogprobs]:
    """Return the `k` most likely tokens of softmax(logits / temperature) at each sample's masked positions, on the CPU.

    k = 0 returns all tokens. `batch` must have one sample per row. Call it without gradients.
    """
    tops = over_logits(model, batch, partial(_top, k=k, temperature=temperature))
    logprobs, ids = (part.numpy() for part in tops)
    ends = np.cumsum([int((mask_L != 0).sum()) for mask_L in batch.loss_mask_BL.cpu()])[:-1]
    return [TopLogprobs(*parts) for parts in zip(np.split(logprobs, ends), np.split(ids, ends), strict=True)]


def _top(logits_CV: Tensor, targets_C: Tensor, *, k: int, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs_CV = log_softmax(logits_CV / temperature, dim=-1)
    if k == 0:
        return logprobs_CV.cpu(), torch.empty((len(logprobs_CV), 0), dtype=torch.int32)
    logprobs_CK, ids_CK = logprobs_CV.topk(k, dim=-1)
    return logprobs_CK.cpu(), ids_CK.int().cpu()
