"""Start and stop a project's servers on 127.0.0.1: `rlhf up`, `rlhf down`, and a Prefect server for one run.

A Prefect or MLflow server that the user set is used instead of ours, which is then not started.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

from pipelines.services.home import (
    AUTH,
    LOOPBACK,
    PROOF_KEY,
    Home,
    check_databases,
    client_environment,
    quiet_environment,
    remote_tracking_uri,
    tracking_store,
)
from pipelines.services.running import (
    PREFECT_PORT,
    ServiceError,
    Services,
    alive,
    await_health,
    bound_port,
    is_reachable,
    port_of,
    proven,
    reason_in,
    running,
    wait_for,
)
from pipelines.services.user_servers import connect_user_prefect, prefect_trouble, user_prefect
from rlhf_core.secrets.redaction import shown

# ---------------------------------------------------------------- watchdog

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
"""Seconds between checks for a death."""
ASK_EVERY_S = 10.0  # between health checks
MISSED_ANSWERS = 4
"""Number of unanswered checks in a row after which a service counts as hung: 40 to 60 s after its last answer."""
START_TIMEOUT_S = 180.0  # until the first answer of a service
LONGEST_PAUSE_S = 60.0  # between restarts of a service that keeps ending
STOP_PATIENCE_S = 8.0  # between SIGTERM and SIGKILL
KILL_AFTER_S = 4.0
"""Seconds after the end of its patience until the guard of a service is killed itself."""


@dataclass
class Child:
    """A service: its command, its health check, its log file and its process."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    well: Callable[[], bool]
    log: Path
    patience_s: float = STOP_PATIENCE_S
    """Seconds that it may take to end."""
    listener: socket.socket | None = None
    """The socket at which it listens, which stays open while it is restarted."""
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = start_guarded(
                self.command, self.environment, log, patience_s=self.patience_s, listener=self.listener
            )

    def dead(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def stop(self) -> None:
        if self.process is not None:
            stop_process(self.process, patience_s=self.patience_s + KILL_AFTER_S)
        if self.listener is not None:
            self.listener.close()

    def kill(self) -> None:
        if self.process is not None:
            kill_family(self.process.pid)
            stop_process(self.process, patience_s=KILL_AFTER_S)


def keep_alive(child: Child, stop: threading.Event, *, answered: bool = True) -> None:
    """Restart `child` whenever it ends or hangs, until `stop` is set. `answered` is whether it has worked since its start.

    The pauses grow if it ends before it has answered again.
    """
    pause_s = LOOK_EVERY_S
    while (ailment := _ailment(child, stop, answered=answered)) is not None:
        answered, trouble = ailment
        pause_s = LOOK_EVERY_S if answered else min(2 * pause_s, LONGEST_PAUSE_S)
        logger.warning("%s %s; restarted", child.name, trouble)
        child.kill()
        if not answered and stop.wait(pause_s):
            return
        child.start()
        answered = False


def _ailment(child: Child, stop: threading.Event, *, answered: bool) -> tuple[bool, str] | None:
    """Whether the child has answered since its start, and its present problem; None when `stop` is set."""
    missed = 0
    began = last_check = time.monotonic()
    while not stop.wait(LOOK_EVERY_S):
        if child.dead():
            assert child.process is not None
            return answered, f"ended with status {child.process.returncode}"
        if answered and time.monotonic() - last_check < ASK_EVERY_S:
            continue
        last_check = time.monotonic()
        if child.well():
            answered, missed = True, 0
        elif answered or last_check - began > START_TIMEOUT_S:
            missed += 1
        if missed >= MISSED_ANSWERS:
            return answered, f"did not answer {missed} times in a row"
    return None


# ---------------------------------------------------------------- processes


def start_guarded(
    command: list[str],
    environment: Mapping[str, str],
    log: BinaryIO,
    *,
    patience_s: float,
    listener: socket.socket | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command that ends with this process. Ctrl-C reaches only this process, which then stops the command.

    The command has the descriptor of `listener`, under its number here.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "pipelines.services.parent_death_guard", str(patience_s), *command],
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        pass_fds=() if listener is None else (listener.fileno(),),
        start_new_session=True,
    )


