"""Define the stages as typed calls. A pipeline is a function over `Stages`, which both runs and plans call.

The inputs and engines of a stage are in its row of `stages.table`; the calls here give the built-in stages types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from pydantic import BaseModel

from pipelines.flows.inputs import Opponents
from pipelines.services.home import Home
from pipelines.services.user_servers import registry
from rlhf_core.config.agents import AgentConfig, EpisodeLimits
from rlhf_core.config.engines import RuntimeConfig
from rlhf_core.config.policy import PPOConfig
from rlhf_core.config.rewards import RewardsConfig
from rlhf_core.errors import ConfigError, explain
from rlhf_core.rewards.model import check_reward_models
from rlhf_core.schema.base import Config, keyed
from rlhf_core.stage.key import StageInput, StageSpec
from rlhf_core.store.fingerprint import hash_file
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
from rlhf_core.user_code.dependencies import user_code_digest
from stages.config.collect_preferences import CollectPreferencesConfig
from stages.config.compare_reward_models import CompareRewardModelsConfig
from stages.config.condition import ConditionConfig
from stages.config.distill import DistillConfig
from stages.config.dpo import DPOConfig
from stages.config.evaluate import EvaluateConfig
from stages.config.evaluate_harness import HarnessSuite
from stages.config.evaluate_suite import AnswerSuite
from stages.config.generate import GenerateConfig
from stages.config.import_policy import ImportPolicyConfig
from stages.config.import_reward_model import ImportRewardModelConfig
from stages.config.merge_preferences import MergePreferencesConfig
from stages.config.prepare_data import PrepareDataConfig
from stages.config.process_reward_model import ProcessRewardModelConfig
from stages.config.propose_comparisons import ProposeComparisonsConfig
from stages.config.publish import GateNote, PublishConfig
from stages.config.report_suites import ReportSuitesConfig
from stages.config.reward_model import RewardModelConfig
from stages.config.score import ScoreConfig
from stages.config.select import SelectConfig
from stages.config.sft import SFTConfig
from stages.config.suite_prompts import SuitePromptsConfig
from stages.table import STAGES, Input, Stage

R = TypeVar("R", bound=ArtifactRef)
T = TypeVar("T")
GivenInput: TypeAlias = ArtifactRef | Mapping[str, ArtifactRef] | None
"""An input that a pipeline passes to a stage; None if it is left out."""

FUNCTION_FIELDS = ("function", "gold")


class RunStage(Protocol):
    """A function that returns a stage's artifact: from the store, by running it, or (in a plan) as a placeholder."""

    def __call__(self, spec: StageSpec, kind: type[R]) -> R: ...


class RunGroup(Protocol):
    """A function that runs `body`, whose stages a graph shows as one node. `after` are artifacts that it reads."""

    def __call__(self, label: str, body: Callable[[], T], *, after: Iterable[ArtifactRef]) -> T: ...


def ungrouped(label: str, body: Callable[[], T], *, after: Iterable[ArtifactRef]) -> T:
    """Run `body` where there is no graph to show."""
    return body()


