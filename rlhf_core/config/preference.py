"""Which loss a preference pair is trained with: `[dpo.loss] type = "..."`, or `loss = "ipo"` for its defaults.

a = sum log pi(y_c) - sum log pi_ref(y_c), b likewise for the rejected answer, h = a - b. The formulas stand with the
functions in `rlhf_core.algorithms`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rlhf_core.config.base import Config, by_type
from rlhf_core.config.custom import CustomFunction


class _Referenced(Config):
    """A loss that holds the policy near a reference."""

    beta: float = Field(0.1, gt=0)
    """Strength of the pull to the reference (inverse temperature of the implicit reward)."""


class DPOLoss(_Referenced):
    """-log sigmoid(beta h): arXiv 2305.18290."""

    type: Literal["dpo"] = "dpo"


class CDPOLoss(_Referenced):
    """DPO with label smoothing (conservative DPO)."""

    type: Literal["cdpo"] = "cdpo"
    label_smoothing: float = Field(0.1, gt=0, lt=0.5)
    """Assumed share of wrong labels."""


class RobustDPOLoss(_Referenced):
    """Unbiased DPO under flipped labels: arXiv 2403.00409."""

    type: Literal["robust"] = "robust"
    label_smoothing: float = Field(0.1, gt=0, lt=0.5)
    """Assumed share of wrong labels."""


class IPOLoss(_Referenced):
    """(h - 1/(2 beta))^2: arXiv 2310.12036."""

    type: Literal["ipo"] = "ipo"
    length_average: bool = True
    """Divide each answer's log-ratio by its length (as TRL does; the paper and OpenRLHF use sums)."""


class HingeLoss(_Referenced):
    """max(0, 1 - beta h): SLiC, arXiv 2305.10425."""

    type: Literal["hinge"] = "hinge"


class APOZeroLoss(_Referenced):
    """Raise the chosen answer, lower the rejected one: arXiv 2408.06266; for winners better than the policy."""

    type: Literal["apo_zero"] = "apo_zero"


class APODownLoss(_Referenced):
    """Lower both, the rejected one more: arXiv 2408.06266; for winners worse than the policy."""

    type: Literal["apo_down"] = "apo_down"


class SPPOLoss(_Referenced):
    """(a - 1/(2 beta))^2 + (b + 1/(2 beta))^2: arXiv 2405.00675, hard labels."""

    type: Literal["sppo"] = "sppo"


class NCALoss(_Referenced):
    """Noise contrastive alignment on pairs: arXiv 2402.05369."""

    type: Literal["nca"] = "nca"


class EXOLoss(_Referenced):
    """Reverse KL between the policy's and the labels' preference: arXiv 2402.00856."""

    type: Literal["exo"] = "exo"
    label_smoothing: float = Field(0.001, gt=0, lt=0.5)
    """The labels' doubt; the loss is infinite without."""


class AOTLoss(_Referenced):
    """Stochastic dominance over the whole optimizer step: arXiv 2406.05882."""

    type: Literal["aot"] = "aot"
    paired: bool = True
    """Compare the distribution of h with the reference's; False: that of chosen with that of rejected rewards."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)


class DiscoPOPLoss(_Referenced):
    """The log-ratio modulated loss that was found by search: arXiv 2406.08414.

    Not convex: from h = 0 its gradient lowers the chosen answer, and it rewards pairs only beyond a hump. A policy that
    starts at its reference may stay on the wrong side.
    """

    type: Literal["discopop"] = "discopop"
    beta: float = Field(0.05, gt=0)
    tau: float = Field(0.05, gt=0)
    """Temperature of the modulation."""


class KTOLoss(_Referenced):
    """Each answer on its own, desirable or not, against the mean KL of the step: arXiv 2402.01306."""

    type: Literal["kto"] = "kto"
    desirable_weight: float = Field(1.0, gt=0)
    undesirable_weight: float = Field(1.0, gt=0)


class SimPOLoss(Config):
    """Reference-free, on mean log-probs with a target margin: arXiv 2405.14734."""

    type: Literal["simpo"] = "simpo"
    beta: float = Field(2.0, gt=0)
    gamma: float = Field(1.0, ge=0)
    """Target margin, in units of the scaled reward."""


class ORPOLoss(Config):
    """Reference-free: likelihood of the chosen answer and its odds against the rejected one: arXiv 2403.07691."""

    type: Literal["orpo"] = "orpo"
    odds_weight: float = Field(0.1, gt=0)
    """lambda of the paper."""


class CustomPreferenceLoss(CustomFunction):
    """A function of yours: see docs/custom.md."""

    type: Literal["custom"] = "custom"
    reference: bool = True
    """Whether it compares with a reference. False spares the reference's pass; the function is given zeros for it."""


PreferenceLoss = Annotated[
    DPOLoss
    | CDPOLoss
    | RobustDPOLoss
    | IPOLoss
    | HingeLoss
    | APOZeroLoss
    | APODownLoss
    | SPPOLoss
    | NCALoss
    | EXOLoss
    | AOTLoss
    | DiscoPOPLoss
    | KTOLoss
    | SimPOLoss
    | ORPOLoss
    | CustomPreferenceLoss,
    Field(discriminator="type"),
    BeforeValidator(by_type),
]
REFERENCE_FREE = (SimPOLoss, ORPOLoss)


def uses_reference(loss: PreferenceLoss) -> bool:
    """Return whether the loss compares with a reference policy."""
    return loss.reference if isinstance(loss, CustomPreferenceLoss) else not isinstance(loss, REFERENCE_FREE)
