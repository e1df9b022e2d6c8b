"""Set the true state of flow runs whose process was killed (kill -9, power cut).

It is Crashed, or Cancelled if that was requested. Both can be run again and resume.

Prefect marks such runs only if its runner outlives them, and never marks their tasks. We label a run with its owner and
check whether that process still exists. Runs that wait for a person are never changed, nor are runs whose process is
alive or invisible from this machine, nor runs of others, since a server may be shared. Ours are runs of our flow that
this state folder started (shown by a label) or that its deployments will start (shown by a tag). On our server they
also include runs without a state folder, as earlier versions left them.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import DeploymentStatus, FlowRun, State, TaskRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Cancelled, Completed, Crashed

from pipelines.services.home import Home
from pipelines.services.run_notes import CLOSED
from pipelines.services.user_servers import shares_prefect, tracking_uri
from rlhf_core.store.leases import Owner, is_gone
from rlhf_core.tracking import mlflow_client
from rlhf_core.tracking.pipeline_runs import close_runs

FLOW_NAME = "rlhf-pipeline"
HOME_LABEL = "rlhf.home"
HOME_TAG = "rlhf-home-"
PIPELINE_TAG, STAGE_TAG, OWN_TAG = "pipeline", "stage", "own-profile"
"""Tags of deployments, by which Prefect's page of them is sorted and can be narrowed; an own profile is a pipeline, too."""
RUN_COUNT = "owner.run_count"
"""Label: the run count of the start to which the owner belongs. A retry keeps the labels of the process that died."""
SETTLED_AFTER = timedelta(seconds=60)
"""The ends of tasks reach the server a little after the end of their flow."""
STARTED_AFTER = timedelta(minutes=5)
"""A run that its process has not started by then counts as lost."""

NEWEST = 200
"""Number of the newest runs that are read, to find unfinished ones and to suggest names; Prefect's own limit."""
RUN_PARAMETERS = ("profile", "config")
"""Every run of stages has one of these parameters; the form that answers a gate has none."""

_FLOW = FlowFilter(name={"any_": [FLOW_NAME]})


@dataclass(frozen=True)
class Reconciled:
    """A run whose state was corrected, and why."""

    place: str
    """`Prefect` or `MLflow`."""
    name: str
    id: str
    state: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place} {self.name} ({self.id}) -> {self.state}: {self.reason}"


def own(flow_run_id: UUID) -> None:
    """Label a flow run with this process as its owner, and with the state folder."""
    with get_client(sync_client=True) as client:
        count = client.read_flow_run(flow_run_id).run_count
        labels = {RUN_COUNT: str(count), HOME_LABEL: Home.here().identity}
        client.update_flow_run_labels(flow_run_id, mlflow_client.owner_tags() | labels)


def rename(flow_run: FlowRun, name: str, tags: Iterable[str] = ()) -> None:
    """Give a flow run the name of its profile or run, and further tags, which it knows once it has read that."""
    flow_run.name, flow_run.tags = name, sorted({*flow_run.tags, *tags})
    with get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, name=name, tags=flow_run.tags)


def home_tag(home: Home) -> str:
    """The tag of the deployments of a state folder, which their runs inherit."""
    return f"{HOME_TAG}{home.identity}"


def ours(flow_runs: Iterable[FlowRun]) -> list[FlowRun]:
    """Select the runs of our flow that this state folder started or that its deployments will start.

    Runs of earlier versions have no state folder: they are ours on our own server, and left alone on a shared one.
    """
    home = Home.here()
    alone = not shares_prefect(home)
    return [one for one in flow_runs if _home_of(one) == home.identity or (alone and not _home_of(one))]


def _home_of(flow_run: FlowRun) -> str:
    """Identity of the state folder that a run belongs to, or ""."""
    if HOME_LABEL in flow_run.labels:
        return str(flow_run.labels[HOME_LABEL])
    return next((tag.removeprefix(HOME_TAG) for tag in flow_run.tags if tag.startswith(HOME_TAG)), "")


