"""Each stage as a flow of its own, with a typed form. An input is the label of a stage that made it, a digest or a path.

The same stage in the full pipeline and here has the same key, so each finds the other's results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from prefect import flow
from pydantic import Field

from pipelines.execution.run import RunOptions, store_of
from pipelines.flows.full import condition_and_imitate, sample_and_imitate
from pipelines.flows.graph import Stages
from pipelines.flows.inputs import find_artifact
from pipelines.flows.iterative_dpo import iterate_dpo
from pipelines.flows.profile import ConditionalSFTConfig, IterativeDPOConfig, PipelineConfig, RejectionSamplingConfig
from pipelines.prefect_flows.pipelines import run_served
from pipelines.services.flow_runs import FLOW_NAME
from pipelines.services.home import Home
from rlhf_core.config.engines import RuntimeConfig
from rlhf_core.config.preference import uses_reference
from rlhf_core.schema.base import Config
from rlhf_core.types import (
    ArtifactRef,
    DemonstrationsRef,
    GenerationsRef,
    PolicyRef,
    PreferencesRef,
    ProcessRewardModelRef,
    PromptsRef,
    ReportRef,
    RewardModelRef,
    RolloutsRef,
    StepsRef,
)
from stages.condition import ConditionConfig
from stages.distill import DistillConfig
from stages.dpo import DPOConfig
from stages.evaluate import EvaluateConfig
from stages.generate import GenerateConfig
from stages.import_reward_model import ImportRewardModelConfig
from stages.ppo import PPOConfig
from stages.prepare_data import PrepareDataConfig
from stages.process_reward_model import ProcessRewardModelConfig
from stages.publish import PublishConfig
from stages.reward_model import RewardModelConfig
from stages.score import ScoreConfig
from stages.select import SelectConfig
from stages.sft import SFTConfig

R = TypeVar("R", bound=ArtifactRef)


class Settings(Config):
    """Where and how the stage runs."""

    name: str = "rlhf"
    """Name of the run, and of the experiment in MLflow."""
    seed: int = Field(17, ge=0)
    store: str = ""
    """Folder of the artifact store; empty: the one in the state folder."""
    runtime: RuntimeConfig = RuntimeConfig()
    force: bool = False
    """Run it although its result is there."""


@flow(name=FLOW_NAME, flow_run_name="prepare_data", persist_result=False)
def prepare_data(config: PrepareDataConfig, settings: Settings) -> dict[str, str]:
    """Read or invent the data, and make the base model."""
    return _run(settings, "prepare_data", lambda stages, find: stages.prepare_data("prepare_data", config))


@flow(name=FLOW_NAME, flow_run_name="sft", persist_result=False)
def sft(
    config: SFTConfig,
    settings: Settings,
    policy: str = "prepare_data.base",
    demonstrations: str = "prepare_data.demonstrations",
) -> dict[str, str]:
    """Supervised fine-tuning of `policy` on `demonstrations`."""

    def body(stages: Stages, find: Find) -> PolicyRef:
        return stages.sft(
            "sft", config, policy=find(PolicyRef, policy), demonstrations=find(DemonstrationsRef, demonstrations)
        )

    return _run(settings, "sft", body)


@flow(name=FLOW_NAME, flow_run_name="reward_model", persist_result=False)
def reward_model(
    config: RewardModelConfig,
    settings: Settings,
    policy: str = "sft",
    preferences: str = "prepare_data.preferences",
) -> dict[str, str]:
    """A reward model from the weights of `policy`, on `preferences`."""

    def body(stages: Stages, find: Find) -> RewardModelRef:
        return stages.reward_model(
            "reward_model", config, policy=find(PolicyRef, policy), preferences=find(PreferencesRef, preferences)
        )

    return _run(settings, "reward_model", body)


@flow(name=FLOW_NAME, flow_run_name="import_reward_model", persist_result=False)
def import_reward_model(
    config: ImportRewardModelConfig, settings: Settings, policy: str = "prepare_data.base"
) -> dict[str, str]:
    """A reward model from outside, checked against the tokens of `policy`."""

    def body(stages: Stages, find: Find) -> RewardModelRef:
        return stages.import_reward_model("import_reward_model", config, policy=find(PolicyRef, policy))

    return _run(settings, "import_reward_model", body)


@flow(name=FLOW_NAME, flow_run_name="process_reward_model", persist_result=False)
def process_reward_model(
    config: ProcessRewardModelConfig, settings: Settings, policy: str = "sft", steps: str = "prepare_data.steps"
) -> dict[str, str]:
    """A model from the weights of `policy` that judges the steps of an answer, on judged `steps`."""

    def body(stages: Stages, find: Find) -> ProcessRewardModelRef:
        return stages.process_reward_model(
            "process_reward_model", config, policy=find(PolicyRef, policy), steps=find(StepsRef, steps)
        )

    return _run(settings, "process_reward_model", body)


@flow(name=FLOW_NAME, flow_run_name="generate", persist_result=False)
def generate(
    config: GenerateConfig,
    settings: Settings,
    policy: str = "sft",
    prompts: str = "prepare_data.prompts",
    asked: str = "",
) -> dict[str, str]:
    """Answers of `policy` to `prompts`, which `asked` may put to it in other words (`conditional_sft/ask`)."""

    def body(stages: Stages, find: Find) -> GenerationsRef:
        return stages.generate(
            "generate",
            config,
            policy=find(PolicyRef, policy),
            prompts=find(PromptsRef, prompts),
            asked=find(PromptsRef, asked) if asked else None,
        )

    return _run(settings, "generate", body)


@flow(name=FLOW_NAME, flow_run_name="score", persist_result=False)
def score(
    config: ScoreConfig,
    settings: Settings,
    generations: str = "generate",
    reward_models: dict[str, str] = {"reward_model": "reward_model"},  # noqa: B006
) -> dict[str, str]:
    """Rewards for `generations`."""

    def body(stages: Stages, find: Find) -> RolloutsRef:
        models = find.all(RewardModelRef, reward_models)
        return stages.score("score", config, generations=find(GenerationsRef, generations), reward_models=models)

    return _run(settings, "score", body)


@flow(name=FLOW_NAME, flow_run_name="select", persist_result=False)
def select(config: SelectConfig, settings: Settings, rollouts: str = "score") -> dict[str, str]:
    """Demonstrations or pairs from `rollouts`."""

    def body(stages: Stages, find: Find) -> ArtifactRef:
        ref = find(RolloutsRef, rollouts)
        if config.type == "pairs":
            return stages.select_pairs("select", config, rollouts=ref)
        return stages.select_demonstrations("select", config, rollouts=ref)

    return _run(settings, "select", body)


@flow(name=FLOW_NAME, flow_run_name="condition", persist_result=False)
def condition(
    config: ConditionConfig, settings: Settings, rollouts: str = "score", prompts: str = ""
) -> dict[str, str]:
    """Demonstrations from `rollouts` that say how good each answer is, or `prompts` that ask for the best level."""

    def body(stages: Stages, find: Find) -> ArtifactRef:
        ref = find(RolloutsRef, rollouts)
        if prompts:
            return stages.condition_prompts("condition", config, rollouts=ref, prompts=find(PromptsRef, prompts))
        return stages.condition_demonstrations("condition", config, rollouts=ref)

    return _run(settings, "condition", body)


@flow(name=FLOW_NAME, flow_run_name="conditional_sft", persist_result=False)
def conditional_sft(
    config: ConditionalSFTConfig,
    settings: Settings,
    policy: str = "sft",
    prompts: str = "prepare_data.prompts",
    reward_models: dict[str, str] = {"reward_model": "reward_model"},  # noqa: B006
) -> dict[str, str]:
    """Sample, score, tell how good each answer is, imitate all."""

    def body(stages: Stages, find: Find) -> PolicyRef:
        models = find.all(RewardModelRef, reward_models)
        return condition_and_imitate(
            config, stages, policy=find(PolicyRef, policy), prompts=find(PromptsRef, prompts), reward_models=models
        )[0]

    return _run(settings, "conditional_sft/sft", body)


@flow(name=FLOW_NAME, flow_run_name="distill", persist_result=False)
def distill(
    config: DistillConfig,
    settings: Settings,
    policy: str = "prepare_data.base",
    teacher: str = "ppo",
    demonstrations: str = "prepare_data.demonstrations",
    prompts: str = "prepare_data.prompts",
) -> dict[str, str]:
    """Distillation of `teacher` into `policy`; `config.on_policy` says whether on `prompts` or on `demonstrations`."""

    def body(stages: Stages, find: Find) -> PolicyRef:
        return stages.distill(
            "distill",
            config,
            policy=find(PolicyRef, policy),
            teacher=find(PolicyRef, teacher),
            demonstrations=None if config.on_policy else find(DemonstrationsRef, demonstrations),
            prompts=find(PromptsRef, prompts) if config.on_policy else None,
        )

    return _run(settings, "distill", body)


@flow(name=FLOW_NAME, flow_run_name="rejection_sampling", persist_result=False)
def rejection_sampling(
    config: RejectionSamplingConfig,
    settings: Settings,
    policy: str = "sft",
    prompts: str = "prepare_data.prompts",
    reward_models: dict[str, str] = {"reward_model": "reward_model"},  # noqa: B006
) -> dict[str, str]:
    """Sample, score, keep the best, imitate it."""

    def body(stages: Stages, find: Find) -> PolicyRef:
        models = find.all(RewardModelRef, reward_models)
        return sample_and_imitate(
            config, stages, policy=find(PolicyRef, policy), prompts=find(PromptsRef, prompts), reward_models=models
        )

    return _run(settings, "rejection_sampling/sft", body)


@flow(name=FLOW_NAME, flow_run_name="iterative_dpo", persist_result=False)
def iterative_dpo(
    config: IterativeDPOConfig,
    settings: Settings,
    policy: str = "sft",
    prompts: str = "prepare_data.prompts",
    reward_models: dict[str, str] = {"reward_model": "reward_model"},  # noqa: B006
) -> dict[str, str]:
    """Rounds of generate, score, pair, dpo. `policy` takes the place of `config.start_from`."""

    def body(stages: Stages, find: Find) -> PolicyRef:
        models = find.all(RewardModelRef, reward_models)
        return iterate_dpo(
            config, stages, policy=find(PolicyRef, policy), prompts=find(PromptsRef, prompts), reward_models=models
        )

    return _run(settings, "iterative_dpo/round_1/dpo", body)


@flow(name=FLOW_NAME, flow_run_name="dpo", persist_result=False)
def dpo(
    config: DPOConfig,
    settings: Settings,
    policy: str = "sft",
    reference: str = "sft",
    preferences: str = "prepare_data.preferences",
) -> dict[str, str]:
    """Direct preference optimisation of `policy` on `preferences`."""

    def body(stages: Stages, find: Find) -> PolicyRef:
        return stages.dpo(
            "dpo",
            config,
            policy=find(PolicyRef, policy),
            reference=find(PolicyRef, reference if uses_reference(config.loss) else policy),
            preferences=find(PreferencesRef, preferences),
        )

    return _run(settings, "dpo", body)


@flow(name=FLOW_NAME, flow_run_name="ppo", persist_result=False)
def ppo(
    config: PPOConfig,
    settings: Settings,
    policy: str = "sft",
    reference: str = "sft",
    prompts: str = "prepare_data.prompts",
    reward_models: dict[str, str] = {"reward_model": "reward_model"},  # noqa: B006
    demonstrations: str = "prepare_data.demonstrations",
) -> dict[str, str]:
    """Policy optimisation of `policy` on `prompts`, held near `reference`, which is not looked for if nothing asks it.

    `demonstrations` are for `config.ptx`.
    """

    def body(stages: Stages, find: Find) -> PolicyRef:
        return stages.ppo(
            "ppo",
            config,
            policy=find(PolicyRef, policy),
            reference=find(PolicyRef, reference if config.uses_reference else policy),
            prompts=find(PromptsRef, prompts),
            reward_models=find.all(RewardModelRef, reward_models),
            demonstrations=find(DemonstrationsRef, demonstrations) if config.ptx else None,
        )

    return _run(settings, "ppo", body)


@flow(name=FLOW_NAME, flow_run_name="evaluate", persist_result=False)
def evaluate(
    config: EvaluateConfig,
    settings: Settings,
    generations: dict[str, str] = {"sft": "evaluate/sft/generate", "ppo": "evaluate/ppo/generate"},  # noqa: B006
    reference: str = "sft",
    reward_model: str = "reward_model",
) -> dict[str, str]:
    """One report over the `generations` of several policies; an empty `reward_model` leaves its column out."""

    def body(stages: Stages, find: Find) -> ReportRef:
        return stages.evaluate(
            "evaluate",
            config,
            generations=find.all(GenerationsRef, generations),
            reference=find(PolicyRef, reference),
            reward_model=find(RewardModelRef, reward_model) if reward_model else None,
        )

    return _run(settings, "evaluate", body)


@flow(name=FLOW_NAME, flow_run_name="publish", persist_result=False)
def publish(config: PublishConfig, settings: Settings, policy: str = "ppo", report: str = "evaluate") -> dict[str, str]:
    """Gate, model card and registration of `policy`."""

    def body(stages: Stages, find: Find) -> ArtifactRef:
        return stages.publish("publish", config, policy=find(PolicyRef, policy), report=find(ReportRef, report))

    return _run(settings, "publish", body)


# ---------------------------------------------------------------- what they share


class Find:
    """Finds an input of a kind by the name that a person gave."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __call__(self, kind: type[R], name: str) -> R:
        return find_artifact(self._store, kind, name)

    def all(self, kind: type[R], names: Mapping[str, str]) -> dict[str, R]:
        """Return the inputs of a table of names, under the same keys."""
        return {key: self(kind, name) for key, name in names.items()}


def _run(settings: Settings, label: str, body: Callable[[Stages, Find], ArtifactRef]) -> dict[str, str]:
    config = PipelineConfig(
        name=settings.name,
        seed=settings.seed,
        store=settings.store,
        runtime=settings.runtime,
        prepare_data=PrepareDataConfig(),
    )
    find = Find(store_of(config, Home.here()))

    def pipeline(_: PipelineConfig, stages: Stages) -> ArtifactRef:
        return body(stages, find)

    return run_served(config, pipeline, RunOptions(force=(label,) if settings.force else ()))
