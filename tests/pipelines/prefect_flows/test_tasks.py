"""Stages as Prefect tasks, under a real Prefect server."""

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.execution.executor import RunOptions, Silent
from pipelines.execution.opening import open_run
from pipelines.execution.plan import Pipeline
from pipelines.execution.request import RunRequest
from pipelines.flows.graph import Stages, ungrouped
from pipelines.flows.profile import PipelineConfig, load_profile
from pipelines.services.home import Home, basic
from pipelines.services.running import wait_for
from rlhf_core.tracking.memory import MemoryTracker
from rlhf_core.types import PolicyRef, PreparedDataRef
from tests.support.listener import Notes
from tests.support.small_pipeline import two_toys, write_mini
from tests.support.toy_stage import ToyConfig, toy_spec

pytestmark = pytest.mark.slow


def diamond(config: PipelineConfig, stages: Stages) -> None:
    """data -> left, right (of its part) -> both; plus a stage that reads nothing."""
    data = stages.run_stage(toy_spec(ToyConfig(trouble="children"), label="data"), PreparedDataRef)
    assert data.base is not None
    left = toy_spec(ToyConfig(kl_coef=0.1), label="left", inputs={"policy": data})
    first = stages.run_stage(left, PolicyRef)
    stages.run_stage(toy_spec(ToyConfig(kl_coef=0.2), label="right", inputs={"policy": first}), PolicyRef)
    stages.run_stage(toy_spec(ToyConfig(kl_coef=0.3), label="alone"), PolicyRef)


def grouped(config: PipelineConfig, stages: Stages) -> None:
    """data -> a group of two stages -> a stage after it."""
    data = stages.run_stage(toy_spec(ToyConfig(trouble="children"), label="data"), PreparedDataRef)

    def body() -> PolicyRef:
        first = stages.run_stage(toy_spec(ToyConfig(kl_coef=0.1), label="a", inputs={"policy": data}), PolicyRef)
        return stages.run_stage(toy_spec(ToyConfig(kl_coef=0.2), label="b", inputs={"policy": first}), PolicyRef)

    policy = stages.group("round", body, after=[data])
    stages.run_stage(toy_spec(ToyConfig(kl_coef=0.3), label="after", inputs={"policy": policy}), PolicyRef)


def run_flow(tmp_path: Path, home: Home, pipeline: Pipeline = diamond, *, until: str = "", tasks: int = 4) -> str:
    from prefect import flow, tags
    from prefect.context import FlowRunContext

    from pipelines.prefect_flows.tasks import run_in_flow, settle

    ids = []

    @flow(name="test-pipeline")
    def body() -> None:
        context = FlowRunContext.get()
        assert context is not None and context.flow_run is not None
        ids.append(context.flow_run.id)
        with open_run(
            load_profile(write_mini(tmp_path)),
            pipeline,
            RunOptions(until=until),
            home=home,
            tracker=MemoryTracker(),
            listener=Notes(),
        ) as run:
            run_in_flow(run, pipeline)
            assert run.started == tasks

    with tags("user:ada"):
        body()
    settle(ids[0], tasks)
    return str(ids[0])


