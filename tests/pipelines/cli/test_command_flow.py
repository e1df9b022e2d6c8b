import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect.exceptions import CancelledRun

from pipelines.cli import command_flow
from pipelines.execution.request import RunRequest
from pipelines.flows.run_rules import ProjectConfig
from pipelines.services.running import ServiceError
from rlhf_core.stage.stopping import StageWaiting


def losing_prefect(monkeypatch: pytest.MonkeyPatch, *, before_the_body: bool) -> list[str]:
    """Prefect's client gives up, before the pipeline or when its end is to be written down; return what was run."""
    done: list[str] = []

    def flow(**_: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
        def decorate(body: Callable[..., None]) -> Callable[..., None]:
            def call(**arguments: object) -> None:
                if not before_the_body:
                    body(**arguments)
                raise httpx.ConnectError("Connection refused")

            return call

        return decorate

    context = SimpleNamespace(get=lambda: SimpleNamespace(flow_run=SimpleNamespace(id="1")))
    monkeypatch.setattr(command_flow, "flow", flow)
    monkeypatch.setattr(command_flow, "FlowRunContext", context)
    monkeypatch.setattr(command_flow, "run_in_flow", lambda *_: done.append("ran"))
    monkeypatch.setattr(command_flow, "settle", lambda *_: done.append("settled"))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    return done


def run_flow() -> None:
    run: Any = SimpleNamespace(started=0, headline="")
    config: Any = SimpleNamespace(name="night", project=ProjectConfig())
    command_flow.run_flow(run, config, RunRequest("tiny/full"), None)


def test_a_run_that_is_complete_ends_well_though_prefect_is_gone(monkeypatch, caplog):
    done = losing_prefect(monkeypatch, before_the_body=False)
    # On the logger itself: Prefect sets up the loggers above it when it is first asked, and keeps their records to itself.
    monkeypatch.setattr(command_flow.logger, "handlers", [caplog.handler])
    with caplog.at_level(logging.WARNING):
        run_flow()
    assert done == ["ran", "settled"]
    assert "http://127.0.0.1:9/api: Prefect does not answer (Connection refused); the run is complete" in caplog.text


def test_a_run_that_prefect_could_not_begin_is_one_error_that_names_the_server(monkeypatch):
    losing_prefect(monkeypatch, before_the_body=True)
    with pytest.raises(
        ServiceError, match=r"^http://127.0.0.1:9/api: Prefect does not answer .*: run the same command again$"
    ):
        run_flow()


def test_a_profile_is_stored_with_its_whole_path_so_that_it_can_be_resumed_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    found = [RunRequest(name) for name in ("mine.toml", "tiny/full")]
    places = [str(tmp_path / "mine.toml"), "tiny/full"]
    assert [one.options().profile for one in found] == [one.parameters()["profile"] for one in found] == places


def test_a_run_that_waits_says_for_what(monkeypatch):
    """Prefect's client raises CancelledRun for the state Waiting; the caller gets what the stage raised."""
    done = losing_prefect(monkeypatch, before_the_body=False)

    def waits(*_: object) -> None:
        raise StageWaiting("collect is waiting: 0 of 60 comparisons are judged")

    def flow(**_: object) -> Callable[[Callable[..., Any]], Callable[..., None]]:
        def decorate(body: Callable[..., Any]) -> Callable[..., None]:
            def call(**arguments: object) -> None:
                raise CancelledRun(body(**arguments).message)

            return call

        return decorate

    monkeypatch.setattr(command_flow, "flow", flow)
    monkeypatch.setattr(command_flow, "run_in_flow", waits)
    with pytest.raises(StageWaiting, match="0 of 60"):
        run_flow()
    assert done == ["settled"]
