"""The configuration of PPO and its kin: `[ppo]`, with `[ppo.advantage] type`, `[ppo.loss] type` and so on in a profile.

A bare name will do where the defaults do: `advantage = "grpo"`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlhf_core.config.base import OPERATIONAL, Config, by_type
from rlhf_core.config.engines import LoraConfig, OptimizerConfig, SamplingConfig
from rlhf_core.config.rewards import RewardsConfig

# ---------------------------------------------------------------- advantages


class GAEAdvantage(Config):
    """Generalised advantage estimation with a value model: arXiv 1506.02438."""

    type: Literal["gae"] = "gae"
    gamma: float = Field(1.0, gt=0, le=1)
    gae_lambda: float = Field(0.95, ge=0, le=1)
    whiten: bool = True


class ReinforcePPAdvantage(Config):
    """Discounted returns, whitened over the step: REINFORCE++, arXiv 2501.03262."""

    type: Literal["reinforce++"] = "reinforce++"
    gamma: float = Field(1.0, gt=0, le=1)


class ReinforcePPBaselineAdvantage(Config):
    """Reward minus the group's mean, whitened over the step: REINFORCE++-baseline, arXiv 2501.03262."""

    type: Literal["reinforce++-baseline"] = "reinforce++-baseline"


class RLOOAdvantage(Config):
    """Reward minus the mean of the others of its group: arXiv 2402.14740."""

    type: Literal["rloo"] = "rloo"


class GRPOAdvantage(Config):
    """Reward minus the group's mean, over its standard deviation: arXiv 2402.03300."""

    type: Literal["grpo"] = "grpo"
    eps: float = Field(1e-6, gt=0)


class DrGRPOAdvantage(Config):
    """Reward minus the group's mean: arXiv 2503.20783; its other half is `[ppo.loss] aggregation = "constant"`."""

    type: Literal["dr_grpo"] = "dr_grpo"


class OPOAdvantage(Config):
    """Reward minus the group's length-weighted mean, the baseline of least variance: arXiv 2505.23585."""

    type: Literal["opo"] = "opo"


GROUP_ADVANTAGES = (ReinforcePPBaselineAdvantage, RLOOAdvantage, GRPOAdvantage, DrGRPOAdvantage, OPOAdvantage)
GroupAdvantage = ReinforcePPBaselineAdvantage | RLOOAdvantage | GRPOAdvantage | DrGRPOAdvantage | OPOAdvantage
"""Those that compare the samples of a prompt."""
Advantage = Annotated[
    GAEAdvantage | ReinforcePPAdvantage | GroupAdvantage, Field(discriminator="type"), BeforeValidator(by_type)
]

# ---------------------------------------------------------------- losses

Aggregation = Literal["token_mean", "seq_mean_token_mean", "constant"]


class ClipLoss(Config):
    """PPO's clipped surrogate: arXiv 1707.06347; with 0.2 and 0.28 the "clip higher" of DAPO."""

    type: Literal["clip"] = "clip"
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)
    dual_clip: float = Field(0.0, ge=0)
    """Bounds the loss of negative advantages (arXiv 1912.09729); 0 switches it off, 3 is common."""
    aggregation: Aggregation = "token_mean"


class GSPOLoss(Config):
    """One ratio per sequence, the geometric mean of its tokens': arXiv 2507.18071."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, gt=0)
    clip_high: float = Field(4e-4, gt=0)


class CISPOLoss(Config):
    """The ratio is a detached, clipped weight, so no token loses its gradient: arXiv 2506.13585."""

    type: Literal["cispo"] = "cispo"
    clip_high: float = Field(4.0, gt=0)
    """The weight is at most 1 + this."""
    aggregation: Aggregation = "token_mean"


PolicyLoss = Annotated[ClipLoss | GSPOLoss | CISPOLoss, Field(discriminator="type"), BeforeValidator(by_type)]

# ---------------------------------------------------------------- the sampler's own probabilities


class CorrectionConfig(Config):
    """What is done about a sampler whose probabilities mu differ from the trainer's; q = pi_old / mu."""

    level: Literal["off", "token", "sequence", "geometric"] = "token"
    """What q is taken over: a token, the product over its sequence, or the geometric mean."""
    mode: Literal["truncate", "mask"] = "truncate"
    """`truncate` bounds q by `cap`; `mask` drops tokens whose q is outside [low, cap] (IcePop: 0.5 to 5)."""
    cap: float = Field(2.0, gt=0)
    low: float = Field(0.5, ge=0)
    """Lower edge of the window of `mask`."""
    pi_old: Literal["trainer", "sampler"] = "trainer"
    """`trainer` computes pi_old anew (decoupled); `sampler` takes mu for it (bypass), so that nothing is left to correct."""

    @model_validator(mode="after")
    def _a_bypass_leaves_nothing_to_correct(self) -> CorrectionConfig:
        if self.pi_old == "sampler" and self.level != "off":
            raise ValueError(f"level = {self.level!r}: with pi_old = 'sampler' q is 1 everywhere; set level = \"off\"")
        return self


# ---------------------------------------------------------------- what a step is made of


class DynamicSampling(Config):
    """Sample whole groups anew for prompts whose answers all earn the same: DAPO, arXiv 2503.14476, section 3.2."""

    low: float | None = None
    """Keep a prompt only if its mean reward is above this ..."""
    high: float | None = None
    """... and below that. Without either a prompt is kept whose rewards differ."""
    max_rounds: int = Field(3, ge=2)
    """Most rounds of sampling in a step; what is missing then is filled with groups that were passed over."""


