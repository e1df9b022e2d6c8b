"""Define the state folder of a project on one machine, and the environment that its services share.

Read the user's settings of Prefect and MLflow: servers and databases that `rlhf` uses and never replaces.

Prefect itself is not imported for this, since that takes seconds. The places are Prefect's, in its order: the
environment, `.env`, `prefect.toml`, `pyproject.toml`, and the active profile, which `prefect config set` writes.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import logging
import os
import secrets
import stat
import time
import tomllib
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from dotenv import dotenv_values

from rlhf_core.errors import ConfigError
from rlhf_core.processes.private_folder import keep_others_out
from rlhf_core.secrets.redaction import shown

# ---------------------------------------------------------------- user settings

OWN = "RLHF_OWN_SETTINGS"
"""Environment variable with the settings that `rlhf` passed to its own processes, to distinguish them from the user's."""
API_URL = "PREFECT_API_URL"
AUTH = "PREFECT_API_AUTH_STRING"
HEADERS = "PREFECT_CLIENT_CUSTOM_HEADERS"
_DATABASE = {
    f"PREFECT_{part}_DATABASE_{name}": name.lower()
    for name in ("CONNECTION_URL", "DRIVER")
    for part in ("SERVER", "API")
}
_PREFECT_DRIVERS = ("postgresql+asyncpg:", "sqlite+aiosqlite:")
_REMOTE_TRACKERS = ("http://", "https://", "databricks")


def prefect_api() -> str:
    """Address of the Prefect API that the user set (a server, Prefect Cloud), or ""."""
    return _setting((API_URL,), ("api", "url")).rstrip("/")


def has_prefect_database() -> bool:
    """Whether the user set the database of Prefect servers, by its URL or by its driver, host and so on."""
    return any(_setting((name,), ("server", "database", key)) for name, key in _DATABASE.items())


def remote_tracking_uri() -> str:
    """The MLflow server that the user set, or "". A database of theirs needs a server of ours."""
    uri = _tracking_uri()
    return uri if uri.startswith(_REMOTE_TRACKERS) else ""


def tracking_store() -> str:
    """The database or folder that the user set for MLflow's runs, or ""; it may contain a password."""
    return "" if remote_tracking_uri() else _tracking_uri()


def check_databases() -> None:
    """Raise ConfigError if a database that the user set, for Prefect's runs or MLflow's, has a driver that cannot serve it.

    A server with such a setting ends a while after its start, with the reason somewhere in its log.
    """
    for name in (name for name, key in _DATABASE.items() if key == "connection_url"):
        url = _setting((name,), ("server", "database", "connection_url"))
        if url and not url.startswith(_PREFECT_DRIVERS):
            remedy = "write it as postgresql+asyncpg://... or sqlite+aiosqlite:///..."
            raise ConfigError(name, shown(url), "Prefect uses asynchronous drivers", remedy)
    store = tracking_store()
    if "://" not in store or store.startswith("file:"):
        allowed = os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1")
        if allowed or not store or store.startswith("arn:"):
            return
        remedy = "name a database (sqlite:////path/mlflow.db), or set MLFLOW_ALLOW_FILE_STORE=true"
        raise ConfigError("MLFLOW_TRACKING_URI", shown(store), "MLflow no longer writes to folders", remedy)
    from sqlalchemy.engine import make_url  # half a second, which only users with their own database wait
    from sqlalchemy.exc import ArgumentError

    try:
        dialect = make_url(store).get_dialect()
        dialect.import_dbapi()
        rule = f"MLflow cannot use {dialect.driver}, an asynchronous driver" if dialect.is_async else ""
    except ModuleNotFoundError as error:
        rule = f"its driver {error.name} is not installed"
    except (ArgumentError, ValueError):  # an unknown kind, also postgres://; a port that is no number
        rule = "is no address of a database"
    if rule:
        remedy = "pip install 'rlhf-lifecycle[server]' has the driver of postgresql://..."
        raise ConfigError("MLFLOW_TRACKING_URI", shown(store), rule, remedy)


def profiles_path() -> Path:
    """File of the user's Prefect profiles, independent of the `PREFECT_HOME` that we set."""
    named = _environment("PREFECT_PROFILES_PATH")
    home = Path(_environment("PREFECT_HOME") or "~/.prefect")
    return (Path(named) if named else home / "profiles.toml").expanduser()


