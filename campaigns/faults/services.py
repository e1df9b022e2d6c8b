"""Cause faults around a run: in Prefect's and MLflow's server, the deployments, their supervisor, the flow's process.

The services are real; the stages are a small `prepare_data` and `sft` with in-process engines.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.processes import family, kill_family
from campaigns.faults.fault import Fault, Outcome
from pipelines.services import servers
from pipelines.services.home import Home, basic
from pipelines.services.running import MLFLOW_PORT, bound_port, healthy, port_of, running, wait_for

PROFILE = """
name = "faults"
[runtime]
type = "local"
trainer = {engine = "torch"}
sampler = {type = "hf"}
[prepare_data]
data = {type = "support", demonstrations = 96, preferences = 16, prompts = 8, eval_demonstrations = 8, \
eval_preferences = 8, eval_prompts = 4}
model = {type = "init", vocab_size = 400, hidden_size = 32, layers = 1, heads = 2, kv_heads = 2, intermediate_size = 64}
[sft]
loop = {batch_size = 8, epochs = 4}
"""
PATIENCE_S = 300.0
"""Seconds. Nothing below should take nearly as long; a fault that does is not handled."""
SEEN_S = 5.0
"""Seconds until the supervisor, too, has seen that a service is healthy. Until then START_TIMEOUT_S applies to it."""
DEATH_S = 10.0
HANG_S = 75.0
"""Four probes, ten seconds apart and up to five seconds long, with some slack."""

PREFECT = "pipelines.services.prefect_server"
MLFLOW = "mlflow"
DEPLOYMENTS = "pipelines.prefect_flows.deployments"
NAMES = {PREFECT: "prefect", MLFLOW: "mlflow", DEPLOYMENTS: "deployments"}
"""A word of a service's command -> the supervisor's name for it."""


# ---------------------------------------------------------------- services of `rlhf up`


@cache
def _home() -> Home:
    """A state folder with running services, shared by the faults below; they stop with this program."""
    folder = tempfile.mkdtemp(prefix="faults-")
    home = Home(Path(folder))
    _cli(home, "up")
    atexit.register(lambda: _cli(home, "down"))
    return home


def _service(home: Home, name: str) -> psutil.Process:
    """The guard process of a service, found by a word of its command."""
    found = running(home)
    if found is not None:  # the supervisor may be between two children
        for child in psutil.Process(found.pid).children():
            if any(name in word for word in child.cmdline()):
                return child
    raise RuntimeError(f"{name} is not running in {home.root}")


def _served(home: Home, name: str) -> Callable[[], bool]:
    """A function that checks whether a service works."""
    found = running(home)
    assert found is not None
    mark, now = home.root / "deployments.ready", time.time()
    checks: dict[str, Callable[[], bool]] = {
        PREFECT: lambda: healthy(found.health["prefect"]),
        MLFLOW: lambda: healthy(found.health["mlflow"]),
        DEPLOYMENTS: lambda: mark.exists() and mark.stat().st_mtime > now,  # the previous process has left its file
    }
    return checks[name]


def _hit_service(name: str, number: signal.Signals) -> Outcome:
    home = _home()
    log = home.logs / "supervisor.log"
    time.sleep(SEEN_S)
    leash = _service(home, name)
    victims = leash.children(recursive=True)
    if not victims:
        raise RuntimeError(f"{name} is not running in {home.root}, only its leash")
    seen = len(log.read_text(encoding="utf-8"))
    began = time.monotonic()
    for process in victims:
        process.send_signal(number)

    def told() -> list[str]:
        lines = [
            line.partition(" ")[2].partition(" ")[2] for line in log.read_text(encoding="utf-8")[seen:].splitlines()
        ]
        return [line for line in lines if line.startswith(NAMES[name])]

    if not wait_for(lambda: bool(told()), PATIENCE_S):
        return Outcome("not handled", None, None, "the supervisor noticed nothing")
    noticed = time.monotonic()
    served = _served(home, name)
    again = wait_for(lambda: not leash.is_running() and served(), PATIENCE_S)
    recovered = time.monotonic()
    left = [process for process in victims if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    (said, *_) = told()
    if not again or left:
        return Outcome("not handled", noticed - began, None, f"{said}; {len(left)} processes left")
    return Outcome("recovered", noticed - began, recovered - noticed, said)


def _prefect_dies_in_a_served_run(folder: Path) -> Outcome:
    """The flow of a deployment continues, and its end is recorded when the server is back."""
    home = _home()
    found = running(home)
    assert found is not None
    api = Api(found.prefect_url, home.prefect_auth_string)
    run = _trigger(api)
    if not _comes_to(api, run, "RUNNING"):
        return Outcome("not handled", None, None, "the deployment did not start")
    deployments = _service(home, DEPLOYMENTS)
    outcome = _hit_service(PREFECT, signal.SIGKILL)
    began = time.monotonic()
    done = _comes_to(api, run, "COMPLETED")
    if outcome.recover_s is None or not done or not deployments.is_running():
        return Outcome("not handled", outcome.detect_s, None, str(_state(api, run)))
    return Outcome("recovered", outcome.detect_s, outcome.recover_s + time.monotonic() - began, outcome.said)


# ---------------------------------------------------------------- the supervisor itself


def _kill_supervisor(folder: Path) -> Outcome:
    home = Home(folder)
    _cli(home, "up")
    before = running(home)
    assert before is not None
    everything = family(before.pid)
    began = time.monotonic()
    os.kill(before.pid, signal.SIGKILL)
    gone = wait_for(lambda: not any(map(_at_work, everything)), 60)
    ended = time.monotonic()
    up = _cli(home, "up")
    after, recovered = running(home), time.monotonic()
    _cli(home, "down")
    if not gone or up.returncode or after is None:
        return Outcome("not handled", ended - began, None, up.stderr.strip())
    same = (before.prefect_port, before.mlflow_port) == (after.prefect_port, after.mlflow_port)
    said = f"its {len(everything) - 1} processes ended; rlhf up started anew" + (" on the same ports" if same else "")
    return Outcome("recovered", ended - began, recovered - ended, said)


def _stop_supervisor(folder: Path) -> Outcome:
    """SIGTERM while a deployment runs: its run is marked, and `rlhf up` and `rlhf resume` complete it."""
    home = Home(folder)
    _cli(home, "up")
    found = running(home)
    assert found is not None
    api = Api(found.prefect_url, home.prefect_auth_string)
    run = _trigger(api)
    if not _comes_to(api, run, "RUNNING"):
        return Outcome("not handled", None, None, "the deployment did not start")
    began = time.monotonic()
    _cli(home, "down")
    ended = time.monotonic()
    _cli(home, "up")
    found = running(home)
    if found is None:
        return Outcome("not handled", ended - began, None, "rlhf up did not start again")
    state = _state(api, run)
    resumed = _cli(home, "resume", run)
    done = _comes_to(api, run, "COMPLETED")
    recovered = time.monotonic()
    _cli(home, "down")
    if state["type"] != "CRASHED" or resumed.returncode or not done:
        return Outcome("not handled", ended - began, None, f"{state['name']}: {state['message']}; {resumed.stdout}")
    return Outcome("recovered", ended - began, recovered - ended, f"{state['name']}: {state['message']}")


class Api(NamedTuple):
    """Address and credentials of the test's Prefect server."""

    url: str
    auth: str


