"""Define the pipelines as Prefect flows with typed parameters, which the served deployments run."""

from __future__ import annotations

import logging

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext

from pipelines.execution.executor import RunOptions, Silent
from pipelines.execution.opening import open_run, open_tracker
from pipelines.execution.plan import Pipeline
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import PipelineConfig, with_overrides
from pipelines.flows.rlvr import verifiable_rewards
from pipelines.prefect_flows.cards import show_halt
from pipelines.prefect_flows.tasks import run_in_flow
from pipelines.prefect_flows.waiting import close_finished, halted, note
from pipelines.services.flow_runs import FLOW_NAME, own
from pipelines.services.home import Home
from rlhf_core.errors import ConfigError
from rlhf_core.stage.key import Strictness
from rlhf_core.stage.stopping import RunHalted

logger = logging.getLogger(__name__)


@flow(name=FLOW_NAME, flow_run_name="{config.name}", persist_result=False, on_completion=[close_finished])
def full(
    config: PipelineConfig,
    overrides: list[str] = [],  # noqa: B006  # Prefect shows it in the form and never changes it
    until: str = "",
    force: list[str] = [],  # noqa: B006
    strict_code: bool = False,
    strict_env: bool = False,
) -> dict[str, str] | State[None]:
    """Run the whole lifecycle: every section that `config` has, in order.

    `overrides` are `dotted.key=value` changes of `config`; `until` ends after that stage; `force` reruns stages.
    """
    options = RunOptions(
        until=until,
        force=tuple(force),
        strict=Strictness(code=strict_code, env=strict_env),
        overrides=tuple(overrides),
    )
    return run_served(with_overrides(config, overrides), lifecycle, options)


@flow(name=FLOW_NAME, flow_run_name="{config.name}", persist_result=False, on_completion=[close_finished])
def rlvr(
    config: PipelineConfig,
    overrides: list[str] = [],  # noqa: B006
    until: str = "",
    force: list[str] = [],  # noqa: B006
    strict_code: bool = False,
    strict_env: bool = False,
) -> dict[str, str] | State[None]:
    """Optimize the policy on verifiable rewards; the profile has no learned reward."""
    options = RunOptions(
        until=until,
        force=tuple(force),
        strict=Strictness(code=strict_code, env=strict_env),
        overrides=tuple(overrides),
    )
    return run_served(with_overrides(config, overrides), verifiable_rewards, options)


@flow(name=FLOW_NAME, flow_run_name="{config.name}", persist_result=False, on_completion=[close_finished])
def online(
    config: PipelineConfig,
    overrides: list[str] = [],  # noqa: B006
    until: str = "",
    force: list[str] = [],  # noqa: B006
    strict_code: bool = False,
    strict_env: bool = False,
) -> dict[str, str] | State[None]:
    """Run rounds in which annotators judge the policy's answers, the reward model learns it, and the policy moves."""
    options = RunOptions(until=until, force=tuple(force), strict=Strictness(code=strict_code, env=strict_env))
    profile = with_overrides(config, overrides)
    if profile.online is None:
        raise ConfigError("online = None: the online pipeline runs the rounds of [online]; add that section")
    return run_served(profile, lifecycle, options)


def run_served(config: PipelineConfig, pipeline: Pipeline, options: RunOptions) -> dict[str, str] | State[None]:
    """Run a pipeline in the active flow; return label -> digest of its artifacts, or the state in which it has halted."""
    home = Home.here().make()
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        own(context.flow_run.id)  # before the plan: a retried run still names the process that died
    with open_run(
        config, pipeline, options, home=home, tracker=open_tracker(config, home), listener=Silent()
    ) as pipeline_run:
        try:
            results = run_in_flow(pipeline_run, pipeline)
        except RunHalted as error:
            logger.warning("%s", error)
            if context is not None and context.flow_run is not None:
                note(home, context.flow_run, error)
                show_halt(error, run=config.name)
            return halted(error)
    return {label: ref.digest for label, ref in results.items()}
