"""Configure PPO and related methods: `[ppo]`, with `[ppo.advantage] type`, `[ppo.loss] type` and so on in a profile.

A bare name selects a method with its defaults: `advantage = "grpo"`.

Configure the loss on preference pairs: `[dpo.loss] type = "..."`, or `loss = "ipo"` for its defaults.

Each loss is a class in `rlhf_core.algorithms.preference` with its options, formula and reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from rlhf_core.algorithms import advantage, policy, preference
from rlhf_core.algorithms.advantage.base import GroupAdvantage, TokenAdvantage
from rlhf_core.algorithms.advantage.token import GAEAdvantage
from rlhf_core.algorithms.methods import one_of
from rlhf_core.algorithms.policy.clip import ClipLoss, PolicyMethod
from rlhf_core.algorithms.preference.base import PreferenceMethod, ReferenceFreeMethod
from rlhf_core.algorithms.token_math import CorrectionConfig, KLInLoss
from rlhf_core.config.agents import AgentConfig
from rlhf_core.config.engines import LoraConfig, OptimizerConfig, SamplingConfig
from rlhf_core.config.monitors import HeldOutConfig, Monitor, check_watched
from rlhf_core.config.rewards import EpisodeReward, Gdpo, RewardsConfig, what_compares_answers, what_moves_rewards
from rlhf_core.schema.base import OPERATIONAL, Config, added_option

# ---------------------------------------------------------------- policy parts


class DynamicSampling(Config):
    """Resampling of whole groups whose answers all get the same reward: DAPO, arXiv 2503.14476, section 3.2.

    A prompt is judged by the shaped rewards of its answers or, as in OpenRLHF, by the `scores` that an agent, a reward
    function or a server returns besides rewards, if it is the only term with a weight. With several terms the reward
    decides. If only some answers to a prompt have a score, the stage ends with an error.
    """

    low: float | None = None
    """Lower bound: a prompt is kept only if the mean of its scores, or rewards, is above it."""
    high: float | None = None
    """Upper bound: a prompt is kept only if the mean of its scores, or rewards, is below it. Without either bound a prompt is
    kept if its scores, or rewards, differ."""
    max_rounds: int = Field(3, ge=2)
    """Maximum number of sampling rounds in a step; after that missing groups are replaced by rejected ones."""


class PtxConfig(Config):
    """Demonstrations mixed into every update to keep the abilities of SFT: PPO-ptx, arXiv 2203.02155 eq. 2."""

    coef: float = Field(0.1, gt=0)
    batch_size: int = Field(16, ge=1)
    """Number of demonstrations per optimizer step."""
    max_length: int = Field(256, ge=8)


class ReferenceSync(Config):
    """A reference that follows the policy: TR-DPO, arXiv 2404.09656."""

    every: int = Field(ge=1)
    """Number of steps after which the reference takes over weights of the policy."""
    mix: float = Field(1.0, gt=0, le=1)
    """Part of the policy in the new reference: 1 takes its weights as they are, less the weighted mean."""


# ---------------------------------------------------------------- policy

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
"""Value from which a KL penalty in the reward is subtracted, for estimators that compare the answers to a prompt."""

TruncatedAnswers = Literal["train", "mask"]
"""Treatment of truncated answers in the update."""

# ---------------------------------------------------------------- the stage


class PPOConfig(Config):
    """Policy optimization with rewards."""

    steps: int = Field(100, ge=1)
    """Number of rounds of sampling and updating."""
    prompts_per_step: int = Field(64, ge=1)
    samples_per_prompt: int = Field(1, ge=1)
    """Number of samples per prompt: the group size of estimators that compare them."""
    sampling: SamplingConfig = SamplingConfig()
    agent: AgentConfig | None = None
    """Agent that turns every answer into an episode of turns with an environment, tools or a program."""
    rewards: RewardsConfig = RewardsConfig()

    advantage: Advantage = GAEAdvantage()
    loss: PolicyLoss = ClipLoss()
    correction: CorrectionConfig = CorrectionConfig()

    kl_coef: float = Field(0.05, ge=0)
    """Weight of the KL divergence from the reference. With 0 no reference is loaded and no KL is measured."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Where the KL penalty enters: `reward` subtracts k1 from every token's reward, `loss` adds k2 to the loss."""
    kl_credit: KLCredit = "token"
    """Value from which a KL penalty in the reward is subtracted, for estimators that compare the answers to a prompt. `token`:
    from each token after the group's baseline, so that a token pays for the penalty from itself on (OpenRLHF;
    REINFORCE++, arXiv 2501.03262). `answer`: its sum, from the answer's reward before the baseline (RLOO, arXiv
    2402.14740; TRL, verl)."""
    kl_estimator: KLInLoss = added_option("k2")
    """Estimator that `kl_in = "loss"` adds: `k2`; the value of `k1` or `k3` with the gradient of k2, the reverse KL's (arXiv
    2510.01555); or `k3_direct`, k3 with its own gradient, as in GRPO's paper (arXiv 2402.03300 eq. 4)."""
    reference_sync: ReferenceSync | None = added_option(None)
    """When the reference takes over weights of the policy; None keeps it as it is."""
    kl_target: float = Field(0.0, ge=0)
    """KL per sequence that the coefficient is adapted to hold; 0 keeps the coefficient fixed."""
    kl_horizon: int = Field(10_000, ge=1)
    """Number of rollouts over which an adapted coefficient may change by 20 %; more than a fifth of a step's."""

    epochs: int = Field(1, ge=1)
    """Number of passes over the rollouts of a step."""
    minibatches: int = Field(1, ge=1)
    """Number of optimizer steps per pass."""
    entropy_coef: float = 0.0
    ptx: PtxConfig | None = None
    """Demonstrations to mix into the updates."""
    dynamic_sampling: DynamicSampling | None = None
    """Replacement of groups that carry no gradient."""

    staleness: int = Field(0, ge=0, le=4)
    """Number of steps by which the sampling weights lag behind, so that sampling and training overlap. 0 samples, then
    trains; 1 is one step off; more helps if answer lengths vary from step to step."""
    partial_tokens: int = Field(0, ge=0)
    """Number of tokens per sampling round if above 0. A step's sampling ends as soon as `prompts_per_step` groups are
    complete; the others continue in the next step with its weights. It must divide `sampling.max_tokens`."""
    in_flight_groups: int = Field(0, ge=0)
    """Number of groups that partial rollouts sample at once; 0 means twice `prompts_per_step`."""

    truncated_answers: TruncatedAnswers = added_option("train")
    """Treatment of truncated answers in the update: `mask` trains on none of their tokens, and
    keeps them in the baseline of their group (DAPO's overlong filtering, arXiv 2503.14476). `rewards.truncated` changes
    their reward instead."""

    value_clip: float = Field(0.2, ge=0)
    """Clip range of the value loss; 0 disables clipping."""
    value_warmup_steps: int = Field(0, ge=0)
    """Number of steps that train only the value model, before the policy's schedule begins; only gae has one."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-6)
    value_optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-6)
    lora: LoraConfig | None = None

    evaluate: HeldOutConfig | None = added_option(None)
    """Evaluation on held-out prompts during the optimization."""
    monitors: tuple[Monitor, ...] = added_option(())
    """Conditions on the metrics of the steps that warn, stop the stage, or roll it back."""

    checkpoint_every: Annotated[int, Field(ge=1), OPERATIONAL] = 10
    table_every: Annotated[int, Field(ge=1), OPERATIONAL] = 10

    @property
    def uses_reference(self) -> bool:
        """Return whether anything depends on the reference: a coefficient of 0 stays 0, as it is adapted by factors."""
        return self.kl_coef > 0

    @property
    def groups_in_flight(self) -> int:
        """Return the number of groups with which a step of partial rollouts begins, including those carried over."""
        return self.in_flight_groups or 2 * self.prompts_per_step

    @model_validator(mode="after")
    def _check_minibatches(self) -> PPOConfig:
        rollouts = self.prompts_per_step * self.samples_per_prompt
        if self.minibatches > rollouts:
            raise ValueError(
                f"minibatches = {self.minibatches}: must be <= the {rollouts} rollouts of a step; lower it"
            )
        if isinstance(self.advantage, GroupAdvantage) and self.samples_per_prompt < self.advantage.least_group:
            raise ValueError(
                f"samples_per_prompt = {self.samples_per_prompt}: {self.advantage.type} compares the samples of a prompt and needs "
                f"at least {self.advantage.least_group}; raise it, or use gae or reinforce++"
            )
        return self

    @model_validator(mode="after")
    def _check_group_size(self) -> PPOConfig:
        comparing = ["dynamic_sampling"] * bool(self.dynamic_sampling) + _what_compares_groups(self.rewards)
        if comparing and self.samples_per_prompt < 2:
            raise ValueError(
                f"samples_per_prompt = {self.samples_per_prompt}: {comparing[0]} compares the samples of a prompt and needs "
                f"at least 2; raise it, or remove {comparing[0]}"
            )
        return self

    @model_validator(mode="after")
    def _check_reward_bounds(self) -> PPOConfig:
        bounds, mover = self.dynamic_sampling, what_moves_rewards(self.rewards)
        if bounds and (bounds.low is not None or bounds.high is not None) and mover:
            raise ValueError(
                f"dynamic_sampling.low = {bounds.low}, high = {bounds.high}: are compared with the shaped reward, and "
                f"{mover} changes it; remove one of them"
            )
        if self.value_optimizer.ema_decay:
            raise ValueError(
                f"value_optimizer.ema_decay = {self.value_optimizer.ema_decay}: the average of a value model is not used; "
                "leave it at 0"
            )
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> PPOConfig:
        # A filter renormalizes the sampler's log-probs but not the trainer's: the ratios would compare unlike values.
        rule = "the trainer's log-probs are those of the whole distribution"
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature = 0.0: greedy answers are not samples of the policy; raise it")
        if self.sampling.top_p < 1:
            raise ValueError(f"sampling.top_p = {self.sampling.top_p}: {rule}; leave it at 1")
        if self.sampling.top_k > 0:
            raise ValueError(f"sampling.top_k = {self.sampling.top_k}: {rule}; leave it at 0")
        return self

    @model_validator(mode="after")
    def _check_episode_rewards(self) -> PPOConfig:
        # The spans of partial rollouts look like those of an episode, and none of them earns anything.
        names = [name for name, term in self.rewards.terms.items() if isinstance(term, EpisodeReward)]
        if names and self.agent is None:
            raise ValueError(
                f"rewards.terms.{names[0]}.type = 'episode': only agent episodes have this reward; set agent, or remove the "
                "term"
            )
        return self

    @property
    def turn_weight(self) -> float:
        """Return the weight of a turn's reward that is assigned to the turn itself; 0 if the whole episode earns it."""
        if self.agent is None or self.agent.credit == "episode":
            return 0.0
        return sum(term.weight for term in self.rewards.terms.values() if isinstance(term, EpisodeReward))

    @model_validator(mode="after")
    def _check_turn_rewards(self) -> PPOConfig:
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
                'normalized or clipped, so that each turn earns what it adds; change the rewards, or set "episode"'
            )
        return self

    @model_validator(mode="after")
    def _check_kl_normalization(self) -> PPOConfig:
        if self.advantage.divides_by_spread and self.kl_in == "reward" and self.kl_coef > 0:
            raise ValueError(
                f"kl_in = 'reward': {self.advantage.type} divides by the spread or the mean of rewards, which consists only of the penalty where all answers "
                "earn the same, and a penalty added afterwards would have another scale at each prompt; as in its paper, set "
                'kl_in = "loss"'
            )
        return self

    @model_validator(mode="after")
    def _check_kl_credit(self) -> PPOConfig:
        if self.kl_credit == "answer" and not (self.kl_in == "reward" and isinstance(self.advantage, GroupAdvantage)):
            found = f"advantage is {self.advantage.type} and kl_in {self.kl_in!r}"
            raise ValueError(
                "kl_credit = 'answer': applies to a penalty in the reward of an estimator that compares the answers to a "
                f'prompt, and {found}; set kl_credit = "token"'
            )
        return self

    @model_validator(mode="after")
    def _check_greedy_answers(self) -> PPOConfig:
        if not self.advantage.asks_greedy:
            return self
        moved, compared = what_moves_rewards(self.rewards), what_compares_answers(self.rewards)
        others = {
            "agent": self.agent is not None,
            "staleness": self.staleness,
            "partial_tokens": self.partial_tokens,
            "dynamic_sampling": self.dynamic_sampling is not None,
        }
        found = [name for name, used in others.items() if used]
        if moved or compared or found:
            rule = "compares with a greedy answer of the same policy, scored by the same rewards"
            if moved:
                what = f"{moved} scales rewards by the answers around them"
            elif compared:
                what = f"{compared} makes them relative to the answers around them, and a greedy answer is scored alone"
            else:
                what = f"{found[0]} is not made for it"
            raise ValueError(f"advantage = {self.advantage.type!r}: {rule}, and {what}; remove one of them")
        return self

    @model_validator(mode="after")
    def _check_kl_estimator(self) -> PPOConfig:
        if self.kl_estimator != "k2" and not (self.kl_in == "loss" and self.kl_coef > 0):
            raise ValueError(
                f"kl_estimator = {self.kl_estimator!r}: applies to a penalty in the loss (the reward takes k1); set "
                'kl_in = "loss" and kl_coef > 0, or remove it'
            )
        return self

    @model_validator(mode="after")
    def _check_reference_updates(self) -> PPOConfig:
        if self.reference_sync and (not self.uses_reference or self.optimizer.ema_decay):
            why = "the average of the policy is what it exports" if self.uses_reference else "kl_coef = 0 loads none"
            raise ValueError(
                f"reference_sync: a reference follows the weights of the policy, and {why}; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_adaptive_kl(self) -> PPOConfig:
        rollouts = self.prompts_per_step * self.samples_per_prompt
        if self.kl_target and not self.kl_coef:
            raise ValueError(
                f"kl_target = {self.kl_target}: the coefficient is adapted by multiplication, so kl_coef = 0 stays 0; raise "
                "kl_coef, or set kl_target to 0"
            )
        if self.kl_target and self.kl_horizon <= 0.2 * rollouts:
            raise ValueError(
                f"kl_horizon = {self.kl_horizon}: must be > a fifth of the {rollouts} rollouts of a step, or a step could "
                "turn the coefficient negative; raise it"
            )
        return self

    @model_validator(mode="after")
    def _check_value_warmup(self) -> PPOConfig:
        if self.advantage.uses_values and self.value_warmup_steps >= self.steps:
            raise ValueError(
                f"value_warmup_steps = {self.value_warmup_steps}: must be < steps = {self.steps}, or the policy is never "
                "trained; lower it, or raise steps"
            )
        return self

    @model_validator(mode="after")
    def _check_correction(self) -> PPOConfig:
        if self.staleness >= self.steps:
            raise ValueError(
                f"staleness = {self.staleness}: must be < steps = {self.steps}, or the first weights would sample all answers; "
                "lower it, or raise steps"
            )
        decoupled = self.correction.level != "off" and self.correction.pi_old == "trainer"
        name, value = ("staleness", self.staleness) if self.staleness > 1 else ("partial_tokens", self.partial_tokens)
        if (self.staleness > 1 or self.partial_tokens) and not decoupled:
            raise ValueError(
                f"{name} = {value}: answers sampled by weights that old need the correction pi_old / mu; set correction.pi_old = "
                '"trainer" and a correction.level other than "off"'
            )
        return self

    @model_validator(mode="after")
    def _check_group_sampling(self) -> PPOConfig:
        if self.dynamic_sampling and (self.staleness or self.partial_tokens):
            name, value = ("staleness", self.staleness) if self.staleness else ("partial_tokens", self.partial_tokens)
            raise ValueError(
                f"{name} = {value}: dynamic_sampling samples again after a step is scored, with the weights of that step; "
                "remove one of them"
            )
        if self.agent and self.partial_tokens:
            raise ValueError(
                f"partial_tokens = {self.partial_tokens}: the episodes of an agent cannot be carried over; set it to 0"
            )
        return self

    @model_validator(mode="after")
    def _check_rounds(self) -> PPOConfig:
        # Rounds of equal size complete every answer, and a pool of at least a step's groups lets every step finish.
        if self.partial_tokens and (
            self.sampling.max_tokens % self.partial_tokens or self.partial_tokens == self.sampling.max_tokens
        ):
            raise ValueError(
                f"partial_tokens = {self.partial_tokens}: must divide sampling.max_tokens = {self.sampling.max_tokens} into "
                "two rounds or more; use a half or a quarter of it"
            )
        if self.in_flight_groups and not self.partial_tokens:
            raise ValueError(
                f"in_flight_groups = {self.in_flight_groups}: without partial_tokens no groups are carried over; set both, "
                "or leave it at 0"
            )
        if 0 < self.in_flight_groups < self.prompts_per_step:
            raise ValueError(
                f"in_flight_groups = {self.in_flight_groups}: must be >= prompts_per_step = {self.prompts_per_step}, or no "
                "step would ever have its groups; raise it"
            )
        return self

    @model_validator(mode="after")
    def _check_monitors(self) -> PPOConfig:
        late = ", ".join(name for name in ("staleness", "partial_tokens") if getattr(self, name))
        check_watched(
            self.evaluate,
            self.monitors,
            self.rewards,
            custom_loss=self.loss.type == "custom",
            uses_reference=self.uses_reference,
            uses_values=self.advantage.uses_values,
            late=late,
        )
        chooses = self.evaluate is not None and (
            self.evaluate.export == "best" or any(monitor.action != "warn" for monitor in self.monitors)
        )
        if chooses and self.optimizer.ema_decay:
            raise ValueError(
                f"optimizer.ema_decay = {self.optimizer.ema_decay}: the average is exported, but evaluations choose the "
                'checkpoint by the trained weights; set it to 0, or choose evaluate.export = "last" and only warn'
            )
        return self


def _what_compares_groups(rewards: RewardsConfig) -> list[str]:
    """Return the settings that normalize within the answers to a prompt: they turn a single answer's reward into 0."""
    gdpo = ['rewards.composition.type = "gdpo"'] * isinstance(rewards.composition, Gdpo)
    terms = [f'rewards.terms.{name}.normalise = "group"' for name, t in rewards.terms.items() if t.normalise == "group"]
    return gdpo + terms


# ---------------------------------------------------------------- preference

REFERENCE_FREE = tuple(kind for kind in preference.METHODS if issubclass(kind, ReferenceFreeMethod))
if TYPE_CHECKING:
    PreferenceLoss: TypeAlias = PreferenceMethod
else:
    PreferenceLoss = one_of(preference.METHODS)


def uses_reference(loss: PreferenceLoss) -> bool:
    """Return whether the loss needs a reference policy."""
    return loss.uses_reference


# ---------------------------------------------------------------- loop


class LoopConfig(Config):
    """The number of passes over the data, and the intervals of evaluation, checkpoints and logging."""

    batch_size: int = Field(32, ge=1)
    """Samples per optimizer step, over all ranks and micro-batches."""
    epochs: int = Field(1, ge=1)
    """Passes over the training data."""
    max_steps: int = Field(0, ge=0)
    """Maximum number of optimizer steps; 0 runs all `epochs`."""
    eval_every: int = Field(50, ge=1)
    """Optimizer steps between evaluations; there is always one at the end."""
    keep_best: int = Field(0, ge=0)
    """Number of checkpoints with the lowest evaluation loss to keep; the best one is the result. 0 uses the last."""
    checkpoint_every: Annotated[int, Field(ge=1), OPERATIONAL] = 50
    """Optimizer steps between checkpoints."""
    log_every: Annotated[int, Field(ge=1), OPERATIONAL] = 1
    """Optimizer steps between points of the training curves."""


def check_best(holds_out: str, fraction: float, loops: Mapping[str, LoopConfig]) -> None:
    """Raise ValueError for a loop that keeps the best checkpoint by rows of which `holds_out` holds none out."""
    for key, loop in loops.items():
        if loop.keep_best and not fraction:
            raise ValueError(
                f"{key}.keep_best = {loop.keep_best}: the best checkpoint is chosen on held-out rows, and there are none; "
                f"raise {holds_out} = {fraction}, or set keep_best to 0"
            )
