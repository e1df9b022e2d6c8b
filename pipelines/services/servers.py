"""The services of a project: started by `rlhf up`, found by `rlhf run`, stopped by `rlhf down`. All on 127.0.0.1.

A Prefect or MLflow server that the user set takes the place of ours, and none of ours is started then.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from pipelines.services import user_settings
from pipelines.services.home import LOOPBACK, Home, client_environment, quiet_environment
from pipelines.services.watchdog import START_TIMEOUT_S, Child, answers, healthy, keep_alive, wait_for
from rlhf_core.errors import RlhfError
from rlhf_core.processes.private_folder import private_folder
from rlhf_core.secrets.redaction import shown, without_secrets
from rlhf_core.store.leases import is_gone
from rlhf_core.tracking.owner import from_tags

PREFECT_PORT = 4200
MLFLOW_PORT = 5000
FIRST_SIGN_S = 60.0
UP_TIMEOUT_S = 240.0
DOWN_TIMEOUT_S = 75.0
LAST_TIMEOUT_S = 20.0
SERVER_TIMEOUT_S = START_TIMEOUT_S
PORTS = 200
MLFLOW_STORE = "MLFLOW_BACKEND_STORE_URI"
"""What `mlflow server` reads in place of `--backend-store-uri`."""

_CLAIMS: list[IO[str]] = []
"""Locked files, one per port that this process gave to a server."""


class ServiceError(RlhfError, RuntimeError):
    """A service could not be started or did not answer; names its log."""


@dataclass(frozen=True)
class Services:
    """What `rlhf up` started: the supervisor's identity, the addresses, and whether all of them answer."""

    owner: dict[str, str]
    """Which process the supervisor is, so that a recycled process id is not mistaken for it."""
    prefect_port: int
    mlflow_port: int
    ready: bool
    prefect_api: str = ""
    """Address of the API of the user's own Prefect server, in place of ours; not to be printed as it is."""
    mlflow_uri: str = ""
    """The user's own MLflow server, in place of ours; not to be printed as it is."""
    shared_database: bool = field(default_factory=user_settings.has_prefect_database)
    """Whether our Prefect server runs on a database that the user set, in which others may have runs too."""

    @property
    def pid(self) -> int:
        return int(self.owner["owner.pid"])

    @property
    def prefect_url(self) -> str:
        """Where to look in a browser, and what may be printed."""
        if self.prefect_api:
            return shown(self.prefect_api).removesuffix("/api")
        return f"http://{LOOPBACK}:{self.prefect_port}"

    @property
    def mlflow_url(self) -> str:
        """Where to look in a browser, and what may be printed."""
        return shown(self.mlflow_uri) if self.mlflow_uri else f"http://{LOOPBACK}:{self.mlflow_port}"

    @property
    def tracking_uri(self) -> str:
        """What a client of MLflow is given."""
        return self.mlflow_uri or self.mlflow_url

    @property
    def health(self) -> dict[str, str]:
        """Service of ours -> an address that answers with success when the service is well."""
        prefect = {} if self.prefect_api else {"prefect": f"{self.prefect_url}/api/health"}
        return prefect | ({} if self.mlflow_uri else {"mlflow": f"{self.mlflow_url}/health"})

    def well(self) -> bool:
        """Return whether everything was started and answers now."""
        return self.ready and all(healthy(url) for url in self.health.values())

    def environment(self, home: Home) -> dict[str, str]:
        """Return the settings of a process that talks to this Prefect server."""
        return client_environment(home, prefect_port=self.prefect_port, prefect_api=self.prefect_api)

    def write(self, home: Home) -> None:
        part = home.services.with_suffix(".part")
        part.touch(mode=0o600)  # an address of the user's may hold a password
        part.write_text(json.dumps(asdict(self)))
        part.replace(home.services)
        if not self.prefect_api:
            _address_note(home).write_text(f"{self.prefect_url}/api")


def running(home: Home) -> Services | None:
    """Return the services of this state folder if their supervisor is alive."""
    services = _noted(home)
    return services if services is not None and alive(services.owner) else None


