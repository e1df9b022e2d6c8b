"""Define training objectives: a pure loss with its parameters, its denominators and its forward pass.

Objectives are small frozen values that are sent to the workers. `denominators` counts over a whole optimizer step in
plain Python. `compute` returns one micro-batch's share of the loss and metrics of that step.

Legend: N samples, B rows, L positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from rlhf_core.algorithms.policy.clip import PolicyBatch, PolicyMethod
from rlhf_core.algorithms.token_math import (
    CorrectionConfig,
    KLInLoss,
    LossOutput,
    bounded,
    bradley_terry_loss,
    clipped_value_loss,
    k3,
    kl_in_loss,
    masked_sum,
    sft_loss,
    step_loss,
)
from rlhf_core.errors import DataError
from rlhf_core.interfaces import Objective
from rlhf_core.models.batches import TokenBatch, collate, to_device
from rlhf_core.models.forward import sequence_scores, step_scores, token_logprobs, token_values, watching
from rlhf_core.sequences import ROUTED_EXPERTS, Sequences, Subset, copy_rows
from rlhf_core.training.batching import ROWS, step_counts
from rlhf_core.types import DistillationSample, RewardPair, StepSample, TokenSample
from rlhf_core.user_code.dependencies import UserFunction


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model, the token that pads its rows, and the device of the rows."""

    module: nn.Module
    pad_id: int
    device: torch.device

    def batch(self, samples: Sequences | Sequence[Any], *, pack_to: int | None = None) -> TokenBatch:
        """Move `samples` to the device as one batch, packed into rows of `pack_to` tokens if it is set."""
        return collate(samples, pad_id=self.pad_id, pack_to=pack_to).to(self.device)


@dataclass(frozen=True)
class SftObjective:
    """The loss of imitating the masked tokens of `TokenSample`s, averaged over the step's tokens, in nats per token.

    `pack_to` lets samples share rows of that length without seeing each other; None gives each sample its own row.
    `dft` weights each token by its own probability (arXiv 2508.05629).
    """

    pack_to: int | None
    dft: bool = False

    def denominators(self, samples: Sequence[TokenSample]) -> dict[str, float]:
        """Count the masked tokens."""
        return {"tokens": count_tokens(samples)}

    def compute(
        self, model: PlacedModel, samples: Sequence[TokenSample], denominators: Mapping[str, float]
    ) -> LossOutput:
        """Compute the share of `samples` in the loss, with the metrics `loss` and `nll`."""
        batch = model.batch(samples, pack_to=self.pack_to)
        logprobs_BL, _ = token_logprobs(model.module, batch, temperature=1.0, with_entropy=False)
        output = sft_loss(logprobs_BL, batch.loss_mask_BL, tokens=denominators["tokens"], dft=self.dft)
        return total(output.loss, output.metrics)


@dataclass(frozen=True)
class Scaled:
    """Another objective multiplied by `coef`. Of its metrics, only `loss` is scaled."""

    objective: Objective
    coef: float

    def denominators(self, samples: Any) -> dict[str, float]:
        """The denominators of the objective."""
        return self.objective.denominators(samples)

    def compute(self, model: PlacedModel, samples: Any, denominators: Mapping[str, float]) -> LossOutput:
        """Compute the scaled share of `samples`."""
        output = self.objective.compute(model, samples, denominators)
        return total(self.coef * output.loss, output.metrics)


@dataclass(frozen=True)
class BradleyTerryObjective:
    """The Bradley-Terry loss, which scores the chosen conversation of each `RewardPair` above the rejected one.

    Both conversations are in the same forward pass.
    """

    centering_coef: float

    def denominators(self, samples: Sequence[RewardPair]) -> dict[str, float]:
        """Count the pairs."""
        return {"pairs": float(len(samples))}

    def compute(
        self, model: PlacedModel, samples: Sequence[RewardPair], denominators: Mapping[str, float]
    ) -> LossOutput:
        """Compute the share of `samples` in the loss, with the metrics `loss`, `accuracy` and `margin`."""
        sequences = [pair.chosen_ids for pair in samples] + [pair.rejected_ids for pair in samples]
        scores_N = sequence_scores(model.module, model.batch(Sequences.from_token_ids(sequences)))
        chosen_B, rejected_B = scores_N.split(len(samples))
        margin_B = to_device(torch.tensor([pair.margin for pair in samples], dtype=torch.float32), model.device)
        return bradley_terry_loss(
            chosen_B, rejected_B, margin=margin_B, center_coef=self.centering_coef, pairs=denominators["pairs"]
        )


