"""The stages: one row each. Everything else that lists stages is made from this table or checked against it by a test.

Planning imports this table and the configurations, never the modules of the stages, which import torch and more. The
stages do not import it either: the code of a strict stage is part of its key, and a new row must not change that.

To add a stage see docs/add_a_stage.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from rlhf_core.config.policy import PPOConfig, uses_reference
from rlhf_core.schema.base import Config
from rlhf_core.stage.key import CodePolicy, StageInput, StageSpec
from rlhf_core.types import (
    ArtifactRef,
    ComparisonsRef,
    DemonstrationsRef,
    GenerationsRef,
    PolicyRef,
    PreferencesRef,
    PreparedDataRef,
    ProcessRewardModelRef,
    PromptsRef,
    PublishedRef,
    ReportRef,
    RewardModelRef,
    RolloutsRef,
    StepsRef,
)
from stages.config import (
    collect_preferences,
    evaluate_harness,
    evaluate_suite,
    import_policy,
    import_reward_model,
    prepare_data,
    suite_prompts,
)
from stages.config.compare_reward_models import CompareRewardModelsConfig
from stages.config.condition import ConditionConfig
from stages.config.distill import DistillConfig
from stages.config.dpo import DPOConfig
from stages.config.evaluate import EvaluateConfig
from stages.config.generate import GenerateConfig
from stages.config.merge_preferences import MergePreferencesConfig
from stages.config.process_reward_model import ProcessRewardModelConfig
from stages.config.propose_comparisons import ProposeComparisonsConfig
from stages.config.publish import PublishConfig
from stages.config.report_suites import ReportSuitesConfig
from stages.config.reward_model import RewardModelConfig
from stages.config.score import ScoreConfig
from stages.config.select import SelectConfig
from stages.config.sft import SFTConfig
from stages.config.suites import suite_digests

Engine: TypeAlias = Literal["trainer", "sampler", "registry"]
"""Services that a stage uses: engines of the runtime, and the registry of models."""


def always(config: Any) -> bool:
    """Return True: the stage reads the input whatever its configuration."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """An input of a stage: a keyword argument of its `run`.

    `start` is the name that the form in Prefect starts with: a label of the store, or several by name where the stage
    takes a table of artifacts. An `optional` input may be left out. The stage reads the input only if `when` holds for
    its configuration; otherwise the input named by `instead` is used, so unused inputs do not enter the key.

    >>> Input(kind=PolicyRef, start="sft").many
    False
    """

    kind: type[ArtifactRef]
    start: str | Mapping[str, str]
    optional: bool = False
    when: Callable[[Any], bool] = always
    instead: str = ""

    @property
    def many(self) -> bool:
        """Return whether the input is a table of artifacts by name."""
        return not isinstance(self.start, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A row of the table.

    >>> STAGES["sft"].module, STAGES["sft"].engines
    ('stages.sft', ('trainer',))
    """

    name: str
    """Of the module in `stages`, of the flow in Prefect and, with dashes, of its deployment."""
    version: int
    """Part of the key; raised when the same configuration gives another result."""
    code: CodePolicy
    """Whether a change of the code makes a new key (`strict`: stages of seconds) or is only pointed out (`warn`)."""
    config: Any
    """The configuration: a class, or a union of classes discriminated by `type`."""
    inputs: Mapping[str, Input]
    output: type[ArtifactRef]
    """The kind of artifact; `ArtifactRef` where it depends on the configuration or the inputs."""
    engines: tuple[Engine, ...]
    """Engines that the stage leases; their configuration is part of its key."""
    section: str
    """Where a profile configures the stage alone, which fills its form in Prefect; "" if no profile does."""
    page: str
    """Its page in docs."""
    about: str
    """One sentence for the form in Prefect."""
    judges: tuple[str, ...] = ()
    """Input that the stage's report judges, and the entry of that table: a gate after the stage holds it back, too."""
    files: Callable[[Any], Mapping[str, str]] | None = None
    """Returns the digests of the user's files that a configuration names; they are part of the key."""

    @property
    def module(self) -> str:
        """Return the name of the module, which is imported only where the stage runs."""
        return f"stages.{self.name}"

    @property
    def configs(self) -> tuple[type[Config], ...]:
        """Return the classes of the configuration.

        >>> [kind.__name__ for kind in STAGES["select"].configs]
        ['BestOfN', 'TopK', 'Threshold', 'Pairs']
        """
        return (self.config,) if isinstance(self.config, type) else get_args(get_args(self.config)[0])

    def reads_input(self, name: str, config: Config) -> bool:
        """Return whether the stage reads the input `name` under this configuration."""
        return self.inputs[name].when(config)

    def inputs_read(self, config: Config) -> list[str]:
        """Return the names of the inputs that the stage reads under this configuration."""
        return [name for name in self.inputs if self.reads_input(name, config)]

    def scores(self, config: Config) -> bool:
        """Return whether the stage computes rewards, whose heads stay float32 under a bfloat16 trainer."""
        kinds = {self.output, *(self.inputs[name].kind for name in self.inputs_read(config))}
        return not kinds.isdisjoint({RewardModelRef, ProcessRewardModelRef})

    def spec(
        self,
        config: Config,
        inputs: dict[str, StageInput],
        *,
        label: str,
        seed: int,
        engines: dict[str, Any],
        callables: tuple[str, ...] = (),
    ) -> StageSpec:
        """Return the stage with these inputs, ready to be decided on and run."""
        return StageSpec(
            name=self.name,
            module=self.module,
            version=self.version,
            code=self.code,
            config=config,
            inputs=inputs,
            seed=seed,
            label=label,
            engines=engines,
            callables=callables,
        )


