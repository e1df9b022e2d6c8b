"""The stages: one declaration each, from which its key, form, deployment and typed call in a pipeline are made.

A declaration is a signature without a body: the function `run` in the stage's module has the same inputs and does the work.
Planning imports this table and the configurations, never the modules of the stages, which import torch and more. The
stages do not import it either: the code of a strict stage is part of its key, and a new declaration must not change that.

To add a stage see docs/add_a_stage.md.
"""

# mypy: disable-error-code="empty-body"
# A declaration returns nothing; the stage's `run` does.

from collections.abc import Mapping
from typing import Annotated

from rlhf_core.config.policy import PPOConfig
from rlhf_core.stage.key import StageSpec
from rlhf_core.types import (
    ArtifactRef,
    ComparisonsRef,
    DemonstrationsRef,
    GenerationsRef,
    ModelRef,
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
from stages.config import measured
from stages.config.checkpoint import CheckpointConfig
from stages.config.collect_preferences import CollectPreferencesConfig
from stages.config.collect_preferences import content_digests as annotator_files
from stages.config.compare_reward_models import CompareRewardModelsConfig
from stages.config.condition import ConditionConfig
from stages.config.distill import DistillConfig
from stages.config.dpo import DPOConfig
from stages.config.evaluate import EvaluateConfig
from stages.config.evaluate_harness import HarnessSuite
from stages.config.evaluate_harness import content_digests as harness_files
from stages.config.evaluate_suite import AnswerSuiteConfig
from stages.config.evaluate_suite import content_digests as measured_files
from stages.config.generate import GenerateConfig
from stages.config.import_policy import ImportPolicyConfig
from stages.config.import_policy import content_digests as policy_files
from stages.config.import_reward_model import ImportRewardModelConfig
from stages.config.import_reward_model import content_digests as reward_model_files
from stages.config.measured import Numbers, Specs
from stages.config.merge import MergeConfig
from stages.config.merge_preferences import MergePreferencesConfig
from stages.config.mix import MixConfig
from stages.config.prepare_data import PrepareDataConfig
from stages.config.prepare_data import content_digests as prepared_files
from stages.config.process_reward_model import ProcessRewardModelConfig
from stages.config.propose_comparisons import ProposeComparisonsConfig
from stages.config.publish import PublishConfig
from stages.config.report_suites import ReportSuitesConfig
from stages.config.reward_model import RewardModelConfig
from stages.config.score import ScoreConfig
from stages.config.select import AnySelectConfig
from stages.config.sft import SFTConfig
from stages.config.suite_prompts import SuitePromptsConfig
from stages.config.suite_prompts import content_digests as prompt_files
from stages.config.suites import suite_digests
from stages.config.synthesize import SynthesizeConfig
from stages.declaration import STAGES, From, stage


def numbers_of(spec: StageSpec, specs: Specs) -> Numbers | None:
    """Return the names of the numbers of a stage among those of its pipeline, None for a stage that is not declared."""
    return STAGES[spec.name].metrics(spec, specs) if spec.name in STAGES else None


def rows_by_table(spec: StageSpec, specs: Specs) -> Numbers:
    """The numbers of a mix. They are not in `measured`, whose code is in the keys of strict stages that import it."""
    rows = [f"tables/*/*/{name}" for name in ("taken", "repeated", "left_out")]
    return Numbers((*measured.SPLITS, "repeated", "moved", "left_out"), ("rows", *rows))


# ---------------------------------------------------------------- the stages


@stage(
    version=3,
    code="strict",
    engines=(),
    section="prepare_data",
    page="prepare_data.md",
    metrics=measured.prepare_data,
    files=prepared_files,
)
def prepare_data(
    config: PrepareDataConfig,
    *,
    suites: Annotated[Mapping[str, PromptsRef] | None, From({}, when=lambda config: config.suite_ngram > 0)] = None,
) -> PreparedDataRef:
    """Read or generate the data, and make the base model. With `suite_ngram`, leave out training rows with prompts of `suites`."""


@stage(
    version=2,
    code="warn",
    engines=("trainer",),
    section="sft",
    page="stages.md",
    metrics=measured.training("train_samples", "train_documents", "dropped_answers"),
)
def sft(
    config: SFTConfig,
    *,
    policy: Annotated[PolicyRef, From("prepare_data.base")],
    demonstrations: Annotated[DemonstrationsRef, From("prepare_data.demonstrations")],
) -> PolicyRef:
    """Supervised fine-tuning of `policy` on `demonstrations`."""


@stage(
    version=3,
    code="warn",
    engines=("trainer",),
    section="reward_model",
    page="reward_model.md",
    metrics=measured.reward_model,
    files=suite_digests,
)
def reward_model(
    config: RewardModelConfig,
    *,
    policy: Annotated[PolicyRef, From("sft")],
    preferences: Annotated[PreferencesRef, From("prepare_data.preferences")],
) -> RewardModelRef:
    """A reward model from the weights of `policy`, on `preferences`."""


@stage(
    version=1,
    code="warn",
    engines=("trainer",),
    page="reward_model.md",
    metrics=measured.fixed("probe/mean", "probe/std", "probes"),
    files=reward_model_files,
)
def import_reward_model(
    config: ImportRewardModelConfig, *, policy: Annotated[PolicyRef, From("prepare_data.base", default="base")]
) -> RewardModelRef:
    """A reward model from outside, checked against the tokens of `policy`."""


@stage(
    version=3,
    code="warn",
    engines=("trainer",),
    section="process_reward_model",
    page="reward_model.md",
    metrics=measured.process_reward_model,
)
def process_reward_model(
    config: ProcessRewardModelConfig,
    *,
    policy: Annotated[PolicyRef, From("sft")],
    steps: Annotated[StepsRef, From("prepare_data.steps")],
) -> ProcessRewardModelRef:
    """A model from the weights of `policy` that judges the steps of an answer, on judged `steps`."""


@stage(
    version=3,
    code="warn",
    engines=("sampler",),
    section="rejection_sampling.generate",
    page="stages.md",
    metrics=measured.fixed(*measured.SAMPLES),
)
def generate(
    config: GenerateConfig,
    *,
    policy: Annotated[PolicyRef, From("sft")],
    prompts: Annotated[PromptsRef, From("prepare_data.prompts")],
    asked: Annotated[PromptsRef | None, From("")] = None,
) -> GenerationsRef:
    """Completions of `policy` for `prompts`. `asked`: reworded prompts to send instead (`conditional_sft/ask`)."""


@stage(
    version=4,
    code="warn",
    engines=("trainer",),
    section="rejection_sampling.score",
    page="score.md",
    metrics=measured.score,
)
def score(
    config: ScoreConfig,
    *,
    generations: Annotated[GenerationsRef, From("generate")],
    reward_models: Annotated[Mapping[str, ModelRef], From({"reward_model": "reward_model"})],
) -> RolloutsRef:
    """Rewards for `generations`; `reward_models` may be policies that judge."""


@stage(
    version=1, code="strict", engines=(), section="rejection_sampling.select", page="stages.md", metrics=measured.select
)
def select(
    config: AnySelectConfig,
    *,
    rollouts: Annotated[RolloutsRef | None, From("score")] = None,
    pool: Annotated[Mapping[str, RolloutsRef] | None, From({})] = None,
) -> ArtifactRef:
    """Demonstrations, pairs or prompts from `rollouts`, or from the rollouts of several policies in `pool`."""


@stage(version=2, code="warn", engines=("sampler",), page="stages.md", metrics=measured.fixed(*measured.SYNTHESIZED))
def synthesize(
    config: SynthesizeConfig,
    *,
    prompts: Annotated[PromptsRef, From("prepare_data.prompts")],
    policy: Annotated[PolicyRef | None, From("sft", when=lambda config: config.uses_policy, default="base")] = None,
) -> ArtifactRef:
    """Demonstrations, prompts, pairs or generations that `policy`, or the model at `config.server`, writes from `prompts`."""


@stage(
    version=1,
    code="strict",
    engines=(),
    section="conditional_sft.condition",
    page="stages.md",
    metrics=measured.fixed("prompts", "level", "level_*", *measured.SPLITS, "truncated", "invalid"),
)
def condition(
    config: ConditionConfig,
    *,
    rollouts: Annotated[RolloutsRef, From("score")],
    prompts: Annotated[PromptsRef | None, From("")] = None,
) -> ArtifactRef:
    """Demonstrations from `rollouts` whose prompts name the level of the answer, or `prompts` that request the best level."""


@stage(
    version=1,
    code="strict",
    engines=(),
    section="online.propose",
    page="online.md",
    metrics=measured.propose_comparisons,
)
def propose_comparisons(
    config: ProposeComparisonsConfig, *, rollouts: Annotated[Mapping[str, RolloutsRef], From({"policy": "score"})]
) -> ComparisonsRef:
    """The pairs among the answers in `rollouts` that are worth a judgment."""


@stage(
    version=1,
    code="warn",
    engines=(),
    section="online.collect",
    page="online.md",
    metrics=measured.collect_preferences,
    files=annotator_files,
)
def collect_preferences(
    config: CollectPreferencesConfig, *, comparisons: Annotated[ComparisonsRef, From("propose_comparisons")]
) -> PreferencesRef:
    """Preference pairs from annotators who judge `comparisons`."""


@stage(
    version=1,
    code="strict",
    engines=(),
    page="online.md",
    metrics=measured.fixed(*measured.SPLITS, "moved", "duplicates"),
)
def merge_preferences(
    config: MergePreferencesConfig,
    *,
    preferences: Annotated[
        Mapping[str, PreferencesRef], From({"prepared": "prepare_data.preferences", "collected": "collect_preferences"})
    ],
) -> PreferencesRef:
    """The union of several sets of `preferences`."""


@stage(
    version=1,
    code="strict",
    engines=(),
    page="stages.md",
    metrics=rows_by_table,
)
def mix(
    config: MixConfig, *, tables: Annotated[Mapping[str, ArtifactRef], From({"first": "prepare_data.demonstrations"})]
) -> ArtifactRef:
    """One table of several `tables` of the same kind: all rows, or rows by shares of the tables or of their sources."""


@stage(
    version=1,
    code="strict",
    engines=("trainer",),
    page="online.md",
    metrics=measured.compare_reward_models,
    judges=("reward_models", "after"),
    files=suite_digests,
)
def compare_reward_models(
    config: CompareRewardModelsConfig,
    *,
    reward_models: Annotated[Mapping[str, RewardModelRef], From({"reward_model": "reward_model"})],
    preferences: Annotated[PreferencesRef, From("collect_preferences")],
) -> ReportRef:
    """Accuracy and calibration of several `reward_models` on the same `preferences`."""


@stage(
    version=2,
    code="warn",
    engines=("trainer", "sampler"),
    section="distill",
    page="distill.md",
    metrics=measured.training("train_samples"),
)
def distill(
    config: DistillConfig,
    *,
    policy: Annotated[PolicyRef, From("prepare_data.base")],
    teacher: Annotated[PolicyRef | None, From("ppo", when=lambda config: not config.teachers)] = None,
    teachers: Annotated[
        Mapping[str, PolicyRef] | None, From({"sft": "sft", "ppo": "ppo"}, when=lambda config: bool(config.teachers))
    ] = None,
    demonstrations: Annotated[
        DemonstrationsRef | None, From("prepare_data.demonstrations", when=lambda config: not config.on_policy)
    ] = None,
    prompts: Annotated[PromptsRef | None, From("prepare_data.prompts", when=lambda config: config.on_policy)] = None,
) -> PolicyRef:
    """Distillation of `teacher`, or of all `teachers` that have a weight in `config.teachers`, into `policy`; on `prompts` if `config.on_policy`, else on `demonstrations`."""


@stage(version=1, code="warn", engines=(), page="recipes.md", metrics=measured.fixed("tensors", "parameters"))
def merge(
    config: MergeConfig,
    *,
    policies: Annotated[Mapping[str, PolicyRef], From({"sft": "sft", "ppo": "ppo"})],
    base: Annotated[PolicyRef | None, From("prepare_data.base", when=lambda config: config.uses_base)] = None,
) -> PolicyRef:
    """The merge of `policies`, or of their changes from `base`, into one policy."""


@stage(
    version=3,
    code="warn",
    engines=("trainer",),
    section="iterative_dpo.dpo",
    page="dpo.md",
    metrics=measured.training("train_pairs", "dropped_pairs", "train_answers", "dropped_answers"),
)
def dpo(
    config: DPOConfig,
    *,
    policy: Annotated[PolicyRef, From("sft")],
    reference: Annotated[PolicyRef, From("sft", when=lambda config: config.loss.uses_reference, instead="policy")],
    preferences: Annotated[PreferencesRef, From("prepare_data.preferences")],
) -> PolicyRef:
    """Direct preference optimization of `policy` on `preferences`."""


@stage(version=5, code="warn", engines=("trainer", "sampler"), section="ppo", page="ppo.md", metrics=measured.ppo)
def ppo(
    config: PPOConfig,
    *,
    policy: Annotated[PolicyRef, From("sft")],
    reference: Annotated[PolicyRef, From("sft", when=lambda config: config.uses_reference, instead="policy")],
    prompts: Annotated[PromptsRef, From("prepare_data.prompts")],
    reward_models: Annotated[Mapping[str, ModelRef], From({"reward_model": "reward_model"})],
    demonstrations: Annotated[
        DemonstrationsRef | None, From("prepare_data.demonstrations", when=lambda config: config.ptx is not None)
    ] = None,
    teachers: Annotated[
        Mapping[str, PolicyRef] | None, From({"sft": "sft"}, when=lambda config: config.distill is not None)
    ] = None,
    critic: Annotated[ModelRef | None, From("")] = None,
) -> PolicyRef:
    """Policy optimization of `policy` on `prompts`, kept close to `reference`, which is not needed if no setting uses it.

    `demonstrations` are for `config.ptx`, `teachers` for `config.distill`; a value model starts from `critic` if it is given."""


@stage(
    version=2,
    code="strict",
    engines=("trainer",),
    section="evaluate.evaluate",
    page="evaluation.md",
    metrics=measured.evaluate,
)
def evaluate(
    config: EvaluateConfig,
    *,
    generations: Annotated[
        Mapping[str, GenerationsRef], From({"sft": "evaluate/sft/generate", "ppo": "evaluate/ppo/generate"})
    ],
    reference: Annotated[PolicyRef, From("sft")],
    reward_model: Annotated[RewardModelRef | None, From("reward_model")] = None,
) -> ReportRef:
    """One report over the `generations` of several policies; an empty `reward_model` leaves its column out."""


@stage(
    version=1,
    code="strict",
    engines=(),
    page="evaluation.md",
    metrics=measured.fixed("prompts", "slices"),
    files=prompt_files,
)
def suite_prompts(config: SuitePromptsConfig) -> PromptsRef:
    """The prompts of a suite, from a local file."""


@stage(version=1, code="warn", engines=(), page="evaluation.md", metrics=measured.fixed(), files=policy_files)
def import_policy(config: ImportPolicyConfig) -> PolicyRef:
    """A policy from outside, to be evaluated beside those of the pipeline."""


@stage(version=3, code="warn", engines=("trainer",), page="evaluation.md", metrics=measured.suite, files=measured_files)
def evaluate_suite(
    config: AnswerSuiteConfig,
    *,
    generations: Annotated[GenerationsRef, From("generate")],
    opponent: Annotated[GenerationsRef | None, From("", when=lambda config: config.type == "judge")] = None,
    reward_model: Annotated[
        RewardModelRef | None, From("reward_model", when=lambda config: config.type == "reward_model")
    ] = None,
) -> ReportRef:
    """One suite on the `generations` of one policy; a judge compares them with those of `opponent`."""


@stage(
    version=2,
    code="warn",
    engines=("trainer", "sampler"),
    page="evaluation.md",
    metrics=measured.suite,
    files=harness_files,
)
def evaluate_harness(config: HarnessSuite, *, policy: Annotated[PolicyRef, From("ppo")]) -> ReportRef:
    """Tasks of EleutherAI's evaluation harness on one `policy`."""


@stage(version=1, code="strict", engines=(), page="recipes.md", metrics=measured.fixed("step"))
def checkpoint(config: CheckpointConfig, *, policy: Annotated[PolicyRef, From("ppo")]) -> PolicyRef:
    """The policy after one step of the training of `policy`, which exported it (`export_every`)."""


@stage(version=1, code="strict", engines=(), page="evaluation.md", metrics=measured.report_suites)
def report_suites(
    config: ReportSuitesConfig, *, results: Annotated[Mapping[str, ReportRef], From({"suite/sft": "evaluate_suite"})]
) -> ReportRef:
    """One report over the `results` of all suites and policies, named `<suite>/<policy>`."""


@stage(
    version=1,
    code="strict",
    engines=("registry",),
    section="publish",
    page="stages.md",
    metrics=measured.fixed("gate/passed", "gate/checks"),
)
def publish(
    config: PublishConfig,
    *,
    policy: Annotated[PolicyRef, From("ppo")],
    report: Annotated[ReportRef, From("evaluate")],
    champion: Annotated[PolicyRef | None, From("")] = None,
) -> PublishedRef:
    """Gate, model card and registration of `policy`, which has to beat `champion` (if empty, the current one) under `config.challenge`."""
