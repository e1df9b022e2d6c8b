"""Configure PPO and related methods: `[ppo]`, with `[ppo.advantage] type`, `[ppo.loss] type` and so on.

A bare name selects a method with its defaults: `advantage = "grpo"`.

Configure the loss on preference pairs: `[dpo.loss] type = "..."`, or `loss = "ipo"` for its defaults.

Each loss is a class in `rlhf_core.algorithms.preference` with its options, formula and reference.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from rlhf_core.algorithms import advantage, policy, preference
from rlhf_core.algorithms.advantage.base import GroupAdvantage, TokenAdvantage
from rlhf_core.algorithms.advantage.token import GAEAdvantage
from rlhf_core.algorithms.methods import one_of
from rlhf_core.algorithms.policy.clip import ClipLoss, PolicyMethod
from rlhf_core.algorithms.preference.base import PreferenceMethod
from rlhf_core.algorithms.token_math import CorrectionConfig, KLInLoss
from rlhf_core.config.agents import AgentConfig, AgentName, AgentsBySource, check_episode_rewards, turn_weight
from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
from rlhf_core.config.exports import check_exports, steps_exported
from rlhf_core.config.former_names import recorded, renamed
from rlhf_core.config.models import LoraConfig
from rlhf_core.config.monitors import HeldOutConfig, Monitor, check_watched
from rlhf_core.config.reward_band import RewardBand
from rlhf_core.config.rewards import Gdpo, RewardsConfig, check_sources, what_compares_answers, what_moves_rewards
from rlhf_core.config.schedule import Scheduled, SchedulePart, Shares, check_parts, scheduled
from rlhf_core.config.teachers import PolicyDistillation
from rlhf_core.errors import ConfigError, nearest
from rlhf_core.schema.base import OPERATIONAL, Config, RenamedConfig, added_option, by_type

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

# ---------------------------------------------------------------- KL


class ReferenceSync(Config):
    """A reference that follows the policy: TR-DPO, arXiv 2404.09656."""

    every: int = Field(ge=1)
    """Number of steps after which the reference takes over weights of the policy."""
    mix: float = Field(1.0, gt=0, le=1)
    """Part of the policy in the new reference: 1 copies the policy's weights, less takes the weighted mean."""


class KLPenalty(Config):
    """The penalty on the KL divergence from the reference."""

    coef: float = Field(0.05, ge=0)
    """Weight of the KL divergence from the reference. With 0 no reference is loaded and no KL is measured."""
    target: float = Field(0.0, ge=0)
    """KL per sequence that the coefficient is adapted to hold; 0 keeps the coefficient fixed."""
    horizon: int = Field(10_000, ge=1)
    """Number of rollouts over which an adapted coefficient may change by 20 %; more than a fifth of a step's."""
    reference_sync: ReferenceSync | None = added_option(None)
    """When the reference takes over weights of the policy; None keeps it unchanged."""

    @model_validator(mode="after")
    def _check_coef(self) -> Self:
        if self.target and not self.coef:
            raise ValueError(
                f"target = {self.target}: the coefficient is adapted by multiplication, so coef = 0 stays 0; raise coef, or "
                "set target to 0"
            )
        if self.reference_sync and not self.coef:
            raise ValueError(
                "reference_sync: a reference follows the weights of the policy, and coef = 0 loads none; remove one of them"
            )
        return self


class KLInReward(KLPenalty):
    """A penalty that is subtracted from the reward: k1 on every token."""

    in_: Literal["reward"] = Field("reward", alias="in")
    """Where the penalty enters: `reward` subtracts k1 from every token's reward, `loss` adds k2 to the loss."""
    credit: KLCredit = "token"
    """Value from which the penalty is subtracted, for estimators that compare the answers to a prompt. `token`: from each
    token after the group's baseline, so that a token pays for the penalty from itself on (OpenRLHF; REINFORCE++, arXiv
    2501.03262). `answer`: its sum, from the answer's reward before the baseline (RLOO, arXiv 2402.14740; TRL, verl)."""