@dataclass(frozen=True)
class Stages:
    """Every stage as a typed call. `label` names the node in tables, graphs and the tracker, not in the key."""

    run_stage: RunStage
    seed: int
    runtime: RuntimeConfig
    champion: Opponents | None = None
    """The champion of the registry and the one before, if a policy has to beat it."""
    decisions: Callable[[], tuple[GateNote, ...]] = tuple
    """Returns the verdicts of the gates so far, for the model card."""
    group: RunGroup = ungrouped

    def prepare_data(self, label: str, config: PrepareDataConfig) -> PreparedDataRef:
        return self.run("prepare_data", label, config, PreparedDataRef)

    def sft(self, label: str, config: SFTConfig, *, policy: PolicyRef, demonstrations: DemonstrationsRef) -> PolicyRef:
        return self.run("sft", label, config, PolicyRef, policy=policy, demonstrations=demonstrations)

    def reward_model(
        self, label: str, config: RewardModelConfig, *, policy: PolicyRef, preferences: PreferencesRef
    ) -> RewardModelRef:
        return self.run("reward_model", label, config, RewardModelRef, policy=policy, preferences=preferences)

    def import_reward_model(self, label: str, config: ImportRewardModelConfig, *, policy: PolicyRef) -> RewardModelRef:
        return self.run("import_reward_model", label, config, RewardModelRef, policy=policy)

    def process_reward_model(
        self, label: str, config: ProcessRewardModelConfig, *, policy: PolicyRef, steps: StepsRef
    ) -> ProcessRewardModelRef:
        return self.run("process_reward_model", label, config, ProcessRewardModelRef, policy=policy, steps=steps)

    def generate(
        self,
        label: str,
        config: GenerateConfig,
        *,
        policy: PolicyRef,
        prompts: PromptsRef,
        asked: PromptsRef | None = None,
    ) -> GenerationsRef:
        return self.run("generate", label, config, GenerationsRef, policy=policy, prompts=prompts, asked=asked)

    def score(
        self,
        label: str,
        config: ScoreConfig,
        *,
        generations: GenerationsRef,
        reward_models: dict[str, RewardModelRef],
    ) -> RolloutsRef:
        return self.run("score", label, config, RolloutsRef, generations=generations, reward_models=reward_models)

    def select_demonstrations(self, label: str, config: SelectConfig, *, rollouts: RolloutsRef) -> DemonstrationsRef:
        return self.run("select", label, config, DemonstrationsRef, rollouts=rollouts)

    def select_pairs(self, label: str, config: SelectConfig, *, rollouts: RolloutsRef) -> PreferencesRef:
        return self.run("select", label, config, PreferencesRef, rollouts=rollouts)

    def condition_demonstrations(
        self, label: str, config: ConditionConfig, *, rollouts: RolloutsRef
    ) -> DemonstrationsRef:
        return self.run("condition", label, config, DemonstrationsRef, rollouts=rollouts)

    def condition_prompts(
        self, label: str, config: ConditionConfig, *, rollouts: RolloutsRef, prompts: PromptsRef
    ) -> PromptsRef:
        return self.run("condition", label, config, PromptsRef, rollouts=rollouts, prompts=prompts)

    def propose_comparisons(
        self, label: str, config: ProposeComparisonsConfig, *, rollouts: Mapping[str, RolloutsRef]
    ) -> ComparisonsRef:
        return self.run("propose_comparisons", label, config, ComparisonsRef, rollouts=rollouts)

    def collect_preferences(
        self, label: str, config: CollectPreferencesConfig, *, comparisons: ComparisonsRef
    ) -> PreferencesRef:
        return self.run("collect_preferences", label, config, PreferencesRef, comparisons=comparisons)

    def merge_preferences(
        self, label: str, config: MergePreferencesConfig, *, preferences: Mapping[str, PreferencesRef]
    ) -> PreferencesRef:
        return self.run("merge_preferences", label, config, PreferencesRef, preferences=preferences)

    def compare_reward_models(
        self,
        label: str,
        config: CompareRewardModelsConfig,
        *,
        reward_models: Mapping[str, RewardModelRef],
        preferences: PreferencesRef,
    ) -> ReportRef:
        return self.run(
            "compare_reward_models", label, config, ReportRef, reward_models=reward_models, preferences=preferences
        )

    def distill(
        self,
        label: str,
        config: DistillConfig,
        *,
        policy: PolicyRef,
        teachers: PolicyRef | Mapping[str, PolicyRef],
        demonstrations: DemonstrationsRef | None = None,
        prompts: PromptsRef | None = None,
    ) -> PolicyRef:
        given = {"demonstrations": demonstrations, "prompts": prompts}
        taught_by = {"teacher" if isinstance(teachers, PolicyRef) else "teachers": teachers}
        return self.run("distill", label, config, PolicyRef, policy=policy, **taught_by, **given)

    def dpo(
        self, label: str, config: DPOConfig, *, policy: PolicyRef, reference: PolicyRef, preferences: PreferencesRef
    ) -> PolicyRef:
        return self.run("dpo", label, config, PolicyRef, policy=policy, reference=reference, preferences=preferences)

    def ppo(
        self,
        label: str,
        config: PPOConfig,
        *,
        policy: PolicyRef,
        reference: PolicyRef,
        prompts: PromptsRef,
        reward_models: dict[str, RewardModelRef],
        demonstrations: DemonstrationsRef | None = None,
    ) -> PolicyRef:
        return self.run(
            "ppo",
            label,
            config,
            PolicyRef,
            policy=policy,
            reference=reference,
            prompts=prompts,
            reward_models=reward_models,
            demonstrations=demonstrations,
        )

    def evaluate(
        self,
        label: str,
        config: EvaluateConfig,
        *,
        generations: dict[str, GenerationsRef],
        reference: PolicyRef,
        reward_model: RewardModelRef | None,
    ) -> ReportRef:
        return self.run(
            "evaluate",
            label,
            config,
            ReportRef,
            generations=generations,
            reference=reference,
            reward_model=reward_model,
        )

    def suite_prompts(self, label: str, config: SuitePromptsConfig) -> PromptsRef:
        return self.run("suite_prompts", label, config, PromptsRef)

    def import_policy(self, label: str, config: ImportPolicyConfig) -> PolicyRef:
        return self.run("import_policy", label, config, PolicyRef)

    def evaluate_suite(
        self,
        label: str,
        config: AnswerSuite,
        *,
        generations: GenerationsRef,
        opponent: GenerationsRef | None = None,
        reward_model: RewardModelRef | None = None,
    ) -> ReportRef:
        return self.run(
            "evaluate_suite",
            label,
            config,
            ReportRef,
            generations=generations,
            opponent=opponent,
            reward_model=reward_model,
        )

    def evaluate_harness(self, label: str, config: HarnessSuite, *, policy: PolicyRef) -> ReportRef:
        return self.run("evaluate_harness", label, config, ReportRef, policy=policy)

    def report_suites(self, label: str, config: ReportSuitesConfig, *, results: Mapping[str, ReportRef]) -> ReportRef:
        return self.run("report_suites", label, config, ReportRef, results=results)

    def publish(
        self,
        label: str,
        config: PublishConfig,
        *,
        policy: PolicyRef,
        report: ReportRef,
        champion: PolicyRef | None = None,
    ) -> PublishedRef:
        decided = config.model_copy(update={"decisions": self.decisions()})
        return self.run("publish", label, decided, PublishedRef, policy=policy, report=report, champion=champion)

    def run(self, name: str, label: str, config: Config, kind: type[R], **given: GivenInput) -> R:
        """Run the stage `name` of the table and return its artifact, of type `kind`.

        `given` are its inputs by name; None, and inputs that the stage does not read under this configuration, are left
        out. Raises TypeError for inputs that the stage does not take, and ConfigError, before any stage runs, if
        something that the configuration needs is missing.
        """
        stage = STAGES[name]
        path = label.replace("/", ".")
        inputs = inputs_of(stage, config, given)
        files = {} if stage.files is None else dict(stage.files(config))
        self._check_reward_models(path, config, inputs)
        self._check_episodes(path, config)
        files |= agent_digests(config, path)
        configured = keyed(self.runtime)
        engines: dict[str, Any] = {engine: configured[engine] for engine in stage.engines if engine != "registry"}
        if files:
            engines["files"] = files
        if "registry" in stage.engines:
            engines["registry"] = registry(Home.here())
        if configured["trainer"]["dtype"] == "bfloat16" and stage.scores(config):
            engines["scalar_heads"] = "float32"  # earlier results were computed in bfloat16 throughout
        functions = reward_functions(config, path)
        for key, function in functions.items():  # now, not after earlier stages have run for hours
            user_code_digest(function, key=key)
        callables = tuple(dict.fromkeys(functions.values()))
        spec = stage.spec(config, inputs, label=label, seed=self.seed, engines=engines, callables=callables)
        return self.run_stage(spec, kind)

    def _check_reward_models(self, path: str, config: Any, inputs: Mapping[str, Any]) -> None:
        """Raise ConfigError for a missing reward model now, not after earlier stages have run for hours."""
        evaluated = getattr(config, "evaluate", None)
        found: dict[str, RewardsConfig | None] = {
            "rewards": getattr(config, "rewards", None),
            "evaluate.independent": getattr(evaluated, "independent", None),
        }
        for key, rewards in found.items():
            if rewards is None or "reward_models" not in inputs:
                continue
            try:
                check_reward_models(rewards, inputs["reward_models"])
            except ConfigError as error:
                raise ConfigError(f"{path}.{key}.{str(error).removeprefix('rewards.')}") from None

    def _check_episodes(self, path: str, config: Any) -> None:
        """Raise ConfigError for episodes that may exceed the sampler's length: the first such one would end the run."""
        agent: AgentConfig | None = getattr(config, "agent", None)
        longest: int | None = getattr(self.runtime.sampler, "max_model_len", None)
        if agent is not None and longest is not None and agent.max_episode_tokens > longest:
            rule, remedy = (
                f"the sampler takes at most {longest} tokens",
                "lower it or raise runtime.sampler.max_model_len",
            )
            raise ConfigError(explain(f"{path}.agent.max_episode_tokens", agent.max_episode_tokens, rule, remedy))


