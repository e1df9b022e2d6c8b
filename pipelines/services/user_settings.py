"""Read the user's settings of Prefect and MLflow: servers and databases that `rlhf` uses and never replaces.

Prefect itself is not imported for this, since that takes seconds. The places are Prefect's, in its order: the
environment, `.env`, `prefect.toml`, `pyproject.toml`, and the active profile, which `prefect config set` writes.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dotenv import dotenv_values

from rlhf_core.errors import ConfigError, explain
from rlhf_core.secrets.redaction import shown

OWN = "RLHF_OWN_SETTINGS"
"""Environment variable with the settings that `rlhf` gave to its own processes, to tell them from the user's."""
API_URL = "PREFECT_API_URL"
AUTH = "PREFECT_API_AUTH_STRING"
_DATABASE = {
    f"PREFECT_{part}_DATABASE_{name}": name.lower()
    for name in ("CONNECTION_URL", "DRIVER")
    for part in ("SERVER", "API")
}
_PREFECT_DRIVERS = ("postgresql+asyncpg:", "sqlite+aiosqlite:")
_REMOTE_TRACKERS = ("http://", "https://", "databricks")


def prefect_api() -> str:
    """Return the address of the Prefect API that the user set (a server, Prefect Cloud), or ""."""
    return _setting((API_URL,), ("api", "url")).rstrip("/")


def has_prefect_database() -> bool:
    """Return whether the user set the database of Prefect servers, by its URL or by its driver, host and so on."""
    return any(_setting((name,), ("server", "database", key)) for name, key in _DATABASE.items())


def remote_tracking_uri() -> str:
    """Return the MLflow server that the user set, or "". A database of theirs needs a server of ours."""
    uri = _tracking_uri()
    return uri if uri.startswith(_REMOTE_TRACKERS) else ""


def tracking_store() -> str:
    """Return the database or folder that the user set for MLflow's runs, or ""; it may contain a password."""
    return "" if remote_tracking_uri() else _tracking_uri()


def check_databases() -> None:
    """Raise ConfigError if a database that the user set, for Prefect's runs or MLflow's, has a driver that cannot serve it.

    A server with such a setting ends a while after its start, with the reason somewhere in its log.
    """
    for name in (name for name, key in _DATABASE.items() if key == "connection_url"):
        url = _setting((name,), ("server", "database", "connection_url"))
        if url and not url.startswith(_PREFECT_DRIVERS):
            remedy = "write it as postgresql+asyncpg://... or sqlite+aiosqlite:///..."
            raise ConfigError(explain(name, shown(url), "Prefect uses asynchronous drivers", remedy))
    store = tracking_store()
    if "://" not in store or store.startswith("file:"):
        allowed = os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1")
        if allowed or not store or store.startswith("arn:"):
            return
        remedy = "name a database (sqlite:////path/mlflow.db), or set MLFLOW_ALLOW_FILE_STORE=true"
        raise ConfigError(explain("MLFLOW_TRACKING_URI", shown(store), "MLflow no longer writes to folders", remedy))
    from sqlalchemy.engine import make_url  # half a second, which only users with a database of their own wait
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
        raise ConfigError(explain("MLFLOW_TRACKING_URI", shown(store), rule, remedy))


def profiles_path() -> Path:
    """Return the file of the user's Prefect profiles, independent of our own `PREFECT_HOME`."""
    named = _environment("PREFECT_PROFILES_PATH")
    home = Path(_environment("PREFECT_HOME") or "~/.prefect")
    return (Path(named) if named else home / "profiles.toml").expanduser()


def marked(settings: Mapping[str, str]) -> dict[str, str]:
    """Return our own settings with the variable that marks them as ours.

    Settings that this process got from `rlhf` stay marked, because the processes that it starts inherit them.
    """
    inherited = {name: value for name, value in _given().items() if os.environ.get(name) == value}
    return {**settings, OWN: json.dumps({**inherited, **settings})}


def _tracking_uri() -> str:
    return os.environ["MLFLOW_TRACKING_URI"] if "MLFLOW_TRACKING_URI" in os.environ else ""


def _setting(names: tuple[str, ...], path: tuple[str, ...]) -> str:
    """Return the value under one of the names, or at the path of a TOML file, from the first place that has it."""
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
    """Return the settings that `rlhf` gave to this process."""
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
        raise ConfigError(explain("file", str(path), f"is not valid TOML ({error})", "fix it")) from error