@dataclass(frozen=True)
class PolicyObjective:
    """A policy gradient on rollouts, corrected for the sampler's own probabilities.

    The loss is any of `rlhf_core.algorithms.policy`. `kl_coef` adds a KL penalty to the reference to the loss (`kl_in_loss`
    by `kl_estimator`); 0 leaves it out, as when the reward contains the penalty.
    `entropy_coef` adds an entropy bonus; entropy is measured in any case. `max_length` is the constant divisor of the
    aggregation `constant`.
    """

    loss: PolicyMethod
    max_length: int
    temperature: float
    kl_coef: float
    entropy_coef: float
    correction: CorrectionConfig
    function: UserFunction | None = None
    """User function for a loss of type custom."""
    kl_estimator: KLInLoss = "k2"
    reads: ClassVar[tuple[str, ...]] = (
        "rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", ROUTED_EXPERTS
    )  # fmt: skip
    """Fields of the samples, of which the reference's and the experts may be missing."""

    def denominators(self, samples: Sequences | Subset) -> dict[str, float]:
        """Count the masked tokens and the sequences."""
        return {"tokens": count_tokens(samples), "sequences": float(len(samples))}

    def compute(self, model: PlacedModel, samples: Sequences, denominators: Mapping[str, float]) -> LossOutput:
        """Share of `samples` in the loss.

        The metrics are `loss`, the metrics of `policy_output`, `entropy`, `correction_fraction`, `ref_kl` (k3) if the
        samples have the reference's log-probs, and `kl_loss` if used. Raises DataError for a penalty without reference
        log-probs.
        """
        batch = model.batch(samples)
        logprobs_BL, entropy_BL = token_logprobs(
            model.module,
            batch,
            temperature=self.temperature,
            with_entropy=True,
            entropy_gradient=self.entropy_coef != 0,
        )
        assert entropy_BL is not None
        old_BL, mask_BL, tokens = batch.fields["old_logprobs"], batch.loss_mask_BL, denominators["tokens"]
        weights_BL, corrected_BL = self.correction.weights(old_BL, batch.fields["rollout_logprobs"], mask_BL)
        policy = self._policy_loss(logprobs_BL, weights_BL, batch, denominators)
        entropy = masked_sum(entropy_BL, mask_BL) / tokens  # H = -sum_v p_v log p_v, mean over tokens
        metrics = policy.metrics | {"entropy": entropy}
        metrics["correction_fraction"] = corrected_BL.sum() / tokens
        if "ref_logprobs" in batch.fields:
            metrics["ref_kl"] = masked_sum(k3(logprobs_BL, batch.fields["ref_logprobs"]), mask_BL) / tokens
        elif self.kl_coef != 0:
            rule = "the samples have no log-probs of the reference"
            raise DataError("kl_coef", self.kl_coef, rule, "compute them, or set it to 0")
        # Left out instead of added with coefficient 0, because 0 times infinity would make the gradient NaN.
        loss = policy.loss
        if self.entropy_coef != 0:
            loss = loss - self.entropy_coef * entropy  # the bonus rewards a large entropy
        if self.kl_coef != 0:
            metrics["kl_loss"] = self._kl(logprobs_BL, weights_BL, batch) / tokens
            loss = loss + self.kl_coef * metrics["kl_loss"]  # L + beta KL
        return total(loss, metrics)

    def _policy_loss(
        self, logprobs_BL: Tensor, weights_BL: Tensor, batch: TokenBatch, denominators: Mapping[str, float]
    ) -> LossOutput:
        return self.loss.loss(
            PolicyBatch(
                logprobs=logprobs_BL,
                old_logprobs=batch.fields["old_logprobs"],
                advantages=batch.fields["advantages"],
                loss_mask=batch.loss_mask_BL,
                weights=weights_BL,
                num_tokens=denominators["tokens"],
                sequences=denominators["sequences"],
                max_length=self.max_length,
                function=None if self.function is None else self.function.load(key="loss.function"),
            )
        )

    def _kl(self, logprobs_BL: Tensor, weights_BL: Tensor, batch: TokenBatch) -> Tensor:
        """The sum of the KL terms over masked tokens.

        The tokens were drawn from mu, so each term is weighted by an estimate of pi / mu: the weight of the correction, which
        stands for pi_old / mu, times pi / pi_old, and at most the cap. It has no gradient. Without it, the gradient of the
        penalty is wrong after the first update.
        """
        ratio_BL = bounded(logprobs_BL.detach() - batch.fields["old_logprobs"]).exp()
        corrected_BL = (weights_BL * ratio_BL).clamp(max=self.correction.cap)
        terms_BL = kl_in_loss(logprobs_BL, batch.fields["ref_logprobs"], estimator=self.kl_estimator)
        return masked_sum(corrected_BL * terms_BL, batch.loss_mask_BL)


