"""Define each stage as a flow with a typed form. An input is the label of the stage that made it, a digest or a path.

The flows of single stages are made from their declarations. A stage has the same key here as in the full
pipeline, so each finds the other's results.
"""

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any, TypeVar

from prefect import Flow, flow
from pydantic import Field

from pipelines.execution.gates import champion_for
from pipelines.execution.opening import store_of
from pipelines.execution.request import RunRequest
from pipelines.flows.full import artifact, run_nodes
from pipelines.flows.graph import GivenInput, Stages
from pipelines.flows.inputs import find_artifact
from pipelines.flows.nodes import Names, Node, expand
from pipelines.flows.profile import PipelineConfig
from pipelines.flows.sections import ConditionalSFTConfig, IterativeDPOConfig, RejectionSamplingConfig
from pipelines.prefect_flows.pipeline_flows import run_served
from pipelines.services.flow_runs import FLOW_NAME
from pipelines.services.home import Home
from rlhf_core.by_path import is_path
from rlhf_core.config.runtime import RuntimeConfig
from rlhf_core.schema.base import Config
from rlhf_core.secrets.redaction import hide_in_logs
from rlhf_core.types import ArtifactRef, ModelRef, PolicyRef, PromptsRef
from stages.declaration import Stage
from stages.prepare_data import PrepareDataConfig
from stages.publish import PublishConfig
from stages.table import STAGES

R = TypeVar("R", bound=ArtifactRef)


class Settings(Config):
    """Where and how the stage runs."""

    name: str = "rlhf"
    """Name of the run and of the MLflow experiment."""
    seed: int = Field(17, ge=0)
    store: str = ""
    """Folder of the artifact store; if empty, the one in the state folder."""
    runtime: RuntimeConfig = RuntimeConfig()
    force: bool = False
    """Run the stage even if its result exists."""


# ---------------------------------------------------------------- single stages


def stage_flow(stage: Stage[..., Any]) -> Flow[..., dict[str, str]]:
    """Return the flow of a stage; its form has the configuration, the settings and a field for every input."""
    signature = form_signature(stage)

    def alone(*args: Any, **kwargs: Any) -> dict[str, str]:
        form = signature.bind(*args, **kwargs)
        form.apply_defaults()
        config, settings, *_ = form.arguments.values()

        def body(stages: Stages, find: Find) -> ArtifactRef:
            inputs = {name: find.input(stage, name, form.arguments[name]) for name in stage.inputs_read(config)}
            if isinstance(config, PublishConfig) and inputs["champion"] is None:
                inputs["champion"] = find.champion(config, inputs["policy"])
            return stages.run(stage, stage.name, config, **inputs)

        return _run(settings, stage.name, body)

    # Prefect builds the form and validates its values from the signature, and finds the flow by its name.
    alone.__name__ = alone.__qualname__ = stage.name
    alone.__doc__ = stage.about
    alone.__dict__["__signature__"] = signature
    alone.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}
    alone.__annotations__["return"] = signature.return_annotation
    return flow(name=FLOW_NAME, flow_run_name=stage.name, persist_result=False)(alone)


def form_signature(stage: Stage[..., Any]) -> Signature:
    """Return the signature from which Prefect builds the form of a stage.

    >>> print(form_signature(STAGES["publish"]).parameters["report"])
    report: str = 'evaluate'
    """
    parameters: dict[str, tuple[Any, Any]] = {
        "config": (stage.config, Parameter.empty),
        "settings": (Settings, Parameter.empty),
    }
    for name, row in stage.inputs.items():
        parameters[name] = (str, row.start) if isinstance(row.start, str) else (dict[str, str], dict(row.start))
    return Signature(
        [
            Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=kind, default=start)
            for name, (kind, start) in parameters.items()
        ],
        return_annotation=dict[str, str],
    )


# ---------------------------------------------------------------- several stages