def marked(settings: Mapping[str, str]) -> dict[str, str]:
    """Mark our own settings with a variable, so that they can be told from the user's.

    Settings that this process got from `rlhf` stay marked, because the processes that it starts inherit them.
    """
    inherited = {name: value for name, value in _given().items() if os.environ.get(name) == value}
    return {**settings, OWN: json.dumps({**inherited, **settings})}


def _tracking_uri() -> str:
    return os.environ["MLFLOW_TRACKING_URI"] if "MLFLOW_TRACKING_URI" in os.environ else ""


def _setting(names: tuple[str, ...], path: tuple[str, ...]) -> str:
    """Read a setting, by its names or its path in a TOML file, from the first place that has it."""
    places: list[Callable[[], str]] = [
        lambda: _first(names, _environment),
        lambda: _first(names, lambda name: (dotenv_values(".env").get(name) or "") if Path(".env").is_file() else ""),
        lambda: _at(_toml(Path("prefect.toml")), path),
        lambda: _at(_toml(Path("pyproject.toml")), ("tool", "prefect", *path)),
        lambda: _first(names, lambda name: str(_profile().get(name, ""))),
    ]
    return next((found for place in places if (found := place())), "")


def _environment(name: str) -> str:
    value = os.environ[name] if name in os.environ else ""
    return "" if value and _given().get(name) == value else value


def _given() -> dict[str, str]:
    """The settings that `rlhf` gave to this process."""
    given: dict[str, str] = json.loads(os.environ[OWN]) if os.environ.get(OWN) else {}
    return given


def _first(names: tuple[str, ...], read: Callable[[str], str]) -> str:
    return next((value for name in names if (value := read(name))), "")


def _profile() -> Mapping[str, Any]:
    stored = _toml(profiles_path())
    active = _environment("PREFECT_PROFILE") or stored.get("active", "")
    profile: Mapping[str, Any] = stored.get("profiles", {}).get(active, {})
    return profile


def _at(tree: Any, path: tuple[str, ...]) -> str:
    for key in path:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return "" if tree is None else str(tree)


def _toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        # If this error were ignored, a server that the user set would be silently replaced.
        raise ConfigError("file", str(path), f"is not valid TOML ({error})", "fix it") from error


# ---------------------------------------------------------------- home

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
SERVER_AUTH = "PREFECT_SERVER_API_AUTH_STRING"
PROOF_KEY = "RLHF_PROOF_KEY"
"""Environment variable with the key by which our MLflow server proves that it is ours."""
SIGN_IN = "/sign-in"
"""Path of our Prefect server that signs a browser in."""
_OWNER_ONLY = 0o600  # rw-------
LONGEST_PATH = 470
"""Maximum bytes of the path of a state folder: SQLite's limit is 512, including the names of database and journal."""
ID_TRIES, ID_WAIT_S = 50, 0.1
"""Number and interval of attempts to read the identity while another process may still be writing it."""


