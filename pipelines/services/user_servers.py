"""A Prefect server of the user's own: whether there is one, whether it answers, and how to talk to it.

Servers that the user set take the place of ours; `pipelines.services.user_settings` reads where they were set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from pipelines.services import user_settings
from pipelines.services.health import ServiceError
from pipelines.services.home import LOOPBACK, Home, client_environment
from pipelines.services.ports import is_claimed, is_free
from pipelines.services.running import running
from rlhf_core.secrets.redaction import shown, without_secrets


def user_prefect(home: Home) -> str:
    """Return the address of the API of the user's own Prefect server, empty where there is none.

    `rlhf up` prints an address to export: that of our own server is none of the user's, also when it is down again.
    """
    api = user_settings.prefect_api()
    services = running(home)
    if services is not None and not services.prefect_api and _plain(api) == f"{services.prefect_url}/api":
        return ""
    note = home.prefect_address
    if note.is_file() and _plain(api) == note.read_text():
        port = urlsplit(api).port
        if port is not None and (is_free(port) or is_claimed(port)):
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


def _plain(api: str) -> str:
    return api.replace("//localhost:", f"//{LOOPBACK}:")
