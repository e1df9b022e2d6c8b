"""`rlhf run`: a pipeline in this process, with a Prefect server for its duration where none is up."""

from __future__ import annotations

import argparse
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from rich.console import Console

from pipelines.display import LiveDisplay, PlainDisplay, open_display, results_table
from pipelines.home import Home, client_environment
from pipelines.profile import PipelineConfig, load_profile
from pipelines.run import PipelineRun, RunOptions, import_tracker, open_run, open_tracker
from pipelines.services import (
    SERVER_TIMEOUT_S,
    PrivateServer,
    ServiceError,
    healthy,
    private_server,
    running,
    wait_for,
)
from rlhf_core.types import ReportRef

OUR_LOGGERS = ("pipelines", "stages", "rlhf_core")


def run_profile(options: argparse.Namespace, console: Console) -> None:
    """Run a profile and print its results; RlhfError for what a person can mend."""
    from pipelines.full import lifecycle

    home = Home.here().make()
    config = load_profile(options.profile, options.overrides)
    wanted = RunOptions(until=options.until, force=tuple(options.force), strict_code=options.strict_code)
    with _server(home) as server, open_display(console) as display:
        _keep_log(home, display)
        threading.Thread(target=import_tracker, args=(home,), daemon=True, name="import-tracker").start()
        with open_run(
            config, lifecycle, wanted, home=home, tracker=open_tracker(config, home), listener=display
        ) as pipeline_run:
            _run_flow(pipeline_run, config, options, server)
    _print_results(pipeline_run, console)
    _say_where_to_look(home, console)


@contextmanager
def _server(home: Home) -> Iterator[PrivateServer | None]:
    """Point Prefect's client at the services that are up, or at a server that starts now and ends with the run."""
    services = running(home)
    if services is not None:
        if not wait_for(lambda: healthy(services.health[0]), SERVER_TIMEOUT_S):
            raise ServiceError(f"{services.prefect_url}: does not answer; read {home.logs}, or rlhf down")
        os.environ.update(client_environment(home, prefect_port=services.prefect_port))
        yield None
        return
    with private_server(home) as server:
        os.environ.update(client_environment(home, prefect_port=server.port))
        yield server


def _run_flow(
    pipeline_run: PipelineRun, config: PipelineConfig, options: argparse.Namespace, server: PrivateServer | None
) -> None:
    from prefect import flow
    from prefect.context import FlowRunContext

    from pipelines.full import lifecycle
    from pipelines.tasks import FLOW_NAME, run_in_flow, settle

    @flow(name=FLOW_NAME, flow_run_name=config.name, validate_parameters=False, persist_result=False)
    def full(profile: str, overrides: list[str], until: str, force: list[str]) -> None:
        flow_runs.append(FlowRunContext.get().flow_run.id)
        run_in_flow(pipeline_run, lifecycle)

    if server is not None:
        server.wait()
    flow_runs: list[UUID] = []
    try:
        full(options.profile, options.overrides, options.until, options.force)
    finally:
        for flow_run in flow_runs:
            settle(flow_run, pipeline_run.started)


def _print_results(pipeline_run: PipelineRun, console: Console) -> None:
    report = pipeline_run.results.get("evaluate")
    if isinstance(report, ReportRef):
        folder = pipeline_run.store.path(report)
        console.print(results_table(json.loads((folder / "report.json").read_text())))
        console.print(f"report: {folder / 'report.html'}", highlight=False, soft_wrap=True)


def _say_where_to_look(home: Home, console: Console) -> None:
    services = running(home)
    if services is None:
        console.print("look at it in a browser (Prefect and MLflow): make up, or rlhf up", highlight=False)
    else:
        console.print(f"Prefect {services.prefect_url}   MLflow {services.mlflow_url}", highlight=False)


def _keep_log(home: Home, display: PlainDisplay | LiveDisplay) -> None:
    """Write our log to a file, and warnings to the person too."""
    to_file = logging.FileHandler(home.logs / "run.log")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    to_person = _Warnings(display)
    for name in OUR_LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(to_file)
        logger.addHandler(to_person)


class _Warnings(logging.Handler):
    """Hands warnings to the display, above its table."""

    def __init__(self, display: PlainDisplay | LiveDisplay) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        self._display.warn(record.getMessage())
