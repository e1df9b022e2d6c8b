"""Define the sections of a profile that combine stages or name the artifacts that their stage starts from."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from rlhf_core.config.exports import refuse_exports
from rlhf_core.config.models import PretrainedModel
from rlhf_core.config.policy import PPOConfig, check_best
from rlhf_core.config.teachers import TeacherName
from rlhf_core.schema.base import OPERATIONAL, Config, added_option
from stages.collect_preferences import CollectPreferencesConfig
from stages.condition import ConditionConfig
from stages.distill import DistillConfig
from stages.dpo import DPOConfig
from stages.evaluate import EvaluateConfig
from stages.evaluate_harness import HarnessSuite
from stages.evaluate_suite import AnswerSuite, PassAtKSuite
from stages.generate import GenerateConfig
from stages.propose_comparisons import ProposeComparisonsConfig
from stages.reward_model import Member, RewardModelConfig
from stages.score import ScoreConfig
from stages.select import SelectConfig, check_one_policy
from stages.sft import SFTConfig

Start = Literal["base", "sft", "rejection_sampling", "dpo", "iterative_dpo"]
Teacher = Literal["sft", "rejection_sampling", "dpo", "iterative_dpo", "ppo"]
POLICY_SECTIONS = ("sft", "rejection_sampling", "conditional_sft", "dpo", "iterative_dpo", "online", "ppo", "distill")


class RewardEnsembleConfig(Config):
    """Several reward models in place of one, as stages `reward_model/1` to `reward_model/<members>`."""

    members: int = Field(3, ge=2)
    """Number of reward models."""
    by: Literal["seeds", "folds"] = "seeds"
    """Difference of the members: the seed alone (`seeds`), or also which fold of the prompts a member is not trained on (`folds`)."""


class RewardModelSection(RewardModelConfig):
    """Training of a reward model, or of several of them."""

    ensemble: Annotated[RewardEnsembleConfig | None, OPERATIONAL] = added_option(None)
    """Trains several reward models. Not part of the key, because each member's number and kind are."""

    def stage_configs(self, name: str = "reward_model") -> dict[str, RewardModelConfig]:
        """Configuration of each reward model by its label, which begins with the `name` of the step.

        >>> list(RewardModelSection(ensemble=RewardEnsembleConfig(members=2)).stage_configs())
        ['reward_model/1', 'reward_model/2']
        """
        fields = {field: getattr(self, field) for field in RewardModelConfig.model_fields}
        if self.ensemble is None:
            return {name: RewardModelConfig(**fields)}
        members = self.ensemble.members
        return {
            f"{name}/{number}": RewardModelConfig(
                **fields | {"member": Member(number=number, of=members, by=self.ensemble.by)}
            )
            for number in range(1, members + 1)
        }


class RejectionSamplingConfig(Config):
    """Sample and score answers, keep the best, fine-tune on them: generate -> score -> select -> sft."""

    generate: GenerateConfig
    score: ScoreConfig
    select: SelectConfig
    sft: SFTConfig

    @model_validator(mode="after")
    def _check_keep_best(self) -> RejectionSamplingConfig:
        check_best("select.eval_fraction", self.select.eval_fraction, {"sft.loop": self.sft.loop})
        refuse_exports({"sft": self.sft})
        return self


class ConditionalSFTConfig(Config):
    """Sample, score, and fine-tune on all answers conditioned on the score: generate -> score -> condition -> sft."""

    generate: GenerateConfig
    score: ScoreConfig
    condition: ConditionConfig = ConditionConfig()
    sft: SFTConfig

    @model_validator(mode="after")
    def _check_keep_best(self) -> ConditionalSFTConfig:
        check_best("condition.eval_fraction", self.condition.eval_fraction, {"sft.loop": self.sft.loop})
        refuse_exports({"sft": self.sft})
        return self


class OfflineDPOConfig(DPOConfig):
    """Preference optimization on the prepared pairs, its initial policy and its reference."""

    start_from: Annotated[Literal["base", "sft", "rejection_sampling"], OPERATIONAL] = "sft"
    """The policy that training starts from. Not part of the key, because the digest of the policy is."""
    reference: Annotated[str, OPERATIONAL] = added_option("")
    """The step of the recipe whose policy is the reference; if empty, the policy that training starts from."""