_ROWS = (
    Stage(
        name="prepare_data",
        version=2,
        code="strict",
        config=prepare_data.PrepareDataConfig,
        inputs={},
        output=PreparedDataRef,
        engines=(),
        section="prepare_data",
        page="prepare_data.md",
        about="Read or generate the data, and make the base model.",
        files=prepare_data.content_digests,
    ),
    Stage(
        name="sft",
        version=2,
        code="warn",
        config=SFTConfig,
        inputs={
            "policy": Input(kind=PolicyRef, start="prepare_data.base"),
            "demonstrations": Input(kind=DemonstrationsRef, start="prepare_data.demonstrations"),
        },
        output=PolicyRef,
        engines=("trainer",),
        section="sft",
        page="stages.md",
        about="Supervised fine-tuning of `policy` on `demonstrations`.",
    ),
    Stage(
        name="reward_model",
        version=3,
        code="warn",
        config=RewardModelConfig,
        inputs={
            "policy": Input(kind=PolicyRef, start="sft"),
            "preferences": Input(kind=PreferencesRef, start="prepare_data.preferences"),
        },
        output=RewardModelRef,
        engines=("trainer",),
        section="reward_model",
        page="reward_model.md",
        about="A reward model from the weights of `policy`, on `preferences`.",
        files=suite_digests,
    ),
    Stage(
        name="import_reward_model",
        version=1,
        code="warn",
        config=import_reward_model.ImportRewardModelConfig,
        inputs={"policy": Input(kind=PolicyRef, start="prepare_data.base")},
        output=RewardModelRef,
        engines=("trainer",),
        section="",  # where the model is only a person knows
        page="reward_model.md",
        about="A reward model from outside, checked against the tokens of `policy`.",
        files=import_reward_model.content_digests,
    ),
    Stage(
        name="process_reward_model",
        version=3,
        code="warn",
        config=ProcessRewardModelConfig,
        inputs={
            "policy": Input(kind=PolicyRef, start="sft"),
            "steps": Input(kind=StepsRef, start="prepare_data.steps"),
        },
        output=ProcessRewardModelRef,
        engines=("trainer",),
        section="process_reward_model",
        page="reward_model.md",
        about="A model from the weights of `policy` that judges the steps of an answer, on judged `steps`.",
    ),
    Stage(
        name="generate",
        version=3,
        code="warn",
        config=GenerateConfig,
        inputs={
            "policy": Input(kind=PolicyRef, start="sft"),
            "prompts": Input(kind=PromptsRef, start="prepare_data.prompts"),
            "asked": Input(kind=PromptsRef, start="", optional=True),
        },
        output=GenerationsRef,
        engines=("sampler",),
        section="rejection_sampling.generate",
        page="stages.md",
        about="Completions of `policy` for `prompts`. `asked`: reworded prompts to send instead (`conditional_sft/ask`).",
    ),
    Stage(
        name="score",
        version=4,
        code="warn",
        config=ScoreConfig,
        inputs={
            "generations": Input(kind=GenerationsRef, start="generate"),
            "reward_models": Input(kind=RewardModelRef, start={"reward_model": "reward_model"}),
        },
        output=RolloutsRef,
        engines=("trainer",),
        section="rejection_sampling.score",
        page="score.md",
        about="Rewards for `generations`.",
    ),
    Stage(
        name="select",
        version=1,
        code="strict",
        config=SelectConfig,
        inputs={"rollouts": Input(kind=RolloutsRef, start="score")},
        output=ArtifactRef,  # demonstrations, or preferences where the configuration is `pairs`
        engines=(),
        section="rejection_sampling.select",
        page="stages.md",
        about="Demonstrations or pairs from `rollouts`.",
    ),
    Stage(
        name="condition",
        version=1,
        code="strict",
        config=ConditionConfig,
        inputs={
            "rollouts": Input(kind=RolloutsRef, start="score"),
            "prompts": Input(kind=PromptsRef, start="", optional=True),
        },
        output=ArtifactRef,  # demonstrations, or prompts where there are some
        engines=(),
        section="conditional_sft.condition",
        page="stages.md",
        about="Demonstrations from `rollouts` whose prompts name the level of the answer, or `prompts` that request the best level.",
    ),
    Stage(
        name="propose_comparisons",
        version=1,
        code="strict",
        config=ProposeComparisonsConfig,
        inputs={"rollouts": Input(kind=RolloutsRef, start={"policy": "score"})},
        output=ComparisonsRef,
        engines=(),
        section="online.propose",
        page="online.md",
        about="The pairs among the answers in `rollouts` that are worth a judgment.",
    ),
    Stage(
        name="collect_preferences",
        version=1,
        code="warn",  # people's time must not be spent again because a line changed
        config=collect_preferences.CollectPreferencesConfig,
        inputs={"comparisons": Input(kind=ComparisonsRef, start="propose_comparisons")},
        output=PreferencesRef,
        engines=(),
        section="online.collect",
        page="online.md",
        about="Preference pairs from annotators who judge `comparisons`.",
        files=collect_preferences.content_digests,
    ),
    Stage(
        name="merge_preferences",
        version=1,
        code="strict",
        config=MergePreferencesConfig,
        inputs={
            "preferences": Input(
                kind=PreferencesRef, start={"prepared": "prepare_data.preferences", "collected": "collect_preferences"}
            )
        },
        output=PreferencesRef,
        engines=(),
        section="",  # it has no options
        page="online.md",
        about="The union of several sets of `preferences`.",
    ),
    Stage(
        name="compare_reward_models",
        version=1,
        code="strict",
        config=CompareRewardModelsConfig,
        inputs={
            "reward_models": Input(kind=RewardModelRef, start={"reward_model": "reward_model"}),
            "preferences": Input(kind=PreferencesRef, start="collect_preferences"),
        },
        output=ReportRef,
        engines=("trainer",),
        section="",
        page="online.md",
        about="Accuracy and calibration of several `reward_models` on the same `preferences`.",
        files=suite_digests,
        judges=("reward_models", "after"),
    ),
    Stage(
        name="distill",
        version=2,
        code="warn",
        config=DistillConfig,
        inputs={
            "policy": Input(kind=PolicyRef, start="prepare_data.base"),
            "teacher": Input(kind=PolicyRef, start="ppo", when=lambda config: not config.teachers),
            "teachers": Input(
                kind=PolicyRef, start={"sft": "sft", "ppo": "ppo"}, when=lambda config: bool(config.teachers)
            ),
            "demonstrations": Input(
                kind=DemonstrationsRef, start="prepare_data.demonstrations", when=lambda config: not config.on_policy
            ),
            "prompts": Input(kind=PromptsRef, start="prepare_data.prompts", when=lambda config: config.on_policy),
        },
        output=PolicyRef,
        engines=("trainer", "sampler"),
        section="distill",
        page="distill.md",
        about=(
            "Distillation of `teacher`, or of all `teachers` that have a weight in `config.teachers`, into `policy`; "
            "`config.on_policy` says whether on `prompts` or on `demonstrations`."
        ),
    ),
    Stage(
        name="dpo",
        version=3,
        code="warn",
        config=DPOConfig,
        inputs={
            "policy": Input(kind=PolicyRef, start="sft"),
            "reference": Input(
                kind=PolicyRef, start="sft", when=lambda config: uses_reference(config.loss), instead="policy"
            ),
            "preferences": Input(kind=PreferencesRef, start="prepare_data.preferences"),
        },
        output=PolicyRef,
        engines=("trainer",),
        section="iterative_dpo.dpo",
        page="dpo.md",
        about="Direct preference optimization of `policy` on `preferences`.",
    ),
    Stage(
        name="ppo",
        version=5,
        code="warn",
        config=PPOConfig,
        inputs={
            "policy": Input(kind=PolicyRef, start="sft"),
            "reference": Input(
                kind=PolicyRef, start="sft", when=lambda config: config.uses_reference, instead="policy"
            ),
            "prompts": Input(kind=PromptsRef, start="prepare_data.prompts"),
            "reward_models": Input(kind=RewardModelRef, start={"reward_model": "reward_model"}),
            "demonstrations": Input(
                kind=DemonstrationsRef, start="prepare_data.demonstrations", when=lambda config: config.ptx is not None
            ),
        },
        output=PolicyRef,
        engines=("trainer", "sampler"),
        section="ppo",
        page="ppo.md",
        about=(
            "Policy optimization of `policy` on `prompts`, kept close to `reference`, which is not needed if no setting uses it.\n\n"
            "`demonstrations` are for `config.ptx`."
        ),
    ),
    Stage(
        name="evaluate",
        version=2,
        code="strict",
        config=EvaluateConfig,
        inputs={
            "generations": Input(
                kind=GenerationsRef, start={"sft": "evaluate/sft/generate", "ppo": "evaluate/ppo/generate"}
            ),
            "reference": Input(kind=PolicyRef, start="sft"),
            "reward_model": Input(kind=RewardModelRef, start="reward_model", optional=True),
        },
        output=ReportRef,
        engines=("trainer",),
        section="evaluate.evaluate",
        page="evaluation.md",
        about="One report over the `generations` of several policies; an empty `reward_model` leaves its column out.",
    ),
    Stage(
        name="suite_prompts",
        version=1,
        code="strict",
        config=suite_prompts.SuitePromptsConfig,
        inputs={},
        output=PromptsRef,
        engines=(),
        section="",  # which file only a person knows
        page="evaluation.md",
        about="The prompts of a suite, from a local file.",
        files=suite_prompts.content_digests,
    ),
    Stage(
        name="import_policy",
        version=1,
        code="warn",
        config=import_policy.ImportPolicyConfig,
        inputs={},
        output=PolicyRef,
        engines=(),
        section="",
        page="evaluation.md",
        about="A policy from outside, to be evaluated beside those of the pipeline.",
        files=import_policy.content_digests,
    ),
    Stage(
        name="evaluate_suite",
        version=3,
        code="warn",  # judges cost money
        config=evaluate_suite.AnswerSuiteConfig,
        inputs={
            "generations": Input(kind=GenerationsRef, start="generate"),
            "opponent": Input(kind=GenerationsRef, start="", when=lambda config: config.type == "judge"),
            "reward_model": Input(
                kind=RewardModelRef, start="reward_model", when=lambda config: config.type == "reward_model"
            ),
        },
        output=ReportRef,
        engines=("trainer",),
        section="",
        page="evaluation.md",
        about="One suite on the `generations` of one policy; a judge compares them with those of `opponent`.",
        files=evaluate_suite.content_digests,
    ),
    Stage(
        name="evaluate_harness",
        version=2,
        code="warn",
        config=evaluate_harness.HarnessSuite,
        inputs={"policy": Input(kind=PolicyRef, start="ppo")},
        output=ReportRef,
        engines=("trainer", "sampler"),
        section="",
        page="evaluation.md",
        about="Tasks of EleutherAI's evaluation harness on one `policy`.",
        files=evaluate_harness.content_digests,
    ),
    Stage(
        name="report_suites",
        version=1,
        code="strict",
        config=ReportSuitesConfig,
        inputs={"results": Input(kind=ReportRef, start={"suite/sft": "evaluate_suite"})},
        output=ReportRef,
        engines=(),
        section="",
        page="evaluation.md",
        about="One report over the `results` of all suites and policies, named `<suite>/<policy>`.",
    ),
    Stage(
        name="publish",
        version=1,
        code="strict",
        config=PublishConfig,
        inputs={
            "policy": Input(kind=PolicyRef, start="ppo"),
            "report": Input(kind=ReportRef, start="evaluate"),
            "champion": Input(kind=PolicyRef, start="", optional=True),
        },
        output=PublishedRef,
        engines=("registry",),
        section="publish",
        page="stages.md",
        about="Gate, model card and registration of `policy`, which has to beat `champion` if `config.challenge` says so; "
        "if empty, the current one.",
    ),
)

STAGES: Mapping[str, Stage] = MappingProxyType({stage.name: stage for stage in _ROWS})
"""All stages by name."""