def node_names(flow_run: str) -> dict[str, str]:
    """Return label -> name of the state of a flow run's tasks."""
    tasks = api("/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
    return {task["name"]: task["state"]["name"] for task in tasks}


def api(path: str, body: dict[str, Any] | None = None) -> Any:
    url = os.environ["PREFECT_API_URL"] + path
    data = None if body is None else json.dumps(body).encode()
    headers = {
        "content-type": "application/json",
        "authorization": f"Basic {basic(os.environ['PREFECT_API_AUTH_STRING'])}",
    }
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


@pytest.mark.smoke
def test_prefect_shows_the_edges_the_hits_the_plan_and_a_card_per_stage(tmp_path, prefect_home):
    home = Home(tmp_path / "home").make()
    ran, cached = run_flow(tmp_path, home), run_flow(tmp_path, home)

    graph = api(f"/flow_runs/{ran}/graph-v2")
    labels = {node_id: node["label"] for node_id, node in graph["nodes"]}
    edges = {node["label"]: [labels[parent["id"]] for parent in node["parents"]] for _, node in graph["nodes"]}
    assert edges == {"data": [], "left": ["data"], "right": ["left"], "alone": []}
    cards = {node["label"]: [one["key"] for one in node["artifacts"]] for _, node in graph["nodes"]}
    assert cards == {name: [f"stage-{name}"] for name in edges}
    assert [artifact["key"] for artifact in graph["artifacts"]] == ["plan", "results"]
    named = [api(f"/flow_runs/{flow_run}")["name"] for flow_run in (ran, cached)]
    assert [name[-7:] for name in named] == [f" ({flow_run[:4]})" for flow_run in (ran, cached)]

    for flow_run, name in ((ran, "Completed"), (cached, "Cached")):
        tasks = api("/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
        assert {task["state"]["name"] for task in tasks} == {name}
        assert len(tasks) == 4
        # Before a task with tags, the client asks the server for slots, and often waits two seconds to ask again.
        assert api(f"/flow_runs/{flow_run}")["tags"] == ["user:ada"]
        assert [task["tags"] for task in tasks] == [[]] * 4


def test_a_group_is_one_node_that_holds_its_stages(prefect_home, tmp_path):
    home = Home(tmp_path / "home").make()
    ended = run_flow(tmp_path, home, grouped, until="a", tasks=3)
    assert node_names(ended) == {"data": "Completed", "round": "Completed", "a": "Completed"}
    flow_run = run_flow(tmp_path, home, grouped, tasks=5)
    assert node_names(flow_run) == {
        "data": "Cached",
        "round": "Completed",
        "a": "Cached",
        "b": "Completed",
        "after": "Completed",
    }
    again = run_flow(tmp_path, home, grouped, tasks=5)
    assert set(node_names(again).values()) == {"Cached"}

    graph = api(f"/flow_runs/{flow_run}/graph-v2")
    labels = {node_id: node["label"] for node_id, node in graph["nodes"]}
    edges = {node["label"]: [labels[one["id"]] for one in node["parents"]] for _, node in graph["nodes"]}
    inside = {node["label"]: [labels[one["id"]] for one in node["encapsulating"]] for _, node in graph["nodes"]}
    assert edges == {"data": [], "round": ["data"], "a": [], "b": ["a"], "after": ["round"]}
    assert inside == {"data": [], "round": [], "a": ["round"], "b": ["round"], "after": []}


def test_a_group_waits_with_the_stage_that_a_gate_holds_back(prefect_home, tmp_path, monkeypatch):
    from prefect import flow

    from pipelines.prefect_flows import pipeline_flows
    from pipelines.prefect_flows.tasks import settle

    monkeypatch.setattr(pipeline_flows, "open_tracker", lambda *_: MemoryTracker())
    gate = '[[gates]]\nafter = "a"\nmetric = "total"\nop = ">="\nvalue = 100.0\notherwise = "approve"\n'
    config = load_profile(write_mini(tmp_path, gate), [f'store="{tmp_path}/store"'])

    @flow(name="test-held", persist_result=False)
    def body() -> Any:
        return pipeline_flows.run_served(config, grouped, RunRequest(""))

    state = body(return_state=True)
    assert state.name == "Waiting" and "WAITING at gate a" in str(state.message)
    flow_run = state.state_details.flow_run_id
    assert flow_run is not None
    settle(flow_run, 5)
    names = {"data": "Completed", "a": "Completed", "b": "Waiting", "round": "Waiting", "after": "Waiting"}
    assert node_names(str(flow_run)) == names


def test_a_group_fails_with_its_stage(prefect_home, tmp_path):
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import FlowRunSort

    def failing(config: PipelineConfig, stages: Stages) -> None:
        def body() -> PolicyRef:
            stages.run_stage(toy_spec(ToyConfig(kl_coef=0.1), label="a"), PolicyRef)
            return stages.run_stage(toy_spec(ToyConfig(trouble="raise:1"), label="broken"), PolicyRef)

        stages.group("round", body, after=[])

    with pytest.raises(ValueError, match="step 1 went wrong"):
        run_flow(tmp_path, Home(tmp_path / "home").make(), failing)
    with get_client(sync_client=True) as client:
        (flow_run,) = client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=1)
    ended = {"round": "Failed", "a": "Completed", "broken": "Failed"}
    wait_for(lambda: node_names(str(flow_run.id)) == ended, 30)
    assert node_names(str(flow_run.id)) == ended


def waiting_in_a_group(before_b: Callable[[], None], file: Path) -> Pipeline:
    """Return a pipeline whose group has a stage `b` that waits for a file, after `before_b`."""

    def pipeline(config: PipelineConfig, stages: Stages) -> None:
        def body() -> PolicyRef:
            first = stages.run_stage(toy_spec(ToyConfig(kl_coef=0.1), label="a"), PolicyRef)
            if stages.group is not ungrouped:  # not while the pipeline is planned
                before_b()
            waits = ToyConfig(kl_coef=0.2, trouble=f"wait:{file}")
            return stages.run_stage(toy_spec(waits, label="b", inputs={"policy": first}), PolicyRef)

        policy = stages.group("round", body, after=[])
        stages.run_stage(toy_spec(ToyConfig(kl_coef=0.3), label="after", inputs={"policy": policy}), PolicyRef)

    return pipeline


@pytest.mark.parametrize("during", [False, True], ids=["between two stages", "during a stage"])
def test_an_interrupt_in_a_group_ends_the_run_and_the_next_one_goes_on(prefect_home, tmp_path, during):
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import FlowRunSort

    file, home = tmp_path / "there", Home(tmp_path / "home").make()

    def interrupt() -> None:
        if not during:
            signal.raise_signal(signal.SIGINT)  # the stage before has ended: the next one does not begin
        else:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        run_flow(tmp_path, home, waiting_in_a_group(interrupt, file), tasks=3)
    with get_client(sync_client=True) as client:
        (flow_run,) = client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=1)
    ended = {"a": "Completed", "b": "Crashed", "round": "Crashed"}
    wait_for(lambda: node_names(str(flow_run.id)) == ended, 30)  # the server hears of the ends a little later
    assert node_names(str(flow_run.id)) == ended
    file.touch()
    again = run_flow(tmp_path, home, waiting_in_a_group(lambda: None, file), tasks=4)
    assert node_names(again) == {"a": "Cached", "b": "Completed", "round": "Completed", "after": "Completed"}


