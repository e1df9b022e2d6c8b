"""Serve the deployments of `rlhf up`: `rlhf-pipeline/full`, `/rlvr`, `/online`, `/approve`, and one per stage.

Each has a typed form.

At its start and every minute, this process also corrects the state of runs that are shown as running although their
process is gone. Runs that wait for people are scheduled again when these have judged enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn
from uuid import UUID

import prefect
import psutil
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    DeploymentFilterTags,
    FlowFilter,
    FlowFilterName,
)
from prefect.client.schemas.objects import VersionInfo
from prefect.context import SyncClientContext
from prefect.runner import Runner
from prefect.runner import _scheduled_run_poller as poller
from pydantic import BaseModel

from pipelines.execution.plan import DIGITS
from pipelines.flows.profile import PipelineConfig, load_profile, shipped_profiles
from pipelines.flows.profile_text import as_table
from pipelines.prefect_flows import pipeline_flows, stage_flows, waiting
from pipelines.prefect_flows.own_deployments import claim, declare, own_deployments
from pipelines.prefect_flows.waiting import keep_resuming
from pipelines.services.flow_runs import FLOW_NAME, PIPELINE_TAG, STAGE_TAG, home_tag, interrupt, reconcile_flow_runs
from pipelines.services.home import Home
from rlhf_core.processes.identity import user_name
from rlhf_core.secrets.redaction import hide_in_logs
from rlhf_core.stage.stopping import terminations
from rlhf_core.store.fingerprint import hash_file, sha256_text
from rlhf_core.store.layout import read_json, write_json
from stages.table import STAGES

logger = logging.getLogger(__name__)

RUNS_AT_ONCE = 1
"""Concurrent runs. Two would each start their own Ray on the same cores and GPUs; the second waits, then finds hits."""
POLL_S = 2.0
PATIENT_QUESTIONS = 10_000
"""Failed requests in a row that end the runner. Prefect's default of 3 would end it, and with it the running flows,
seconds after its server went away.
"""
BEAT_EVERY_S = 5.0
ADOPT_EVERY_S = 5.0
RECONCILE_EVERY_S = 60.0
FORMS = ("tiny/distill", "tiny/conditional", "tiny/prm", "tiny/online", "tiny/full")
"""Profiles that fill the forms of single stages. If several have a section, the last one is used."""
SAVE_TIMEOUT_S = 25.0
"""Seconds that a flow may take to save and end. Then it is killed, and resumes from its last checkpoint."""


def deployments() -> list[Any]:
    """List the deployments; the forms of stages are filled from the tiny profiles, so that each can run unchanged."""
    profile = load_profile("tiny/full")
    forms: dict[str, tuple[Flow[..., Any], dict[str, Any]]] = {
        _dashed(name): (flow, {"settings": _settings(profile)})
        for name, flow in stage_flows.STAGE_FLOWS.items()
        if not STAGES[name].section
    }
    for name in FORMS:
        forms |= stage_parameters(load_profile(name))
    return [
        *(declare(one, one.fn.__name__, {"profile": ""}, PIPELINE_TAG) for one in pipeline_flows.PIPELINES),
        declare(waiting.approve, "approve", {}, PIPELINE_TAG),
        *(declare(flow, name, parameters, STAGE_TAG) for name, (flow, parameters) in forms.items()),
    ]


@cache
def initial_parameters() -> dict[str, dict[str, Any]]:
    """Deployment name -> parameters of its form: the build step of `prefect.yaml`, for work pools."""
    return {deployment.name: deployment.parameters for deployment in deployments()}


def stage_parameters(profile: PipelineConfig) -> dict[str, tuple[Flow[..., Any], dict[str, Any]]]:
    """Deployment name -> flow and the initial parameters of its form, for each stage in the profile."""
    settings = _settings(profile)
    parameters: dict[str, tuple[Flow[..., Any], dict[str, Any]]] = {}
    for stage in STAGES.values():
        config = section_of(profile, stage.section)
        if config is not None:
            # A section may have keys of the pipeline that are inputs when the stage runs alone: `ppo.start_from`.
            known = {field for kind in stage.configs for field in kind.model_fields}
            left_out = set(type(config).model_fields) - known
            form = {"config": _plain(config, left_out), "settings": settings}
            parameters[_dashed(stage.name)] = (stage_flows.STAGE_FLOWS[stage.name], form)
    for name, flow in stage_flows.GROUP_FLOWS.items():
        config = section_of(profile, name)
        if config is not None:
            parameters[_dashed(name)] = (flow, {"config": _plain(config), "settings": settings})
    return parameters


def section_of(profile: PipelineConfig, path: str) -> BaseModel | None:
    """Find the section of a profile at a dotted path; None if the profile has none there.

    >>> section_of(load_profile("tiny/full"), "rejection_sampling.select").type
    'best_of_n'
    """
    section: Any = profile if path else None
    for name in path.split("."):
        section = None if section is None else getattr(section, name)
    found: BaseModel | None = section
    return found


def register(runner: Runner, home: Home) -> None:
    """Let the runner serve the deployments. Deployments that this version of the program has made before are kept."""
    version, note = _version(home), home.root / "deployments.json"
    wanted = DeploymentFilter(tags=DeploymentFilterTags(all_=[home_tag(home)]))
    with SyncClientContext.get_or_create():
        client = get_client(sync_client=True)
        served = client.read_deployments(deployment_filter=wanted)
        found = {one.name: one.id for one in served}
        kept = read_json(note)
        versions = {one.name: one.version for one in served}
        if kept is None or kept["version"] != version or not kept["made"].items() <= versions.items():
            note.unlink(missing_ok=True)  # until all are made whole
            made = [claim(one, home) for one in deployments()]
            found = apply(client, made)
            kept = {"version": version, "made": {one.name: one.version for one in made}}
            write_json(note, kept)
    for name in kept["made"]:
        runner._deployment_registry.register_deployment(found[name], name)


def apply(client: SyncPrefectClient, made: Collection[Any]) -> dict[str, UUID]:
    """Make deployments on the server, or update the changed ones; return name -> id.

    The version of a deployment is a digest of its form and settings. Prefect's own way takes five requests and asks git.
    Its server enforces a form unless told otherwise, and checks it only if told to enforce it. The check of a large form
    takes 0.3 CPU seconds. An update always checks.
    """
    names = DeploymentFilter(name=DeploymentFilterName(any_=[one.name for one in made]))
    of_ours = FlowFilter(name=FlowFilterName(any_=[FLOW_NAME]))
    known = {one.name: one for one in client.read_deployments(flow_filter=of_ours, deployment_filter=names)}
    flow = client.create_flow_from_name(FLOW_NAME)
    found = {}
    for one in made:
        form = one._parameter_openapi_schema.model_dump(exclude_unset=True)
        one.version = sha256_text(json.dumps([form, one.model_dump(mode="json", exclude={"version"})]))[:DIGITS]
        info = VersionInfo(type="prefect:simple", version=one.version)
        if one.name in known:  # to make it again would remove its schedules
            found[one.name] = known[one.name].id
            if known[one.name].version != one.version:
                one.apply(version_info=info)
            continue
        fields = ("version", "paused", "concurrency_limit", "concurrency_options", "parameters", "description", "tags")
        found[one.name] = client.create_deployment(
            flow,
            one.name,
            version_info=info,
            entrypoint=one.entrypoint,
            parameter_openapi_schema=form,
            **{field: getattr(one, field) for field in fields},
        )
    return found


def _version(home: Home) -> str:
    """A digest of all that the deployments of a state folder are made from: the program, the shipped profiles, the user."""
    package = Path(__file__).parents[1]
    folders = (package, package.with_name("rlhf_core"), package.with_name("stages"), shipped_profiles())
    files = [
        f"{path} {hash_file(path)}"
        for folder in folders
        for path in sorted(folder.rglob("*.[pt][yo]*"))
        if path.suffix in (".py", ".toml")
    ]
    return sha256_text("\n".join([prefect.__version__, home.identity, user_name(), *files]))[:DIGITS]


def _settings(profile: PipelineConfig) -> dict[str, Any]:
    return {"name": profile.name, "seed": profile.seed, "runtime": _plain(profile.runtime)}


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _plain(config: BaseModel, left_out: Collection[str] = ()) -> dict[str, Any]:
    return {name: value for name, value in as_table(config).items() if name not in left_out}


class InterruptingRunner(Runner):
    """A runner that, at its end, first marks its runs as interrupted and then lets them save.

    Prefect's own runner kills them and leaves them Running, or marks them Cancelled. Its folder has a name in the shared
    temporary folder that any user of the machine can take first; here it is in the state folder. It also serves the
    deployments that `rlhf deploy` has made, even while it runs.
    """

    def __init__(self, home: Home) -> None:
        super().__init__(limit=RUNS_AT_ONCE, query_seconds=POLL_S)
        self._tmp_dir: Path = home.prefect / "runner_storage" / self._tmp_dir.name

    async def __aenter__(self) -> InterruptingRunner:
        await super().__aenter__()
        self._adopting = asyncio.create_task(self._adopt())
        return self

    async def _adopt(self) -> None:
        while True:
            try:
                for deployment, name in (await own_deployments(self._client)).items():
                    self._deployment_registry.register_deployment(deployment, name)
            except Exception as error:  # the server may be away for a while
                logger.warning("could not look for deployments of profiles: %s", error)
            await asyncio.sleep(ADOPT_EVERY_S)

    def handle_sigterm(self, *args: Any, **kwargs: Any) -> NoReturn:
        end_children("interrupted by rlhf down")


def end_children(reason: str, *, alone: bool = True) -> NoReturn:
    """Mark the active runs of the state folder as interrupted, let runs of this process save, and end the process.

    If this process is not `alone`, because other workers run, only its own runs are marked.
    """
    flows_under_way = psutil.Process().children()
    try:
        for corrected in interrupt(reason, None if alone else [process.pid for process in flows_under_way]):
            logger.warning("%s", corrected)
    except Exception as error:  # the flows must be notified in any case
        logger.warning("could not mark the active runs as interrupted: %s", error)
    for process in flows_under_way:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            process.send_signal(signal.SIGTERM)
    psutil.wait_procs(flows_under_way, timeout=SAVE_TIMEOUT_S)
    os._exit(0)


async def _serve(runner: Runner, mark: Path) -> None:
    poller.critical_service_loop = partial(poller.critical_service_loop, consecutive=PATIENT_QUESTIONS)
    beating = asyncio.create_task(_beat(mark))
    try:
        await runner.start()
    finally:
        beating.cancel()


async def _beat(mark: Path) -> None:
    """Touch `mark` from the serving loop, so that it grows old if that loop hangs."""
    while True:
        mark.touch()
        await asyncio.sleep(BEAT_EVERY_S)


def keep_true(home: Home) -> None:
    """Start the threads that correct the state of dead runs, and schedule runs again that have waited for people."""
    log = home.logs / "reconcile.log"
    threading.Thread(target=_keep_true, args=(log,), daemon=True, name="reconcile").start()
    waiting = (home, log.with_name("waiting.log"))
    threading.Thread(target=keep_resuming, args=waiting, daemon=True, name="waiting").start()


def _keep_true(log: Path) -> None:
    """Reconcile everything once, and again whenever Prefect turns out to have shown a wrong state."""
    _reconcile_all(log)
    while True:
        time.sleep(RECONCILE_EVERY_S)
        try:
            corrected = reconcile_flow_runs()
        except Exception as error:  # the server may be away for a while
            logger.warning("could not search for runs of dead processes: %s", error)
            continue
        for found in corrected:
            logger.warning("%s", found)
        if corrected:
            _reconcile_all(log)


def _reconcile_all(log: Path) -> None:
    # In a separate process: MLflow takes 200 MB and is needed here only now and then.
    with log.open("ab") as stream:
        subprocess.run(
            [sys.executable, "-P", "-m", "pipelines.cli.main", "reconcile"], stdout=stream, stderr=stream, check=False
        )


def main(mark: Path) -> None:
    """Serve the deployments; the file `mark` exists and is recent while they can be triggered."""
    logging.basicConfig(format="%(asctime)s %(message)s")
    hide_in_logs()
    if signal.SIGHUP in terminations():
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    home = Home.here()
    reconcile_flow_runs()
    runner = InterruptingRunner(home)
    register(runner, home)
    keep_true(home)
    asyncio.run(_serve(runner, mark))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
