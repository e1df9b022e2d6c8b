"""Define each stage as a flow with a typed form. An input is the label of the stage that made it, a digest or a path.

The flows of single stages are made from their declarations. A stage has the same key here as in the full
pipeline, so each finds the other's results.
"""

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any

from prefect import Flow, flow
from pydantic import Field

from pipelines.execution.gates import champion_of
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
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef, ModelRef, PolicyRef, PromptsRef
from stages.declaration import Input, Stage
from stages.prepare_data import PrepareDataConfig
from stages.publish import PublishConfig
from stages.table import STAGES


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
    """The flow of a stage; its form has the configuration, the settings and a field for every input."""
    signature = form_signature(stage)

    def alone(*args: Any, **kwargs: Any) -> dict[str, str]:
        form = signature.bind(*args, **kwargs)
        form.apply_defaults()
        config, settings, *_ = form.arguments.values()

        def body(stages: Stages, store: ArtifactStore) -> ArtifactRef:
            read = {name: stage.inputs[name] for name in stage.inputs_read(config)}
            inputs = {name: find_input(store, row, form.arguments[name]) for name, row in read.items()}
            if isinstance(config, PublishConfig) and inputs["champion"] is None:
                policy, champion = inputs["policy"], champion_of(config, store)  # as the pipelines do
                inputs["champion"] = champion.of(policy) if champion and isinstance(policy, PolicyRef) else None
            return stages.run(stage, stage.name, config, **inputs)

        return _run(settings, stage.name, body)

    # Prefect builds the form and validates its values from the signature.
    alone.__dict__["__signature__"] = signature
    alone.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}
    alone.__annotations__["return"] = signature.return_annotation
    return named_flow(alone, stage.name, stage.about)


def named_flow(function: Callable[..., dict[str, str]], name: str, about: str) -> Flow[..., dict[str, str]]:
    """Make a flow of a function. Prefect finds it in this module by its name."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = about
    return flow(name=FLOW_NAME, flow_run_name=name, persist_result=False)(function)


def form_signature(stage: Stage[..., Any]) -> Signature:
    """The signature from which Prefect builds the form of a stage.

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


def group_flow(name: str, options: type[Config], last: str, about: str) -> Flow[..., dict[str, str]]:
    """The flow of a group of stages, of which `last` is forced; its form has a field for every input."""

    def alone(
        config: Any,
        settings: Settings,
        policy: str = "sft",
        prompts: str = "prepare_data.prompts",
        reward_models: dict[str, str] = {"reward_model": "reward_model"},  # noqa: B006
    ) -> dict[str, str]:
        models: dict[str, str] = {model: model for model in reward_models}
        inputs: dict[str, Names] = {"policy": "policy", "prompts": "prompts", "reward_models": models}

        def body(stages: Stages, store: ArtifactStore) -> PolicyRef:
            named = {"policy": (PolicyRef, policy), "prompts": (PromptsRef, prompts)}
            named |= {model: (ModelRef, one) for model, one in reward_models.items()}
            given = {name: find_artifact(store, kind, one) for name, (kind, one) in named.items()}
            return artifact(name, PolicyRef, run_nodes(expand(Node(name, name, config, inputs)), stages, given))

        return _run(settings, f"{name}/{last}", body)

    alone.__annotations__ = {**alone.__annotations__, "config": options}
    return named_flow(alone, name, about)


# ---------------------------------------------------------------- shared helpers


def find_input(store: ArtifactStore, row: Input, named: str | Mapping[str, str]) -> GivenInput:
    """Find the input that the form names; None for an optional input without a name."""
    if row.optional and not named:
        return None
    if isinstance(named, str):
        return find_artifact(store, row.kind, named)
    return {key: find_artifact(store, row.kind, name) for key, name in named.items()}


def _run(settings: Settings, label: str, body: Callable[[Stages, ArtifactStore], ArtifactRef]) -> dict[str, str]:
    hide_in_logs()
    config = PipelineConfig(
        name=settings.name,
        seed=settings.seed,
        store=settings.store,
        runtime=settings.runtime,
        prepare_data=PrepareDataConfig(),
    )
    store = store_of(config, Home.here())

    def pipeline(_: PipelineConfig, stages: Stages) -> ArtifactRef:
        return body(stages, store)

    return run_served(config, pipeline, RunRequest("", force=(label,) if settings.force else ()))


STAGE_FLOWS = {name: stage_flow(stage) for name, stage in STAGES.items() if not is_path(name)}
"""Name of a stage of ours -> its flow."""
GROUP_FLOWS = {
    name: group_flow(name, options, last, about)
    for name, options, last, about in (
        (
            "rejection_sampling",
            RejectionSamplingConfig,
            "sft",
            "Sample and score answers, keep the best, and fine-tune on them.",
        ),
        (
            "conditional_sft",
            ConditionalSFTConfig,
            "sft",
            "Sample and score answers, add the score to each prompt, and fine-tune on all of them.",
        ),
        (
            "iterative_dpo",
            IterativeDPOConfig,
            "round_1/dpo",
            "Run rounds of generate, score, pair, dpo. `policy` replaces `config.start_from`.",
        ),
    )
}
"""Name of a group of stages -> its flow."""
globals().update(STAGE_FLOWS | GROUP_FLOWS)  # Prefect finds a flow by its name in this module