class RoundsFrom(Config):
    """Rounds and their first policy, in this order even where another class holds the other options."""

    rounds: int
    start_from: str


class IterativeDPORounds(Config):
    """Rounds of generate -> score -> select (pairs) -> dpo, each starting from the policy of the previous round."""

    rounds: int = Field(2, ge=1)
    reference: Literal["initial", "previous"] = "initial"
    """Reference policy: `initial` keeps every round close to the first policy, `previous` uses the last round's."""
    generate: GenerateConfig
    score: ScoreConfig
    select: SelectConfig
    dpo: DPOConfig

    @model_validator(mode="after")
    def _check_keep_best(self) -> IterativeDPORounds:
        check_best("select.eval_fraction", self.select.eval_fraction, {"dpo.loop": self.dpo.loop})
        refuse_exports({"dpo": self.dpo})
        check_one_policy(self.select)
        return self


class IterativeDPOConfig(IterativeDPORounds, RoundsFrom):
    """Rounds of DPO, and their first policy."""

    start_from: Literal["base", "sft", "rejection_sampling"] = "sft"


class OnlineRounds(Config):
    """Rounds of generate -> score -> propose -> collect -> reward model -> dpo or ppo, on the current policy's answers."""

    rounds: int = Field(3, ge=1)
    refresh: bool = True
    """Whether each round trains a reward model on all pairs so far; otherwise `[reward_model]` serves in all rounds."""
    generate: GenerateConfig
    score: ScoreConfig = ScoreConfig()
    propose: ProposeComparisonsConfig = ProposeComparisonsConfig()
    collect: CollectPreferencesConfig
    reward_model: RewardModelConfig = RewardModelConfig()
    """Training of the reward model of each round, always from the same weights."""
    dpo: DPOConfig | None = None
    """Optimization of the policy on the pairs of the round; `dpo` or `ppo`."""
    ppo: PPOConfig | None = None
    """Optimization of the policy on the reward model of the round."""

    @property
    def uses_demonstrations(self) -> bool:
        """Whether demonstrations are mixed into the updates of PPO."""
        return self.ppo is not None and self.ppo.ptx is not None

    @model_validator(mode="after")
    def _check_one_optimizer(self) -> OnlineRounds:
        if (self.dpo is None) == (self.ppo is None):
            found = "neither" if self.dpo is None else "both"
            raise ValueError(f"the profile has {found} of [online.dpo] and [online.ppo]; give one of them")
        if self.ppo is not None and self.ppo.distill is not None:
            raise ValueError("ppo.distill = {...}: rounds have no teachers; distill in a step of its own")
        if self.refresh and not self.collect.eval_fraction:
            raise ValueError(
                "collect.eval_fraction = 0.0: each refreshed reward model is compared with the one before on held-out "
                "pairs; raise it, or set refresh = false"
            )
        loops = {"dpo.loop": self.dpo.loop} if self.dpo else {}
        check_best("collect.eval_fraction", self.collect.eval_fraction, loops)
        refuse_exports({"dpo": self.dpo, "ppo": self.ppo})
        return self


class OnlineConfig(OnlineRounds, RoundsFrom):
    """Rounds of the online loop, and their first policy."""

    start_from: Annotated[Literal["base", "sft", "rejection_sampling"], OPERATIONAL] = "sft"
    """The first policy, which is also the reference of all rounds. Not part of the key, because its digest is."""


class PolicyOptimizationConfig(PPOConfig):
    """Policy optimization and its initial policy, which is also its reference."""

    start_from: Annotated[Start, OPERATIONAL] = "sft"
    """The policy that training starts from. Not part of the key, because the digest of the policy is."""
    critic: Annotated[str, OPERATIONAL] = added_option("")
    """The policy or reward model whose weights the value model starts from; if empty, a reward model, or else the policy."""


