"""The stages: one declaration each, from which its key, form, deployment and typed call in a pipeline are made.

A declaration is a signature without a body: the function `run` in the stage's module has the same inputs and does the work.
Planning imports this table and the configurations, never the modules of the stages, which import torch and more. The
stages do not import it either: the code of a strict stage is part of its key, and a new declaration must not change that.

To add a stage see docs/add_a_stage.md.
"""

# mypy: disable-error-code="empty-body"
# A declaration returns nothing; the stage's `run` does.

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, ParamSpec, TypeAlias, TypeVar, get_args, get_type_hints

from rlhf_core.config.policy import PPOConfig
from rlhf_core.schema.base import Config
from rlhf_core.stage.key import CodePolicy, StageInput, StageSpec
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

P = ParamSpec("P")
R = TypeVar("R", bound=ArtifactRef)
Engine: TypeAlias = Literal["trainer", "sampler", "registry"]
"""Services that a stage uses: engines of the runtime, and the registry of models."""


def always(config: Any) -> bool:
    """Return True: the stage reads the input whatever its configuration."""
    return True


@dataclass(frozen=True, slots=True)
class From:
    """Where the form of an input starts, and when the input is read: an annotation of the declaration's argument.

    `start` is the label of the store with which the form in Prefect starts, or several by name where the stage takes a table
    of artifacts. The stage reads the input only if `when` holds for its configuration; otherwise the input named by
    `instead` is used, so unused inputs do not enter the key.
    """

    start: str | Mapping[str, str]
    when: Callable[[Any], bool] = always
    instead: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """An input of a stage: a keyword argument of its `run`. An `optional` one may be left out; the rest is as in `From`.

    >>> sft.inputs["policy"].many, sft.inputs["policy"].start
    (False, 'prepare_data.base')
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
class Stage(Generic[P, R]):
    """A stage as it is declared.

    >>> sft.module, sft.engines
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
    output: type[R]
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
    metrics: Callable[[StageSpec, Specs], Numbers]
    """Returns the names of the metrics of its record and the numbers of its report, which gates and sweeps may name."""
    files: Callable[[Any], Mapping[str, str]] | None = None
    """Returns the digests of the user's files that a configuration names; they are part of the key."""

    @property
    def module(self) -> str:
        """Return the name of the module, which is imported only where the stage runs."""
        return f"stages.{self.name}"

    @property
    def configs(self) -> tuple[type[Config], ...]:
        """Return the classes of the configuration.

        >>> [kind.__name__ for kind in select.configs]
        ['BestOfN', 'TopK', 'Threshold', 'Pairs', 'PromptsInBand']
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
        read = self.inputs_read(config)
        kinds = {self.output, *(self.inputs[name].kind for name in read)}
        return "reward_models" in read or not kinds.isdisjoint({RewardModelRef, ProcessRewardModelRef})

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


STAGES: dict[str, Stage[..., Any]] = {}
"""All stages by name, in the order of their declarations."""


def stage(
    *,
    version: int,
    code: CodePolicy,
    engines: tuple[Engine, ...],
    page: str,
    metrics: Callable[[StageSpec, Specs], Numbers],
    section: str = "",
    judges: tuple[str, ...] = (),
    files: Callable[[Any], Mapping[str, str]] | None = None,
) -> Callable[[Callable[P, R]], Stage[P, R]]:
    """Return what makes a stage of a signature, its docstring and these fields of `Stage`, and adds it to `STAGES`."""

    def declared(signature: Callable[P, R]) -> Stage[P, R]:
        types = get_type_hints(signature, include_extras=True)
        config, output = types.pop("config"), types.pop("return")
        arguments = inspect.signature(signature).parameters
        made: Stage[P, R] = Stage(
            name=signature.__name__,
            version=version,
            code=code,
            config=config,
            inputs={name: _input(kind, arguments[name].default is None) for name, kind in types.items()},
            output=output,
            engines=engines,
            section=section,
            page=page,
            about=inspect.getdoc(signature) or "",
            judges=judges,
            metrics=metrics,
            files=files,
        )
        STAGES[made.name] = made
        return made

    return declared


def _input(annotation: Any, may_be_left_out: bool) -> Input:
    """Return the input of an argument: `Annotated[kind, From(...)]`, where the kind is one, a mapping of it, or optional."""
    kind, given = get_args(annotation)
    if may_be_left_out:
        kind = next(one for one in get_args(kind) if one is not type(None))
    many = not isinstance(kind, type)
    return Input(
        kind=get_args(kind)[1] if many else kind,
        start=given.start,
        optional=may_be_left_out and given.when is always,
        when=given.when,
        instead=given.instead,
    )


def numbers_of(spec: StageSpec, specs: Specs) -> Numbers | None:
    """Return the names of the numbers of a stage among those of its pipeline, None for a stage that is not declared."""
    return STAGES[spec.name].metrics(spec, specs) if spec.name in STAGES else None


# ---------------------------------------------------------------- the stages


@stage(
    version=2,
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
    config: ImportRewardModelConfig, *, policy: Annotated[PolicyRef, From("prepare_data.base")]
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
def select(config: AnySelectConfig, *, rollouts: Annotated[RolloutsRef, From("score")]) -> ArtifactRef:
    """Demonstrations, pairs or prompts from `rollouts`."""


@stage(version=2, code="warn", engines=("sampler",), page="stages.md", metrics=measured.fixed(*measured.SYNTHESIZED))
def synthesize(
    config: SynthesizeConfig,
    *,
    prompts: Annotated[PromptsRef, From("prepare_data.prompts")],
    policy: Annotated[PolicyRef | None, From("sft", when=lambda config: config.server is None)] = None,
) -> ArtifactRef:
    """Demonstrations or prompts that `policy`, or the model at `config.server`, writes from `prompts`."""


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