@dataclass(frozen=True)
class ValueObjective:
    """The loss of fitting values to `returns`. `clip` None gives the plain squared error."""

    clip: float | None

    def denominators(self, samples: Sequences | Subset) -> dict[str, float]:
        """Count the masked tokens."""
        return {"tokens": count_tokens(samples)}

    def compute(self, model: PlacedModel, samples: Sequences, denominators: Mapping[str, float]) -> LossOutput:
        """Share of `samples` in the loss, with `loss` and the metrics of `clipped_value_loss`."""
        batch = model.batch(samples)
        output = clipped_value_loss(
            token_values(model.module, batch),
            batch.fields["old_values"],
            batch.fields["returns"],
            batch.loss_mask_BL,
            clip=self.clip,
            num_tokens=denominators["tokens"],
        )
        return total(output.loss, output.metrics)


def count_tokens(samples: Sequences | Subset | Sequence[TokenSample] | Sequence[DistillationSample]) -> float:
    """The number of masked tokens. Raises DataError if there are none to average over."""
    if isinstance(samples, Subset):
        whole = samples.sequences
        tokens = int(np.count_nonzero(copy_rows(whole.loss_mask, whole.offsets, samples.rows)))
    elif isinstance(samples, Sequences):
        tokens = int(np.count_nonzero(samples.loss_mask))
    else:
        tokens = sum(one.loss_mask.count(1) for one in samples)
    if tokens == 0:
        rule = "an optimizer step needs at least one token to train on"
        raise DataError("loss_mask", f"0 tokens in {len(samples)} samples", rule, "drop the empty samples")
    return float(tokens)


def total(loss: Tensor, metrics: Mapping[str, Tensor]) -> LossOutput:
    """Combine `loss` with its metrics, and with itself as the metric `loss`."""
    return LossOutput(loss, {name: value.detach() for name, value in {**metrics, "loss": loss}.items()})


# ---------------------------------------------------------------- steps


@dataclass(frozen=True)
class StepObjective:
    """The binary cross-entropy of each answer step's score with its hard or soft label.

    The loss is the mean over the answer steps of the optimizer step. See arXiv 2305.20050 (human labels) and arXiv
    2312.08935 (labels from rollouts).
    """

    def denominators(self, samples: Sequence[StepSample]) -> dict[str, float]:
        """Count the judged steps."""
        return {"steps": float(sum(sample.loss_mask.count(1) for sample in samples))}

    def compute(
        self, model: PlacedModel, samples: Sequence[StepSample], denominators: Mapping[str, float]
    ) -> LossOutput:
        """Share of `samples` in the loss, with the metrics `loss`, `accuracy` and `positive_fraction`."""
        batch = model.batch(samples)
        judged = batch.masked_positions()
        logits_S = step_scores(model.module, batch)[judged]
        return step_loss(logits_S, batch.fields["labels"][judged], steps=denominators["steps"])


# ---------------------------------------------------------------- Add the load-balancing loss of a mixture of experts to an objective


@dataclass(frozen=True)
class RoutedObjective:
    """`objective` plus `coef` times the routers' balance (metric `router_aux`), averaged over the step's token rows."""

    objective: Objective
    coef: float

    def denominators(self, samples: Any) -> dict[str, float]:
        """The denominators of the objective and the number of token rows."""
        return step_counts(self.objective, samples)

    def compute(self, model: PlacedModel, samples: Any, denominators: Mapping[str, float]) -> LossOutput:
        """Share of `samples` in the sum of both losses."""
        with watching() as routing:
            output = self.objective.compute(model, samples, denominators)
        balance = routing.total() / denominators[ROWS]  # mean over the token rows of the whole step
        return total(output.loss + self.coef * balance, output.metrics | {"router_aux": balance})