def inputs_of(stage: Stage, config: Config, given: Mapping[str, GivenInput]) -> dict[str, StageInput]:
    """Return the `given` inputs that the stage reads under `config`; raise TypeError if its row has no such input."""
    unknown = given.keys() - stage.inputs.keys()
    if unknown:
        raise TypeError(f"{stage.name}: has no input {', '.join(sorted(unknown))}")
    inputs: dict[str, StageInput] = {}
    for name, row in stage.inputs.items():
        reads = stage.reads_input(name, config)
        value = given.get(name if reads else row.instead)
        if value is not None:
            inputs[name] = _checked(stage.name, name, row, value)
        elif reads and not row.optional:
            raise TypeError(f"{stage.name}: the input {name} is missing")
    return inputs


def _checked(stage: str, name: str, row: Input, value: ArtifactRef | Mapping[str, ArtifactRef]) -> StageInput:
    refs = [value] if isinstance(value, ArtifactRef) else list(value.values())
    if isinstance(value, ArtifactRef) == row.many or not all(isinstance(ref, row.kind) for ref in refs):
        kind = f"a table of {row.kind.__name__}" if row.many else row.kind.__name__
        raise TypeError(f"{stage}: the input {name} must be {kind}, not {value!r}")
    return value if isinstance(value, ArtifactRef) else dict(value)


