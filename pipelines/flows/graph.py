"""The stages as typed calls. A pipeline is a function over `Stages`; running it and planning it share that function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel

from pipelines.services.home import Home
from pipelines.services.registry import registry
from rlhf_core.config.agents import AgentConfig, EpisodeLimits
from rlhf_core.config.engines import RuntimeConfig
from rlhf_core.config.preference import uses_reference
from rlhf_core.config.rewards import RewardsConfig
from rlhf_core.errors import ConfigError, explain
from rlhf_core.schema.base import Config, keyed
from rlhf_core.stage.key import StageSpec
from rlhf_core.store.fingerprint import hash_file
from rlhf_core.types import (
    ArtifactRef,
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
from stages.condition import ConditionConfig
from stages.distill import DistillConfig
from stages.dpo import DPOConfig
from stages.evaluate import EvaluateConfig
from stages.generate import GenerateConfig
from stages.import_reward_model import ImportRewardModelConfig
from stages.import_reward_model import content_digests as reward_model_digests
from stages.ppo import PPOConfig
from stages.prepare_data import PrepareDataConfig, content_digests
from stages.process_reward_model import ProcessRewardModelConfig
from stages.publish import PublishConfig
from stages.reward_model import RewardModelConfig
from stages.score import ScoreConfig
from stages.select import SelectConfig
from stages.sft import SFTConfig

R = TypeVar("R", bound=ArtifactRef)

ENGINES: Mapping[str, tuple[str, ...]] = {
    "prepare_data": (),
    "sft": ("trainer",),
    "reward_model": ("trainer",),
    "import_reward_model": ("trainer",),
    "process_reward_model": ("trainer",),
    "generate": ("sampler",),
    "score": ("trainer",),
    "select": (),
    "condition": (),
    "distill": ("trainer", "sampler"),
    "dpo": ("trainer",),
    "ppo": ("trainer", "sampler"),
    "evaluate": ("trainer",),
    "publish": (),
}
"""What a stage leases from the runtime; the configuration of these engines is part of its key."""


FUNCTION_FIELDS = ("function", "gold")


class RunStage(Protocol):
    """Returns the artifact of a stage: from the store, by running it, or (in a plan) as a placeholder."""

    def __call__(self, spec: StageSpec, kind: type[R]) -> R: ...


@dataclass(frozen=True)
class Stages:
    """Every stage as a typed call; `label` names the node in tables, graphs and the tracker, not in the key."""

    run_stage: RunStage
    seed: int
    runtime: RuntimeConfig

    def prepare_data(self, label: str, config: PrepareDataConfig) -> PreparedDataRef:
        return self._run("prepare_data", label, config, PreparedDataRef, {}, files=content_digests(config))

    def sft(self, label: str, config: SFTConfig, *, policy: PolicyRef, demonstrations: DemonstrationsRef) -> PolicyRef:
        return self._run("sft", label, config, PolicyRef, {"policy": policy, "demonstrations": demonstrations})

    def reward_model(
        self, label: str, config: RewardModelConfig, *, policy: PolicyRef, preferences: PreferencesRef
    ) -> RewardModelRef:
        return self._run("reward_model", label, config, RewardModelRef, {"policy": policy, "preferences": preferences})

    def import_reward_model(self, label: str, config: ImportRewardModelConfig, *, policy: PolicyRef) -> RewardModelRef:
        files = reward_model_digests(config)
        return self._run("import_reward_model", label, config, RewardModelRef, {"policy": policy}, files=files)

    def process_reward_model(
        self, label: str, config: ProcessRewardModelConfig, *, policy: PolicyRef, steps: StepsRef
    ) -> ProcessRewardModelRef:
        inputs = {"policy": policy, "steps": steps}
        return self._run("process_reward_model", label, config, ProcessRewardModelRef, inputs)

    def generate(
        self,
        label: str,
        config: GenerateConfig,
        *,
        policy: PolicyRef,
        prompts: PromptsRef,
        asked: PromptsRef | None = None,
    ) -> GenerationsRef:
        self._check_episodes(label, config.agent)
        inputs = {"policy": policy, "prompts": prompts} | ({"asked": asked} if asked else {})
        return self._run("generate", label, config, GenerationsRef, inputs)

    def score(
        self,
        label: str,
        config: ScoreConfig,
        *,
        generations: GenerationsRef,
        reward_models: dict[str, RewardModelRef],
    ) -> RolloutsRef:
        self._check_reward_models(label, config.rewards, reward_models)
        inputs = {"generations": generations, "reward_models": reward_models}
        return self._run("score", label, config, RolloutsRef, inputs)

    def select_demonstrations(self, label: str, config: SelectConfig, *, rollouts: RolloutsRef) -> DemonstrationsRef:
        return self._run("select", label, config, DemonstrationsRef, {"rollouts": rollouts})

    def select_pairs(self, label: str, config: SelectConfig, *, rollouts: RolloutsRef) -> PreferencesRef:
        return self._run("select", label, config, PreferencesRef, {"rollouts": rollouts})

    def condition_demonstrations(
        self, label: str, config: ConditionConfig, *, rollouts: RolloutsRef
    ) -> DemonstrationsRef:
        return self._run("condition", label, config, DemonstrationsRef, {"rollouts": rollouts})

    def condition_prompts(
        self, label: str, config: ConditionConfig, *, rollouts: RolloutsRef, prompts: PromptsRef
    ) -> PromptsRef:
        return self._run("condition", label, config, PromptsRef, {"rollouts": rollouts, "prompts": prompts})

    def distill(
        self,
        label: str,
        config: DistillConfig,
        *,
        policy: PolicyRef,
        teacher: PolicyRef,
        demonstrations: DemonstrationsRef | None = None,
        prompts: PromptsRef | None = None,
    ) -> PolicyRef:
        inputs: dict[str, Any] = {"policy": policy, "teacher": teacher}
        inputs |= {"demonstrations": demonstrations} if demonstrations else {}
        inputs |= {"prompts": prompts} if prompts else {}
        return self._run("distill", label, config, PolicyRef, inputs)

    def dpo(
        self, label: str, config: DPOConfig, *, policy: PolicyRef, reference: PolicyRef, preferences: PreferencesRef
    ) -> PolicyRef:
        # Losses that ask no reference have the policy in its place, so that another one makes no other key.
        asked = reference if uses_reference(config.loss) else policy
        inputs = {"policy": policy, "reference": asked, "preferences": preferences}
        return self._run("dpo", label, config, PolicyRef, inputs)

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
        self._check_reward_models(label, config.rewards, reward_models)
        self._check_episodes(label, config.agent)
        asked = reference if config.uses_reference else policy  # as for dpo
        inputs = {"policy": policy, "reference": asked, "prompts": prompts, "reward_models": reward_models}
        if demonstrations is not None:
            inputs["demonstrations"] = demonstrations
        return self._run("ppo", label, config, PolicyRef, inputs)

    def evaluate(
        self,
        label: str,
        config: EvaluateConfig,
        *,
        generations: dict[str, GenerationsRef],
        reference: PolicyRef,
        reward_model: RewardModelRef | None,
    ) -> ReportRef:
        inputs: dict[str, Any] = {"generations": generations, "reference": reference}
        if reward_model is not None:
            inputs["reward_model"] = reward_model
        return self._run("evaluate", label, config, ReportRef, inputs)

    def publish(self, label: str, config: PublishConfig, *, policy: PolicyRef, report: ReportRef) -> PublishedRef:
        return self._run("publish", label, config, PublishedRef, {"policy": policy, "report": report})

    def _check_reward_models(self, label: str, rewards: RewardsConfig, given: Mapping[str, RewardModelRef]) -> None:
        """Raise ConfigError now, and not when the stages before have run for hours, for a judge that is not there."""
        from rlhf_core.rewards.scoring import check_reward_models

        try:
            check_reward_models(rewards, given)
        except ConfigError as error:
            raise ConfigError(f"{label.replace('/', '.')}.{error}") from None

    def _check_episodes(self, label: str, agent: AgentConfig | None) -> None:
        """Raise ConfigError for episodes that may outgrow the sampler: the first that did would end the run."""
        longest: int | None = getattr(self.runtime.sampler, "max_model_len", None)
        if agent is not None and longest is not None and agent.max_episode_tokens > longest:
            key = f"{label.replace('/', '.')}.agent.max_episode_tokens"
            rule = f"the sampler takes {longest} tokens"
            raise ConfigError(
                explain(key, agent.max_episode_tokens, rule, "lower it or raise runtime.sampler.max_model_len")
            )

    def _run(
        self,
        name: str,
        label: str,
        config: Config,
        kind: type[R],
        inputs: dict[str, Any],
        *,
        files: Mapping[str, str] = MappingProxyType({}),
    ) -> R:
        """Run a stage; the digests of the user's `files` that its configuration names are part of its key."""
        configured = keyed(self.runtime)
        engines: dict[str, Any] = {engine: configured[engine] for engine in ENGINES[name]}
        files = {**files, **agent_digests(config, label.replace("/", "."))}
        if files:
            engines["files"] = files
        if name == "publish":
            engines["registry"] = registry(Home.here())
        functions = reward_functions(config, label.replace("/", "."))
        for key, function in functions.items():  # now, and not when the stages before have run for hours
            user_code_digest(function, key=key)
        spec = StageSpec(
            name=name,
            module=f"stages.{name}",
            config=config,
            inputs=inputs,
            seed=self.seed,
            engines=engines,
            label=label,
            callables=tuple(dict.fromkeys(functions.values())),
        )
        return self.run_stage(spec, kind)


def agent_digests(config: Any, key: str) -> dict[str, str]:
    """Return the digests of the files that decide what a configuration's agent does; ConfigError if one is missing."""
    agent = getattr(config, "agent", None)
    if not isinstance(agent, EpisodeLimits):
        return {}
    for name in agent.read_files():
        if not Path(name).is_file():
            raise ConfigError(explain(f"{key}.agent", name, f"there is no such file in {Path.cwd()}", "mend the path"))
    return {name: hash_file(Path(name)) for name in agent.read_files()}


def reward_functions(config: Any, key: str) -> dict[str, str]:
    """Return dotted key -> function that a configuration names, in fields called `function` or `gold`."""
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
