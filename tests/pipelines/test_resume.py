"""Which run `rlhf resume` means and what comes of it, under a real Prefect server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pipelines.home import Home

pytestmark = pytest.mark.slow

PARAMETERS = {"profile": "tiny/full", "overrides": ["seed=3"], "until": "sft", "force": [], "strict_code": True}


@pytest.fixture
def client(prefect_home: Home) -> Iterator[Any]:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        yield client


def foreground(client: Any, name: str, state: Any, parameters: dict[str, Any] | None = None) -> Any:
    from prefect import flow

    @flow(name="test-resume", validate_parameters=False)
    def body(profile: str, overrides: list[str], until: str, force: list[str], strict_code: bool) -> None:
        return None

    chosen = PARAMETERS if parameters is None else parameters
    return client.create_flow_run(body, name=name, parameters=chosen, state=state).id


def test_a_run_of_a_terminal_is_run_again_with_its_own_options_by_name_or_id(client: Any) -> None:
    from prefect.states import Crashed, Failed

    from pipelines.resume import resume

    foreground(client, "nightly", Failed())
    newest = foreground(client, "nightly", Crashed(message="killed"))
    for wanted in ("nightly", str(newest), ""):
        found = resume(wanted, served=False)
        assert found.kind == "foreground" and found.options is not None
        assert vars(found.options) == PARAMETERS
        assert found.said == f"nightly ({newest}) was Crashed (killed)"


def test_there_is_nothing_to_resume_of_what_completed_runs_or_waits(client: Any) -> None:
    from prefect.states import Completed, Paused, Running

    from pipelines.resume import resume

    said = {}
    for state in (Completed(), Running(), Paused()):
        run = foreground(client, f"a-{state.name}-run", state)
        found = resume(str(run), served=True)
        assert found.kind == "nothing" and found.options is None
        said[state.name] = found.said
    assert said["Completed"].endswith("has completed: nothing is left to resume")
    assert said["Running"].endswith("is Running: its process is at work")
    assert said["Paused"].endswith("is Paused: it waits for a person, in Prefect's page")


def test_a_name_that_no_run_has_is_refused_with_the_one_that_was_meant(client: Any) -> None:
    from prefect.states import Completed

    from pipelines.resume import ResumeError, resume

    foreground(client, "weekly-sweep", Completed())
    with pytest.raises(ResumeError, match="no flow run has this name or id; did you mean weekly-sweep"):
        resume("wekly-sweep", served=True)


def test_a_run_of_another_program_is_refused(client: Any) -> None:
    from prefect.states import Failed

    from pipelines.resume import ResumeError, resume

    run = foreground(client, "strange", Failed(), {"profile": "x"})
    with pytest.raises(ResumeError, match="no run of rlhf"):
        resume(str(run), served=True)


def test_a_served_run_is_scheduled_again_and_needs_the_deployments(client: Any) -> None:
    from prefect import flow
    from prefect.states import Crashed

    from pipelines.resume import ResumeError, resume

    @flow(name="test-resume-served")
    def body() -> None:
        return None

    deployment = client.create_deployment(client.create_flow(body), name="full")
    run = client.create_flow_run_from_deployment(deployment).id
    client.set_flow_run_state(run, Crashed(), force=True)
    with pytest.raises(ResumeError, match="served by a deployment; rlhf up, then again"):
        resume(str(run), served=False)
    assert resume(str(run), served=True).kind == "scheduled"
    assert client.read_flow_run(run).state.is_scheduled()
