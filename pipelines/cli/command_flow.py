"""The Prefect flow of a run in this process (`rlhf run`). Import it when Prefect's settings are made: it imports Prefect."""

import logging
import os
from typing import Any
from uuid import UUID

from httpx import TransportError
from prefect import flow, tags
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext, refresh_global_settings_context
from prefect.exceptions import CancelledRun, PrefectHTTPStatusError

from pipelines.execution.request import RunRequest
from pipelines.execution.run import PipelineRun
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import PipelineConfig
from pipelines.prefect_flows.tasks import completed, run_in_flow, settle
from pipelines.prefect_flows.waiting import close_finished, halted
from pipelines.services.flow_runs import FLOW_NAME
from pipelines.services.running import ServiceError
from pipelines.services.servers import PrivateServer
from rlhf_core.processes.identity import user_name
from rlhf_core.secrets.redaction import shown
from rlhf_core.stage.stopping import RunHalted

logger = logging.getLogger(__name__)


def run_flow(
    pipeline_run: PipelineRun, config: PipelineConfig, request: RunRequest, server: PrivateServer | None
) -> None:
    """Run the pipeline as a flow; raise ServiceError if Prefect's server is gone before the last stage is done.

    Raises RunHalted if the run waits for people, a gate blocks, or the budget is spent; the flow run has that state,
    and `rlhf resume` finds it.
    """

    @flow(
        name=FLOW_NAME,
        flow_run_name=config.name,
        validate_parameters=False,
        persist_result=False,
        on_completion=[close_finished],
    )
    def full(
        profile: str, overrides: list[str], until: str, force: list[str], strict_code: bool, strict_env: bool
    ) -> State[Any]:
        flow_runs.append(FlowRunContext.get().flow_run.id)
        try:
            run_in_flow(pipeline_run, lifecycle)
        except RunHalted as error:
            halts.append(error)
            return halted(error)
        ended.append(True)
        return completed(pipeline_run, True)

    refresh_global_settings_context()  # an earlier run of this process (`--wait`) may have had another server
    if server is not None:
        server.wait()
    flow_runs: list[UUID] = []
    ended: list[bool] = []
    halts: list[RunHalted] = []
    try:
        with tags(f"user:{user_name()}", *config.project.tags):
            full(**request.parameters())
    except CancelledRun:
        if not halts:
            raise
    except (TransportError, PrefectHTTPStatusError) as error:
        url = shown(os.environ["PREFECT_API_URL"])
        if not ended:
            raise ServiceError(
                f"{url}: Prefect does not answer ({_said(error)}); finished work is kept: run the same command again"
            ) from error
        # The client has retried for minutes, and all stages have committed: only the page is incomplete.
        logger.warning(
            "%s: Prefect does not answer (%s); the run is complete, but its page may show another state",
            *(url, _said(error)),
        )
    finally:
        for flow_run in flow_runs:
            settle(flow_run, pipeline_run.started)
    if halts:
        raise halts[0]


def _said(error: Exception) -> str:
    """The first line of an error of Prefect's client, which adds a page about the status to it."""
    return (str(error).splitlines() or [type(error).__name__])[0]
