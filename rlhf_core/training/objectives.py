"""What a model is trained for: a pure loss with its scalars, its denominators and the forward pass that it needs.

Objectives are small frozen values that travel to the workers. `denominators` counts over a whole optimizer step, in
plain Python; `loss` is one micro-batch's share of the loss and of the metrics of that step.

Legend: N samples, B rows, L positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, assert_never

import torch
from torch import Tensor, nn

from rlhf_core.batches import TokenBatch, collate
from rlhf_core.errors import DataError, explain
from rlhf_core.kl import k2, k3
from rlhf_core.losses.correction import Level, Mode, fraction_corrected, importance_weights
from rlhf_core.losses.output import LossOutput
from rlhf_core.losses.policy import Aggregation, ppo_clip_loss
from rlhf_core.losses.preference import dpo_loss, hinge_loss, ipo_loss, robust_dpo_loss, simpo_loss
from rlhf_core.losses.reward import bradley_terry_loss
from rlhf_core.losses.supervised import sft_loss
from rlhf_core.losses.value import value_loss
from rlhf_core.models.forward import sequence_scores, token_logprobs, token_values
from rlhf_core.token_math import bounded, masked_sum
from rlhf_core.types import PolicySample, PreferenceSample, RewardPair, TokenSample, ValueSample

Denominators = Mapping[str, float]


class TrainingObjective(Protocol):
    """What the trainer asks of an objective. Every `loss` has the metric `loss`, its own value."""

    @property
    def pack_to(self) -> int | None:
        """Length of the rows that several samples may share; None gives each sample a row."""
        ...

    def denominators(self, samples: Sequence[Any]) -> dict[str, float]:
        """Return the counts that the losses of all micro-batches on all ranks are divided by."""
        ...

    def loss(
        self, model: nn.Module, samples: Sequence[Any], denominators: Denominators, *, pad_id: int, device: torch.device
    ) -> LossOutput: ...


@dataclass(frozen=True)
class SftObjective:
    """Imitate the masked tokens of `TokenSample`s: nats per token, a mean over the step's tokens.

    `pack_to` lets samples share rows of that length without seeing each other.
    """

    pack_to: int | None

    def denominators(self, samples: Sequence[TokenSample]) -> dict[str, float]:
        return {"tokens": _tokens(samples)}

    def loss(
        self,
        model: nn.Module,
        samples: Sequence[TokenSample],
        denominators: Denominators,
        *,
        pad_id: int,
        device: torch.device,
    ) -> LossOutput:
        batch = collate(samples, pad_id=pad_id, pack_to=self.pack_to).to(device)
        logprobs_BL, _ = token_logprobs(model, batch, temperature=1.0, with_entropy=False)
        return _with_loss(sft_loss(logprobs_BL, batch.loss_mask_BL, tokens=denominators["tokens"]))


@dataclass(frozen=True)
class BradleyTerryObjective:
    """Score the chosen conversation of each `RewardPair` above the rejected one; both go forward together."""

    centering_coef: float

    @property
    def pack_to(self) -> None:
        return None

    def denominators(self, samples: Sequence[RewardPair]) -> dict[str, float]:
        return {"pairs": float(len(samples))}

    def loss(
        self,
        model: nn.Module,
        samples: Sequence[RewardPair],
        denominators: Denominators,
        *,
        pad_id: int,
        device: torch.device,
    ) -> LossOutput:
        sequences = [pair.chosen_ids for pair in samples] + [pair.rejected_ids for pair in samples]
        scores_N = sequence_scores(model, collate(unmasked(sequences), pad_id=pad_id).to(device))
        chosen_B, rejected_B = scores_N.split(len(samples))
        margin_B = torch.tensor([pair.margin for pair in samples], dtype=torch.float32, device=device)
        return bradley_terry_loss(
            chosen_B, rejected_B, margin_B, centering_coef=self.centering_coef, pairs=denominators["pairs"]
        )


@dataclass(frozen=True)
class PreferenceObjective:
    """DPO and its kin on `PreferenceSample`s, whose reference log-probs were computed before.

    `cdpo` is `dpo` with `label_smoothing`; `length_average` concerns `ipo` alone. `nll_coef` adds the token mean of the
    chosen answers' negative log-likelihood (RPO, arXiv 2404.19733), with its own denominator; 0 leaves it out.
    """

    loss_type: Literal["dpo", "cdpo", "robust", "ipo", "hinge"]
    beta: float
    label_smoothing: float
    length_average: bool
    nll_coef: float