def _trigger(api: Api) -> str:
    """Start the deployment of the stage `prepare_data`; returns the id of its run."""
    (deployment,) = _post(api, "/deployments/filter", {"deployments": {"name": {"any_": ["prepare-data"]}}})
    return str(_post(api, f"/deployments/{deployment['id']}/create_flow_run", {})["id"])


def _comes_to(api: Api, run: str, state: str) -> bool:
    def there() -> bool:
        try:
            return bool(_state(api, run)["type"] == state)
        except OSError:  # the server is unreachable at the moment
            return False

    return wait_for(there, PATIENCE_S)


def _state(api: Api, run: str) -> dict[str, Any]:
    (found,) = _post(api, "/flow_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
    state: dict[str, Any] = found["state"]
    return state


# ---------------------------------------------------------------- a run in a terminal


def _kill_flow(folder: Path) -> Outcome:
    home = Home(folder)
    with _running(home, folder) as (process, lines):
        _until(lines, "sft: RUN")
        kill_family(process.pid)
    began = time.monotonic()
    said = _cli(home, "reconcile").stdout.strip().splitlines()
    noticed = time.monotonic()
    again = _cli(home, "run", str(_profile(folder)))
    recovered = time.monotonic()
    shown = [line for line in said if line.startswith(("Prefect faults", "MLflow faults"))]
    if len(shown) < 3 or again.returncode or "prepare_data: HIT" not in again.stdout:
        return Outcome("not handled", noticed - began, None, "; ".join(said) + again.stderr)
    return Outcome("recovered", noticed - began, recovered - noticed, shown[-1])


def _hit_private_server(folder: Path, number: signal.Signals) -> Outcome:
    home = Home(folder / f"private_{number.name}")  # a separate one: a run with only hits starts no server
    with _running(home, folder) as (process, lines):
        _until(lines, "prepare_data: RUN")
        (leash,) = [child for child in family(process.pid) if _is_leash(child)]
        began = time.monotonic()
        for child in leash.children(recursive=True):
            child.send_signal(number)
        said = _until(lines, "the Prefect server of this run")
        noticed = time.monotonic() if said else None
        for _ in lines:  # read to the end
            continue
        status = process.wait(PATIENCE_S)
        recovered = time.monotonic()
    made = (home.store / "keys").glob("*/*.json")
    if status or len(list(made)) != 2:
        return Outcome("not handled", None, None, said or f"status {status}")
    if noticed is None:
        return Outcome("recovered", None, recovered - began, "the run ended before the server was missed")
    return Outcome("recovered", noticed - began, recovered - noticed, said.removeprefix("warning: "))


def _mlflow_away(folder: Path, number: signal.Signals) -> Outcome:
    """MLflow's server dies or hangs and is not restarted: the run must end well, and its records are kept for later."""
    home = Home(folder / f"away_{number.name}").make()
    listener = bound_port(MLFLOW_PORT)
    url = f"http://127.0.0.1:{port_of(listener)}"
    command, quiet = servers.mlflow_command(home, listener), subprocess.DEVNULL
    server = subprocess.Popen(command, stdout=quiet, stderr=quiet, pass_fds=(listener.fileno(),))
    listener.close()
    try:
        wait_for(lambda: healthy(f"{url}/health"), PATIENCE_S)
        with _running(home, folder, MLFLOW_TRACKING_URI=url) as (process, lines):
            _until(lines, "prepare_data: RUN")
            began = time.monotonic()
            for victim in family(server.pid):
                victim.send_signal(number)
            said = _until(lines, "warning: tracking:")
            noticed = time.monotonic()
            for _ in lines:
                continue
            status = process.wait(PATIENCE_S)
            ended = time.monotonic()
    finally:
        kill_family(server.pid)
        server.wait()
    spooled = [path for path in home.mlflow_artifacts.rglob("*.jsonl") if path.stat().st_size]
    if status or not said or not spooled:
        return Outcome("not handled", None, None, said or f"status {status}, {len(spooled)} spools")
    return Outcome("recovered", noticed - began, ended - noticed, said.removeprefix("warning: "))


# ---------------------------------------------------------------- pieces


def _cli(home: Home, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipelines.cli.main", *arguments]
    return subprocess.run(command, env=_environment(home), capture_output=True, text=True, timeout=900, check=False)


def _environment(home: Home, **changes: str) -> dict[str, str]:
    return os.environ | {"RLHF_HOME": str(home.root), "PYTHONUNBUFFERED": "1"} | changes


def _profile(folder: Path) -> Path:
    path = folder / "faults.toml"
    path.write_text(PROFILE, encoding="utf-8")
    return path


@contextmanager
def _running(home: Home, folder: Path, **changes: str) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """A run of the small profile in a separate process, and its output lines; killed at the end."""
    command = [sys.executable, "-m", "pipelines.cli.main", "run", str(_profile(folder))]
    environment = _environment(home, **changes)
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield process, iter(process.stdout)
    finally:
        kill_family(process.pid)
        process.wait()


def _until(lines: Iterator[str], beginning: str) -> str:
    """Read up to the line with this text; returns the line, or "" if the run ended first."""
    return next((line.strip() for line in lines if beginning in line), "")


def _is_leash(process: psutil.Process) -> bool:
    """Whether this is the process that guards the Prefect server of a run."""
    words = " ".join(process.cmdline())
    return "pipelines.services.parent_death_guard" in words and PREFECT in words


def _at_work(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _post(api: Api, path: str, body: dict[str, Any]) -> Any:
    """POST to Prefect's server; retried for a minute if its database is busy."""
    headers = {"content-type": "application/json", "authorization": f"Basic {basic(api.auth)}"}
    request = urllib.request.Request(f"{api.url}/api{path}", json.dumps(body).encode(), headers)
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return json.load(response)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


FAULTS: list[Fault] = [
    Fault("Prefect server dies", DEATH_S, lambda folder: _hit_service(PREFECT, signal.SIGKILL)),
    Fault("Prefect server hangs", HANG_S, lambda folder: _hit_service(PREFECT, signal.SIGSTOP)),
    Fault("Prefect server dies during a served run", DEATH_S, _prefect_dies_in_a_served_run),
    Fault("MLflow server dies", DEATH_S, lambda folder: _hit_service(MLFLOW, signal.SIGKILL)),
    Fault("MLflow server hangs", HANG_S, lambda folder: _hit_service(MLFLOW, signal.SIGSTOP)),
    Fault("deployments die", DEATH_S, lambda folder: _hit_service(DEPLOYMENTS, signal.SIGKILL)),
    Fault("deployments hang", HANG_S, lambda folder: _hit_service(DEPLOYMENTS, signal.SIGSTOP)),
    Fault("supervisor killed", 45.0, _kill_supervisor),
    Fault("supervisor stopped during a served run", 75.0, _stop_supervisor),
    Fault("flow process killed", PATIENCE_S, _kill_flow),
    Fault("Prefect server of a run dies", DEATH_S, lambda folder: _hit_private_server(folder, signal.SIGKILL)),
    Fault("Prefect server of a run hangs", HANG_S, lambda folder: _hit_private_server(folder, signal.SIGSTOP)),
    Fault("MLflow dies for the rest of a run", 30.0, lambda folder: _mlflow_away(folder, signal.SIGKILL)),
    Fault("MLflow hangs for the rest of a run", 60.0, lambda folder: _mlflow_away(folder, signal.SIGSTOP)),
]
