"""Run stages as Prefect tasks.

The store decides which stages run; a cached result is a task in state Cached, with its edges.

Prefect's own caching is off: it remembers return values, notices neither changed files nor changed code, and its locks
outlive their owner.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar
from uuid import UUID

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import State
from prefect.concurrency.sync import concurrency
from prefect.context import FlowRunContext, TagsContext
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, PREFECT_UI_URL, temporary_settings
from prefect.states import Cancelled, Completed
from prefect.transactions import CommitMode, transaction

from pipelines.execution.plan import Pipeline, ReachedUntil, expect
from pipelines.execution.run import PipelineRun, run_stages
from pipelines.execution.summary import run_name
from pipelines.flows.inputs import parts
from pipelines.prefect_flows.cards import Curves, ProgressCard, show_plan, show_results, show_stage
from pipelines.prefect_flows.waiting import halted
from pipelines.services.flow_runs import own, reconcile_flow_runs, rename
from pipelines.services.running import wait_for
from rlhf_core.errors import RlhfError
from rlhf_core.secrets.redaction import shown, without_secrets
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.stopping import RunHalted, on_signals, time_limit
from rlhf_core.tracking.mlflow_client import FLOW_RUN_TAG
from rlhf_core.types import ArtifactRef

logger = logging.getLogger(__name__)

_HALTED = re.compile(
    r"Finished in state (Waiting|Blocked|OverBudget|Cancelled|Closed)\b"
    r"|Crash detected! Execution was aborted by an? (interrupt|termination) signal"
)


class _Plainly(logging.Filter):
    """Log runs that wait or were cancelled as information, and an error in the user's input as its message.

    Prefect would log the former as an error or a crash, and the latter with the traceback of its own engine.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if _HALTED.match(text):
            record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
            record.msg, record.args = text.removeprefix("Crash detected! "), ()
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, RlhfError):
            record.msg, record.args, record.exc_info = without_secrets(str(error)), (), None
        return True


