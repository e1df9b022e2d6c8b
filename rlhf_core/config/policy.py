"""The configuration of PPO and its kin: `[ppo]`, with `[ppo.advantage] type`, `[ppo.loss] type` and so on in a profile.

A bare name will do where the defaults do: `advantage = "grpo"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from rlhf_core.algorithms import advantage, policy
from rlhf_core.algorithms.advantage.base import GroupAdvantage, TokenAdvantage
from rlhf_core.algorithms.advantage.gae import GAEAdvantage
from rlhf_core.algorithms.correction import CorrectionConfig
from rlhf_core.algorithms.methods import one_of
from rlhf_core.algorithms.policy.base import PolicyMethod
from rlhf_core.algorithms.policy.clip import ClipLoss
from rlhf_core.config.agents import AgentConfig
from rlhf_core.config.engines import LoraConfig, OptimizerConfig, SamplingConfig
from rlhf_core.config.rewards import EpisodeReward, Gdpo, RewardsConfig
from rlhf_core.schema.base import OPERATIONAL, Config

# ---------------------------------------------------------------- the methods, by their type

GROUP_ADVANTAGES = tuple(kind for kind in advantage.METHODS if issubclass(kind, GroupAdvantage))
"""The estimators that compare the samples of a prompt."""
if TYPE_CHECKING:
    Advantage: TypeAlias = TokenAdvantage | GroupAdvantage
    PolicyLoss: TypeAlias = PolicyMethod
else:
    Advantage = one_of(advantage.METHODS)
    PolicyLoss = one_of(policy.METHODS)

KLCredit = Literal["token", "answer"]
"""What a penalty in the reward is taken off where the answers to a prompt are compared."""

# ---------------------------------------------------------------- what a step is made of


class DynamicSampling(Config):
    """Sample whole groups anew for prompts whose answers all earn the same: DAPO, arXiv 2503.14476, section 3.2.

    A prompt is judged by the shaped rewards of its answers or, as OpenRLHF does, by the `scores` that are given beside
    the rewards: by an agent, a reward function or a server that is the only term with a weight. Of a reward made of
    several terms the reward decides. Where some answers to a prompt have a score and some have none, the stage ends.
    """

    low: float | None = None
    """Keep a prompt only if the mean of its scores, or rewards, is above this ..."""
    high: float | None = None
    """... and below that. Without either a prompt is kept whose scores, or rewards, differ."""
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
    agent: AgentConfig | None = None
    """Makes every answer an episode of turns with an environment, tools or an agent program."""
    rewards: RewardsConfig = RewardsConfig()

    advantage: Advantage = GAEAdvantage()
    loss: PolicyLoss = ClipLoss()
    correction: CorrectionConfig = CorrectionConfig()

    kl_coef: float = Field(0.05, ge=0)
    """Weight of the KL to the reference. With 0 no reference is loaded, and no KL measured."""
    kl_in: Literal["reward", "loss"] = "reward"
    """`reward`: k1 off every token's reward. `loss`: k2 added to the loss."""
    kl_credit: KLCredit = "token"
    """What a penalty in the reward is taken off, for estimators that compare the answers to a prompt. `token`: off each
    token after the group's baseline, and a token pays for what comes from it on (OpenRLHF; REINFORCE++, arXiv
    2501.03262). `answer`: its sum is off the reward of the answer before the baseline (RLOO, arXiv 2402.14740; TRL, verl)."""
    kl_target: float = Field(0.0, ge=0)
    """Adapts the coefficient to hold this KL per sequence; 0 keeps it fixed."""
    kl_horizon: int = Field(10_000, ge=1)
    """Rollouts over which an adapted coefficient may change by 20 %; more than a fifth of a step's."""

    epochs: int = Field(1, ge=1)
    """Passes over the rollouts of a step."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per pass."""
    entropy_coef: float = 0.0
    ptx: PtxConfig | None = None
    """Mixes demonstrations into the updates."""
    dynamic_sampling: DynamicSampling | None = None
    """Replaces groups that carry no gradient."""

    staleness: int = Field(0, ge=0, le=4)
    """Each step trains on what the weights of this many steps before sampled, so that sampling and training overlap. 0
    samples, then trains; 1 is one step off; more helps where the lengths of the answers vary from step to step."""
    partial_tokens: int = Field(0, ge=0)
    """Above 0 sampling goes in rounds of this many tokens, and a step's ends as soon as `prompts_per_step` groups are
    whole: the others go on in the next step with its weights. It divides `sampling.max_tokens`."""
    in_flight_groups: int = Field(0, ge=0)
    """Groups that partial rollouts have under way at once; 0 means twice `prompts_per_step`."""

    value_clip: float = Field(0.2, ge=0)
    """0 switches value clipping off."""
    value_warmup_steps: int = Field(0, ge=0)
    """Steps that train the value model alone, before the policy's schedule begins; only gae has a value model."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-6)
    value_optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-6)
    lora: LoraConfig | None = None

    checkpoint_every: Annotated[int, Field(ge=1), OPERATIONAL] = 10
    table_every: Annotated[int, Field(ge=1), OPERATIONAL] = 10

    @property
    def uses_reference(self) -> bool:
        """Whether anything depends on the reference: a coefficient of 0 stays 0, since it is adapted by factors."""
        return self.kl_coef > 0

    @property
    def groups_in_flight(self) -> int:
        """How many groups a step of partial rollouts begins with, those that were carried over among them."""
        return self.in_flight_groups or 2 * self.prompts_per_step

    @model_validator(mode="after")
    def _minibatches_divide_the_rollouts(self) -> PPOConfig:
        rollouts = self.prompts_per_step * self.samples_per_prompt
        if self.minibatches > rollouts:
            raise ValueError(
                f"minibatches = {self.minibatches}: must be <= the {rollouts} rollouts of a step; lower it"
            )
        if isinstance(self.advantage, GroupAdvantage) and self.samples_per_prompt < 2:
            raise ValueError(
                f"samples_per_prompt = {self.samples_per_prompt}: {self.advantage.type} compares the samples of a prompt, "
                "at least 2; raise it, or use gae or reinforce++"
            )
        return self

    @model_validator(mode="after")
    def _there_are_groups_to_compare(self) -> PPOConfig:
        comparing = ["dynamic_sampling"] * bool(self.dynamic_sampling) + _what_compares_groups(self.rewards)
        if comparing and self.samples_per_prompt < 2:
            raise ValueError(
                f"samples_per_prompt = {self.samples_per_prompt}: {comparing[0]} compares the samples of a prompt, "
                f"at least 2; raise it, or take {comparing[0]} out"
            )
        return self

    @model_validator(mode="after")
    def _bounds_are_of_rewards_as_they_are(self) -> PPOConfig:
        bounds, mover = self.dynamic_sampling, _what_moves_rewards(self.rewards)
        if bounds and (bounds.low is not None or bounds.high is not None) and mover:
            raise ValueError(
                f"dynamic_sampling.low = {bounds.low}, high = {bounds.high}: are compared with the shaped reward, and "
                f"{mover} moves it; leave one of them out"
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
    def _episodes_are_played(self) -> PPOConfig:
        # The spans of partial rollouts look like those of an episode, and none of them earns anything.
        names = [name for name, term in self.rewards.terms.items() if isinstance(term, EpisodeReward)]
        if names and self.agent is None:
            raise ValueError(
                f"rewards.terms.{names[0]}.type = 'episode': only the episodes of an agent earn it; set agent, or take "
                "the term out"
            )
        return self

    @property
    def turn_weight(self) -> float:
        """The weight of what a turn earned that is put at the turn itself; 0 where the whole episode earns it."""
        if self.agent is None or self.agent.credit == "episode":
            return 0.0
        return sum(term.weight for term in self.rewards.terms.values() if isinstance(term, EpisodeReward))

    @model_validator(mode="after")
    def _turns_earn_what_they_add(self) -> PPOConfig:
        if self.agent is None or self.agent.credit == "episode":
            return self
        terms = [term for term in self.rewards.terms.values() if isinstance(term, EpisodeReward)]
        plain = all(term.weight_end is None and term.normalise == "none" and not term.clip for term in terms)
        if (
            not terms
            or not plain
            or self.rewards.normalise != "none"
            or self.rewards.clip
            or self.rewards.composition.type != "weighted_sum"
        ):
            raise ValueError(
                'agent.credit = "turn": needs a term of type "episode" with a constant weight in a weighted sum, nothing '
                'normalised or clipped, so that each turn earns what it adds; mend the rewards, or set "episode"'
            )
        return self

    @model_validator(mode="after")
    def _the_penalty_is_not_normalised(self) -> PPOConfig:
        if self.advantage.divides_by_spread and self.kl_in == "reward" and self.kl_coef > 0:
            raise ValueError(
                f"kl_in = 'reward': {self.advantage.type} divides by the spread of a group, which is the penalty alone where all answers "
                "earn the same, and a penalty after it would be on another scale at each prompt; as in its paper, set "
                'kl_in = "loss"'
            )
        return self

    @model_validator(mode="after")
    def _credit_is_of_a_penalty_beside_a_baseline(self) -> PPOConfig:
        if self.kl_credit == "answer" and not (self.kl_in == "reward" and isinstance(self.advantage, GroupAdvantage)):
            found = f"advantage is {self.advantage.type} and kl_in {self.kl_in!r}"
            raise ValueError(
                "kl_credit = 'answer': is for a penalty in the reward of an estimator that compares the answers to a "
                f'prompt, and {found}; set kl_credit = "token"'
            )
        return self

    @model_validator(mode="after")
    def _the_coefficient_can_be_adapted(self) -> PPOConfig:
        rollouts = self.prompts_per_step * self.samples_per_prompt
        if self.kl_target and not self.kl_coef:
            raise ValueError(
                f"kl_target = {self.kl_target}: the coefficient is adapted by factors, and kl_coef = 0 stays 0; raise "
                "kl_coef, or set kl_target to 0"
            )
        if self.kl_target and self.kl_horizon <= 0.2 * rollouts:
            raise ValueError(
                f"kl_horizon = {self.kl_horizon}: must be > a fifth of the {rollouts} rollouts of a step, or a step could "
                "turn the coefficient negative; raise it"
            )
        return self

    @model_validator(mode="after")
    def _the_policy_is_trained_after_the_warm_up(self) -> PPOConfig:
        if self.advantage.uses_values and self.value_warmup_steps >= self.steps:
            raise ValueError(
                f"value_warmup_steps = {self.value_warmup_steps}: must be < steps = {self.steps}, or the policy is never "
                "trained; lower it, or raise steps"
            )
        return self

    @model_validator(mode="after")
    def _older_rollouts_are_corrected(self) -> PPOConfig:
        if self.staleness >= self.steps:
            raise ValueError(
                f"staleness = {self.staleness}: must be < steps = {self.steps}, or the first weights answer everything; "
                "lower it, or raise steps"
            )
        decoupled = self.correction.level != "off" and self.correction.pi_old == "trainer"
        name, value = ("staleness", self.staleness) if self.staleness > 1 else ("partial_tokens", self.partial_tokens)
        if (self.staleness > 1 or self.partial_tokens) and not decoupled:
            raise ValueError(
                f"{name} = {value}: answers of weights that old need the correction pi_old / mu; set correction.pi_old = "
                '"trainer" and a correction.level other than "off"'
            )
        return self

    @model_validator(mode="after")
    def _groups_are_drawn_in_one_way(self) -> PPOConfig:
        if self.dynamic_sampling and (self.staleness or self.partial_tokens):
            name, value = ("staleness", self.staleness) if self.staleness else ("partial_tokens", self.partial_tokens)
            raise ValueError(
                f"{name} = {value}: dynamic_sampling draws again once a step is scored, with the weights of that step; "
                "leave one of them out"
            )
        if self.agent and self.partial_tokens:
            raise ValueError(
                f"partial_tokens = {self.partial_tokens}: the episodes of an agent cannot be carried over; set it to 0"
            )
        return self

    @model_validator(mode="after")
    def _rounds_make_whole_groups(self) -> PPOConfig:
        # Rounds of equal size end every answer, and a pool that holds a step's groups makes every step possible.
        if self.partial_tokens and (
            self.sampling.max_tokens % self.partial_tokens or self.partial_tokens == self.sampling.max_tokens
        ):
            raise ValueError(
                f"partial_tokens = {self.partial_tokens}: must divide sampling.max_tokens = {self.sampling.max_tokens} into "
                "two rounds or more; take a half or a quarter of it"
            )
        if self.in_flight_groups and not self.partial_tokens:
            raise ValueError(
                f"in_flight_groups = {self.in_flight_groups}: without partial_tokens no group is carried over; set both, "
                "or leave it at 0"
            )
        if 0 < self.in_flight_groups < self.prompts_per_step:
            raise ValueError(
                f"in_flight_groups = {self.in_flight_groups}: must be >= prompts_per_step = {self.prompts_per_step}, or no "
                "step would ever have its groups; raise it"
            )
        return self


def _what_compares_groups(rewards: RewardsConfig) -> list[str]:
    """Return the settings that normalise within the answers to a prompt: of a single one they make 0."""
    gdpo = ['rewards.composition.type = "gdpo"'] * isinstance(rewards.composition, Gdpo)
    terms = [f'rewards.terms.{name}.normalise = "group"' for name, t in rewards.terms.items() if t.normalise == "group"]
    return gdpo + terms


def _what_moves_rewards(rewards: RewardsConfig) -> str:
    """Return the first setting that puts the reward on a scale of the answers around it; "" if there is none."""
    if rewards.normalise != "none":
        return f"rewards.normalise = {rewards.normalise!r}"
    if isinstance(rewards.composition, Gdpo):
        return f"rewards.composition.type = {rewards.composition.type!r}"
    for name, term in rewards.terms.items():
        if term.normalise != "none" and (term.weight or term.weight_end):
            return f"rewards.terms.{name}.normalise = {term.normalise!r}"
    return ""
