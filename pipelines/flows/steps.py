"""Define the tables `[recipe.NAME]` of a profile: a stage or several, with their options and their inputs by name.

An input names a step, a part of `prepare_data` (`base`, `prompts`, ...), the digest of an artifact in the store (`store:3fa9c1d2`) or
the registered `champion`. Neither `stage` nor the names enter a key: the digests of the inputs do.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from pipelines.flows.sections import (
    ConditionalSFTConfig,
    IterativeDPORounds,
    OnlineRounds,
    RejectionSamplingConfig,
    RewardModelSection,
)
from rlhf_core.config.policy import PPOConfig
from rlhf_core.schema.base import OPERATIONAL
from stages.config.distill import DistillConfig
from stages.config.dpo import DPOConfig
from stages.config.generate import GenerateConfig
from stages.config.import_policy import ImportPolicyConfig
from stages.config.import_reward_model import ImportRewardModelConfig
from stages.config.merge import MergeConfig
from stages.config.process_reward_model import ProcessRewardModelConfig
from stages.config.score import ScoreConfig
from stages.config.select import BestOfN, Pairs, PromptsInBand, Threshold, TopK
from stages.config.sft import SFTConfig

Name: TypeAlias = Annotated[str, OPERATIONAL]
"""The name of an input; "" for the one that the text of its field describes."""
Names: TypeAlias = Annotated[tuple[str, ...] | dict[str, str], OPERATIONAL]
"""Several inputs: a list of names, or a table of names by the name that the stage uses."""


class ImportPolicyStep(ImportPolicyConfig):
    """A policy from outside."""

    stage: Annotated[Literal["import_policy"], OPERATIONAL]


class ImportRewardModelStep(ImportRewardModelConfig):
    """A reward model from outside."""

    stage: Annotated[Literal["import_reward_model"], OPERATIONAL]
    policy: Name = "base"
    """The policy whose tokens the model has to know."""


class SFTStep(SFTConfig):
    """Supervised fine-tuning."""

    stage: Annotated[Literal["sft"], OPERATIONAL]
    policy: Name
    demonstrations: Name = "demonstrations"


class RewardModelStep(RewardModelSection):
    """Training of a reward model, or of several (`ensemble`)."""

    stage: Annotated[Literal["reward_model"], OPERATIONAL]
    policy: Name
    """The policy whose weights training starts from."""
    preferences: Name = "preferences"


class ProcessRewardModelStep(ProcessRewardModelConfig):
    """Training of a reward model that scores the steps of an answer."""

    stage: Annotated[Literal["process_reward_model"], OPERATIONAL]
    policy: Name
    steps: Name = "steps"


class DPOStep(DPOConfig):
    """Preference optimization on pairs."""

    stage: Annotated[Literal["dpo"], OPERATIONAL]
    policy: Name
    reference: Name = ""
    """The reference policy; if empty, the policy that training starts from."""
    preferences: Name = "preferences"


class PPOStep(PPOConfig):
    """Policy optimization on rewards."""

    stage: Annotated[Literal["ppo"], OPERATIONAL]
    policy: Name
    reference: Name = ""
    """The reference policy; if empty, the policy that training starts from."""
    prompts: Name = "prompts"
    reward_models: Names = ()
    """The reward models; if empty, those that the terms of `rewards` name."""
    demonstrations: Name = "demonstrations"
    """Demonstrations for `ptx`."""


class DistillStep(DistillConfig):
    """Distillation of one or several teachers, which `teachers` names with their weights, into the student `policy`."""

    stage: Annotated[Literal["distill"], OPERATIONAL]
    policy: Name
    teacher: Name = ""
    """The teacher, if there are no `teachers` with weights; one or the other."""
    demonstrations: Name = "demonstrations"
    prompts: Name = "prompts"


class MergeStep(MergeConfig):
    """The merge of several policies, which `weights` names, into one."""

    stage: Annotated[Literal["merge"], OPERATIONAL]
    base: Name = ""
    """The policy that they started from, for methods that merge changes."""


class GenerateStep(GenerateConfig):
    """Sampling of answers."""

    stage: Annotated[Literal["generate"], OPERATIONAL]
    policy: Name
    prompts: Name = "prompts"


class ScoreStep(ScoreConfig):
    """Rewards for answers."""

    stage: Annotated[Literal["score"], OPERATIONAL]
    generations: Name
    reward_models: Names = ()
    """The reward models; if empty, those that the terms of `rewards` name."""


class BestOfNStep(BestOfN):
    """The best answer to each prompt, as demonstrations."""

    stage: Annotated[Literal["select"], OPERATIONAL]
    rollouts: Name


class TopKStep(TopK):
    """The k best different answers to each prompt, as demonstrations."""

    stage: Annotated[Literal["select"], OPERATIONAL]
    rollouts: Name


class ThresholdStep(Threshold):
    """All different answers with at least a given reward, as demonstrations."""

    stage: Annotated[Literal["select"], OPERATIONAL]
    rollouts: Name


class PairsStep(Pairs):
    """One preferred and one rejected answer per prompt, as preferences."""

    stage: Annotated[Literal["select"], OPERATIONAL]
    rollouts: Name


class RejectionSamplingStep(RejectionSamplingConfig):
    """Fine-tuning on the best of a policy's own answers."""

    stage: Annotated[Literal["rejection_sampling"], OPERATIONAL]
    policy: Name
    prompts: Name = "prompts"
    reward_models: Names = ()
    """The reward models; if empty, those that the terms of `score.rewards` name."""