class DistillationConfig(DistillConfig):
    """Distillation, its student and its teachers. On-policy it uses the prompts, otherwise the demonstrations."""

    start_from: Annotated[Start, OPERATIONAL] = "base"
    """The student. Not part of the key, because the digest of the policy is; the same holds for the teacher."""
    teacher: Annotated[Teacher, OPERATIONAL] = "ppo"
    """The teacher, if there are no `teachers` with weights; one or the other."""
    external: Annotated[dict[TeacherName, PretrainedModel], OPERATIONAL] = added_option({})
    """Policies from outside by name, which `teachers` gives a weight: `big = {path = ...}`, a folder, a Hub name with
    `revision`, or `package:<python package>/<folder>`, with a chat template. Their tokenizers may differ from the
    student's."""

    @model_validator(mode="after")
    def _check_external_teachers(self) -> DistillationConfig:
        if self.teachers and self.teacher != type(self).model_fields["teacher"].default:
            raise ValueError(
                f"teacher = {self.teacher!r}: is not read beside teachers, which have the weights; remove it (teacher = none "
                f"with --set), and add teachers.{self.teacher} = 1.0 if it is to teach, too"
            )
        for name in self.external:
            if name in ("base", *POLICY_SECTIONS):
                raise ValueError(f"external.{name} = {{...}}: is the name of a section; give the policy another name")
            if name not in self.teachers:
                raise ValueError(f"external.{name} = {{...}}: has no weight; add distill.teachers.{name} = 1.0")
        for name, weight in self.teachers.items():
            if name not in (*get_args(Teacher), *self.external):
                raise ValueError(
                    f"teachers.{name} = {weight}: there is no such teacher; name one of {', '.join(get_args(Teacher))}, "
                    f"or add distill.external.{name}"
                )
        return self

    def sections(self) -> list[str]:
        """Sections whose policies are teachers.

        >>> DistillationConfig(teachers={"sft": 1.0, "ppo": 2.0}).sections(), DistillationConfig().sections()
        (['sft', 'ppo'], ['ppo'])
        """
        return [name for name in self.teachers if name not in self.external] if self.teachers else [self.teacher]


Suite = Annotated[AnswerSuite | HarnessSuite, Field(discriminator="type")]


class BaselineConfig(Config):
    """A policy from outside that takes part in the suites."""

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*$")
    """Name in labels and in the report."""
    model: PretrainedModel
    """A causal language model with a chat template: `{path = ...}`, a folder, a Hub name with `revision`, or
    `package:<python package>/<folder>`."""


class EvaluationConfig(Config):
    """Sampling of every policy's answers to the held-out prompts, and their comparison in one report."""

    generate: GenerateConfig
    """Sampling of the answers. A policy in `evaluate.best_of` answers each prompt as often as given there."""
    evaluate: EvaluateConfig = EvaluateConfig()
    suites: tuple[Suite, ...] = added_option(())
    """Further measures of every policy, each a separate stage, in a report over all of them (docs/evaluation.md)."""
    baselines: tuple[BaselineConfig, ...] = added_option(())
    """Policies from outside that the suites measure alongside the policies of the pipeline."""

    @model_validator(mode="after")
    def _check_suites(self) -> EvaluationConfig:
        for kind, names in (
            ("suites", [suite.name for suite in self.suites]),
            ("baselines", [baseline.name for baseline in self.baselines]),
        ):
            for index, name in enumerate(names):
                if name in names[:index]:
                    raise ValueError(
                        f"{kind}[{index}].name = {name!r}: is the name of two {kind}; give one another name"
                    )
        if self.baselines and not self.suites:
            raise ValueError("baselines = [...]: only suites measure them; add [[evaluate.suites]]")
        for index, suite in enumerate(self.suites):
            if not isinstance(suite, PassAtKSuite):
                continue
            samples = (suite.generate or self.generate).samples_per_prompt
            if suite.prompts is None and suite.generate in (None, self.generate):
                samples = min([samples, *self.evaluate.best_of.values()])  # whose answers there are
            if max(suite.k) > samples:
                raise ValueError(
                    f"suites[{index}].k = {list(suite.k)}: needs {max(suite.k)} answers to each prompt, and there are "
                    f"{samples}; raise samples_per_prompt in the suite's generate (or evaluate.best_of)"
                )
        return self
