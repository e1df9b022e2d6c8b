"""What a model is trained for: a pure loss with its scalars, its denominators and the forward pass that it needs.

Objectives are small frozen values that travel to the workers. `denominators` counts over a whole optimizer step, in
plain Python; `compute` is one micro-batch's share of the loss and of the metrics of that step.

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
from rlhf_core.losses.policy import Aggregation, clipped_policy_loss
from rlhf_core.losses.preference import dpo_loss, hinge_loss, ipo_loss, robust_dpo_loss, simpo_loss
from rlhf_core.losses.reward import bradley_terry_loss
from rlhf_core.losses.supervised import sft_loss
from rlhf_core.losses.value import clipped_value_loss
from rlhf_core.models.forward import sequence_scores, token_logprobs, token_values
from rlhf_core.token_math import bounded, masked_sum
from rlhf_core.types import PolicySample, PreferenceSample, RewardPair, TokenSample, ValueSample


class TrainingObjective(Protocol):
    """What the trainer asks of an objective."""

    def denominators(self, samples: Sequence[Any]) -> dict[str, float]:
        """Return the counts that the losses of all micro-batches on all ranks are divided by."""
        ...

    def compute(
        self,
        model: nn.Module,
        samples: Sequence[Any],
        denominators: Mapping[str, float],
        *,
        pad_id: int,
        device: torch.device,
    ) -> LossOutput:
        """Return the share of `samples`, one micro-batch, in the loss of the step. The metric `loss` is always there."""
        ...


@dataclass(frozen=True)
class SftObjective:
    """Imitate the masked tokens of `TokenSample`s; the mean over the step's tokens, in nats per token.

    `pack_to` lets samples share rows of that length without seeing each other; None gives each a row of its own.
    """

    pack_to: int | None

    def denominators(self, samples: Sequence[TokenSample]) -> dict[str, float]:
        """Return the masked tokens."""
        return {"tokens": _tokens(samples)}

    def compute(
        self,
        model: nn.Module,
        samples: Sequence[TokenSample],
        denominators: Mapping[str, float],
        *,
        pad_id: int,
        device: torch.device,
    ) -> LossOutput:
        """Return the share of `samples` in the loss; metrics `loss`, `nll`."""
        batch = collate(samples, pad_id=pad_id, pack_to=self.pack_to).to(device)
        logprobs_BL, _ = token_logprobs(model, batch, temperature=1.0, with_entropy=False)
        output = sft_loss(logprobs_BL, batch.loss_mask_BL, tokens=denominators["tokens"])
        return _total(output.loss, output.metrics)


@dataclass(frozen=True)
class BradleyTerryObjective:
    """Score the chosen conversation of each `RewardPair` above the rejected one; both go forward together."""

    centering_coef: float

    def denominators(self, samples: Sequence[RewardPair]) -> dict[str, float]:
        """Return the pairs."""
        return {"pairs": float(len(samples))}

    def compute(
        self,
        model: nn.Module,
        samples: Sequence[RewardPair],
        denominators: Mapping[str, float],
        *,
        pad_id: int,
        device: torch.device,
    ) -> LossOutput:
        """Return the share of `samples` in the loss; metrics `loss`, `accuracy`, `margin`."""
        sequences = [pair.chosen_ids for pair in samples] + [pair.rejected_ids for pair in samples]
        scores_N = sequence_scores(model, collate(unmasked(sequences), pad_id=pad_id).to(device))
        chosen_B, rejected_B = scores_N.split(len(samples))
        margin_B = torch.tensor([pair.margin for pair in samples], dtype=torch.float32, device=device)
        return bradley_terry_loss(
            chosen_B, rejected_B, margin=margin_B, center_coef=self.centering_coef, pairs=denominators["pairs"]
        )


@dataclass(frozen=True)
class PreferenceObjective:
    """DPO and its kin on `PreferenceSample`s, whose reference log-probs were computed before.

    `label_smoothing` is for `cdpo` and `robust`, `length_average` for `ipo`. `nll_coef` adds that much of the chosen
    answers' mean token loss (RPO, arXiv 2404.19733), which has its own denominator; 0 leaves it out.
    """

    loss: Literal["dpo", "cdpo", "robust", "ipo", "hinge"]
    beta: float
    label_smoothing: float
    length_average: bool
    nll_coef: float

    def denominators(self, samples: Sequence[PreferenceSample]) -> dict[str, float]:
        """Return the pairs, and the masked tokens of the chosen answers."""
        return _pair_denominators(samples)

    def compute(
        self,
        model: nn.Module,
        samples: Sequence[PreferenceSample],
        denominators: Mapping[str, float],
        *,
        pad_id: int,
        device: torch.device,
    ) -> LossOutput:
        """Return the share of `samples` in the loss; metrics `loss`, `rewards/*`, `logprobs/*` and, if used, `nll`."""
        pairs = _forward_pairs(model, samples, pad_id=pad_id, device=device)
        references = [[s.ref_chosen_logprob, s.ref_rejected_logprob] for s in samples]
        ref_chosen_B, ref_rejected_B = torch.tensor(references, dtype=torch.float32, device=device).unbind(dim=1)
        four = (pairs.chosen_B, pairs.rejected_B, ref_chosen_B, ref_rejected_B)
        count = denominators["pairs"]
        match self.loss:
            case "dpo" | "cdpo":
                output = dpo_loss(*four, beta=self.beta, label_smoothing=self.label_smoothing, pairs=count)
            case "robust":
                output = robust_dpo_loss(*four, beta=self.beta, label_smoothing=self.label_smoothing, pairs=count)
            case "ipo":
                output = ipo_loss(
                    *four,
                    chosen_lengths=pairs.chosen_length_B,
                    rejected_lengths=pairs.rejected_length_B,
                    beta=self.beta,
                    length_average=self.length_average,
                    pairs=count,
                )
            case "hinge":
                output = hinge_loss(*four, beta=self.beta, pairs=count)
            case _:
                assert_never(self.loss)
        return _with_nll(output, pairs, coef=self.nll_coef, tokens=denominators["tokens"])


@dataclass(frozen=True)
class SimpoObjective:
    """Reference-free preference optimisation (arXiv 2405.14734) on `PreferenceSample`s; their references are unused."""

    beta: float
    gamma: float
    nll_coef: float

    def denominators(self, samples: Sequence[PreferenceSample]) -> dict[str, float]:
        """Return the pairs, and the masked tokens of the chosen answers."""
        return _pair_denominators(samples)

    def compute(
        self,
        model: nn.Module,
        samples: Sequence[PreferenceSample],
        denominators: Mapping[str, float],
        *,
        pad_id: int,
        device: torch.device,
    ) -> LossOutput:
        """Return the share of `samples` in the loss; metrics as for `PreferenceObjective`."""
        pairs = _forward_pairs(model, samples, pad_id=pad_id, device=device)
        output = simpo_loss(
            pairs.chosen_B,
            pairs.rejected_B,
            chosen_lengths=pairs.chosen_length_B,
            rejected_lengths=pairs.rejected_length_B,
            beta=self.beta,
            gamma=self.gamma,
            pairs=denominators["pairs"],
        )
        return _with_nll(output, pairs, coef=self.nll_coef, tokens=denominators["tokens"])


@dataclass(frozen=True)
class PolicyObjective:
    """The clipped policy gradient on `PolicySample`s, corrected for the sampler's own probabilities.

    `kl_coef` adds a KL penalty to the reference to the loss (k2: its gradient is the reverse KL's, arXiv 2510.01555);
    0 leaves it out, as when the reward carries the penalty. `entropy_coef` adds an entropy bonus; entropy is measured
    either way. `max_length` is the constant divisor of the aggregation `constant`.
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None
    aggregation: Aggregation
    max_length: int
    temperature: float
    kl_coef: float
    entropy_coef: float
    correction: Level
    correction_mode: Mode
    correction_cap: float
    correction_low: float

    def denominators(self, samples: Sequence[PolicySample]) -> dict[str, float]:
        """Return the masked tokens and the sequences."""
        return {"tokens": _tokens(samples), "sequences": float(len(samples))}

    def compute(
        self,
        model: nn.Module,
        samples: Sequence[PolicySample],
        denominators: Mapping[str, float],
        *,
        pad_id: int,
        device: torch.device,
    ) -> LossOutput:
        """Return the share of `samples` in the loss.

        Metrics: `loss`, those of `clipped_policy_loss`, `entropy`, `ref_kl` (k3), `correction_fraction`, and `kl_loss` if used.
        """
        batch = collate(samples, pad_id=pad_id).to(device)
        logprobs_BL, entropy_BL = token_logprobs(model, batch, temperature=self.temperature, with_entropy=True)
        assert entropy_BL is not None
        old_BL, mask_BL, tokens = batch.fields["old_logprobs"], batch.loss_mask_BL, denominators["tokens"]
        weights_BL = importance_weights(old_BL, batch.fields["rollout_logprobs"], mask_BL, **self._correction())
        policy = clipped_policy_loss(
            logprobs_BL,
            old_BL,
            batch.fields["advantages"],
            mask_BL,
            weights=weights_BL,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            aggregation=self.aggregation,
            num_tokens=tokens,
            sequences=denominators["sequences"],
            max_length=self.max_length,
        )
        entropy = masked_sum(entropy_BL, mask_BL) / tokens
        ref_kl = masked_sum(k3(logprobs_BL, batch.fields["ref_logprobs"]), mask_BL) / tokens
        metrics = policy.metrics | {"entropy": entropy, "ref_kl": ref_kl}
        metrics["correction_fraction"] = self._fraction_corrected(batch) / tokens
        # Left out rather than added with coefficient 0: 0 times infinity would poison the gradient.
        loss = policy.loss
        if self.entropy_coef != 0:
            loss = loss - self.entropy_coef * entropy
        if self.kl_coef != 0:
            metrics["kl_loss"] = self._kl(logprobs_BL, weights_BL, batch) / tokens
            loss = loss + self.kl_coef * metrics["kl_loss"]
        return _total(loss, metrics)

    def _kl(self, logprobs_BL: Tensor, weights_BL: Tensor, batch: TokenBatch) -> Tensor:
        """Return the sum of k2 over masked tokens, each weighted by pi / mu (detached, truncated at the cap).

        The tokens were drawn from mu: without the weight the penalty's gradient is off after the first update.
        """
        ratio_BL = bounded(logprobs_BL.detach() - batch.fields["old_logprobs"]).exp()
        corrected_BL = (weights_BL * ratio_BL).clamp(max=self.correction_cap)
        return masked_sum(corrected_BL * k2(logprobs_BL, batch.fields["ref_logprobs"]), batch.loss_mask_BL)

    def _fraction_corrected(self, batch: TokenBatch) -> Tensor:
        """Return how many tokens of this micro-batch the correction truncated or dropped."""
        count = (batch.loss_mask_BL != 0).sum()
        if self.correction == "off" or count == 0:
            return torch.zeros((), device=count.device)
        old_BL, rollout_BL = batch.fields["old_logprobs"], batch.fields["rollout_logprobs"]
        return fraction_corrected(old_BL, rollout_BL, batch.loss_mask_BL, **self._correction()) * count

    def _correction(self) -> Any:
        return {
            "level": self.correction,
            "mode": self.correction_mode,
            "cap": self.correction_cap,
            "low": self.correction_low,
        }


@dataclass(frozen=True)
class ValueObjective:
    """Fit the values of `ValueSample`s to their returns; `clip` None is the plain squared error."""

    clip: float | None

    def denominators(self, samples: Sequence[ValueSample]) -> dict[str, float]:
        """Return the masked tokens."""
        return {"tokens": _tokens(samples)}

    def compute(
        self,
        model: nn.Module,
        samples: Sequence[ValueSample],
        denominators: Mapping[str, float],
        *,
        pad_id: int,
        device: torch.device,
    ) -> LossOutput:
        """Return the share of `samples` in the loss; metrics `loss` and those of `clipped_value_loss`."""
        batch = collate(samples, pad_id=pad_id).to(device)
        output = clipped_value_loss(
            token_values(model, batch),
            batch.fields["old_values"],
            batch.fields["returns"],
            batch.loss_mask_BL,
            clip=self.clip,
            num_tokens=denominators["tokens"],
        )
        return _total(output.loss, output.metrics)


def unmasked(sequences: Sequence[tuple[int, ...]]) -> list[TokenSample]:
    """Return samples of `sequences` with an empty loss mask: what is scored and not trained on token by token."""
    return [TokenSample(ids, (0,) * len(ids)) for ids in sequences]


@dataclass(frozen=True)
class _Pairs:
    """Summed log-probs of both answers of each pair and their masked tokens; `batch` has the chosen rows first."""

    chosen_B: Tensor
    rejected_B: Tensor
    chosen_length_B: Tensor
    rejected_length_B: Tensor


def _forward_pairs(
    model: nn.Module, samples: Sequence[PreferenceSample], *, pad_id: int, device: torch.device
) -> _Pairs:
    sides = [sample.chosen for sample in samples] + [sample.rejected for sample in samples]
    batch = collate(sides, pad_id=pad_id).to(device)
    logprobs_BL, _ = token_logprobs(model, batch, temperature=1.0, with_entropy=False)
    chosen_B, rejected_B = logprobs_BL.sum(dim=1).split(len(samples))
    chosen_length_B, rejected_length_B = batch.loss_mask_BL.sum(dim=1).split(len(samples))
    return _Pairs(chosen_B, rejected_B, chosen_length_B, rejected_length_B)


def _with_nll(output: LossOutput, pairs: _Pairs, *, coef: float, tokens: float) -> LossOutput:
    if coef == 0:
        return output
    nll = -pairs.chosen_B.sum() / tokens
    return _total(output.loss + coef * nll, output.metrics | {"nll": nll})


def _pair_denominators(samples: Sequence[PreferenceSample]) -> dict[str, float]:
    return {"pairs": float(len(samples)), "tokens": _tokens([sample.chosen for sample in samples])}


def _tokens(samples: Sequence[TokenSample] | Sequence[PolicySample] | Sequence[ValueSample]) -> float:
    tokens = sum(sum(sample.loss_mask) for sample in samples)
    if tokens == 0:
        rule = "an optimizer step needs a token to train on"
        raise DataError(explain("loss_mask", f"0 tokens in {len(samples)} samples", rule, "drop the empty samples"))
    return float(tokens)


def _total(loss: Tensor, metrics: Mapping[str, Tensor]) -> LossOutput:
    return LossOutput(loss, {name: value.detach() for name, value in {**metrics, "loss": loss}.items()})
