from __future__ import annotations

import argparse
import io
import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from rich.console import Console

from pipelines.cli import run_command
from pipelines.execution.lazy_runtime import LazyRuntime
from pipelines.execution.plan import Planner
from pipelines.execution.run import PipelineRun
from pipelines.services.health import ServiceError, healthy, wait_for
from pipelines.services.home import Home
from rlhf_core.stage.key import StageSpec
from rlhf_core.tracking.memory import MemoryTracker
from rlhf_core.types import ArtifactRef
from tests.support.small_pipeline import write_mini

OPTIONS = argparse.Namespace(profile="tiny/full", overrides=[], until="", force=[], strict_code=False, strict_env=False)


def losing_prefect(monkeypatch: pytest.MonkeyPatch, *, before_the_body: bool) -> list[str]:
    """Prefect's client gives up, before the pipeline or when its end is to be written down; return what was run."""
    done: list[str] = []

    def flow(**_: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
        def decorate(body: Callable[..., None]) -> Callable[..., None]:
            def call(*arguments: object) -> None:
                if not before_the_body:
                    body(*arguments)
                raise httpx.ConnectError("Connection refused")

            return call

        return decorate

    context = SimpleNamespace(get=lambda: SimpleNamespace(flow_run=SimpleNamespace(id="1")))
    monkeypatch.setattr("prefect.flow", flow)
    monkeypatch.setattr("prefect.context.FlowRunContext", context)
    monkeypatch.setattr("pipelines.prefect_flows.tasks.run_in_flow", lambda *_: done.append("ran"))
    monkeypatch.setattr("pipelines.prefect_flows.tasks.settle", lambda *_: done.append("settled"))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    return done


def run_flow() -> None:
    run: Any = SimpleNamespace(started=0)
    config: Any = SimpleNamespace(name="night")
    run_command._run_flow(run, config, OPTIONS, None)


def test_a_run_that_is_complete_ends_well_though_prefect_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done = losing_prefect(monkeypatch, before_the_body=False)
    # On the logger itself: Prefect sets up the loggers above it when it is first asked, and keeps their records to itself.
    monkeypatch.setattr(run_command.logger, "handlers", [caplog.handler])
    with caplog.at_level(logging.WARNING):
        run_flow()
    assert done == ["ran", "settled"]
    assert "http://127.0.0.1:9/api: Prefect does not answer (Connection refused); the run is complete" in caplog.text


def test_a_run_that_prefect_could_not_begin_is_one_error_that_names_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    losing_prefect(monkeypatch, before_the_body=True)
    with pytest.raises(
        ServiceError, match=r"^http://127.0.0.1:9/api: Prefect does not answer .*: run the same command again$"
    ):
        run_flow()


@pytest.mark.slow
def test_a_run_is_recorded_on_the_users_own_server_and_none_is_started(
    home: Home, prefect_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = os.environ["PREFECT_API_URL"]
    # Whoever watches the server starts it again when it does not answer for a minute, as under heavy load it may not.
    assert wait_for(lambda: healthy(f"{theirs}/health"), 180), (prefect_home.logs / "prefect_run.log").read_text()[
        -2000:
    ]
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.delenv("RLHF_OWN_SETTINGS")  # so it is the user's
    monkeypatch.setattr(run_command, "private_server", lambda home: pytest.fail("a server of our own"))
    with run_command._server(home) as server:
        assert server is None and os.environ["PREFECT_API_URL"] == theirs
    assert run_command.is_watched(home)
    monkeypatch.setenv("PREFECT_API_URL", "http://me:hunter2@127.0.0.1:9/api")
    with pytest.raises(ServiceError, match=r"^PREFECT_API_URL = http://\*\*\*@127.0.0.1:9/api: does not answer"):
        run_command._server(home).__enter__()


@pytest.mark.parametrize("watched", [False, True])
def test_a_run_is_planned_once(tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch, *, watched: bool) -> None:
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
    monkeypatch.setattr(run_command, "_server", lambda home: nullcontext())
    monkeypatch.setattr(run_command, "open_tracker", lambda config, home: MemoryTracker())
    monkeypatch.setattr(run_command, "import_tracker", lambda home: None)
    monkeypatch.setattr(run_command, "_run_flow", run_flow)
    monkeypatch.setattr(LazyRuntime, "prewarm", lambda self, **_: None)
    options = argparse.Namespace(**vars(OPTIONS) | {"profile": str(write_mini(tmp_path)), "until": "sft"})
    run_command.run_profile(options, Console(file=io.StringIO()))
    assert planned == shown == ["prepare_data", "sft"]


def test_a_profile_is_stored_with_its_whole_path_so_that_it_can_be_resumed_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert run_command._whereabouts("mine.toml") == str(tmp_path / "mine.toml")
    assert run_command._whereabouts("tiny/full") == "tiny/full"