def _noted(home: Home) -> Services | None:
    try:
        return Services(**json.loads(home.services.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def await_end_of_last(home: Home) -> None:
    """Wait until the services of a supervisor that was killed have let go of their ports: they end with it, soon."""
    last = _noted(home)
    if last is not None:
        ports = [] if last.prefect_api else [last.prefect_port]
        ports += [] if last.mlflow_uri else [last.mlflow_port]
        wait_for(lambda: all(is_free(port) for port in ports), LAST_TIMEOUT_S)


# ---------------------------------------------------------------- servers of the user's own


def user_prefect(home: Home) -> str:
    """Return the address of the API of the user's own Prefect server, empty where there is none.

    `rlhf up` prints an address to export: that of our own server is none of the user's, also when it is down again.
    """
    api = user_settings.prefect_api()
    services = running(home)
    if services is not None and not services.prefect_api and _plain(api) == f"{services.prefect_url}/api":
        return ""
    note = _address_note(home)
    if note.is_file() and _plain(api) == note.read_text():
        port = urlsplit(api).port
        if port is not None and (is_free(port) or _is_claimed(port)):
            return ""
    return api


def shares_prefect(home: Home) -> bool:
    """Return whether others may have runs on the Prefect server that this state folder uses, or in its database."""
    services = running(home)
    if services is not None and (services.prefect_api or services.shared_database):
        return True
    return bool(user_prefect(home)) or user_settings.has_prefect_database()


def prefect_trouble(environment: Mapping[str, str]) -> str:
    """Return why the user's own Prefect server cannot be used with these settings, or an empty text.

    Prefect's client asks: proxies, certificates and keys of the user are its business.
    """
    os.environ.update(environment)
    from prefect.client.orchestration import get_client
    from prefect.context import refresh_global_settings_context
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    refresh_global_settings_context()
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
            client.read_flows(limit=1)
    except Exception as error:  # whatever it is, the person is told
        url = environment[user_settings.API_URL]
        said = str(error).splitlines()[:1] or [""]
        return f"{type(error).__name__}: {without_secrets(said[0].replace(url, shown(url)))}"
    return ""


def connect_user_prefect(home: Home, api: str) -> None:
    """Point Prefect's client at the user's own server; ServiceError if it does not answer."""
    trouble = prefect_trouble(client_environment(home, prefect_api=api))
    if trouble:
        remedy = (
            "start it or mend the address and the key; unset it (also `prefect config unset`) for a server of our own"
        )
        raise ServiceError(f"PREFECT_API_URL = {shown(api)}: does not answer ({trouble}); {remedy}")


def states(home: Home, services: Services) -> dict[str, bool]:
    """Return for Prefect and MLflow whether they answer now, ours or the user's."""
    if services.prefect_api:
        prefect = not prefect_trouble(services.environment(home))
    else:
        prefect = healthy(services.health["prefect"])
    theirs = services.mlflow_uri
    mlflow = answers(theirs) if theirs.startswith("http") else bool(theirs) or healthy(services.health["mlflow"])
    return {"Prefect": prefect, "MLflow": mlflow}


def _check_user_servers(home: Home) -> None:
    api, tracking = user_prefect(home), user_settings.remote_tracking_uri()
    if api:
        connect_user_prefect(home, api)
        from pipelines.services.flow_runs import served_elsewhere

        elsewhere = served_elsewhere()
        if elsewhere:
            raise ServiceError(f"{elsewhere}; rlhf down there, delete that deployment, or use another server")
    if tracking.startswith("http") and not answers(tracking):
        remedy = "start it, or unset it for a server of our own"
        raise ServiceError(f"MLFLOW_TRACKING_URI = {shown(tracking)}: does not answer; {remedy}")


def _address_note(home: Home) -> Path:
    return home.root / "prefect_address"


def _plain(api: str) -> str:
    return api.replace("//localhost:", f"//{LOOPBACK}:")


# ---------------------------------------------------------------- up and down


def up(home: Home, *, foreground: bool, new_auth: bool = False) -> Services:
    """Start Prefect, MLflow and the deployments; return when all of them answer.

    The auth string of Prefect is that of the last time, which shells and browsers have, unless a new one is asked for.
    """
    services = running(home)
    if new_auth and services is not None:
        raise ServiceError("--new-auth: the servers run with the present auth string; rlhf down first")
    if new_auth:
        home.prefect_auth.unlink(missing_ok=True)
    api = user_prefect(home)
    if services is not None and api and services.prefect_api != api:
        rule = f"rlhf up runs with Prefect at {services.prefect_url}"
        raise ServiceError(f"PREFECT_API_URL = {shown(api)}: {rule}; rlhf down first, or unset it")
    if services is not None and services.well():
        return services
    _check_user_servers(home)
    home.make()
    command = [sys.executable, "-P", "-m", "pipelines.services.supervisor", str(home.root)]
    environment = os.environ | quiet_environment(home) | mlflow_environment()
    if foreground:
        os.execve(sys.executable, command, environment)
    if services is None:
        with (home.logs / "supervisor.log").open("ab") as log:
            subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        wait_for(lambda: running(home) is not None, FIRST_SIGN_S)
    try:
        settled = wait_for(lambda: _ready(home) or running(home) is None, UP_TIMEOUT_S)
    except KeyboardInterrupt:
        down(home)
        raise
    if not settled or not _ready(home):
        raise ServiceError(
            f"rlhf up: Prefect, MLflow or the deployments did not start; read {home.logs}, then rlhf down"
        )
    services = running(home)
    assert services is not None
    return services


def _ready(home: Home) -> bool:
    services = running(home)
    return services is not None and services.well()


def down(home: Home) -> bool:
    """Stop what `up` started; return whether there was anything. A Ray that others use is left alone."""
    services = running(home)
    if services is None:
        home.services.unlink(missing_ok=True)
        return False
    os.kill(services.pid, signal.SIGTERM)
    if not wait_for(lambda: not alive(services.owner), DOWN_TIMEOUT_S):
        # The services notice that their starter is gone and end by themselves.
        os.kill(services.pid, signal.SIGKILL)
    home.services.unlink(missing_ok=True)
    return True


# ---------------------------------------------------------------- a server for one run


@dataclass
class PrivateServer:
    """A Prefect server for the length of one run, on the database that `rlhf up` uses too.

    From its first answer on it is started again, on the same port, when it dies or hangs.
    """

    child: Child
    port: int
    stopped: threading.Event

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def wait(self) -> None:
        """Return when it answers; ServiceError if it ends or takes too long."""
        assert self.child.process is not None
        await_health(f"{self.url}/api/health", self.child.process, SERVER_TIMEOUT_S, self.child.log)
        threading.Thread(target=keep_alive, args=(self.child, self.stopped), daemon=True, name="keep-prefect").start()

    def stop(self) -> None:
        self.stopped.set()
        self.child.stop()


@contextmanager
def private_server(home: Home) -> Iterator[PrivateServer]:
    """Start a Prefect server at once, without waiting for it; it stops when the block, or this process, ends."""
    home.make()
    port = claim_port(PREFECT_PORT)
    log = home.logs / "prefect_run.log"
    log.unlink(missing_ok=True)
    environment = os.environ | client_environment(home, prefect_port=port) | SAFE_PATH
    health = f"http://{LOOPBACK}:{port}/api/health"
    child = Child("the Prefect server of this run", prefect_command(port), environment, lambda: healthy(health), log)
    child.start()
    server = PrivateServer(child, port, threading.Event())
    try:
        yield server
    finally:
        server.stop()


# ---------------------------------------------------------------- commands, ports, health


SAFE_PATH = {"PYTHONSAFEPATH": "1", "UVICORN_APP_DIR": str(Path(__file__).parents[2])}
"""Environment of the services: nothing in the folder that they were started in is imported. `-P` alone does not do it:
uvicorn adds that folder to the path, and MLflow and Prefect start processes of their own."""


def prefect_command(port: int) -> list[str]:
    """Return the command of the Prefect server: what `prefect server start` runs, without the wait for its own CLI.

    It answers this machine's own pages alone. Start it with `SAFE_PATH` in its environment.
    """
    return [
        *(sys.executable, "-P", "-m", "uvicorn", "--factory", "pipelines.services.own_pages:prefect_app"),
        *("--host", LOOPBACK, "--port", str(port), "--timeout-keep-alive", "5", "--log-level", "warning"),
        # A stage may hold Python's lock for a while; its process is not gone because it does not answer a ping.
        *("--ws-ping-interval", "60", "--ws-ping-timeout", "300"),
    ]


def mlflow_command(home: Home, port: int) -> list[str]:
    """Return the command of the MLflow server: one worker and no job runners (0.5 GB instead of 2.4).

    It answers this user alone, and this machine's own pages.

    A database of the user's is not in it, since any user of the machine can read it: see `mlflow_environment`.
    """
    store = () if user_settings.tracking_store() else ("--backend-store-uri", home.mlflow_uri)
    return [
        *(
            sys.executable,
            "-P",
            "-m",
            "pipelines.services.mlflow_server",
            "server",
            "--host",
            LOOPBACK,
            "--port",
            str(port),
        ),
        *("--workers", "1"),
        *store,
        *("--artifacts-destination", str(home.mlflow_artifacts)),
    ]


def mlflow_environment() -> dict[str, str]:
    """Return what tells our MLflow server to show the user's own database, where runs write to; {} without one."""
    store = user_settings.tracking_store()
    return {MLFLOW_STORE: store} if store else {}


def claim_port(wanted: int) -> int:
    """Return `wanted`, or the next port that nobody listens on, and keep it from others that ask this function.

    A server takes seconds before it listens: without a claim two runs that start together would choose the same port,
    and one of them would talk to the other's server until that ends. A claim ends with its process.
    """
    for port in range(wanted, wanted + PORTS):
        claim = _claim_file(port).open("w")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            claim.close()
            continue
        if is_free(port):
            _CLAIMS.append(claim)
            return port
        claim.close()
    raise ServiceError(f"port = {wanted}: this and the {PORTS} after it are taken; stop what listens there")


def _claim_file(port: int) -> Path:
    return private_folder(Path(tempfile.gettempdir()) / f"rlhf-ports-{os.getuid()}") / str(port)


def _is_claimed(port: int) -> bool:
    """Return whether a process of rlhf keeps the port for a server of its own."""
    with _claim_file(port).open("w") as claim:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def is_free(port: int) -> bool:
    """Return whether nobody listens on a port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def await_health(url: str, process: subprocess.Popen[bytes], timeout_s: float, log: Path) -> None:
    """Return when `url` answers; ServiceError if the process ends first or the time is up."""
    deadline = time.monotonic() + timeout_s
    while not healthy(url):
        if process.poll() is not None:
            raise ServiceError(f"{url}: its process ended with status {process.returncode}; read {log}")
        if time.monotonic() > deadline:
            raise ServiceError(f"{url}: no answer after {timeout_s:.0f} s; read {log}")
        time.sleep(0.1)


def alive(owner: Mapping[str, str]) -> bool:
    """Return whether the process that `rlhf_core.tracking.owner.tags` described is still there."""
    process = from_tags(owner)
    return process is not None and not is_gone(process)
