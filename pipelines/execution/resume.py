"""Run an unfinished run again (`rlhf resume`). Finished stages are taken from the store."""

from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.states import Scheduled

from pipelines.execution.request import RunRequest
from pipelines.services.flow_runs import FLOW_NAME, is_unfinished, ours, read_newest, reconcile_flow_runs
from pipelines.services.run_notes import CLOSED
from rlhf_core.errors import RlhfError, nearest


class ResumeError(RlhfError, ValueError):
    """A run cannot be resumed as requested; the message gives the remedy."""


@dataclass(frozen=True)
class Resumption:
    """The result of `resume_flow_run`, and the remaining action.

    `nothing`: there is nothing to do; `message` is the reason. `scheduled`: `rlhf up` will run it again. `foreground`:
    it was started by `rlhf run`, and the caller must run `request` again.
    """

    kind: Literal["nothing", "scheduled", "foreground"]
    message: str
    request: RunRequest | None = None


def resume_flow_run(wanted: str, *, served: bool) -> Resumption:
    """Resume the flow run with this name or id; "" means the newest that has not completed.

    `served`: whether the deployments are up. Prefect's client must point at the server.
    """
    reconcile_flow_runs()
    with get_client(sync_client=True) as client:
        flow_run = _find(client, wanted)
        if flow_run is None:
            return Resumption("nothing", "nothing to resume: no run has failed, crashed or been cancelled")
        state = flow_run.state
        named = f"{flow_run.name} ({flow_run.id})"
        if state is None or not state.is_final():
            return Resumption("nothing", f"{named} is {'unknown' if state is None else state.name}: {_wait(flow_run)}")
        if state.is_completed():
            return Resumption("nothing", f"{named} has completed: nothing to resume")
        if state.name == CLOSED:
            return Resumption("nothing", f"{named}: {state.message}")
        why = f"{named} was {state.name}" + (f" ({state.message})" if state.message else "")
        if flow_run.deployment_id is None:
            return Resumption("foreground", why, _request(flow_run))
        if not served:
            raise ResumeError(
                f"resume = {wanted or flow_run.name!r}: it runs in a deployment; start the services with `rlhf up`, then try again"
            )
        client.set_flow_run_state(flow_run.id, Scheduled(message="resumed by rlhf resume"), force=True)
        return Resumption("scheduled", f"{why}; the deployments run it again, and it resumes where it stopped")


def _find(client: SyncPrefectClient, wanted: str) -> FlowRun | None:
    """Find the run of our flow by its name or the beginning of its id.

    A shared server has runs of other flows and folders too.
    """
    newest = read_newest(client)
    if not wanted:
        return next(filter(is_unfinished, newest), None)
    found = [run for run in newest if _is_called(run, wanted) or str(run.id).startswith(wanted)]
    if not found:  # an older one
        try:
            chosen = FlowRunFilter(id={"any_": [UUID(wanted)]})
        except ValueError:
            chosen = FlowRunFilter(name={"like_": wanted})
        flow = FlowFilter(name={"any_": [FLOW_NAME]})
        older = ours(client.read_flow_runs(flow_filter=flow, flow_run_filter=chosen))
        found = [run for run in older if _is_called(run, wanted) or str(run.id) == wanted]
    if not found:
        names = sorted({run.name for run in newest})
        raise ResumeError(f"resume = {wanted!r}: no flow run has this name or id; {nearest(wanted, names)}")
    return found[0]


def _is_called(flow_run: FlowRun, wanted: str) -> bool:
    """Whether a run has this name, or a profile of this name (the first word of the run's name)."""
    return flow_run.name == wanted or flow_run.name.startswith(f"{wanted} ")


def _wait(flow_run: FlowRun) -> str:
    assert flow_run.state is not None
    if flow_run.state.is_paused():
        return "it is waiting for input on its page in Prefect"
    return "it will start by itself" if flow_run.state.is_scheduled() else "its process is running"


def _request(flow_run: FlowRun) -> RunRequest:
    """The request of the `rlhf run` that started a flow run."""
    try:
        return RunRequest.from_parameters(flow_run.parameters)
    except KeyError as error:
        raise ResumeError(
            f"resume = {flow_run.name!r}: is not a run of rlhf (its parameters have no {error})"
        ) from None