class ConditionalSFTStep(ConditionalSFTConfig):
    """Fine-tuning on a policy's own answers, conditioned on their rewards."""

    stage: Annotated[Literal["conditional_sft"], OPERATIONAL]
    policy: Name
    prompts: Name = "prompts"
    reward_models: Names = ()
    """The reward models; if empty, those that the terms of `score.rewards` name."""


class IterativeDPOStep(IterativeDPORounds):
    """Rounds of DPO on pairs of a policy's own answers."""

    stage: Annotated[Literal["iterative_dpo"], OPERATIONAL]
    policy: Name
    prompts: Name = "prompts"
    reward_models: Names = ()
    """The reward models; if empty, those that the terms of `score.rewards` name."""


class OnlineStep(OnlineRounds):
    """Rounds of judgments, a refreshed reward model and optimization; `NAME_1`, `NAME_2`, ... are their policies."""

    stage: Annotated[Literal["online"], OPERATIONAL]
    policy: Name
    """The first policy, which is also the reference of all rounds."""
    reward_start: Name = ""
    """The policy whose weights the reward models start from; if empty, the first policy."""
    first_reward_model: Name = "reward_model"
    """The reward model of the first round."""
    preferences: Name = ""
    """Pairs that are there before the first round."""
    prompts: Name = "prompts"
    demonstrations: Name = "demonstrations"
    """Demonstrations for `ppo.ptx`."""


class PromptsInBandStep(PromptsInBand):
    """The prompts that are neither too easy nor too hard."""

    stage: Annotated[Literal["select"], OPERATIONAL]
    rollouts: Name


SelectStep: TypeAlias = Annotated[
    BestOfNStep | TopKStep | ThresholdStep | PairsStep | PromptsInBandStep, Field(discriminator="type")
]
RecipeStep: TypeAlias = Annotated[
    ImportPolicyStep
    | ImportRewardModelStep
    | SFTStep
    | RewardModelStep
    | ProcessRewardModelStep
    | DPOStep
    | PPOStep
    | DistillStep
    | MergeStep
    | GenerateStep
    | ScoreStep
    | SelectStep
    | RejectionSamplingStep
    | ConditionalSFTStep
    | IterativeDPOStep
    | OnlineStep,
    Field(discriminator="stage"),
]