for name in ("prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(name).addFilter(_Plainly())  # no handler: Prefect adds its own when a flow starts

SLOT_S = 60.0
"""Seconds after which the slot of a killed process is free again, the least that Prefect takes; it is renewed after 45."""
R = TypeVar("R", bound=ArtifactRef)
T = TypeVar("T")


def run_in_flow(run: PipelineRun, pipeline: Pipeline) -> dict[str, ArtifactRef]:
    """Run the pipeline inside the active flow, each stage as a task; return the artifacts by label."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("run_in_flow: no flow is active; call it inside a flow")
    own(context.flow_run.id)  # first: a retried run still names the process that died
    reconcile_flow_runs()
    name = run_name(context.flow_run.name, run.context.options.overrides, str(context.flow_run.id))
    rename(context.flow_run, name)
    show_plan([(stage.label, stage.decision) for stage in run.planned])
    # A task with tags asks the server for a slot of each tag. On SQLite that request collides with the events of the
    # task before, and the client tries again after two seconds. The tags are meant for the flow run only.
    untagged = TagsContext(current_tags=set())
    with time_limit(run.context.config.runtime.time_limit_s), on_signals(), untagged:
        runner = TaskRunner(run)
        links = _links(context.flow_run.id, name)
        try:
            return run_stages(run, pipeline, runner, tags=links, name=name, group=runner.group)
        finally:
            show_results(name, run.description, run.page)


def completed(run: PipelineRun, data: Any) -> State[Any]:
    """The state of a flow whose run has finished; its message is the result."""
    return Completed(message=run.headline or None, data=data)


def settle(flow_run_id: UUID, tasks: int, *, patience_s: float = 10.0) -> None:
    """Wait until the server has recorded the end of `tasks` tasks, which it does a little later, from events."""

    def all_written() -> bool:
        task_runs = client.read_task_runs(flow_run_filter=flow_run)
        return sum(task_run.state is not None and task_run.state.is_final() for task_run in task_runs) >= tasks

    # In a separate thread: where a loop of asyncio runs, as in a notebook, it would wait for nothing.
    drain = threading.Thread(target=EventsWorker.drain_all, kwargs={"timeout": patience_s}, daemon=True)
    drain.start()
    drain.join(patience_s)
    flow_run = FlowRunFilter(id={"any_": [flow_run_id]})
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
            wait_for(all_written, patience_s)
    except Exception as error:
        # The run has ended, successfully or not, and its result must not depend on the page.
        logger.warning("Prefect may show tasks of this run as running: %s", error)


class TaskRunner:
    """A `RunStage` that runs a stage as a task of the active flow."""

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        run.slot = slots(run.context.config.deployments.limits)
        self._made: dict[str, State[bool]] = {}
        """Uri of an artifact -> the task that made or found it; outside a group, the group's."""
        self._ended: list[State[bool]] = []
        """States of the finished stages, with the active group last."""

    def __call__(self, spec: StageSpec, kind: type[R]) -> R:
        run, refs = self._run, []
        halts: list[RunHalted] = []

        # Handles bypass Prefect, and `wait_for` draws the edges. As arguments and results they would draw wrong edges,
        # since Prefect compares the identity of every value in them, down to the digests of parents.
        @task(name=spec.label, task_run_name=spec.label, cache_policy=NO_CACHE, persist_result=False)
        def stage() -> State[Any]:
            curves = Curves(lambda: run.context.store.attempts(run.context.key_of(spec)))
            progress = ProgressCard(spec.label, curves)
            try:
                outcome = run.stage(spec, progress.show)
                refs.append(outcome.ref)
                show_stage(spec, outcome, curves)
            except RunHalted as error:
                halts.append(error)
                return halted(error)
            finally:
                progress.close()
            name = "Cached" if outcome.decision.action == "HIT" else "Completed"
            return Completed(name=name, message=f"{outcome.decision.action}: {outcome.decision.reason}", data=True)

        state = stage(wait_for=self._before(spec.refs()), return_state=True)
        self._ended.append(state)
        if halts:
            raise halts[0]
        state.result()  # raises the error of the stage
        ref: R = expect(refs[0], kind, spec.label)
        self._made |= dict.fromkeys([ref.uri, *(part.uri for part in parts(ref))], state)
        return ref

    def group(self, label: str, body: Callable[[], T], *, after: Iterable[ArtifactRef]) -> T:
        """Run `body` as a task around the tasks of its stages; Prefect's graph shows it as one node that opens.

        Edges from outside end at the group: one to a stage in it would keep that stage from being drawn.
        """
        before, outside, first = self._before(after), self._made, len(self._ended)
        self._made = {}
        made: list[T] = []
        ends: list[BaseException] = []

        @task(name=label, task_run_name=label, cache_policy=NO_CACHE, persist_result=False)
        def group() -> State[Any]:
            # Otherwise Prefect shows the stages before a failed or interrupted stage as RolledBack.
            with transaction(commit_mode=CommitMode.EAGER):
                try:
                    made.append(body())
                except RunHalted as error:
                    ends.append(error)
                    return halted(error)
                except ReachedUntil as error:
                    ends.append(error)
            return _of_group(self._ended[first:])

        self._run.started += 1
        state = group(wait_for=before, return_state=True)
        # Prefect runs no task after a Cancelled one, and a group is Cancelled if a gate holds back a part of it.
        self._made = outside | (dict.fromkeys(self._made, state) if state.is_completed() else {})
        if ends:
            raise ends[0]
        if not made:
            state.result()  # raises the error of the stage that failed
        return made[0]

    def _before(self, refs: Iterable[ArtifactRef]) -> list[State[bool]]:
        """The tasks that made these artifacts, each once."""
        return list({self._made[ref.uri].id: self._made[ref.uri] for ref in refs if ref.uri in self._made}.values())


def slots(limits: Mapping[str, int]) -> Callable[[str], AbstractContextManager[None]]:
    """Set the concurrency limits of stages on the server; return a function that holds a slot of a stage in a block.

    A slot of a killed process is free again after a minute. A stage continues if the server is unreachable for a while.
    """
    if limits:
        with get_client(sync_client=True) as client:
            for name, limit in limits.items():
                client.upsert_global_concurrency_limit_by_name(f"stage:{name}", limit)

    def slot(name: str) -> AbstractContextManager[None]:
        if name not in limits:
            return nullcontext()
        return concurrency(f"stage:{name}", strict=True, lease_duration=SLOT_S, raise_on_lease_renewal_failure=False)

    return slot


def _of_group(stages: Sequence[State[bool]]) -> State[Any]:
    """State of a group: the state of a held-back stage if there is one; Cached if all its stages were."""
    for one in stages:
        if one.is_cancelled():
            return Cancelled(name=one.name, message=one.message)
    name = "Cached" if stages and all(one.name == "Cached" for one in stages) else "Completed"
    return Completed(name=name, message=f"{len(stages)} stages", data=True)


def _links(flow_run: UUID, name: str) -> dict[str, str]:
    address = shown(f"{PREFECT_UI_URL.value()}/runs/flow-run/{flow_run}")
    return {FLOW_RUN_TAG: str(flow_run), "prefect.flow_run_name": name, "prefect.url": address}
