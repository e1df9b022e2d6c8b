"""Stages as Prefect tasks: the store decides, Prefect shows. A hit is a task in state Cached, with its edges.

Prefect's own caching is off: it remembers return values, sees neither changed files nor changed code, and its locks
outlive their owner.
"""

from __future__ import annotations

import logging
from typing import TypeVar
from uuid import UUID

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_UI_URL
from prefect.states import Completed

from pipelines.cards import ProgressCard, show_plan, show_samples, show_stage
from pipelines.inputs import parts
from pipelines.plan import Pipeline, expect
from pipelines.reconcile import own, reconcile
from pipelines.run import PipelineRun, run_stages
from pipelines.services import wait_for
from rlhf_core.stage import StageInput, StageSpec
from rlhf_core.types import ArtifactRef

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=ArtifactRef)

FLOW_NAME = "rlhf-pipeline"


def run_in_flow(run: PipelineRun, pipeline: Pipeline) -> dict[str, ArtifactRef]:
    """Run the pipeline inside the flow that is active, each stage as a task; return the artifacts by label."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("run_in_flow: no flow is active; call it inside a flow")
    reconcile()
    own(context.flow_run.id)
    show_plan([(stage.label, stage.decision) for stage in run.planned])
    return run_stages(run, pipeline, TaskRunner(run), tags=_links(context.flow_run))


def settle(flow_run_id: UUID, tasks: int, *, patience_s: float = 10.0) -> None:
    """Wait until the server has written down the end of `tasks` tasks: it does so a little later, from events."""

    def all_written() -> bool:
        task_runs = client.read_task_runs(flow_run_filter=flow_run)
        return sum(task_run.state is not None and task_run.state.is_final() for task_run in task_runs) >= tasks

    EventsWorker.drain_all(timeout=patience_s)
    flow_run = FlowRunFilter(id={"any_": [flow_run_id]})
    try:
        with get_client(sync_client=True) as client:
            wait_for(all_written, patience_s)
    except Exception as error:
        # The run has ended, well or not, and its result must not hang on what the page shows.
        logger.warning("Prefect may show tasks of this run as running: %s", error)


class TaskRunner:
    """A `RunStage` that runs a stage as a task of the active flow."""

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        self._made: dict[str, State[str]] = {}

    def __call__(self, spec: StageSpec, kind: type[R]) -> R:
        run = self._run

        @task(name=spec.label, task_run_name=spec.label, cache_policy=NO_CACHE, persist_result=False)
        def stage(**inputs: str) -> State[R]:
            outcome = run.stage(spec, ProgressCard(spec.label).show)
            show_stage(spec.label, outcome.decision, outcome.metrics, outcome.seconds, outcome.tracking_url)
            show_samples(spec.label, outcome.samples)
            name = "Cached" if outcome.decision.action == "HIT" else "Completed"
            message = f"{outcome.decision.action}: {outcome.decision.reason}"
            return Completed(name=name, message=message, data=outcome.ref)

        # The edges are what the stage waits for. Handles as arguments would draw false ones: Prefect goes by the
        # identity of every value inside them, and a handle holds the digests of its parents.
        shown = {name: _shown(value) for name, value in spec.inputs.items()}
        before = {self._made[ref.uri].id: self._made[ref.uri] for ref in spec.refs() if ref.uri in self._made}
        state = stage(**shown, wait_for=list(before.values()), return_state=True)
        ref: R = expect(state.result(), kind, spec.label)
        self._made |= dict.fromkeys([ref.uri, *(part.uri for part in parts(ref))], _without_handle(state, spec.label))
        return ref


def _without_handle(state: State[R], label: str) -> State[str]:
    """Return a state that stands for its task alone: with the handle in it each edge would be drawn several times."""
    bare: State[str] = state.model_copy(update={"data": f"made by {label}"})
    return bare


def _shown(value: StageInput) -> str:
    if isinstance(value, ArtifactRef):
        return f"{type(value).__name__} {value.digest[:12]}"
    named = value.items() if isinstance(value, dict) else enumerate(value)
    return ", ".join(f"{name}: {_shown(ref)}" for name, ref in named)


def _links(flow_run: FlowRun) -> dict[str, str]:
    address = f"{PREFECT_UI_URL.value()}/runs/flow-run/{flow_run.id}"
    return {"prefect.flow_run_id": str(flow_run.id), "prefect.flow_run_name": flow_run.name, "prefect.url": address}
