"""Run a pipeline in this process (`rlhf run`), with a Prefect server for its duration if none is up."""

import argparse
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pipelines.cli.common import console, print_line
from pipelines.cli.display import LiveDisplay, PlainDisplay, open_display, results_tables
from pipelines.execution.executor import Listener, Listeners, RunOptions, Tally
from pipelines.execution.local import LazyRuntime
from pipelines.execution.opening import (
    import_tracker,
    is_watched,
    note_of,
    open_run,
    open_tracker,
    plan_run,
    results_if_all_cached,
    store_of,
)
from pipelines.execution.plan import PlannedStage, outlook
from pipelines.execution.request import RunRequest
from pipelines.execution.run import PipelineRun, model_digests
from pipelines.execution.summary import run_name
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import PipelineConfig
from pipelines.services.home import Home
from pipelines.services.links import with_addresses
from pipelines.services.reconcile import prefect_server
from pipelines.services.run_notes import COMPLETED
from pipelines.services.running import running
from pipelines.services.servers import PrivateServer
from pipelines.services.user_servers import tracking_uri, user_prefect
from pipelines.services.waits import may_go_on
from rlhf_core.errors import RlhfError
from rlhf_core.secrets.redaction import shown
from rlhf_core.stage.stopping import StageWaiting
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef, ReportRef

logger = logging.getLogger(__name__)

OUR_LOGGERS = ("pipelines", "stages", "rlhf_core", "rlhf_contrib")


WAIT_LOOK_S = 10.0


def run(options: argparse.Namespace) -> None:
    """Run a pipeline in this process; with `--wait`, again after each annotation or decision that it waits for."""
    request = RunRequest.from_parameters(vars(options))
    while True:
        try:
            run_request(request)
        except StageWaiting as waiting:
            if not options.wait or not waiting.condition:
                raise
            print_line(f"{waiting}; Ctrl-C ends the wait")
            _await_people(waiting.condition)
        else:
            return


def _await_people(condition: Mapping[str, Any]) -> None:
    while True:
        time.sleep(WAIT_LOOK_S)
        try:
            if may_go_on(condition, uri=tracking_uri(Home.here())):
                return
        except RlhfError as error:  # a half-edited file, or a server that is away: the next look may succeed
            logger.warning("%s", error)


def run_request(request: RunRequest) -> None:
    """Run a profile and print its results; raise RlhfError for errors that the user can fix."""
    home = Home.here().make()
    store, results, _, done = shown_run(request, home)
    _print_links(home, {} if done is None else done.links)
    _print_results(results, store, done)


def shown_run(
    request: RunRequest, home: Home
) -> tuple[ArtifactStore, dict[str, ArtifactRef], Tally, PipelineRun | None]:
    """Run a profile with its progress on the console; return store, artifacts by label, decisions, and the run.

    If every stage is cached and no service runs, neither Prefect nor MLflow is started, and the run is None.
    """
    config, wanted = request.config(), request.options()
    store = store_of(config, home)
    with open_display(console) as display, kept_log(home, display):
        tally = Tally()
        listener = Listeners(display, tally)
        planned = plan_run(config, lifecycle, wanted, store=store)
        display.expect(planned, outlook(planned, store))
        from pipelines.cli.main import when_planned  # it imports this module for its command

        when_planned(config, planned, store)
        note = note_of(config, wanted, home)
        # A run that this one finishes is closed on Prefect's and MLflow's pages, too.
        watched = is_watched(home) or note.finishes_another()
        done: PipelineRun | None = None
        results = None if watched else results_if_all_cached(planned, store, listener, strict=wanted.strict)
        if results is not None:
            name = run_name(config.name, wanted.overrides, "")
            note.change(name=name, state=COMPLETED, policies=model_digests(results))
        if results is None:
            # If all stages were cached a moment ago, a result is gone now: the run plans again, with the checks of a plan.
            stale = not watched and all(stage.decision.action == "HIT" for stage in planned)
            with prefect_server(home) as server:
                done = run_recorded(config, None if stale else planned, wanted, request, home, listener, server=server)
                results = done.results
    return store, results, tally, done


def run_recorded(
    config: PipelineConfig,
    planned: list[PlannedStage] | None,
    wanted: RunOptions,
    request: RunRequest,
    home: Home,
    listener: Listener,
    *,
    server: PrivateServer | None,
    runtime: LazyRuntime | None = None,
) -> PipelineRun:
    """Run the pipeline as a Prefect flow, tracked in MLflow; return the finished run.

    `runtime` holds engines that outlive the run.
    """
    # MLflow and Prefect import it late. If two threads do so at once, an import may fail.
    import fastapi.encoders  # noqa: F401

    threading.Thread(target=import_tracker, args=(home,), daemon=True, name="import-tracker").start()
    tracker = open_tracker(config, home)
    with open_run(
        config, lifecycle, wanted, home=home, tracker=tracker, listener=listener, planned=planned, runtime=runtime
    ) as pipeline_run:
        # Prefect takes two seconds, which a run of cached stages does without, and reads the settings made above.
        from pipelines.cli.command_flow import run_flow

        run_flow(pipeline_run, config, request, server)
    return pipeline_run


def _print_results(results: Mapping[str, ArtifactRef], store: ArtifactStore, done: PipelineRun | None) -> None:
    report = results.get("evaluate")
    if isinstance(report, ReportRef):
        folder = store.path(report)
        kept = None if done is None or done.note is None else done.note.page  # with the run's name, seed and links
        shown_page = folder / "report.html" if kept is None or not kept.is_file() else kept
        print_line(f"report: {shown_page}")
        table = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        console.print(results_tables(table, console.width))


def _print_links(home: Home, links: Mapping[str, str]) -> None:
    services = running(home)
    theirs = user_prefect(home)
    if theirs and (services is None or services.prefect_api != theirs):
        print_line(f"Prefect {shown(theirs).removesuffix('/api')}")
    elif services is None:
        print_line("to see runs in a browser: `rlhf up` starts Prefect and MLflow")
    else:
        pages = ("prefect.url", services.prefect_url), ("mlflow.url", services.mlflow_page)
        # They may have other addresses than when the run began.
        prefect, mlflow = (with_addresses(links[link], services) if link in links else page for link, page in pages)
        print_line(f"Prefect {prefect}\nMLflow  {mlflow}")


@contextmanager
def kept_log(home: Home, display: PlainDisplay | LiveDisplay) -> Iterator[None]:
    """Write our log to a file, and warnings to the display too."""
    to_file = logging.FileHandler(home.logs / "run.log", encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers = (to_file, _Warnings(display))
    loggers = [logging.getLogger(name) for name in OUR_LOGGERS]
    for one in loggers:
        one.setLevel(logging.INFO)
        for handler in handlers:
            one.addHandler(handler)
    try:
        yield
    finally:
        for one in loggers:
            for handler in handlers:
                one.removeHandler(handler)
        to_file.close()


class _Warnings(logging.Handler):
    """A log handler that shows warnings above the display's table."""

    def __init__(self, display: PlainDisplay | LiveDisplay) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        self._display.warn(record.getMessage())
