"""Find the user's own Prefect server, check that it answers, and connect to it.

Servers that the user set are used instead of ours; `pipelines.services.home` reads the settings.
"""

import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from pipelines.services.home import API_URL, AUTH, LOOPBACK, Home, client_environment, has_prefect_database, prefect_api
from pipelines.services.running import ServiceError, is_free, proven, running, status_and_proof
from rlhf_core.errors import distrust
from rlhf_core.secrets.redaction import shown, without_secrets


def user_prefect(home: Home) -> str:
    """API address of the user's own Prefect server; "" if none is set.

    `rlhf up` prints an address to export: the address of our server does not count as the user's, even after it ended.
    """
    api = prefect_api()
    services = running(home)
    if services is not None and not services.prefect_api and _plain(api) == f"{services.prefect_url}/api":
        return ""
    note = home.prefect_address
    if note.is_file() and _plain(api) == note.read_text(encoding="utf-8"):
        port = urlsplit(api).port
        # Nobody is there now, or a server of ours for another state folder or run, which may still be starting.
        if port is not None and (is_free(port) or _is_of_rlhf(api)):
            return ""
    return api


def shares_prefect(home: Home) -> bool:
    """Whether others may have runs on the Prefect server that this state folder uses, or in its database."""
    services = running(home)
    if services is not None and (services.prefect_api or services.shared_database):
        return True
    return bool(user_prefect(home)) or has_prefect_database()


def prefect_trouble(environment: Mapping[str, str]) -> str:
    """The reason why the user's own Prefect server cannot be used with these settings, or "".

    The check uses Prefect's client, which handles the user's proxies, certificates and keys.
    """
    os.environ.update(environment)
    # Two seconds, which `rlhf status` and runs of cached stages do without unless the user has a server.
    from prefect.client.orchestration import get_client
    from prefect.context import refresh_global_settings_context
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    refresh_global_settings_context()
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
            client.read_flows(limit=1)
    except Exception as error:  # any error is reported to the user
        url = environment[API_URL]
        said = str(error).splitlines()[:1] or [""]
        return f"{type(error).__name__}: {without_secrets(said[0].replace(url, shown(url)))}"
    return ""


def connect_user_prefect(home: Home, api: str) -> None:
    """Connect Prefect's client to the user's own server; raise ServiceError if it does not answer."""
    trouble = prefect_trouble(client_environment(home, prefect_api=api))
    refused = re.search(r"'(40[13] [\w ]+)'", trouble)
    if refused is not None:
        remedy = f"set {AUTH}=NAME:PASSWORD (PREFECT_API_KEY for Prefect Cloud) of a user whom it knows"
        raise ServiceError(f"PREFECT_API_URL = {shown(api)}: refuses this user ({refused[1]}); {remedy}")
    if why := distrust(trouble):
        remedy = "set PREFECT_API_SSL_CERT_FILE to the certificate of its authority"
        raise ServiceError(f"PREFECT_API_URL = {shown(api)}: has a certificate that is not trusted ({why}); {remedy}")
    if trouble:
        remedy = "start it, or fix the address and the key; if it is unset (also with `prefect config unset`), rlhf starts a server"
        raise ServiceError(f"PREFECT_API_URL = {shown(api)}: does not answer ({trouble}); {remedy}")


def _is_of_rlhf(api: str) -> bool:
    status, proof = status_and_proof(f"{api}/health", "whose")
    return not status or bool(proof)


def _plain(api: str) -> str:
    return api.replace("//localhost:", f"//{LOOPBACK}:")


# ---------------------------------------------------------------- Find where runs are tracked and models registered

REGISTRY = "MLFLOW_REGISTRY_URI"
OWN = "of the state folder"


def tracking_uri(home: Home) -> str:
    """Address of the user's own MLflow server, of the server of `rlhf up` if it proves itself, or of the database."""
    if os.environ.get("MLFLOW_TRACKING_URI"):
        return os.environ["MLFLOW_TRACKING_URI"]
    services = running(home)
    if services is None or not (services.mlflow_uri or proven(services.health["mlflow"], home.prefect_auth_string)):
        return home.mlflow_uri
    return services.tracking_uri


def tracking_place(home: Home) -> str:
    """One address for the place behind `tracking_uri`: our own server and its database count as one."""
    uri, services = tracking_uri(home), running(home)
    ours = services is not None and not services.mlflow_uri and uri == services.mlflow_url
    return home.mlflow_uri if ours else uri


def registry(home: Home) -> str:
    """The registry of a model, for the key of `publish`: without user, password and query."""
    place = os.environ[REGISTRY] if os.environ.get(REGISTRY) else tracking_place(home)
    if place == home.mlflow_uri:
        return OWN  # independent of the state folder's path: the folder is moved and copied with its database
    # Up to the last @, even if a password is badly escaped: better to lose a part of the address than to keep a secret.
    return re.sub(r"://.*@", "://", place).partition("?")[0].rstrip("/")
