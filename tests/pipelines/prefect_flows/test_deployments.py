import asyncio
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import yaml
from jsonschema import ValidationError, validate
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import PrefectHTTPStatusError
from rich.console import Console

from pipelines.flows.profile import load_profile
from pipelines.prefect_flows import deployments, pipeline_flows
from pipelines.prefect_flows.deployments import stage_parameters
from pipelines.prefect_flows.own_deployments import declare
from pipelines.services.home import Home
from rlhf_core.errors import ConfigError
from stages.table import STAGES

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def forms() -> dict[str, tuple[dict, dict]]:
    found = {}
    for name, (flow, parameters) in stage_parameters(load_profile("tiny/full")).items():
        schema = flow.parameters.model_dump_for_openapi()
        found[name] = (schema, parameters)
    return found


def test_there_is_a_deployment_for_every_stage(forms):
    assert set(forms) == {
        "prepare-data", "sft", "reward-model", "generate", "score", "select", "rejection-sampling", "iterative-dpo",
        "dpo", "ppo", "evaluate", "publish",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("profile", "names"),
    [
        ("tiny/conditional", {"condition", "conditional-sft"}),
        ("tiny/distill", {"distill"}),
        ("tiny/prm", {"process-reward-model"}),
    ],
)
def test_the_stages_of_other_profiles_have_forms_too(profile, names):
    found = stage_parameters(load_profile(profile))
    assert names <= set(found)
    for name in names:
        flow, parameters = found[name]
        assert validate(parameters, flow.parameters.model_dump_for_openapi()) is None


def test_every_deployment_is_served_once():
    served = [deployment.name for deployment in deployments.deployments()]
    assert len(served) == len(set(served))
    several = {"full", "rlvr", "online", "approve", "rejection-sampling", "conditional-sft", "iterative-dpo"}
    assert set(served) == several | {name.replace("_", "-") for name in STAGES}


def declared() -> dict[str, dict[str, Any]]:
    """The deployments of prefect.yaml by name, as Prefect's own loader reads them."""
    from prefect.cli.deploy._config import _load_deploy_configs_and_actions

    said = io.StringIO()
    found, actions = _load_deploy_configs_and_actions(CHECKOUT / "prefect.yaml", console=Console(file=said))
    assert said.getvalue() == "", "Prefect skips a file that it finds fault with, and says so"
    assert [list(step) for step in actions["pull"]] == [["prefect.deployments.steps.set_working_directory"]]
    assert [list(step) for step in actions["build"]] == [["pipelines.prefect_flows.deployments.initial_parameters"]]
    names = [one["name"] for one in found]
    assert len(names) == len(set(names))
    return {one["name"]: one for one in found}


def without_texts(schema: Any) -> Any:
    """Return a form without its descriptions."""
    if isinstance(schema, dict):
        return {key: without_texts(value) for key, value in schema.items() if key != "description"}
    return [without_texts(one) for one in schema] if isinstance(schema, list) else schema


