"""Which run `rlhf resume` means and what comes of it, under a real Prefect server."""

from typing import Any

import pytest

from pipelines.services.home import Home

pytestmark = pytest.mark.slow

PARAMETERS = {
    "profile": "tiny/full",
    "overrides": ["seed=3"],
    "until": "sft",
    "force": [],
    "strict_code": True,
    "strict_env": False,
}


def foreground(
    client: Any,
    name: str,
    state: Any,
    parameters: dict[str, Any] | None = None,
    home: Home | None = None,
    *,
    labeled: bool = True,
) -> Any:
    from prefect import flow

    @flow(name="rlhf-pipeline", validate_parameters=False)
    def body(
        profile: str, overrides: list[str], until: str, force: list[str], strict_code: bool, strict_env: bool
    ) -> None:
        return None

    chosen = PARAMETERS if parameters is None else parameters
    run = client.create_flow_run(body, name=name, parameters=chosen, state=state).id
    if labeled:
        client.update_flow_run_labels(run, {"rlhf.home": (home or Home.here()).identity})
    return run


def test_a_run_of_a_terminal_is_run_again_with_its_own_options_by_name_or_id(client):
    from prefect.states import Crashed, Failed

    from pipelines.execution.resume import resume_flow_run

    foreground(client, "nightly", Failed())
    newest = foreground(client, "nightly", Crashed(message="killed"))
    for wanted in ("nightly", str(newest), ""):
        found = resume_flow_run(wanted, served=False)
        assert found.kind == "foreground" and found.request is not None
        assert found.request.parameters() == PARAMETERS
        assert found.message == f"nightly ({newest}) was Crashed (killed)"


def test_a_run_that_a_later_one_of_the_same_profile_has_finished_is_closed(client):
    """And is neither resumed again nor left Waiting: not by one of another profile, or one that ended earlier."""
    from prefect.states import Cancelled, Completed, Failed

    from pipelines.execution.resume import resume_flow_run
    from pipelines.services.flow_runs import reconcile_flow_runs

    mine = PARAMETERS | {"overrides": ["seed=11"]}
    whole = mine | {"until": ""}
    waits = foreground(client, "nightly", Cancelled(name="Waiting"), mine)
    failed = foreground(client, "nightly", Failed(), mine)
    other = foreground(client, "other", Failed(), PARAMETERS | {"overrides": ["seed=12"]})
    foreground(client, "nightly", Completed(), whole)
    later = foreground(client, "nightly", Failed(), whole)
    closed = [str(one) for one in reconcile_flow_runs() if one.id in (str(waits), str(failed), str(later))]
    assert [one.split(":")[0] for one in closed] == [f"Prefect nightly ({run}) -> Closed" for run in (failed, waits)]
    assert {client.read_flow_run(run).state.name for run in (waits, failed)} == {"Closed"}
    assert str(later) in resume_flow_run("", served=False).message and reconcile_flow_runs() == []
    assert "a later run of the same profile has finished it" in resume_flow_run(str(waits)[:8], served=False).message
    assert client.read_flow_run(other).state.name == "Failed"


def test_the_form_that_answers_a_gate_is_not_what_resume_means(client):
    from prefect.states import Failed

    from pipelines.execution.resume import resume_flow_run

    wanted = foreground(client, "nightly", Failed())
    foreground(client, "approve quality", Failed(), {"run": "nightly", "gate": "quality"})
    assert str(wanted) in resume_flow_run("", served=False).message


def test_there_is_nothing_to_resume_of_what_completed_runs_or_waits(client):
    from prefect.states import Completed, Paused, Running

    from pipelines.execution.resume import resume_flow_run

    said = {}
    for state in (Completed(), Running(), Paused()):
        run = foreground(client, f"a-{state.name}-run", state)
        found = resume_flow_run(str(run), served=True)
        assert found.kind == "nothing" and found.request is None
        said[state.name] = found.message
    assert said["Completed"].endswith("has completed: nothing to resume")
    assert said["Running"].endswith("is Running: its process is running")
    assert said["Paused"].endswith("is Paused: it is waiting for input on its page in Prefect")


def test_a_name_that_no_run_has_is_refused_with_the_one_that_was_meant(client):
    from prefect.states import Completed

    from pipelines.execution.resume import ResumeError, resume_flow_run

    foreground(client, "weekly-sweep", Completed())
    with pytest.raises(ResumeError, match="no flow run has this name or id; did you mean weekly-sweep"):
        resume_flow_run("wekly-sweep", served=True)


def test_a_run_of_another_program_is_refused(client):
    from prefect.states import Failed

    from pipelines.execution.resume import ResumeError, resume_flow_run

    run = foreground(client, "strange", Failed(), {"profile": "x"})
    with pytest.raises(ResumeError, match="is not a run of rlhf"):
        resume_flow_run(str(run), served=True)


def test_a_served_run_is_scheduled_again_and_needs_the_deployments(client):
    from prefect import flow
    from prefect.states import Crashed

    from pipelines.execution.resume import ResumeError, resume_flow_run
    from pipelines.services.flow_runs import home_tag

    @flow(name="rlhf-pipeline")
    def body() -> None:
        return None

    deployment = client.create_deployment(client.create_flow(body), name="full", tags=[home_tag(Home.here())])
    run = client.create_flow_run_from_deployment(deployment).id
    client.set_flow_run_state(run, Crashed(), force=True)
    with pytest.raises(ResumeError, match="it runs in a deployment; start the services with `rlhf up`, then try again"):
        resume_flow_run(str(run), served=False)
    assert resume_flow_run(str(run), served=True).kind == "scheduled"
    assert client.read_flow_run(run).state.is_scheduled()


def test_a_run_of_another_state_folder_on_the_same_server_is_not_ours_to_resume(client, tmp_path):
    from prefect.states import Failed

    from pipelines.execution.resume import ResumeError, resume_flow_run

    ours = foreground(client, "ours", Failed())
    theirs = foreground(client, "theirs", Failed(), home=Home(tmp_path))
    assert str(ours) in resume_flow_run("", served=False).message
    for wanted in ("theirs", str(theirs)):
        with pytest.raises(ResumeError, match="no flow run has this name or id"):
            resume_flow_run(wanted, served=False)


def test_a_run_of_an_earlier_version_is_resumed_on_our_own_server(client, monkeypatch):
    from prefect.states import Failed

    from pipelines.execution.resume import ResumeError, resume_flow_run

    run = foreground(client, "earlier", Failed(), labeled=False)
    found = resume_flow_run("earlier", served=False)
    assert found.kind == "foreground" and str(run) in found.message
    monkeypatch.delenv("RLHF_OWN_SETTINGS")  # now its address is one that the user set
    with pytest.raises(ResumeError, match="no flow run has this name or id"):
        resume_flow_run("earlier", served=False)