def stop_process(process: subprocess.Popen[bytes], *, patience_s: float) -> None:
    """Stop a child with SIGTERM; if it has not ended after `patience_s`, kill it and all its descendants."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            kill_family(process.pid)
            process.wait()
    if process.stdin is not None:
        process.stdin.close()


def kill_family(pid: int) -> None:
    """Kill a process and all its descendants, stopped ones included."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in [*parent.children(recursive=True), parent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


# ---------------------------------------------------------------- servers

FIRST_SIGN_S = 60.0  # until the supervisor has written its record
UP_TIMEOUT_S = 240.0  # until all services answer
DOWN_TIMEOUT_S = 75.0  # until all services have ended
SERVER_TIMEOUT_S = START_TIMEOUT_S
MLFLOW_STORE = "MLFLOW_BACKEND_STORE_URI"
"""Environment variable that `mlflow server` reads in place of `--backend-store-uri`."""


def start_services(home: Home, *, foreground: bool) -> Services:
    """Start Prefect, MLflow and the deployments; return when all of them answer."""
    services = running(home)
    api = user_prefect(home)
    if services is not None and api and services.prefect_api != api:
        rule = f"the services that are running use Prefect at {services.prefect_url}"
        raise ServiceError(f"PREFECT_API_URL = {shown(api)}: {rule}; stop them with `rlhf down` first, or unset it")
    if services is not None and services.well(home):
        return services
    _check_user_servers(home)
    home.make()
    command = [sys.executable, "-P", "-m", "pipelines.services.supervisor", str(home.root)]
    environment = os.environ | quiet_environment(home) | mlflow_environment()
    if foreground:
        os.execve(sys.executable, command, environment)
    logs = {
        log: log.stat().st_size if log.is_file() else 0 for log in (home.logs / "prefect.log", home.logs / "mlflow.log")
    }
    if services is None:
        with (home.logs / "supervisor.log").open("ab") as log:
            subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        wait_for(lambda: running(home) is not None, FIRST_SIGN_S)
    try:
        settled = wait_for(lambda: _ready(home) or running(home) is None, UP_TIMEOUT_S)
    except KeyboardInterrupt:
        stop_services(home)
        raise
    services = running(home)
    if services is None:
        reason = next((found for log, size in logs.items() if (found := reason_in(log, after=size))), "")
        raise ServiceError(f"rlhf up: a service ended while it started{reason}; read the logs in {home.logs}")
    if not settled:
        late = [name for name, url in services.health.items() if not proven(url, home.prefect_auth_string)]
        late += [] if services.ready else ["the deployments"]
        rule = f"{', '.join(late)}: not ready after {UP_TIMEOUT_S:.0f} s, and still starting"
        remedy = f"`rlhf up` waits again, the logs are in {home.logs}, `rlhf down` stops everything"
        raise ServiceError(f"rlhf up: {rule}; {remedy}")
    return services


def _check_user_servers(home: Home) -> None:
    check_databases()
    api, tracking = user_prefect(home), remote_tracking_uri()
    if api:
        connect_user_prefect(home, api)
        from pipelines.services.flow_runs import served_elsewhere  # imports Prefect, whose settings were just made

        elsewhere = served_elsewhere()
        if elsewhere:
            raise ServiceError(f"{elsewhere}; run `rlhf down` there, delete that deployment, or use another server")
    if tracking.startswith("http") and not is_reachable(tracking):
        remedy = "start it, or unset the variable and `rlhf up` starts a server"
        raise ServiceError(f"MLFLOW_TRACKING_URI = {shown(tracking)}: does not answer; {remedy}")


def _ready(home: Home) -> bool:
    services = running(home)
    return services is not None and services.well(home)


def stop_services(home: Home) -> bool:
    """Stop the services that `start_services` started; True if any were running.

    A Ray that others use is left alone.
    """
    services = running(home)
    if services is None:
        forget(home)
        return False
    os.kill(services.pid, signal.SIGTERM)
    if not wait_for(lambda: not alive(services.owner), DOWN_TIMEOUT_S):
        # The services notice that their starter is gone and end by themselves.
        os.kill(services.pid, signal.SIGKILL)
    forget(home)
    return True


def forget(home: Home) -> None:
    """Remove the record of services that have ended, and their auth string: browsers and shells keep it for longer."""
    home.services.unlink(missing_ok=True)
    home.prefect_auth.unlink(missing_ok=True)


