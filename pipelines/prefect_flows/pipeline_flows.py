"""Define the pipelines as Prefect flows with typed parameters, which the served deployments run."""

import logging
from typing import Any

from prefect import Flow, flow
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext

from pipelines.execution.executor import Silent
from pipelines.execution.named_profiles import named_profile
from pipelines.execution.opening import open_run, open_tracker
from pipelines.execution.plan import Pipeline
from pipelines.execution.request import RunRequest
from pipelines.flows.full import lifecycle
from pipelines.flows.graph import Stages
from pipelines.flows.profile import PipelineConfig, parse, with_overrides
from pipelines.flows.rlvr import verifiable_rewards
from pipelines.prefect_flows.cards import show_halt
from pipelines.prefect_flows.tasks import completed, run_in_flow
from pipelines.prefect_flows.waiting import close_finished, halted, note_halt
from pipelines.services.flow_runs import FLOW_NAME, own, rename
from pipelines.services.home import Home
from rlhf_core.errors import ConfigError
from rlhf_core.secrets.redaction import hide_in_logs
from rlhf_core.stage.key import Strictness
from rlhf_core.stage.stopping import RunHalted
from rlhf_core.types import PolicyRef

logger = logging.getLogger(__name__)


FORM = """Args:
    profile: Name of a shipped profile (tiny/full), a file below the project's folder (team.toml), or the digest of a kept
        profile. If empty, and without config, {example}.
    overrides: Changes of single keys, each as key=value, such as ppo.steps=20; the same as --set of `rlhf run`.
    until: Label of the last stage to run, such as sft. If empty, all stages run.
    seed: Seed of the run. If empty, that of the profile.
    force: Labels of stages that run even if their result exists.
    strict_code: Run a stage again after any change of its code.
    strict_env: Run a stage again if Python or a package has another version.
    config: A whole profile as a JSON object, in place of profile.
"""
"""Descriptions of the fields, where Prefect looks for them: in the docstring of the flow."""


def pipeline_flow(name: str, pipeline: Pipeline, example: str, about: str) -> Flow[..., State[Any]]:
    """The flow that runs `pipeline` on the profile of its form, which is `example` if the form names none."""

    def served(
        profile: str = "",
        overrides: list[str] = [],  # noqa: B006  # Prefect shows it in the form and never changes it
        until: str = "",
        seed: int | None = None,
        force: list[str] = [],  # noqa: B006
        strict_code: bool = False,
        strict_env: bool = False,
        config: dict[str, Any] | None = None,
    ) -> State[Any]:
        hide_in_logs()
        changes = [*overrides, *([] if seed is None else [f"seed={seed}"])]
        if config and profile:
            raise ConfigError("profile", profile, "config is given, too", "clear one of the two fields")
        if config:
            wanted = parse(with_overrides(config, changes), origin="config")
        else:
            wanted = named_profile(profile or example, changes, Home.here())
        context = FlowRunContext.get()
        if context is not None and context.flow_run is not None:
            rename(context.flow_run, wanted.name, wanted.project.tags)
        strict = Strictness(code=strict_code, env=strict_env)
        return run_served(wanted, pipeline, RunRequest("", tuple(changes), until, tuple(force), strict))

    served.__name__ = served.__qualname__ = name  # by which Prefect finds the flow in this module
    served.__doc__ = f"{about}\n\n{FORM.format(example=example)}"
    return flow(name=FLOW_NAME, description=about, persist_result=False, on_completion=[close_finished])(served)


def with_rounds(config: PipelineConfig, stages: Stages) -> dict[str, PolicyRef]:
    """Run the lifecycle of a profile that has rounds; raise ConfigError if it has none."""
    if config.online is None:
        raise ConfigError("online = None: the online pipeline runs the rounds of [online]; add that section")
    return lifecycle(config, stages)


full = pipeline_flow("full", lifecycle, "tiny/full", "Run the lifecycle of a profile: each of its sections, in order.")
rlvr = pipeline_flow(
    "rlvr", verifiable_rewards, "tiny/rlvr", "Optimize the policy on verifiable rewards, without a learned reward."
)
online = pipeline_flow(
    "online",
    with_rounds,
    "tiny/online",
    "Run rounds in which annotators judge the policy's answers, the reward model learns it, and the policy moves.",
)
PIPELINES = (full, rlvr, online)


def run_served(config: PipelineConfig, pipeline: Pipeline, request: RunRequest) -> State[Any]:
    """Run a pipeline in the active flow; return its state: label -> digest of its artifacts, or why it has halted."""
    home = Home.here().make()
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        own(context.flow_run.id)  # before the plan: a retried run still names the process that died
    with open_run(
        config, pipeline, request.options(), home=home, tracker=open_tracker(config, home), listener=Silent()
    ) as pipeline_run:
        try:
            results = run_in_flow(pipeline_run, pipeline)
        except RunHalted as error:
            logger.warning("%s", error)
            if context is not None and context.flow_run is not None:
                note_halt(home, context.flow_run, error)
                show_halt(error, run=config.name)
            return halted(error)
    return completed(pipeline_run, {label: ref.digest for label, ref in results.items()})