@dataclass(frozen=True)
class Home:
    """Paths below the state folder.

    >>> Home(Path("/tmp/x")).store
    PosixPath('/tmp/x/store')
    """

    root: Path

    @classmethod
    def here(cls) -> Home:
        """The state folder: `RLHF_HOME`, or `.rlhf` in the current folder.

        Raises ConfigError for an unusable path, such as the folder of another user, and for a path that a database
        address would misread: SQLAlchemy reads `?` as the end of the path and `%41` as A, so the database would be a
        file next to the folder.
        """
        root = Path(os.environ["RLHF_HOME"] if os.environ.get("RLHF_HOME") else ".rlhf")
        try:
            root = root.expanduser().resolve()
            rule = _trouble(root)
        except (
            OSError,
            RuntimeError,
            UnicodeEncodeError,
        ) as error:  # RuntimeError: a link to itself, a user that is none
            rule = f"cannot be a folder ({error.strerror if isinstance(error, OSError) else error})"
        if rule:
            remedy = "set it to a folder of your own; a team shares a store (`rlhf store share`), not a state folder"
            raise ConfigError("RLHF_HOME", str(root), rule, remedy)
        return cls(root)

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def prefect(self) -> Path:
        return self.root / "prefect"

    @property
    def mlflow_uri(self) -> str:
        """Address of MLflow's database, for a client without a server."""
        return f"sqlite:///{self.root / 'mlflow.db'}"

    @property
    def mlflow_artifacts(self) -> Path:
        return self.root / "mlartifacts"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def profiles(self) -> Path:
        """Folder of the profiles that deployments name by their digests."""
        return self.root / "profiles"

    @property
    def services(self) -> Path:
        """File with the process ids and addresses of the services that `rlhf up` started."""
        return self.root / "services.json"

    @property
    def prefect_address(self) -> Path:
        """File with the address of the Prefect server that `rlhf up` last started, running or not."""
        return self.root / "prefect_address"

    @property
    def identity(self) -> str:
        """Id of this state folder among others on the same Prefect server; created at the first call."""
        return _read_or_create(self.root / "home.id", lambda: uuid.uuid4().hex[:12])

    @property
    def prefect_auth(self) -> Path:
        """File of our Prefect server's auth string, which only its owner can read."""
        return self.root / "prefect_auth"

    @property
    def prefect_auth_string(self) -> str:
        """The auth string that our Prefect server requires of every request; created at the first call."""
        # 144 bits, so that the link that signs a browser in fits into a line of 80 columns.
        return _read_or_create(self.prefect_auth, lambda: f"rlhf:{secrets.token_urlsafe(18)}")

    @property
    def serving(self) -> Path:
        """File with the policy and address of `rlhf serve`."""
        return self.root / "serving.json"

    @property
    def serve_token(self) -> Path:
        """File with the token of `rlhf serve`, which only its owner can read."""
        return self.root / "serve_token"

    @property
    def serve_token_string(self) -> str:
        """The token that `rlhf serve` requires of its clients; created at the first call."""
        return _read_or_create(self.serve_token, lambda: secrets.token_urlsafe(32))

    def make(self) -> Home:
        """Create the folders, for this user alone: the databases in them hold samples, parameters and logs."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        keep_others_out(self.root)  # an earlier version, or `mkdir`, has left it open
        for folder in (self.store, self.prefect, self.mlflow_artifacts, self.logs):
            folder.mkdir(exist_ok=True)
        return self


def _trouble(root: Path) -> str:
    """The reason why a path cannot be the state folder, or "". Raises OSError if the system accepts no such path."""
    if "?" in str(root) or unquote(str(root)) != str(root):
        return "the address of a database cannot hold ? and % codes"
    if len(str(root).encode()) > LONGEST_PATH:
        return f"SQLite opens no database in a path of more than {LONGEST_PATH} bytes"
    try:
        mode = root.stat().st_mode
    except FileNotFoundError:
        return ""  # not made yet
    except PermissionError:
        return "this user may not use that folder"
    if not stat.S_ISDIR(mode) or mode & stat.S_ISVTX:
        return "all users share that folder" if stat.S_ISDIR(mode) else "it is no folder"
    return "" if os.access(root, os.R_OK | os.X_OK) else "this user may not use that folder"


def _read_or_create(path: Path, make: Callable[[], str]) -> str:
    """Read a small file; the first process that needs it creates it, readable by this user only."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_first(path, make())
    for _ in range(ID_TRIES):
        text = path.read_text(encoding="utf-8").strip()
        if text:
            return text
        time.sleep(ID_WAIT_S)  # without hard links, the file is created first and written afterwards
    raise ConfigError("file", str(path), "is empty: its writer was killed", "remove it; a new one is written")