def service_states(home: Home, services: Services) -> dict[str, bool]:
    """Check whether Prefect and MLflow, ours or the user's, answer now."""
    if services.prefect_api:
        prefect = not prefect_trouble(services.environment(home))
    else:
        prefect = proven(services.health["prefect"], home.prefect_auth_string)
    theirs = services.mlflow_uri
    ours = not theirs and proven(services.health["mlflow"], home.prefect_auth_string)
    mlflow = is_reachable(theirs) if theirs.startswith("http") else bool(theirs) or ours
    return {"Prefect": prefect, "MLflow": mlflow}


# ---------------------------------------------------------------- a server for one run

PRIVATE_LOG = "prefect_run.log"


@dataclass
class PrivateServer:
    """A Prefect server for the length of one run, on the database that `rlhf up` uses too.

    After its first answer it is restarted, on the same port, whenever it dies or hangs.
    """

    child: Child
    url: str
    environment: dict[str, str]
    """The settings of a process that uses this server."""
    stopped: threading.Event

    def wait(self) -> None:
        """Wait until the server answers. Raises ServiceError if it ends or takes too long."""
        assert self.child.process is not None
        auth = self.environment[AUTH]
        await_health(f"{self.url}/api/health", auth, self.child.process, SERVER_TIMEOUT_S, self.child.log)
        threading.Thread(target=keep_alive, args=(self.child, self.stopped), daemon=True, name="keep-prefect").start()

    def stop(self) -> None:
        self.stopped.set()
        self.child.stop()


@contextmanager
def private_server(home: Home) -> Iterator[PrivateServer]:
    """Start a Prefect server without waiting for it; it stops when the block, or this process, ends."""
    check_databases()
    home.make()
    listener = bound_port(PREFECT_PORT)
    (home.logs / PRIVATE_LOG).unlink(missing_ok=True)
    server = server_at(home, listener, client_environment(home, prefect_port=port_of(listener)))
    server.child.start()
    try:
        yield server
    finally:
        server.stop()


def server_at(home: Home, listener: socket.socket, environment: dict[str, str]) -> PrivateServer:
    """A Prefect server of this run at a bound socket, not yet started."""
    url, auth = f"http://{LOOPBACK}:{port_of(listener)}", environment[AUTH]
    child = Child(
        "the Prefect server of this run",
        prefect_command(listener),
        os.environ | environment | SAFE_PATH,
        lambda: proven(f"{url}/api/health", auth),
        home.logs / PRIVATE_LOG,
        listener=listener,
    )
    return PrivateServer(child, url, environment, threading.Event())


# ---------------------------------------------------------------- commands


SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment of the services that prevents imports from the folder in which they were started. `-P` alone is not
enough, because MLflow and Prefect start further processes."""


def prefect_command(listener: socket.socket) -> list[str]:
    """Command of the Prefect server: the same as `prefect server start` runs, without waiting for its CLI.

    It answers only this machine's own pages. Start it with `SAFE_PATH` in its environment and with the socket.
    """
    return [sys.executable, "-P", "-m", "pipelines.services.prefect_server", str(listener.fileno())]


def mlflow_command(home: Home, listener: socket.socket) -> list[str]:
    """Command of the MLflow server: one worker and no job runners (0.5 GB instead of 2.4).

    It answers only this user and this machine's own pages.

    The user's database is not in the command, since any user of the machine could read it: see `mlflow_environment`.
    """
    store = () if tracking_store() else ("--backend-store-uri", home.mlflow_uri)
    return [
        *(
            sys.executable,
            "-P",
            "-m",
            "pipelines.services.mlflow_server",
            str(listener.fileno()),
            "server",
            "--host",
            LOOPBACK,
            "--port",
            str(port_of(listener)),
        ),
        *("--workers", "1"),
        *store,
        *("--artifacts-destination", str(home.mlflow_artifacts)),
    ]


def mlflow_environment() -> dict[str, str]:
    """Variables that point our MLflow server to the user's own database; {} without one."""
    store = tracking_store()
    return {MLFLOW_STORE: store} if store else {}


def proof_environment(home: Home) -> dict[str, str]:
    """Variables with which our MLflow server proves that it is ours."""
    return {PROOF_KEY: home.prefect_auth_string}
