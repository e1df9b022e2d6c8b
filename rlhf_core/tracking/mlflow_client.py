"""Open MLflow: the client, a new database, the address of a run."""

import json
import logging
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_core.errors import RlhfError
from rlhf_core.processes.identity import user_name
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.store import leases
from rlhf_core.store.leases import Owner

logger = logging.getLogger(__name__)

_SETTINGS = {  # short: a server that is down must be noticed in seconds, and we retry ourselves
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


TRACKING_URI = "MLFLOW_TRACKING_URI"
_OPENING = threading.Lock()
_SQLITE = "sqlite:///"


class TrackingError(RlhfError, RuntimeError):
    """MLflow could not answer a user's command, or refuses a run at its start. Later in a run, records wait instead."""


def import_mlflow() -> Any:
    """Import MLflow with our settings. It takes 3 s, so the thread that delivers records does it."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import mlflow  # reads the settings when it is imported

    logging.getLogger("mlflow.tracing.export.async_export_queue").setLevel(logging.WARNING)  # announces its end
    return mlflow


def open_client(uri: str) -> Any:
    """Open an MlflowClient of `uri`; a missing SQLite database is created (4-6 s, once)."""
    mlflow = import_mlflow()
    # We report a locked or full database ourselves, in one line, and retry.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    # The registry of a direct SQLite store looks up the model through the process's own tracking URI. MLflow also sets
    # the variable by which users name their own server, and ours may have another address later.
    with _OPENING:
        theirs = os.environ[TRACKING_URI] if TRACKING_URI in os.environ else None
        mlflow.set_tracking_uri(uri)
        os.environ.pop(TRACKING_URI, None)
        if theirs is not None:
            os.environ[TRACKING_URI] = theirs
    if (database := database_file(uri)) is not None:
        create_database(database)
    return mlflow.MlflowClient(tracking_uri=uri)


def database_file(uri: str) -> Path | None:
    """The file of a SQLite database; None if `uri` is something else.

    >>> database_file("sqlite:////data/mlflow.db"), database_file("http://127.0.0.1:5000")
    (PosixPath('/data/mlflow.db'), None)
    """
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def is_missing_database(uri: str) -> bool:
    """True if `uri` is a SQLite database that does not exist yet."""
    database = database_file(uri)
    return database is not None and not database.exists()


def in_one_line(error: Exception) -> str:
    """Type and first line of an error, without secrets."""
    return without_secrets(f"{type(error).__name__}: {error}".splitlines()[0][:300])


@contextmanager
def tracking_errors(uri: str, *, name: str = "MLflow") -> Iterator[None]:
    """Turn any error of the server or the database inside into a TrackingError: the user must fix it."""
    try:
        yield
    except Exception as error:
        text = f"{name} at {without_secrets(uri)}: does not answer ({in_one_line(error)}); try again"
        raise TrackingError(text) from error


def experiment_id(client: Any, name: str, files: Path | None, *, tags: Mapping[str, str]) -> str:
    """Find the id of an experiment, which is created if it does not exist; its files are below `files`.

    None leaves their place to the server.
    """
    found = client.get_experiment_by_name(name)
    if found is None:
        location = None if files is None else files.resolve().as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=location, tags=dict(tags)))
        except Exception:  # another process was faster, or the server is away: the next line shows which
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


_CREATING = threading.Lock()


def create_database(path: Path) -> None:
    """Create MLflow's SQLite database at `path` if it does not exist.

    Its 60 or so migrations commit one by one, so they run in memory-backed storage where available (4 s instead of 6 s
    and more on a slow disk). The finished database then appears at once, also for a process that waits for it.
    """
    with _CREATING:
        if path.exists() and path.stat().st_size:
            return
        mlflow = import_mlflow()
        logger.info("tracking: creating %s (takes a few seconds, only once)", path)
        clock = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        memory = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
            draft = Path(folder) / "mlflow.db"
            mlflow.MlflowClient(tracking_uri=f"sqlite:///{draft}").search_experiments(max_results=1)
            ready = path.with_name(f".{path.name}.{os.getpid()}")
            source, target = sqlite3.connect(draft), sqlite3.connect(ready)
            source.backup(target)
            source.close()
            target.close()
        try:
            os.link(ready, path)  # unlike a rename, this does not replace a database that another process has made
        except FileExistsError:
            if not path.stat().st_size:
                ready.replace(path)
        except OSError:  # a disk without hard links: a second process finds the same empty tables
            if not path.exists() or not path.stat().st_size:
                ready.replace(path)
        ready.unlink(missing_ok=True)
        logger.info("tracking: %s is ready after %.1f s", path, time.monotonic() - clock)


def get_run(client: Any, run_id: str) -> Any:
    """Look up a run; None if it is gone."""
    try:
        return client.get_run(run_id)
    except Exception as error:
        if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
            logger.warning("tracking: run %s is gone", run_id)
            return None
        raise


TRAINING = "?workflowType=machine_learning"
"""End of an address that shows MLflow's pages for training, and not those for applications, which a new browser gets."""


def run_path(experiment_id: str, run_id: str) -> str:
    """Address of a run in MLflow's pages, independent of the server's address."""
    return f"#/experiments/{experiment_id}/runs/{run_id}{TRAINING}"


def run_url(uri: str, experiment_id: str, run_id: str) -> str:
    """Address of a run in the web interface, or `runs:/<id>` without a server."""
    if uri.startswith(("http://", "https://")):
        return without_secrets(f"{uri.rstrip('/')}/{run_path(experiment_id, run_id)}")
    return f"runs:/{run_id}"


# ---------------------------------------------------------------- Store the process that a run belongs to in the run's tags

FLOW_RUN_TAG = "prefect.flow_run_id"
"""Tag, and link of a run, with the id of its flow run in Prefect."""
USER_TAG = "mlflow.user"
"""Tag that MLflow's page shows as the user of a run."""
_FIELDS = ("host", "boot_id", "pid_namespace", "pid", "pid_started")


def owner_tags() -> dict[str, str]:
    """Tags of a run that this process drives."""
    process = leases.ourselves()
    return {f"owner.{name}": str(getattr(process, name)) for name in _FIELDS} | {USER_TAG: user_name()}


OWNER_TAG = "rlhf.owner"
"""Tag of a run with the facts of its process in JSON, so that the page of the run does not begin with them."""


def in_one_tag() -> dict[str, str]:
    """The tags of a run that this process drives, as MLflow keeps them."""
    process = {name: value for name, value in owner_tags().items() if name != USER_TAG}
    return {OWNER_TAG: json.dumps(process), USER_TAG: user_name()}


def from_tags(values: Mapping[str, str]) -> Owner | None:
    """The owner that `owner_tags` described, in one tag or several; None if the run is not ours.

    It never expires: the tags have no heartbeat, so whether a process of another machine is alive cannot be decided.
    """
    if OWNER_TAG in values:
        values = json.loads(values[OWNER_TAG])
    if any(f"owner.{name}" not in values for name in _FIELDS):
        return None
    host, boot_id, pid_namespace, pid, pid_started = (values[f"owner.{name}"] for name in _FIELDS)
    return Owner(
        host=host,
        boot_id=boot_id,
        pid_namespace=pid_namespace,
        pid=int(pid),
        pid_started=int(pid_started),
        token="",
    )
