"""Read and write the record of running services in the state folder: their addresses, and who supervises them."""

import hmac
import http.client
import json
import re
import secrets
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from pipelines.services.home import LOOPBACK, Home, client_environment, has_prefect_database
from rlhf_core.errors import RlhfError
from rlhf_core.http.door import NONCE, PROOF, proof
from rlhf_core.secrets.redaction import shown, without_secrets
from rlhf_core.store.leases import is_gone
from rlhf_core.tracking.mlflow_client import TRAINING, from_tags

# ---------------------------------------------------------------- Check whether servers answer, and whether they are ours, and wait until they do

ANSWER_TIMEOUT_S = 5.0  # of one health check
LONGEST_REASON = 800  # characters of an error: a path may have 470

_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception)\w*: ")  # the last line of a traceback
_NEWER = re.compile(r"Can't locate revision identified by ('\w+')")  # alembic, for a revision of a later release
_DAMAGED = re.compile(r"file is not a database|disk image is malformed")  # SQLite
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opener without proxies: our services are on this machine, which a network proxy cannot reach."""


class ServiceError(RlhfError, RuntimeError):
    """A service could not be started or does not answer; the message names its log."""


def healthy(url: str) -> bool:
    """Whether `url` answers with status 200 within a few seconds, regardless of the server's owner."""
    return status_and_proof(url, "")[0] == HTTPStatus.OK


def proven(url: str, key: str) -> bool:
    """Whether `url` answers with status 200 within a few seconds, from a server of ours that knows `key`.

    Anybody may listen at a port, so this comes before any secret is sent there: the server proves that it knows the key
    with an HMAC of a random number and its port.
    """
    nonce = secrets.token_hex(16)
    status, given = status_and_proof(url, nonce)
    right = proof(key, nonce, urlsplit(url).port or 80)
    return status == HTTPStatus.OK and hmac.compare_digest(given.encode(), right.encode())


def status_and_proof(url: str, nonce: str) -> tuple[int, str]:
    """Status of a server's answer, 0 without one, and its proof, which only servers of ours give."""
    try:
        with _DIRECT.open(urllib.request.Request(url, headers={NONCE: nonce}), timeout=ANSWER_TIMEOUT_S) as response:
            return response.status, response.headers.get(PROOF, "")
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get(PROOF, "")
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return 0, ""