def test_prefect_yaml_declares_the_deployments_that_are_served_with_the_same_flows(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # Prefect puts a file's folder first, and ours has a `profile.py`
    from prefect.flows import load_flow_from_entrypoint
    from prefect.utilities.templating import apply_values

    wanted = {one.name: one for one in deployments.deployments()}
    found = declared()
    assert set(found) == set(wanted)
    for name, one in found.items():
        file, _, function = one["entrypoint"].partition(":")
        assert f"{file.removesuffix('.py').replace('/', '.')}.{function}" == wanted[name].entrypoint
        filled = apply_values(one.get("parameters") or {}, deployments.initial_parameters())  # as the build step does
        assert filled == wanted[name].parameters
        assert one["tags"] == wanted[name].tags
    for name in ("full", "process-reward-model"):  # one of each file, since a file is run anew for each
        flow = load_flow_from_entrypoint(str(CHECKOUT / found[name]["entrypoint"]))
        assert flow.name == wanted[name].flow_name
        form = flow.parameters.model_dump_for_openapi()
        served = wanted[name]._parameter_openapi_schema.model_dump_for_openapi()
        # Pydantic finds the texts of fields in modules that were imported by name, and Prefect imports this one by path.
        assert without_texts(form) == without_texts(served)
        assert validate(wanted[name].parameters, form) is None


def test_prefect_yaml_has_no_key_that_prefect_would_pass_over():
    """Prefect ignores keys that it does not know, so a misspelt limit would be none."""
    from prefect.cli.deploy._models import ConcurrencyLimitSpec, DeploymentConfig, PrefectYamlModel, WorkPoolConfig

    known = {field.alias or name for name, field in PrefectYamlModel.model_fields.items()}
    text = yaml.safe_load((CHECKOUT / "prefect.yaml").read_text())
    assert set(text) - {"definitions"} <= known  # `definitions` holds YAML's own anchors
    for one in text["deployments"]:
        assert set(one) <= set(DeploymentConfig.model_fields)
        assert set(one["work_pool"]) <= set(WorkPoolConfig.model_fields)
        assert set(one.get("concurrency_limit", {})) <= set(ConcurrencyLimitSpec.model_fields)


def test_the_forms_of_pipelines_are_short_and_every_field_is_described():
    served = {one.name: one for one in deployments.deployments()}
    for name in ("full", "rlvr", "online", "approve"):
        form = served[name]._parameter_openapi_schema.model_dump_for_openapi()
        assert len(form["properties"]) == 8 and all(field["description"] for field in form["properties"].values())
        assert "\n" not in served[name].description and served[name].tags == ["pipeline"]
        if name != "approve":
            for filled in ({}, {"profile": "team.toml", "seed": 3, "overrides": ["ppo.steps=2"]}, {"config": {}}):
                assert validate(served[name].parameters | filled, form) is None


def test_every_form_accepts_what_it_is_filled_with(forms):
    for schema, parameters in forms.values():
        assert validate(parameters, schema) is None


def test_a_misspelt_key_is_refused_by_the_form(forms):
    schema, parameters = forms["sft"]
    with pytest.raises(ValidationError, match="max_lenght"):
        validate(parameters | {"config": parameters["config"] | {"max_lenght": 3}}, schema)


def test_a_stage_run_alone_asks_for_the_same_seed_as_in_the_pipeline(forms):
    assert forms["sft"][1]["settings"]["seed"] == load_profile("tiny/full").seed


def test_a_runner_that_is_asked_to_end_marks_its_runs_before_it_tells_its_flows(monkeypatch):
    events: list[str] = []

    class Flow:
        def send_signal(self, number: int) -> None:
            events.append(f"signal {number}")

    monkeypatch.setattr(deployments, "interrupt", lambda *given: events.append(f"marked {given[1]}") or [])
    monkeypatch.setattr(deployments.psutil, "Process", lambda: SimpleNamespace(children=lambda: [Flow()]))
    monkeypatch.setattr(deployments.psutil, "wait_procs", lambda flows, timeout: events.append(f"waited {timeout:.0f}"))
    monkeypatch.setattr(deployments.os, "_exit", lambda status: events.append(f"exit {status}"))
    deployments.InterruptingRunner.handle_sigterm(SimpleNamespace())
    assert events == ["marked None", "signal 15", "waited 25", "exit 0"]


def test_the_runner_keeps_its_files_where_no_other_user_can_take_their_names(tmp_path):
    runner = deployments.InterruptingRunner(Home(tmp_path))
    assert runner._tmp_dir.is_relative_to(tmp_path) and runner.limit == deployments.RUNS_AT_ONCE


@pytest.mark.slow
def test_a_profile_gets_a_deployment_of_four_fields_which_is_updated_and_served(client):
    from prefect.client.schemas.sorting import DeploymentSort

    from pipelines.prefect_flows.own_deployments import make_deployment, of_kept_profile

    def deployed(name: str, digest: str, cron: str) -> tuple[Any, str]:
        made, stages = of_kept_profile(name, 64 * digest, ()), ["prepare_data", "sft"]
        return make_deployment(made, about="`rlhf deploy team.toml`", seed=17, stages=stages, cron=cron)

    found, before = deployed("team", "a", "0 2 * * *")
    made = client.read_deployment(found)
    assert (before, made.version, made.parameters) == ("", 12 * "a", {"profile": 64 * "a"})
    form = made.parameter_openapi_schema["properties"]
    assert set(form) == {"overrides", "until", "seed", "force"}
    assert "sft" in form["until"]["description"] and "17" in form["seed"]["description"]
    with pytest.raises(PrefectHTTPStatusError, match="409"):
        client.create_flow_run_from_deployment(found, parameters={"seed": "many"})

    assert deployed("team", "b", "") == (found, 12 * "a")  # the schedule stays
    for seed in (3, None):  # the page sends null for an empty field
        run = client.create_flow_run_from_deployment(found, parameters={"seed": seed})
        assert run.parameters == {"profile": 64 * "b", "seed": seed}
    assert [one.schedule.cron for one in client.read_deployment_schedules(found)] == ["0 2 * * *"]
    deployed("team", "b", "0 3 * * *")
    assert [one.schedule.cron for one in client.read_deployment_schedules(found)] == ["0 3 * * *"]
    deployed("team", "b", "none")
    assert client.read_deployment_schedules(found) == []

    ids = {found}  # other tests may have deployments on this server
    for name, tags in (("sft", ["stage"]), ("distill", ["stage"]), ("online", ["pipeline"]), ("full", ["pipeline"])):
        ids.add(client.create_deployment(made.flow_id, name=name, tags=tags))
    listed = [one for one in client.read_deployments(sort=DeploymentSort.NAME_ASC) if one.id in ids]
    assert [one.name for one in listed] == ["team", "full", "online", "distill", "sft"]
    for name, cron, rule in (
        ("sft", "", "--name = 'sft': is a deployment of rlhf"),
        ("new", "at 2", "--cron = 'at 2': is not"),
    ):
        with pytest.raises(ConfigError, match=rule):
            deployed(name, "c", cron)

    async def adopted() -> set[Any]:
        async with deployments.InterruptingRunner(Home.here()) as runner:
            while not runner._deployment_registry.get_deployment_ids():
                await asyncio.sleep(0.05)
            return runner._deployment_registry.get_deployment_ids()

    assert asyncio.run(asyncio.wait_for(adopted(), 60)) == {found}


def test_the_mark_stays_young_only_while_the_loop_turns(tmp_path, monkeypatch):
    mark = tmp_path / "ready"
    monkeypatch.setattr(deployments, "BEAT_EVERY_S", 0.01)
    runner = SimpleNamespace(start=lambda: asyncio.sleep(0.1))
    asyncio.run(deployments._serve(runner, mark))
    first = mark.stat().st_mtime_ns
    asyncio.run(deployments._serve(runner, mark))
    assert mark.stat().st_mtime_ns > first


def test_a_server_that_is_away_for_a_while_does_not_end_the_runner(tmp_path):
    """The loop through which Prefect's runner asks for work goes on after more than its own three failures."""
    from prefect.runner import _scheduled_run_poller as poller

    asked: list[int] = []

    async def ask() -> None:
        asked.append(1)
        if len(asked) == 10:
            raise KeyboardInterrupt  # enough seen
        raise httpx.ConnectError("away")

    async def start() -> None:
        await poller.critical_service_loop(workload=ask, interval=0.001, run_once=False, jitter_range=0.3)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(deployments._serve(SimpleNamespace(start=start), tmp_path / "ready"))
    assert len(asked) == 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "sft"])