class PtxConfig(Config):
    """Demonstrations mixed into every update, so that what SFT taught stays: PPO-ptx, arXiv 2203.02155 eq. 2."""

    coef: float = Field(0.1, gt=0)
    batch_size: int = Field(16, ge=1)
    """Demonstrations per optimizer step."""
    max_length: int = Field(256, ge=8)


# ---------------------------------------------------------------- the stage


class PPOConfig(Config):
    """Policy optimisation against rewards."""

    steps: int = Field(100, ge=1)
    """Rollout-and-update rounds."""
    prompts_per_step: int = Field(64, ge=1)
    samples_per_prompt: int = Field(1, ge=1)
    """Group size of the estimators that compare the samples of a prompt."""
    sampling: SamplingConfig = SamplingConfig()
    rewards: RewardsConfig = RewardsConfig()

    advantage: Advantage = GAEAdvantage()
    loss: PolicyLoss = ClipLoss()
    correction: CorrectionConfig = CorrectionConfig()

    kl_coef: float = Field(0.05, ge=0)
    kl_in: Literal["reward", "loss"] = "reward"
    """`reward`: k1 off every token's reward. `loss`: k2 added to the loss."""
    kl_target: float = Field(0.0, ge=0)
    """Adapts the coefficient to hold this KL per sequence; 0 keeps it fixed."""
    kl_horizon: int = Field(10_000, ge=1)

    epochs: int = Field(1, ge=1)
    """Passes over the rollouts of a step."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per pass."""
    entropy_coef: float = 0.0
    ptx: PtxConfig | None = None
    """Mixes demonstrations into the updates."""
    dynamic_sampling: DynamicSampling | None = None
    """Replaces groups that carry no gradient."""

    value_clip: float = Field(0.2, ge=0)
    """0 switches value clipping off."""
    value_warmup_steps: int = Field(0, ge=0)
    """Steps that train the value model alone, before the policy's schedule begins; only gae has a value model."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-6)
    value_optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-6)
    lora: LoraConfig | None = None

    checkpoint_every: Annotated[int, Field(ge=1), OPERATIONAL] = 10
    table_every: Annotated[int, Field(ge=1), OPERATIONAL] = 10

    @model_validator(mode="after")
    def _minibatches_divide_the_rollouts(self) -> PPOConfig:
        rollouts = self.prompts_per_step * self.samples_per_prompt
        if self.minibatches > rollouts:
            raise ValueError(
                f"minibatches = {self.minibatches}: must be <= the {rollouts} rollouts of a step; lower it"
            )
        if isinstance(self.advantage, GROUP_ADVANTAGES) and self.samples_per_prompt < 2:
            raise ValueError(
                f"samples_per_prompt = {self.samples_per_prompt}: {self.advantage.type} compares the samples of a prompt, "
                "at least 2; raise it, or use gae or reinforce++"
            )
        return self

    @model_validator(mode="after")
    def _there_are_groups_to_sample_anew(self) -> PPOConfig:
        if self.dynamic_sampling and self.samples_per_prompt < 2:
            raise ValueError(
                f"samples_per_prompt = {self.samples_per_prompt}: dynamic_sampling compares the samples of a prompt, "
                "at least 2; raise it, or take dynamic_sampling out"
            )
        return self

    @model_validator(mode="after")
    def _bounds_are_of_rewards_as_they_are(self) -> PPOConfig:
        bounds = self.dynamic_sampling
        if bounds and (bounds.low is not None or bounds.high is not None) and self.rewards.normalise != "none":
            raise ValueError(
                f"dynamic_sampling.low = {bounds.low}, high = {bounds.high}: are compared with the shaped reward, and "
                f"rewards.normalise = {self.rewards.normalise!r} moves it; leave one of them out"
            )
        if self.value_optimizer.ema_decay:
            raise ValueError(
                f"value_optimizer.ema_decay = {self.value_optimizer.ema_decay}: nobody uses the average of a value model; "
                "leave it at 0"
            )
        return self

    @model_validator(mode="after")
    def _the_whole_distribution_is_sampled(self) -> PPOConfig:
        # A filter renormalises the sampler's log-probs and not the trainer's: the ratios would compare two things.
        rule = "the trainer's log-probs are those of the whole distribution"
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature = 0.0: greedy answers are no samples of the policy; raise it")
        if self.sampling.top_p < 1:
            raise ValueError(f"sampling.top_p = {self.sampling.top_p}: {rule}; leave it at 1")
        if self.sampling.top_k > 0:
            raise ValueError(f"sampling.top_k = {self.sampling.top_k}: {rule}; leave it at 0")
        return self

    @model_validator(mode="after")
    def _the_penalty_is_not_normalised(self) -> PPOConfig:
        if self.advantage.type == "grpo" and self.kl_in == "reward" and self.kl_coef > 0:
            raise ValueError(
                "kl_in = 'reward': grpo divides by the spread of a group, which is the penalty alone where all answers "
                'earn the same; set kl_in = "loss"'
            )
        return self

    @model_validator(mode="after")
    def _the_policy_is_trained_after_the_warm_up(self) -> PPOConfig:
        if self.advantage.type == "gae" and self.value_warmup_steps >= self.steps:
            raise ValueError(
                f"value_warmup_steps = {self.value_warmup_steps}: must be < steps = {self.steps}, or the policy is never "
                "trained; lower it, or raise steps"
            )
        return self