def test_a_run_that_is_retried_is_not_taken_for_that_of_the_dead_process(prefect_home, tmp_path):
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.context import FlowRunContext

    from pipelines.prefect_flows.tasks import run_in_flow
    from rlhf_core.tracking import mlflow_client

    ids = []

    @flow(name="test-retried", validate_parameters=False, persist_result=False)
    def body() -> None:
        context = FlowRunContext.get()
        assert context is not None and context.flow_run is not None
        ids.append(context.flow_run.id)
        with get_client(sync_client=True) as client:  # what the attempt that was killed had left
            client.update_flow_run_labels(
                ids[0], mlflow_client.owner_tags() | {"owner.pid": "1", "owner.pid_started": "1"}
            )
        config, home = load_profile(write_mini(tmp_path)), Home(tmp_path / "home").make()
        with open_run(
            config, two_toys, RunOptions(), home=home, tracker=MemoryTracker(), listener=Silent()
        ) as pipeline_run:
            run_in_flow(pipeline_run, two_toys)

    body()
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(ids[0]).state.name == "Completed"
        history = client.read_flow_run_states(ids[0])
    assert "Crashed" not in [state.name for state in history]


def test_a_blocked_run_and_an_approval_from_a_form(prefect_home, tmp_path, monkeypatch):
    from prefect import flow
    from prefect.exceptions import ParameterTypeError

    from pipelines.execution.resume import Resumption
    from pipelines.prefect_flows import pipeline_flows, waiting
    from pipelines.prefect_flows.waiting import approve

    monkeypatch.setattr(pipeline_flows, "open_tracker", lambda *_: MemoryTracker())
    monkeypatch.setenv("RLHF_HOME", str(prefect_home.root))
    gate = '[[gates]]\nafter = "first"\nmetric = "total"\nop = ">="\nvalue = 2.0\nname = "quality"\n'
    config = load_profile(write_mini(tmp_path, gate + 'otherwise = "approve"\n'), [f'store="{tmp_path}/store"'])

    @flow(name="test-blocked", persist_result=False)
    def body() -> Any:
        return pipeline_flows.run_served(config, two_toys, RunRequest(""))

    state = body(return_state=True)
    assert state.name == "Waiting" and "`rlhf approve mini quality --question" in str(state.message)
    flow_run = str(state.state_details.flow_run_id)
    given = {"run": flow_run, "gate": "quality", "reason": "too short", "by": "ada", "store": f"{tmp_path}/store"}
    # This test's flow is none of `rlhf up`, so it cannot be started again from here.
    said = approve(decision="reject", **given)
    assert "rejected by ada at" in said and said.endswith("run the same command again, and it goes on")
    state = body(return_state=True)
    assert state.name == "Blocked" and str(state.message).startswith(
        "BLOCKED by gate quality: total 1.5 < 2; rejected by ada"
    )
    resumed = []
    monkeypatch.setattr(
        waiting, "resume_flow_run", lambda one, *, served: resumed.append(one) or Resumption("scheduled", "it goes on")
    )
    assert approve(decision="approve", **given).endswith("; it goes on")
    assert resumed == [given["run"]]
    assert body(return_state=True).is_completed()
    with pytest.raises(ParameterTypeError, match="decision: Input should be 'approve' or 'reject'"):
        approve(decision="maybe", **given)


def test_a_stage_with_a_limit_waits_for_a_run_that_computes_it(prefect_home, tmp_path):
    from pipelines.prefect_flows.tasks import slots

    inside: list[str] = []
    slot, order, go_on = slots({"toy": 1})("toy"), [], threading.Event()

    def hold(name: str) -> None:
        with slots({"toy": 1})("toy"):
            order.append(name)
            inside.append(name)
            assert inside == [name]
            go_on.wait(60)
            inside.remove(name)

    threads = [threading.Thread(target=hold, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(order) == 1, 60)
    limit = api("/v2/concurrency_limits/stage:toy")
    assert (limit["limit"], limit["active_slots"]) == (1, 1)
    with slots({})("toy"):
        assert len(order) == 1, "a run without the limit is free"
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert sorted(order) == ["a", "b"]
    with slot:
        assert inside == []