def agent_digests(config: Any, key: str) -> dict[str, str]:
    """Return the digests of the files that an agent's behavior depends on; raise ConfigError if one is missing."""
    agent = getattr(config, "agent", None)
    if not isinstance(agent, EpisodeLimits):
        return {}
    for name in agent.read_files():
        if not Path(name).is_file():
            raise ConfigError(explain(f"{key}.agent", name, f"there is no such file in {Path.cwd()}", "fix the path"))
    return {name: hash_file(Path(name)) for name in agent.read_files()}


def reward_functions(config: Any, key: str) -> dict[str, str]:
    """Return dotted key -> function that a configuration names in a field called `function` or `gold`."""
    found: dict[str, str] = {}
    if isinstance(config, EpisodeLimits):
        found |= {f"{key}.{function}": function for function in config.callables()}
    elif isinstance(config, BaseModel):
        for name in type(config).model_fields:
            value = getattr(config, name)
            if name in FUNCTION_FIELDS and isinstance(value, str):
                found |= {f"{key}.{name}": value} if value else {}
            else:
                found |= reward_functions(value, f"{key}.{name}")
    elif isinstance(config, Mapping):
        for name, value in config.items():
            found |= reward_functions(value, f"{key}.{name}")
    elif isinstance(config, (list, tuple)):
        for index, value in enumerate(config):
            found |= reward_functions(value, f"{key}[{index}]")
    return found