def is_reachable(url: str) -> bool:
    """Whether a remote server answers at all, even with an error such as a missing password. Uses proxies."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_TIMEOUT_S):
            return True
    except urllib.error.HTTPError:
        return True
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return False


def wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for `condition`, and tell whether it became true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def await_health(url: str, key: str, process: subprocess.Popen[bytes], timeout_s: float, log: Path) -> None:
    """Wait until our server at `url` answers and proves itself.

    Raises ServiceError if its process ends, or on timeout.
    """
    deadline = time.monotonic() + timeout_s
    while not proven(url, key):
        if process.poll() is not None:
            raise ServiceError(f"{url}: its process ended with status {process.returncode}{reason_in(log)}; read {log}")
        if time.monotonic() > deadline:
            raise ServiceError(f"{url}: no answer after {timeout_s:.0f} s{reason_in(log)}; read {log}")
        time.sleep(0.1)


def database_problem(failure: str, url: str) -> str:
    """A last line for a traceback of Prefect's start, with the database and a remedy; "" if it is not the problem.

    >>> print(database_problem("CommandError: Can't locate revision identified by 'f0'", "postgresql+asyncpg://me:word@host/db"))
    <BLANKLINE>
    DatabaseError: postgresql+asyncpg://***@host/db: a newer version of Prefect has changed it (no revision 'f0' here); upgrade Prefect here
    <BLANKLINE>
    """
    file = url.partition(":///")[2] if url.startswith("sqlite") else ""
    away = f"move {Path(file).name}* away: the next start makes an empty one, and results stay in the store"
    if newer := _NEWER.search(failure):
        rule = f"a newer version of Prefect has changed it (no revision {newer[1]} here)"
        remedy = f"upgrade Prefect here{f', or {away}' if file else ''}"
    elif damage := _DAMAGED.search(failure):
        rule, remedy = f"it is damaged ({damage[0]})", f"restore a copy, or {away}"
    else:
        return ""
    return f"\nDatabaseError: {file or shown(url) or 'the database of Prefect'}: {rule}; {remedy}\n"


def reason_in(log: Path, *, after: int = 0) -> str:
    """The last error in a log after so many bytes, such as a damaged database, in parentheses; "" if it has none."""
    text = log.read_bytes()[after:].decode(errors="replace") if log.is_file() else ""
    errors = [line for line in text.splitlines() if _ERROR.match(line)]
    return f" ({without_secrets(errors[-1])[:LONGEST_REASON]})" if errors else ""


# ---------------------------------------------------------------- running


@dataclass(frozen=True)
class Services:
    """The services that `rlhf up` started: the supervisor's identity, the addresses, and whether all of them answer."""

    owner: dict[str, str]
    """Identity of the supervisor process, so that a recycled process id is not mistaken for it."""
    prefect_port: int
    mlflow_port: int
    ready: bool
    prefect_api: str = ""
    """Address of the API of the user's own Prefect server, used instead of ours. It may contain secrets: do not print
    it."""
    mlflow_uri: str = ""
    """Address of the user's own MLflow server, used instead of ours. It may contain secrets: do not print it."""
    handover: str = ""
    """Socket file at which runs get a copy of the Prefect server's socket (`pipelines.services.handover`)."""
    shared_database: bool = field(default_factory=has_prefect_database)
    """Whether our Prefect server uses a database that the user set, in which others may have runs too."""

    @property
    def pid(self) -> int:
        return int(self.owner["owner.pid"])

    @property
    def prefect_url(self) -> str:
        """Address for a browser; it contains no password and may be printed."""
        if self.prefect_api:
            return shown(self.prefect_api).removesuffix("/api")
        return f"http://{LOOPBACK}:{self.prefect_port}"

    @property
    def mlflow_url(self) -> str:
        """Address for a browser; it contains no password and may be printed."""
        return shown(self.mlflow_uri) if self.mlflow_uri else f"http://{LOOPBACK}:{self.mlflow_port}"

    @property
    def mlflow_page(self) -> str:
        """Address of MLflow's list of training experiments; the server's own page shows applications."""
        page = f"{self.mlflow_url.rstrip('/')}/#/experiments{TRAINING}"
        return page if page.startswith("http") else self.mlflow_url

    @property
    def tracking_uri(self) -> str:
        """Address for an MLflow client; it may contain a password."""
        return self.mlflow_uri or self.mlflow_url

    @property
    def health(self) -> dict[str, str]:
        """For each service of ours, an address that answers with status 200 while the service works."""
        prefect = {} if self.prefect_api else {"prefect": f"{self.prefect_url}/api/health"}
        return prefect | ({} if self.mlflow_uri else {"mlflow": f"{self.mlflow_url}/health"})

    def well(self, home: Home) -> bool:
        """Whether everything was started and answers now."""
        return self.ready and all(proven(url, home.prefect_auth_string) for url in self.health.values())

    def environment(self, home: Home) -> dict[str, str]:
        """Settings of a process that uses this Prefect server."""
        return client_environment(home, prefect_port=self.prefect_port, prefect_api=self.prefect_api)

    def write(self, home: Home) -> None:
        """Write the record into the state folder, readable by this user only."""
        part = home.services.with_suffix(".part")
        part.touch(mode=0o600)  # an address of the user's may contain a password
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.replace(home.services)
        if not self.prefect_api:
            home.prefect_address.write_text(f"{self.prefect_url}/api", encoding="utf-8")


def running(home: Home) -> Services | None:
    """The services of this state folder, if their supervisor is alive."""
    services = read_note(home)
    return services if services is not None and alive(services.owner) else None


def read_note(home: Home) -> Services | None:
    """The services that were last recorded, running or not; None without a readable record."""
    try:
        return Services(**json.loads(home.services.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def alive(owner: Mapping[str, str]) -> bool:
    """Whether the process that `rlhf_core.tracking.mlflow_client.owner_tags` described still exists."""
    process = from_tags(owner)
    return process is not None and not is_gone(process)


# ---------------------------------------------------------------- Bind ports of 127.0.0.1 for servers that do not listen yet

PREFECT_PORT = 4200  # Prefect's own
MLFLOW_PORT = 5000  # MLflow's own
PORTS_TRIED = 200  # from the wanted one on
LAST_PORT = 65535  # ports have 16 bits


def bound_port(wanted: int) -> socket.socket:
    """Open a socket that listens at `wanted` or the next free port; close it when its server has ended for good.

    A server needs seconds before it listens, and may be restarted. Its starter binds the port and hands the socket
    over, so no other process gets the port meanwhile, regardless of its state folder, TMPDIR or user.
    """
    if not 0 <= wanted <= LAST_PORT:
        raise ServiceError(f"port = {wanted}: must be from 0 to {LAST_PORT}; 0 is any free port")
    for port in range(wanted, min(wanted + PORTS_TRIED, LAST_PORT + 1)):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of its last server may linger
        try:
            listener.bind((LOOPBACK, port))
            listener.listen()
        except OSError:
            listener.close()
            continue
        return listener
    raise ServiceError(
        f"port = {wanted}: this port and the {PORTS_TRIED} after it are in use; stop the programs that listen there"
    )


def port_of(listener: socket.socket) -> int:
    """The port at which a socket listens."""
    return int(listener.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a port of 127.0.0.1 is free: no process listens on it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True
