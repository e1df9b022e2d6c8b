"""Find where runs are tracked and models registered."""

from __future__ import annotations

import os
import re

from pipelines.services.home import Home
from pipelines.services.running import running

REGISTRY = "MLFLOW_REGISTRY_URI"
OWN = "of the state folder"


def tracking_uri(home: Home) -> str:
    """Return the address of the user's own MLflow server, of that of `rlhf up`, or of the database itself."""
    if os.environ.get("MLFLOW_TRACKING_URI"):
        return os.environ["MLFLOW_TRACKING_URI"]
    services = running(home)
    return services.tracking_uri if services is not None and services.ready else home.mlflow_uri


def tracking_place(home: Home) -> str:
    """Return one address for the place behind `tracking_uri`: our own server and its database count as one."""
    uri, services = tracking_uri(home), running(home)
    ours = services is not None and not services.mlflow_uri and uri == services.mlflow_url
    return home.mlflow_uri if ours else uri


def registry(home: Home) -> str:
    """Return the registry of a model, for the key of `publish`: without user, password and query."""
    place = os.environ[REGISTRY] if os.environ.get(REGISTRY) else tracking_place(home)
    if place == home.mlflow_uri:
        return OWN  # independent of the state folder's path: the folder is moved and copied with its database
    # Up to the last @, even if a password is badly escaped: better to lose a part of the address than to keep a secret.
    return re.sub(r"://.*@", "://", place).partition("?")[0].rstrip("/")