class KLAsLoss(KLPenalty):
    """A penalty that is added to the loss."""

    in_: Literal["loss"] = Field("loss", alias="in")
    """Where the penalty enters: `reward` subtracts k1 from every token's reward, `loss` adds k2 to the loss."""
    estimator: KLInLoss = added_option("k2")
    """Estimator that is added: `k2`; the value of `k1` or `k3` with the gradient of k2, the reverse KL's (arXiv
    2510.01555); or `k3_direct`, k3 with its plain gradient, as in GRPO's paper (arXiv 2402.03300 eq. 4)."""


KL = Annotated[KLInReward | KLAsLoss, Field(discriminator="in_")]

# ---------------------------------------------------------------- ways of sampling


class Staleness(Config):
    """Sampling of the next steps while this one trains, by older weights."""

    type: Literal["staleness"] = "staleness"
    steps: int = Field(1, ge=0, le=4)
    """Number of steps by which the sampling weights lag behind, so that sampling and training overlap. 0 samples, then
    trains; 1 is one step off; more helps if answer lengths vary from step to step."""


class PartialRollouts(Config):
    """Sampling in rounds that leave unfinished answers to the next step, which continues them with its weights."""

    type: Literal["partial"] = "partial"
    tokens: int = Field(ge=1)
    """Number of tokens per sampling round. A step's sampling ends as soon as `prompts_per_step` groups are complete; the
    others continue in the next step. It must divide `sampling.max_tokens`."""
    in_flight_groups: int = Field(0, ge=0)
    """Number of groups that are sampled at once; 0 means twice `prompts_per_step`."""
    staleness: int = Field(0, ge=0, le=4)
    """Number of steps by which the sampling weights lag behind, too."""


class DynamicSampling(Config):
    """Resampling of whole groups whose answers all get the same reward: DAPO, arXiv 2503.14476, section 3.2.

    A prompt is judged by the shaped rewards of its answers or, as in OpenRLHF, by the `scores` that an agent, a reward
    function or a server returns besides rewards, if it is the only term with a weight. With several terms the reward
    decides. If only some answers to a prompt have a score, the stage ends with an error.
    """

    type: Literal["dynamic"] = "dynamic"
    low: float | None = None
    """Lower bound: a prompt is kept only if the mean of its scores, or rewards, is above it."""
    high: float | None = None
    """Upper bound: a prompt is kept only if the mean of its scores, or rewards, is below it. Without either bound a prompt is
    kept if its scores, or rewards, differ."""
    max_rounds: int = Field(3, ge=2)
    """Maximum number of sampling rounds in a step; after that missing groups are replaced by rejected ones."""


Ahead = Annotated[Staleness | PartialRollouts | DynamicSampling, Field(discriminator="type"), BeforeValidator(by_type)]

# ---------------------------------------------------------------- the stage