@flow(name=FLOW_NAME, flow_run_name="rejection_sampling", persist_result=False)
def rejection_sampling(
    config: RejectionSamplingConfig,
    settings: Settings,
    policy: str = "sft",
    prompts: str = "prepare_data.prompts",
    reward_models: dict[str, str] = {"reward_model": "reward_model"},  # noqa: B006
) -> dict[str, str]:
    """Sample and score answers, keep the best, and fine-tune on them."""

    return _run_group("rejection_sampling", config, settings, "rejection_sampling/sft", policy, prompts, reward_models)


@flow(name=FLOW_NAME, flow_run_name="conditional_sft", persist_result=False)
def conditional_sft(
    config: ConditionalSFTConfig,
    settings: Settings,
    policy: str = "sft",
    prompts: str = "prepare_data.prompts",
    reward_models: dict[str, str] = {"reward_model": "reward_model"},  # noqa: B006
) -> dict[str, str]:
    """Sample and score answers, add the score to each prompt, and fine-tune on all of them."""

    return _run_group("conditional_sft", config, settings, "conditional_sft/sft", policy, prompts, reward_models)


@flow(name=FLOW_NAME, flow_run_name="iterative_dpo", persist_result=False)
def iterative_dpo(
    config: IterativeDPOConfig,
    settings: Settings,
    policy: str = "sft",
    prompts: str = "prepare_data.prompts",
    reward_models: dict[str, str] = {"reward_model": "reward_model"},  # noqa: B006
) -> dict[str, str]:
    """Run rounds of generate, score, pair, dpo. `policy` replaces `config.start_from`."""

    return _run_group("iterative_dpo", config, settings, "iterative_dpo/round_1/dpo", policy, prompts, reward_models)


# ---------------------------------------------------------------- shared helpers


class Find:
    """A lookup of inputs by their kind and the name that the user gave."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __call__(self, kind: type[R], name: str) -> R:
        return find_artifact(self._store, kind, name)

    def input(self, stage: Stage[..., Any], name: str, named: str | Mapping[str, str]) -> GivenInput:
        """Return the input that the form names for `name` of a stage; None for an optional input without a name."""
        row = stage.inputs[name]
        if row.optional and not named:
            return None
        return self(row.kind, named) if isinstance(named, str) else self.all(row.kind, named)

    def champion(self, config: PublishConfig, policy: GivenInput) -> PolicyRef | None:
        """Return the champion that the policy has to beat if the configuration has a challenge, as the pipelines do."""
        found = champion_for(config, self._store)
        return found.of(policy) if found is not None and isinstance(policy, PolicyRef) else None

    def all(self, kind: type[R], names: Mapping[str, str]) -> dict[str, R]:
        """Return the artifacts for a table of names, under the same keys."""
        return {key: self(kind, name) for key, name in names.items()}


def _run_group(
    name: str, config: Config, settings: Settings, label: str, policy: str, prompts: str, models: Mapping[str, str]
) -> dict[str, str]:
    """Run the nodes of a group on artifacts that the form names."""

    def body(stages: Stages, find: Find) -> PolicyRef:
        given = {"policy": find(PolicyRef, policy), "prompts": find(PromptsRef, prompts), **find.all(ModelRef, models)}
        inputs: dict[str, Names] = {
            "policy": "policy",
            "prompts": "prompts",
            "reward_models": {model: model for model in models},
        }
        return artifact(name, PolicyRef, run_nodes(expand(Node(name, name, config, inputs)), stages, given))

    return _run(settings, label, body)


def _run(settings: Settings, label: str, body: Callable[[Stages, Find], ArtifactRef]) -> dict[str, str]:
    hide_in_logs()
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

    return run_served(config, pipeline, RunRequest("", force=(label,) if settings.force else ()))


STAGE_FLOWS = {name: stage_flow(stage) for name, stage in STAGES.items() if not is_path(name)}
"""Name of a stage of ours -> its flow."""
globals().update(STAGE_FLOWS)  # Prefect finds a flow by its name in this module
