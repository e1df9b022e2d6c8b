"""What a rollout is rewarded for: named terms, how they are combined, and how the result is shaped."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from rlhf_core.config.base import OPERATIONAL, Config

# ---------------------------------------------------------------- terms


class RewardModelReward(Config):
    """The score of a trained reward model."""

    type: Literal["reward_model"] = "reward_model"
    model: str = "reward_model"
    """Name of the reward model among the inputs of the stage."""
    weight: float = 1.0


class ProcessRewardModelReward(Config):
    """The steps of an answer, judged by a trained process reward model: a probability for each, made one score."""

    type: Literal["process_reward_model"] = "process_reward_model"
    model: str = "process_reward_model"
    """Name of the process reward model among the inputs of the stage."""
    reduce: Literal["model", "min", "mean", "last", "product"] = "model"
    """How the steps become one score; `model`: as the model was trained to be read."""
    weight: float = 1.0


class EnsembleReward(Config):
    """One score from several reward models, so that no single one is exploited (arXiv 2310.02743)."""

    type: Literal["ensemble"] = "ensemble"
    models: tuple[str, ...] = Field(min_length=2)
    """Names of reward models among the inputs of the stage."""
    reduce: Literal["mean", "min", "mean_minus_std"] = "mean"
    k: float = Field(1.0, ge=0)
    """Standard deviations that `mean_minus_std` takes off."""
    weight: float = 1.0


class FunctionReward(Config):
    """A Python function from generations to one float each; it runs in a process of its own."""

    type: Literal["function"] = "function"
    function: str
    """`package.module:function` or `path/to/file.py:function`."""
    weight: float = 1.0
    timeout_s: Annotated[float, Field(gt=0), OPERATIONAL] = 60.0
    """Deadline of one batch; the process is killed after it."""

    @field_validator("function")
    @classmethod
    def _names_module_and_function(cls, function: str) -> str:
        module, separator, name = function.rpartition(":")
        if not separator or not module or not name.isidentifier():
            raise ValueError("must read package.module:function or path/to/file.py:function; add what is missing")
        return function


RewardSpec = Annotated[
    RewardModelReward | ProcessRewardModelReward | EnsembleReward | FunctionReward, Field(discriminator="type")
]

# ---------------------------------------------------------------- composition and shaping


class WeightedSum(Config):
    """sum of weight * term."""

    type: Literal["weighted_sum"] = "weighted_sum"


class GatedProduct(Config):
    """The weighted sum of the other terms, let through by gates in [0, 1]: g * sum + (1 - g) * closed."""

    type: Literal["gated_product"] = "gated_product"
    gates: tuple[str, ...] = Field(min_length=1)
    """Terms whose product is g; their weights are not used."""
    closed: float = 0.0
    """The reward of a closed gate. Must lie below every honest reward, or failing the gate pays."""


Composition = Annotated[WeightedSum | GatedProduct, Field(discriminator="type")]


class OverlongPenalty(Config):
    """DAPO's soft penalty for answers that come near the limit (arXiv 2503.14476 eq. 13)."""

    max_tokens: int = Field(ge=1)
    """The limit; answers of this length lose `factor`."""
    buffer_tokens: int = Field(ge=1)
    """The penalty grows linearly over the last this many tokens."""
    factor: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _buffer_fits(self) -> OverlongPenalty:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"buffer_tokens = {self.buffer_tokens}: must be <= max_tokens = {self.max_tokens}; lower it"
            )
        return self


class RewardsConfig(Config):
    """Terms -> composition -> running normalisation -> clip -> overlong penalty, in this order."""

    terms: dict[str, RewardSpec] = Field(default={"reward_model": RewardModelReward()}, min_length=1)
    """Every term is kept under its name in `reward_components`, unweighted."""
    composition: Composition = WeightedSum()
    normalise: Literal["none", "running"] = "none"
    """`running` subtracts the mean and divides by the standard deviation of all rewards so far."""
    clip: float = Field(0.0, ge=0)
    """Clips to +- this; 0 does not clip."""
    overlong: OverlongPenalty | None = None

    @model_validator(mode="after")
    def _terms_fit_together(self) -> RewardsConfig:
        if "overlong" in self.terms:
            raise ValueError("terms.overlong = {...}: the name is taken by the overlong penalty; give the term another")
        gates = set(self.composition.gates) if isinstance(self.composition, GatedProduct) else set()
        unknown = sorted(gates - set(self.terms))
        if unknown:
            raise ValueError(f"composition.gates = {unknown}: must name terms; there are {sorted(self.terms)}")
        if not any(spec.weight for name, spec in self.terms.items() if name not in gates):
            raise ValueError("terms = {...}: no term has a weight, so every reward would be equal; give one a weight")
        return self