class ValueConfig(Config):
    """The value model of `gae`: its loss and its optimizer."""

    clip: float = Field(0.2, ge=0)
    """Clip range of the value loss; 0 disables clipping."""
    warmup_steps: int = Field(0, ge=0)
    """Number of steps that train only the value model, before the policy's schedule begins."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-6)
    lora: LoraConfig | None = added_option(None)

    @model_validator(mode="after")
    def _check_average(self) -> Self:
        if self.optimizer.ema_decay:
            raise ValueError(
                f"optimizer.ema_decay = {self.optimizer.ema_decay}: the average of a value model is not used; leave it at 0"
            )
        return self


class PtxConfig(Config):
    """Demonstrations mixed into every update to keep the abilities of SFT: PPO-ptx, arXiv 2203.02155 eq. 2."""

    coef: float = Field(0.1, gt=0)
    batch_size: int = Field(16, ge=1)
    """Number of demonstrations per optimizer step."""
    max_length: int = Field(256, ge=8)


class PPOConfig(AgentsBySource, RenamedConfig):
    """Policy optimization with rewards."""

    steps: int = Field(100, ge=1)
    """Number of rounds of sampling and updating."""
    prompts_per_step: int = Field(64, ge=1)
    samples_per_prompt: int = Field(1, ge=1)
    """Number of samples per prompt: the group size of estimators that compare them."""
    mixture: Shares = added_option({})
    """Share of the prompts of each step by their source, as `{gsm8k = 0.7, support = 0.3}`; they are divided by their sum.
    Sources without a share are left out. Without a table, prompts come in the proportions of the data."""
    order: Literal["shuffled", "given", "easy_first", "band"] = added_option("shuffled")
    """Order of the prompts in each epoch: `shuffled` is new each time, `given` is the order of the data. `easy_first`
    begins with the prompts that the policy answered best when a `select` stage of type `prompts` measured them. `band`
    begins with prompts whose answers in this run earned a mean inside of `band`, or without answers so far."""
    band: RewardBand = added_option(RewardBand())
    """The prompts that `order = "band"` takes first."""
    sampling: SamplingConfig = SamplingConfig()
    schedule: tuple[SchedulePart, ...] = added_option(())
    """Options that change during the training, such as `[{steps = 100, sampling.max_tokens = 16384}, {steps = 200,
    sampling.temperature = 0.8}]`, with one optimizer. Held-out evaluations keep `sampling`."""
    agent: AgentConfig | None = None
    """Agent that turns every answer into an episode of turns with an environment, tools or a program."""
    agents: dict[AgentName, AgentConfig] = added_option({})
    """Agents by name, each for the prompts of its `sources`; prompts of other sources are answered in one turn."""
    rewards: RewardsConfig = RewardsConfig()

    advantage: Advantage = GAEAdvantage()
    loss: PolicyLoss = ClipLoss()
    correction: CorrectionConfig = CorrectionConfig()
    router_replay: bool = added_option(False)
    """Whether the trainer sends tokens to the experts that the sampler chose (R3, arXiv 2510.11370)."""

    kl: KL = KLInReward()
    """The penalty on the KL divergence from the reference."""

    epochs: int = Field(1, ge=1)
    """Number of passes over the rollouts of a step."""
    minibatches: int = Field(1, ge=1)
    """Number of optimizer steps per pass."""
    entropy_coef: float = 0.0
    ptx: PtxConfig | None = None
    """Demonstrations to mix into the updates."""
    distill: PolicyDistillation | None = added_option(None)
    """Teachers whose log-probs at the policy's own tokens are advantages (on-policy distillation)."""
    ahead: Ahead | None = None
    """Replaces sampling in one round of whole answers per step with that step's weights: the next steps while this one
    trains (`staleness`), in parts (`partial`), or again for groups that carry no gradient (`dynamic`)."""

    truncated_answers: TruncatedAnswers = added_option("train")
    """Treatment of truncated answers in the update: `mask` trains on none of their tokens, and
    keeps them in the baseline of their group (DAPO's overlong filtering, arXiv 2503.14476). `rewards.truncated` changes
    their reward instead."""

    value: ValueConfig = ValueConfig()
    """The value model, used only by `gae`."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-6)
    lora: LoraConfig | None = None

    evaluate: HeldOutConfig | None = added_option(None)
    """Evaluation on held-out prompts during the optimization."""
    monitors: tuple[Monitor, ...] = added_option(())
    """Conditions on the metrics of the steps that warn, stop the stage, or roll it back."""

    export_every: int = added_option(0, ge=0)
    """Number of steps after which the policy is exported, each time: as the policies `<name>_<step>` of the section or of a
    step of a recipe, which are evaluated, too. 0 exports the last policy alone."""
    checkpoint_every: Annotated[int, Field(ge=1), OPERATIONAL] = 10
    table_every: Annotated[int, Field(ge=1), OPERATIONAL] = 10

    @property
    def uses_reference(self) -> bool:
        """Whether anything depends on the reference: a coefficient of 0 stays 0, since it is adapted by factors."""
        return self.kl.coef > 0

    def lends_reference(self, reference: object, policy: object) -> bool:
        """Whether the reference is the policy without its adapters: both start from the same weights, unrounded."""
        follows = self.kl.reference_sync is not None
        return self.lora is not None and not self.lora.quantize and not follows and reference == policy

    @property
    def exported_steps(self) -> tuple[int, ...]:
        """The steps after which the policy is exported, without the last one."""
        return steps_exported(self.export_every, self.steps)

    @property
    def mixtures(self) -> dict[str, Mapping[str, float]]:
        """The mixtures of all steps, by their key."""
        parts = {f"schedule[{index}].mixture": part.mixture for index, part in enumerate(self.schedule) if part.mixture}
        return {"mixture": self.mixture, **parts}

    @property
    def most_tokens(self) -> int:
        """The most tokens of an answer in any step."""
        return max(self.at(0).sampling.max_tokens, *(part.sampling.max_tokens or 0 for part in self.schedule), 0)

    def at(self, step: int) -> Scheduled:
        """The options of a step that a schedule changes."""
        return scheduled(self.schedule, step, self.sampling, self.mixture)

    @property
    def staleness(self) -> int:
        """The number of steps by which the sampling weights lag behind."""
        match self.ahead:
            case Staleness(steps=steps) | PartialRollouts(staleness=steps):
                return steps
            case _:
                return 0

    @property
    def estimator(self) -> Advantage | None:
        """The estimator of the rewards' advantages, None if the policy learns only from teachers."""
        return None if self.distill and not self.distill.reward_weight else self.advantage

    @property
    def uses_values(self) -> bool:
        """Whether a value model is trained."""
        return self.estimator is not None and self.estimator.uses_values

    @model_validator(mode="before")
    @classmethod
    def _read_former_names(cls, table: Any) -> Any:
        if not isinstance(table, Mapping):
            return table
        taught = table.get("distill")
        alone = isinstance(taught, Mapping) and not taught.get("reward_weight")
        return ({"rewards": {"terms": {}}} if alone else {}) | dict(renamed(table, below={}))

    def recorded(self, table: dict[str, Any]) -> dict[str, Any]:
        """The fields under the names with which results were recorded."""
        return recorded(table)

    def sources_used(self, sources: Collection[str], *, key: str, present: bool = True) -> set[str]:
        """Select the `sources` that are drawn. Raises ConfigError for an unknown source, or one without a term.

        Unless all are `present` in the end, as after a selection, a source may have no term.
        """
        for name, mixture in self.mixtures.items():
            for source in mixture.keys() - sources:
                rule = f"no prompt has this source; {nearest(source, sorted(sources))}"
                raise ConfigError(f"{key}.{name}.{source} = {mixture[source]}: {rule}")
        shared = {source for mixture in self.mixtures.values() for source, share in mixture.items() if share}
        used = (shared if self.at(0).mixture else set(sources)) if present else set()
        self.check_agents(sources, key=key)
        check_sources(self.rewards, used, known=sources, key=f"{key}.rewards")
        independent = self.evaluate.independent if self.evaluate else None
        if independent:  # of which some sources may have no term
            check_sources(independent, (), known=sources, key=f"{key}.evaluate.independent")
        if self.distill:
            self.distill.check_sources(used, known=sources, key=f"{key}.distill")
        counted = self.rewards.terms[self.band.term].sources if self.band.term else ()
        for source in sorted(used - set(counted)) if counted else ():
            rule = f"does not apply to prompts of the source {source}, which would come first once and never again"
            raise ConfigError(f"{key}.band.term", self.band.term, rule, "name a term of all sources, or none")
        return used

    @model_validator(mode="after")
    def _check_mixture(self) -> PPOConfig:
        for name, mixture in self.mixtures.items():
            if mixture and not any(mixture.values()):
                raise ValueError(
                    f"{name} = {{...}}: no source has a share; give one a positive share, or remove the table"
                )
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> PPOConfig:
        check_parts(self.schedule, self.steps)
        if self.schedule and isinstance(self.ahead, PartialRollouts):
            rule = "answers of ahead.type = 'partial' are sampled over several steps; remove one of them"
            raise ValueError(f"schedule = [...]: {rule}")
        return self

    @model_validator(mode="after")
    def _check_band(self) -> PPOConfig:
        if self.order != "band":
            if self.band != RewardBand():
                raise ValueError(
                    f'band = {{...}}: is read with order = "band", and it is {self.order!r}; set it, or remove band'
                )
            return self
        if self.band.term and self.band.term not in self.rewards.terms:
            rule = nearest(self.band.term, list(self.rewards.terms))
            raise ValueError(f"band.term = {self.band.term!r}: rewards have no such term; {rule}")
        mover = "" if self.band.term else what_moves_rewards(self.rewards)
        if mover or not self.rewards.terms:
            rule = f"{mover} changes the reward" if mover else "there is no reward"
            raise ValueError(
                f"band.low = {self.band.low}, high = {self.band.high}: are compared with the reward of the answers, and {rule}; "
                "name a term as band.term, or remove one of them"
            )
        if isinstance(self.ahead, PartialRollouts):
            rule = "the prompts of a step depend on rewards, and ahead.type = 'partial' draws them in groups of no step"
            raise ValueError(f"order = 'band': {rule}; remove one of them")
        return self

    @model_validator(mode="after")
    def _check_order(self) -> PPOConfig:
        if self.order != "shuffled" and isinstance(self.ahead, DynamicSampling):
            raise ValueError(
                f"order = {self.order!r}: ahead.type = 'dynamic' draws other prompts in each round of a step; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_distillation(self) -> PPOConfig:
        kl = self.kl
        if self.distill is None or self.distill.reward_weight:
            if not self.rewards.terms:
                raise ValueError(
                    "rewards.terms = {}: there is nothing to learn from; add a term, or [ppo.distill] alone"
                )
        elif isinstance(kl, KLInReward) and kl.coef:
            raise ValueError(
                f"kl.coef = {kl.coef}: a penalty in the reward is not learned from where distill.reward_weight is 0; set it "
                'to 0, or kl.in = "loss"'
            )
        elif isinstance(self.ahead, DynamicSampling):
            raise ValueError(
                "ahead.type = 'dynamic': leaves out prompts by rewards, which are not learned from where "
                "distill.reward_weight is 0; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_minibatches(self) -> PPOConfig:
        rollouts = self.prompts_per_step * self.samples_per_prompt
        if self.minibatches > rollouts:
            raise ValueError(
                f"minibatches = {self.minibatches}: must be <= the {rollouts} rollouts of a step; lower it"
            )
        estimator = self.estimator
        if isinstance(estimator, GroupAdvantage) and self.samples_per_prompt < estimator.least_group:
            raise ValueError(
                f"samples_per_prompt = {self.samples_per_prompt}: {estimator.type} compares the samples of a prompt and needs "
                f"at least {estimator.least_group}; raise it, or use gae or reinforce++"
            )
        return self

    @model_validator(mode="after")
    def _check_group_size(self) -> PPOConfig:
        dynamic = isinstance(self.ahead, DynamicSampling)
        comparing = ["ahead.type = 'dynamic'"] * dynamic + _what_compares_groups(self.rewards)
        if comparing and self.samples_per_prompt < 2:
            raise ValueError(
                f"samples_per_prompt = {self.samples_per_prompt}: {comparing[0]} compares the samples of a prompt and needs "
                f"at least 2; raise it, or remove {comparing[0]}"
            )
        return self

    @model_validator(mode="after")
    def _check_reward_bounds(self) -> PPOConfig:
        bounds, mover = self.ahead, what_moves_rewards(self.rewards)
        if isinstance(bounds, DynamicSampling) and (bounds.low is not None or bounds.high is not None) and mover:
            raise ValueError(
                f"ahead.low = {bounds.low}, high = {bounds.high}: are compared with the shaped reward, and {mover} changes "
                "it; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> PPOConfig:
        # A filter renormalizes the sampler's log-probs but not the trainer's: the ratios would compare unlike values.
        rule = "the trainer's log-probs are those of the whole distribution"
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature = 0.0: greedy answers are not samples of the policy; raise it")
        if self.sampling.reshapes:
            raise ValueError(f"sampling.{self.sampling.reshapes}: {rule}; remove it")
        if self.sampling.stop and isinstance(self.ahead, PartialRollouts):
            raise ValueError(
                f"sampling.stop = {list(self.sampling.stop)}: a text may lie in two rounds of ahead.type = 'partial'; remove one "
                "of them"
            )
        return self

    @model_validator(mode="after")
    def _check_episode_rewards(self) -> PPOConfig:
        check_episode_rewards(self, self.rewards)
        return self

    def turn_weight(self, source: str) -> float:
        """The weight of a turn's reward that is assigned to the turn itself; 0 if the whole episode earns it."""
        return turn_weight(self, self.rewards, source)

    @model_validator(mode="after")
    def _check_kl(self) -> PPOConfig:
        kl, rollouts = self.kl, self.prompts_per_step * self.samples_per_prompt
        if self.advantage.divides_by_spread and isinstance(kl, KLInReward) and kl.coef > 0:
            raise ValueError(
                f"kl.in = 'reward': {self.advantage.type} divides by the spread or the mean of rewards, which consists only of the penalty where all answers "
                "earn the same, and a penalty added afterwards would have another scale at each prompt; as in its paper, set "
                'kl.in = "loss"'
            )
        if isinstance(kl, KLInReward) and kl.credit == "answer" and not isinstance(self.advantage, GroupAdvantage):
            raise ValueError(
                "kl.credit = 'answer': applies to an estimator that compares the answers to a prompt, and advantage is "
                f'{self.advantage.type}; set kl.credit = "token"'
            )
        if kl.reference_sync and self.optimizer.ema_decay:
            raise ValueError(
                "kl.reference_sync: a reference follows the weights of the policy, and the average of the policy is what it "
                "exports; remove one of them"
            )
        if (
            kl.target and kl.horizon <= 0.2 * rollouts
        ):  # a step changes the coefficient by up to 0.2 * rollouts / horizon
            raise ValueError(
                f"kl.horizon = {kl.horizon}: must be > a fifth of the {rollouts} rollouts of a step, or a step could turn "
                "the coefficient negative; raise it"
            )
        return self

    @model_validator(mode="after")
    def _check_greedy_answers(self) -> PPOConfig:
        if self.estimator is None or not self.estimator.asks_greedy:
            return self
        moved, compared = what_moves_rewards(self.rewards), what_compares_answers(self.rewards)
        found = list(self.by_key)[:1] + [f"ahead.type = {one.type!r}" for one in [self.ahead] if one]
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
    def _check_value_warmup(self) -> PPOConfig:
        if self.uses_values and self.value.warmup_steps >= self.steps:
            raise ValueError(
                f"value.warmup_steps = {self.value.warmup_steps}: must be < steps = {self.steps}, or the policy is never "
                "trained; lower it, or raise steps"
            )
        return self

    @model_validator(mode="after")
    def _check_ahead(self) -> PPOConfig:
        partial = isinstance(self.ahead, PartialRollouts)
        if self.router_replay and (partial or self.by_key):
            rule = (
                f"{'ahead.type = partial' if partial else next(iter(self.by_key))} samples an answer in several calls"
            )
            raise ValueError(
                f"router_replay = true: {rule}, and the experts of one alone are known; remove one of them"
            )
        key = f"ahead.{'staleness' if partial else 'steps'}"
        if self.staleness >= self.steps:
            raise ValueError(
                f"{key} = {self.staleness}: must be < steps = {self.steps}, or the first weights would sample all answers; "
                "lower it, or raise steps"
            )
        decoupled = self.correction.level != "off" and self.correction.pi_old == "trainer"
        if (self.staleness > 1 or partial) and not decoupled:
            what = f"{key} = {self.staleness}" if self.staleness > 1 else "ahead.type = 'partial'"
            raise ValueError(
                f"{what}: answers sampled by weights that old need the correction pi_old / mu; set correction.pi_old = "
                '"trainer" and a correction.level other than "off"'
            )
        if isinstance(self.ahead, PartialRollouts):
            self._check_rounds(self.ahead)
        return self

    def _check_rounds(self, ahead: PartialRollouts) -> None:
        # Rounds of equal size complete every answer, and a pool of at least a step's groups lets every step finish.
        longest = self.sampling.max_tokens
        if self.by_key:
            raise ValueError(
                "ahead.type = 'partial': the episodes of an agent cannot be carried over; remove one of them"
            )
        if longest % ahead.tokens or ahead.tokens == longest:
            raise ValueError(
                f"ahead.tokens = {ahead.tokens}: must divide sampling.max_tokens = {longest} into two rounds or more; use a "
                "half or a quarter of it"
            )
        if 0 < ahead.in_flight_groups < self.prompts_per_step:
            raise ValueError(
                f"ahead.in_flight_groups = {ahead.in_flight_groups}: must be >= prompts_per_step = {self.prompts_per_step}, "
                "or no step would ever have its groups; raise it"
            )

    @model_validator(mode="after")
    def _check_exports(self) -> PPOConfig:
        check_exports(self.export_every, "steps", self.steps)
        return self

    @model_validator(mode="after")
    def _check_monitors(self) -> PPOConfig:
        late = self.ahead.type if self.ahead and (self.staleness or isinstance(self.ahead, PartialRollouts)) else ""
        check_watched(
            self.evaluate,
            self.monitors,
            self.rewards,
            custom_loss=self.loss.type == "custom",
            uses_reference=self.uses_reference,
            uses_values=self.uses_values,
            uses_teachers=self.distill is not None,
            late=late,
        )
        acts = any(monitor.action != "warn" for monitor in self.monitors)
        chooses = self.evaluate is not None and (self.evaluate.export == "best" or acts)
        if self.export_every and (acts or (self.evaluate is not None and self.evaluate.patience)):
            what = "a monitor" if acts else f"evaluate.patience = {self.evaluate.patience}" if self.evaluate else ""
            raise ValueError(
                f"export_every = {self.export_every}: {what} may end the run or go back before these steps, and their policies "
                "would be missing; remove one of them"
            )
        if chooses and self.optimizer.ema_decay:
            raise ValueError(
                f"optimizer.ema_decay = {self.optimizer.ema_decay}: the average is exported, but evaluations choose the "
                'checkpoint by the trained weights; set it to 0, or choose evaluate.export = "last" and only warn'
            )
        return self


def _what_compares_groups(rewards: RewardsConfig) -> list[str]:
    """List the settings that need several answers to a prompt: normalization turns a single answer's reward into 0."""
    found = ['rewards.composition.type = "gdpo"'] * isinstance(rewards.composition, Gdpo)
    for name, t in rewards.terms.items():
        found += [f'rewards.terms.{name}.normalize = "group"'] * (t.normalize == "group")
        found += [f'rewards.terms.{name}.compares = "group"'] * (t.type == "judge" and t.compares == "group")
    return found


if TYPE_CHECKING:
    PreferenceLoss: TypeAlias = PreferenceMethod
else:
    PreferenceLoss = one_of(preference.METHODS)


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
    """Raise ValueError for a loop that keeps the best checkpoint although `holds_out` holds out no rows for it."""
    for key, loop in loops.items():
        if loop.keep_best and not fraction:
            raise ValueError(
                f"{key}.keep_best = {loop.keep_best}: the best checkpoint is chosen on held-out rows, and there are none; "
                f"raise {holds_out} = {fraction}, or set keep_best to 0"
            )