def test_a_declared_flow_loads_in_a_process_that_has_loaded_nothing_else(name, tmp_path):
    """Prefect puts the folder of the file first on the path: a file called as a package of ours would hide it."""
    program = (
        "import sys; from prefect.flows import load_flow_from_entrypoint\n"
        "print(load_flow_from_entrypoint(sys.argv[1], use_placeholder_flow=False).name)"
    )
    command = [sys.executable, "-c", program, declared()[name]["entrypoint"]]
    environment = os.environ | {"PREFECT_HOME": str(tmp_path), "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "rlhf-pipeline", done.stderr[-2000:]


@pytest.mark.slow
def test_only_changed_deployments_are_sent_and_their_forms_are_enforced(prefect_home, client, monkeypatch, tmp_path):
    """The server's check of all forms takes 7 CPU seconds, for each of our changes to the program.

    In a clone that has a remote, Prefect takes the commit for the version of a deployment that was made without one.
    """
    sent: list[str] = []
    parameters: dict[str, Any] = {"profile": ""}

    def two() -> list[Any]:
        sent.append("made")
        return [declare(flow, flow.fn.__name__, parameters) for flow in pipeline_flows.PIPELINES[:2]]

    def update(self: Any, deployment_id: Any, deployment: Any) -> None:
        sent.append("updated")
        as_sent(self, deployment_id, deployment)

    as_sent = SyncPrefectClient.update_deployment
    monkeypatch.setattr(SyncPrefectClient, "update_deployment", update)
    monkeypatch.setattr(deployments, "deployments", two)
    (tmp_path / "clone").mkdir()
    monkeypatch.chdir(tmp_path / "clone")
    author = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.com")
    for words in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "x"), ("remote", "add", "origin", "x:y")):
        subprocess.run(["git", *author, *words], check=True)

    (prefect_home.root / "deployments.json").unlink(missing_ok=True)
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))  # the runner serves its own folder, whichever is set

    def registered() -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """Name -> id on the server, id -> name at the runner, and what was made and sent."""
        sent.clear()
        runner = deployments.InterruptingRunner(prefect_home)
        deployments.register(runner, prefect_home)
        found = {one.name: one.id for one in client.read_deployments()}
        return (
            found,
            {str(key): name for key, name in runner._deployment_registry._deployment_name_map.items()},
            [*sent],
        )

    found, served, said = registered()
    assert said == ["made"] and len(served) == 2
    with pytest.raises(PrefectHTTPStatusError, match="409"):
        client.create_flow_run_from_deployment(found["full"], parameters={"seed": "many"})
    assert registered() == (found, served, [])
    (prefect_home.root / "deployments.json").unlink()
    assert registered() == (found, served, ["made"]), "another program with the same forms"
    parameters["seed"] = 3
    (prefect_home.root / "deployments.json").unlink()
    assert registered() == (found, served, ["made", "updated", "updated"])
    assert client.read_deployment(found["full"]).parameters == {"profile": "", "seed": 3}
    client.delete_deployment(found["full"])
    again, _, said = registered()
    assert again.keys() == found.keys() and again["rlvr"] == found["rlvr"] and said == ["made"], "one was removed"
    monkeypatch.setenv("RLHF_USER", "somebody")
    assert registered()[2] == ["made", "updated", "updated"], "they are tagged with the user"


@pytest.mark.parametrize("gone", [0, 1])
def test_at_the_end_every_child_is_told_although_one_has_just_ended(monkeypatch, gone):
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    found = [psutil.Process(child.pid) for child in children]

    def end_one(*_: object) -> list[str]:  # while the server is asked to mark the runs
        children[gone].kill()
        children[gone].wait()
        return []

    monkeypatch.setattr(psutil.Process, "children", lambda self: found)
    monkeypatch.setattr(deployments, "interrupt", end_one)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        deployments.end_children("stopped")
    assert ended.value.code == 0
    assert found[1 - gone].wait(60) == -signal.SIGTERM