def _write_first(path: Path, text: str) -> None:
    """Write a small file unless another process has done so: the first process wins, and the others read its text."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")  # process ids repeat between machines and containers
    part.touch(mode=_OWNER_ONLY)
    part.write_text(text, encoding="utf-8")
    try:
        os.link(part, path)  # appears complete or not at all
    except FileExistsError:
        pass
    except OSError:  # exFAT and many FUSE and network file systems have no hard links
        try:
            with open(
                path, "x", opener=lambda name, flags: os.open(name, flags, _OWNER_ONLY), encoding="utf-8"
            ) as made:
                made.write(text)
        except FileExistsError:
            pass
    finally:
        part.unlink()


def quiet_environment(home: Home) -> dict[str, str]:
    """Settings of every process: state under `home`, no telemetry.

    PREFECT_HOME alone does not move results and the memo store (Prefect 3.7), so each is set. A database that the user
    set for Prefect's servers is kept, and so is the profile.
    """
    past = [os.environ[name] for name in ("no_proxy", "NO_PROXY") if os.environ.get(name)][:1]
    direct = ",".join([*past, LOOPBACK, "localhost"])
    own = {"PREFECT_HOME": str(home.prefect)}
    if not has_prefect_database():
        own["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = f"sqlite+aiosqlite:///{home.prefect / 'prefect.db'}"
    return (
        marked(own)
        | _without_socks()
        | {
            "PREFECT_PROFILES_PATH": str(profiles_path()),
            "no_proxy": direct,
            "NO_PROXY": direct,
            "RLHF_HOME": str(home.root),
            "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home.prefect / "storage"),
            "PREFECT_SERVER_MEMO_STORE_PATH": str(home.prefect / "memo.toml"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
            "PREFECT__SERVER_FINAL": "1",
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
            "DO_NOT_TRACK": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_ENABLE_AI_GATEWAY": "false",
            "MLFLOW_MODEL_CATALOG_URI": "",
            "RAY_USAGE_STATS_ENABLED": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TQDM_DISABLE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
    )


def _without_socks() -> dict[str, str]:
    """Settings that disable SOCKS proxies if httpx cannot use them: it would refuse requests to 127.0.0.1, too."""
    names = ("ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy")
    socks = [name for name in names if name in os.environ and os.environ[name].startswith("socks")]
    if not socks or importlib.util.find_spec("socksio") is not None:
        return {}
    logger.warning("%s: not used, because the package socksio is not installed", ", ".join(socks))
    return dict.fromkeys(socks, "")


def _without_our_auth(home: Home) -> dict[str, str]:
    """Settings that keep our server's auth string, if the shell has it, from being sent to the user's server."""
    given = os.environ.get(AUTH)
    ours = bool(given) and home.prefect_auth.exists() and given == home.prefect_auth_string
    return {AUTH: "", SERVER_AUTH: ""} if ours else {}


def _auth_of_sockets() -> dict[str, str]:
    """Settings that send the user's auth string when a WebSocket is opened, too: a proxy may ask for it there.

    Prefect's client sends it as the first message, which reaches only the server itself.
    """
    auth = _setting((AUTH,), ("api", "auth_string"))
    if not auth or os.environ.get(HEADERS):
        return {}
    return {HEADERS: json.dumps({"Authorization": f"Basic {basic(auth)}"})}


def client_environment(home: Home, *, prefect_port: int = 0, prefect_api: str = "") -> dict[str, str]:
    """Settings of a process that uses our Prefect server on `prefect_port`, or the user's own."""
    quiet = quiet_environment(home)
    if prefect_api:
        api = {API_URL: prefect_api} | (_without_our_auth(home) or _auth_of_sockets())
    else:
        auth = home.prefect_auth_string
        ours = {
            API_URL: f"http://{LOOPBACK}:{prefect_port}/api",
            AUTH: auth,
            SERVER_AUTH: auth,
        }
        api = marked(json.loads(quiet[OWN]) | ours)
    return (
        quiet
        | api
        | {
            # With five retries, the client bridges a restart of a server that was down for a minute, or hung for three.
            "PREFECT_API_REQUEST_TIMEOUT": "20",
            # Prefect's pages keep every log line; the terminal is for our own display.
            "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
            "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",
            "PREFECT_LOGGING_EXTRA_LOGGERS": "rlhf_core,stages,pipelines",
            "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        }
    )


def sign_in_link(url: str, auth: str) -> str:
    """The address that signs a browser in at the server of `url`; anyone who reads it can sign in.

    >>> sign_in_link("http://127.0.0.1:4200", "me:word")
    'http://127.0.0.1:4200/sign-in#bWU6d29yZA=='
    """
    return f"{url}{SIGN_IN}#{basic(auth)}"


def basic(auth: str) -> str:
    """Encode an auth string for the header `Authorization: Basic`."""
    return base64.b64encode(auth.encode()).decode()
