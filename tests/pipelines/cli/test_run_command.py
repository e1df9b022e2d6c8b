import argparse
import os
from contextlib import nullcontext

import pytest

from pipelines.cli import run_command
from pipelines.execution.local import LazyRuntime
from pipelines.execution.plan import Planner
from pipelines.execution.request import RunRequest
from pipelines.execution.run import PipelineRun
from pipelines.services.running import ServiceError, healthy, wait_for
from rlhf_core.annotation import people
from rlhf_core.errors import DataError
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.stopping import StageWaiting
from rlhf_core.tracking.memory import MemoryTracker
from rlhf_core.types import ArtifactRef
from tests.support.small_pipeline import write_mini

WORDS = RunRequest("tiny/full").parameters()


@pytest.mark.slow
def test_a_run_is_recorded_on_the_users_own_server_and_none_is_started(home, prefect_home, monkeypatch):
    theirs = os.environ["PREFECT_API_URL"]
    # Whoever watches the server starts it again when it does not answer for a minute, as under heavy load it may not.
    assert wait_for(lambda: healthy(f"{theirs}/health"), 180), (prefect_home.logs / "prefect_run.log").read_text()[
        -2000:
    ]
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.delenv("RLHF_OWN_SETTINGS")  # so it is the user's
    monkeypatch.setattr("pipelines.services.reconcile.private_server", lambda home: pytest.fail("a server of our own"))
    with run_command.prefect_server(home) as server:
        assert server is None and os.environ["PREFECT_API_URL"] == theirs
    assert run_command.is_watched(home)
    monkeypatch.setenv("PREFECT_API_URL", "http://me:hunter2@127.0.0.1:9/api")
    with pytest.raises(ServiceError, match=r"^PREFECT_API_URL = http://\*\*\*@127.0.0.1:9/api: does not answer"):
        run_command.prefect_server(home).__enter__()


@pytest.mark.parametrize("watched", [False, True])
def test_a_run_is_planned_once(tmp_path, home, monkeypatch, *, watched):
    planned: list[str] = []
    shown: list[str] = []
    decide = Planner.__call__

    def counted(self: Planner, spec: StageSpec, kind: type[ArtifactRef]) -> ArtifactRef:
        planned.append(spec.label)
        return decide(self, spec, kind)

    def run_flow(run: PipelineRun, *_: object) -> None:
        shown.extend(stage.label for stage in run.planned)

    monkeypatch.setenv("RLHF_HOME", str(home.root))
    monkeypatch.setattr(Planner, "__call__", counted)
    monkeypatch.setattr(run_command, "is_watched", lambda home: watched)
    monkeypatch.setattr(run_command, "prefect_server", lambda home: nullcontext())
    monkeypatch.setattr(run_command, "open_tracker", lambda config, home: MemoryTracker())
    monkeypatch.setattr(run_command, "import_tracker", lambda home: None)
    monkeypatch.setattr("pipelines.cli.command_flow.run_flow", run_flow)
    monkeypatch.setattr(LazyRuntime, "prewarm", lambda self, **_: None)
    request = RunRequest(str(write_mini(tmp_path)), until="sft")
    run_command.run_request(request)
    assert planned == shown == ["prepare_data", "sft"]


def test_a_run_may_stay_while_people_judge(monkeypatch, home):
    """It ends at once without --wait; with it, it looks until they are done, through an error, and runs again."""
    monkeypatch.setenv("RLHF_HOME", str(home.root))
    monkeypatch.setattr(run_command, "WAIT_LOOK_S", 0.0)
    done: list[str] = []

    def judged(condition: object, *, uri: str) -> bool:
        assert condition == {"name": "x"}
        done.append("look")
        if len(done) == 1:
            raise DataError("judgments.jsonl:1 = 'x': is not JSON; write it anew")
        return len(done) == 3

    def run_request(request: RunRequest) -> None:
        if len(done) < 3:
            raise StageWaiting("collect is waiting: 0 of 1 comparisons are judged", {"name": "x"})
        done.append("ran")

    monkeypatch.setattr(people, "is_met", judged)
    monkeypatch.setattr(run_command, "run_request", run_request)
    with pytest.raises(StageWaiting):
        run_command.run(argparse.Namespace(**WORDS, wait=False))
    assert done == []
    run_command.run(argparse.Namespace(**WORDS, wait=True))
    assert done == ["look", "look", "look", "ran"]