def reconcile_flow_runs() -> list[Reconciled]:
    """End our runs of dead processes of this machine, and the tasks of runs that have ended; return the changes."""
    with get_client(sync_client=True) as client:
        active = FlowRunFilter(state={"type": {"any_": ["RUNNING", "CANCELLING", "PENDING"]}})
        ended = []
        for flow_run in _ours(client, active):
            reason = _why_gone(flow_run)
            if reason:
                ended.append(_end(client, flow_run, f"{reason}; run it again and it resumes"))
        ended += _end_tasks_left_behind(client)
    return ended + close_halted()


def close_halted(finished: str = "") -> list[Reconciled]:
    """Close our runs that wait, failed or were interrupted, if a later run of the same profile finished their work.

    `finished` is a run that has just finished; MLflow may have earlier runs of it, from before it was resumed.
    """
    with get_client(sync_client=True) as client:
        newest = read_newest(client)
        done = [one for one in newest if one.state is not None and one.state.is_completed()]
        closed = []
        for flow_run in filter(is_unfinished, newest):
            by = next((other for other in done if _finishes(other, flow_run)), None)
            if by is not None:
                message = f"a later run of the same profile has finished it: {by.name} ({by.id})"
                client.set_flow_run_state(flow_run.id, Cancelled(name=CLOSED, message=message), force=True)
                closed.append(Reconciled("Prefect", flow_run.name, str(flow_run.id), CLOSED, message))
    ended = [*(one.id for one in closed), *([finished] if finished else [])]
    if ended:
        close_runs(tracking_uri(Home.here()), ended)
    return closed


def read_newest(client: SyncPrefectClient) -> list[FlowRun]:
    """The newest of our runs, the last one first."""
    return ours(client.read_flow_runs(flow_filter=_FLOW, sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=NEWEST))


def is_unfinished(flow_run: FlowRun) -> bool:
    """Whether a run of stages has ended, and neither it nor a later one has completed its work."""
    state = flow_run.state
    ended = state is not None and state.is_final() and not state.is_completed() and state.name != CLOSED
    return ended and not flow_run.parameters.keys().isdisjoint(RUN_PARAMETERS)


def _finishes(later: FlowRun, earlier: FlowRun) -> bool:
    assert later.state is not None and earlier.state is not None
    ours, theirs = ({"overrides": [], "until": "", **one.parameters} for one in (later, earlier))
    same = all(ours.get(name) == theirs.get(name) for name in (*RUN_PARAMETERS, "overrides", "seed"))
    same = same and later.deployment_id == earlier.deployment_id  # each has its own example for an empty form
    return same and ours["until"] in ("", theirs["until"]) and later.state.timestamp > earlier.state.timestamp


def interrupt(reason: str, processes: Collection[int] | None = None) -> list[Reconciled]:
    """Mark the active runs of our deployments as interrupted before their processes are stopped; return them.

    With the ids of `processes`, runs of other processes are left alone: two workers may share a state folder.
    """
    with get_client(sync_client=True) as client:
        active = FlowRunFilter(
            state={"type": {"any_": ["RUNNING", "CANCELLING", "PENDING"]}}, deployment_id={"is_null_": False}
        )
        message = f"{reason}; run it again and it resumes"
        owned = ((one, _owner(one)) for one in _ours(client, active))
        ended = [one for one, owner in owned if processes is None or (owner is not None and owner.pid in processes)]
        return [_end(client, one, message) for one in ended]


def _owner(flow_run: FlowRun) -> Owner | None:
    """The process that works on a run, or that did before the run was started again."""
    return mlflow_client.from_tags({name: str(value) for name, value in flow_run.labels.items()})


def served_elsewhere() -> str:
    """Describe a deployment of our flow that others serve on this server; "" if none is found.

    Prefect has one deployment per name: ours would replace theirs and execute their runs. A deployment of a state
    folder without a request for work in the last minute counts as abandoned.
    """
    tag = home_tag(Home.here())
    with get_client(sync_client=True) as client:
        for found in client.read_deployments(flow_filter=_FLOW):
            if tag in found.tags:
                continue
            if found.work_pool_name or found.status == DeploymentStatus.READY:
                by = f"the work pool {found.work_pool_name}" if found.work_pool_name else "another state folder"
                return f"deployment {FLOW_NAME}/{found.name}: is served by {by} on this Prefect server"
    return ""


def _ours(client: SyncPrefectClient, wanted: FlowRunFilter) -> list[FlowRun]:
    return ours(client.read_flow_runs(flow_run_filter=wanted, flow_filter=_FLOW))


def _why_gone(flow_run: FlowRun) -> str:
    """The reason why no process works on the run anymore, or ""."""
    if flow_run.state is None:
        return ""
    if flow_run.state.is_pending():
        late = flow_run.deployment_id is not None and _age(flow_run.state) > STARTED_AFTER
        return "the process that was supposed to start it has ended" if late else ""
    process = _owner(flow_run)
    if process is None or not is_gone(process):
        return ""
    labels = flow_run.labels
    of_this_start = RUN_COUNT not in labels or str(labels[RUN_COUNT]) == str(flow_run.run_count)
    if not of_this_start and _age(flow_run.state) < STARTED_AFTER:
        return ""  # it has just been started again, and its new process will label it
    return f"its {process} ended without reporting a result"


def _end(client: SyncPrefectClient, flow_run: FlowRun, message: str) -> Reconciled:
    cancelling = flow_run.state is not None and flow_run.state.is_cancelling()
    state: State = Cancelled(message=message) if cancelling else Crashed(message=message)
    client.set_flow_run_state(flow_run.id, state, force=True)
    for task_run in _active_tasks(client, flow_run.id):
        client.set_task_run_state(task_run.id, Crashed(message="its flow run ended"), force=True)
    return Reconciled("Prefect", flow_run.name, str(flow_run.id), str(state.name), message)


def _active_tasks(client: SyncPrefectClient, *flow_runs: UUID) -> list[TaskRun]:
    active = TaskRunFilter(state={"type": {"any_": ["RUNNING", "PENDING"]}, "name": None})
    within = FlowRunFilter(id={"any_": list(flow_runs)}) if flow_runs else None
    return client.read_task_runs(task_run_filter=active, flow_run_filter=within, flow_filter=_FLOW)


def _end_tasks_left_behind(client: SyncPrefectClient) -> list[Reconciled]:
    """End the tasks that Prefect still shows as running although their flow run ended some time ago."""
    task_runs = [task_run for task_run in _active_tasks(client) if task_run.flow_run_id is not None]
    flow_runs = _read_ours(client, [task_run.flow_run_id for task_run in task_runs])
    ended = []
    for task_run in task_runs:
        flow_run = flow_runs[task_run.flow_run_id] if task_run.flow_run_id in flow_runs else None
        if flow_run is None or flow_run.state is None or not flow_run.state.is_final():
            continue
        if _age(flow_run.state) > SETTLED_AFTER:
            reason = f"its flow run {flow_run.name} is {flow_run.state.name}, but the task did not report its own end"
            done = flow_run.state.is_completed()
            state: State = Completed(message=reason) if done else Crashed(message=reason)
            client.set_task_run_state(task_run.id, state, force=True)
            ended.append(Reconciled("Prefect", f"task {task_run.name}", str(task_run.id), str(state.name), reason))
    return ended


def _read_ours(client: SyncPrefectClient, ids: Sequence[UUID | None]) -> dict[UUID | None, FlowRun]:
    if not ids:
        return {}
    wanted = FlowRunFilter(id={"any_": list(set(ids))})
    return {flow_run.id: flow_run for flow_run in _ours(client, wanted)}


def _age(state: State) -> timedelta:
    return datetime.now(UTC) - state.timestamp
