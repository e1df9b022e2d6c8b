"""The address of a bucket: S3 and compatible servers, Google Cloud Storage, Azure, through `obstore`.

Credentials, region and endpoint come from the environment or the machine's role, under the names of the providers' own tools
(docs/cluster.md).
"""

import os
import re
import socket
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlhf_core.errors import ConfigError
from rlhf_core.processes.identity import is_loopback
from rlhf_core.schema.hosts import is_host, is_server
from rlhf_core.secrets.redaction import shown

SCHEMES = ("s3", "gs", "az")
_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_")
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_PARTS_OF_HOSTS = ("AWS_REGION", "AWS_DEFAULT_REGION", "AZURE_STORAGE_ACCOUNT_NAME")
"""Variables whose values become part of a server's name."""
_NOT_IN_ADDRESSES = "?#%:\\"
_CREDENTIALS = {
    "s3": (
        r"AWS_(SECRET_ACCESS_KEY|WEB_IDENTITY_TOKEN_FILE|CONTAINER_\w+|METADATA_ENDPOINT|SKIP_SIGNATURE)",
        "AWS_ACCESS_KEY_ID",
    ),
    "gs": (
        r"GOOGLE_(SERVICE_ACCOUNT\w*|\w+_CREDENTIALS|BEARER_TOKEN|SKIP_SIGNATURE)|GCE_\w+",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ),
    "az": (
        r"AZURE_(\w+_(KEY|TOKEN|SECRET|TOKEN_FILE|CLI|EMULATOR)|\w+Y_ENDPOINT|MSI_ENDPOINT|CREDENTIAL_TYPE|SKIP_SIGNATURE)|IDENTITY_\w+",
        "AZURE_STORAGE_ACCOUNT_KEY",
    ),
}
"""Scheme -> the variables of which one has credentials or says where they are, and the first of them to name."""
_GCLOUD = ".config/gcloud/application_default_credentials.json"
_ROLES = ("169.254.169.254", 80)
"""Where a machine of Amazon's, Google's or Azure's asks for the credentials of its role."""
_ROLES_TIMEOUT_S = 2.0
_FIRST_RETRIES: Any = {"max_retries": 5, "retry_timeout": timedelta(seconds=4)}
"""Of the first requests to a bucket, whose address may be wrong."""
_LONGEST_FOLDER = 200  # bytes: the folder of its cache has this name and a digest


def check_address(uri: str) -> None:
    """Raise ConfigError for an address that is not `s3://bucket/folder`, `gs://` or `az://`, or that has two spellings."""
    scheme, _, rest = uri.partition("://")
    bucket, *folders = rest.rstrip("/").split("/")
    given, rule = uri, ""
    if scheme not in SCHEMES or not bucket:
        rule = f"is no bucket; known are {', '.join(f'{one}://' for one in SCHEMES)}"
    elif "@" in bucket:
        given, rule = f"...@{uri.rpartition('@')[2]}", "has credentials, which belong into the environment"
    elif not uri.isprintable():
        rule = "has signs that do not print"
    elif found := next((sign for sign in _NOT_IN_ADDRESSES if sign in rest), ""):
        rule = f"has {found!r}, so it may mean another bucket or folder than it names"
    elif not is_host(bucket) or len(bucket) > _LONGEST_FOLDER:  # the name of its host, for some servers
        rule = "has a bucket that is no name of one: letters, digits, '.', '-' and '_'"
    elif bad := [one for one in folders if one in ("", ".", "..") or len(one.encode()) > _LONGEST_FOLDER]:
        rule = f"has a folder {bad[0]!r}; one must have 1 to {_LONGEST_FOLDER} bytes, and be neither . nor .."
    if rule:
        raise ConfigError("store", given, rule, "write s3://BUCKET/FOLDER")


def open_bucket(uri: str, *, is_first: bool = False) -> Any:
    """Open the client of the bucket `s3://bucket/folder`, `gs://` or `az://`. Raises ConfigError without obstore.

    Raises it without credentials, too. If `is_first`, a request that fails is repeated for seconds instead of minutes.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        remedy = "pip install 'rlhf-lifecycle[s3]'"
        raise ConfigError("store", uri, "needs the package obstore, which is not installed", remedy) from None
    check_address(uri)
    for name in [name for name, value in os.environ.items() if name.startswith(_VARIABLES) and not value.strip()]:
        del os.environ[name]  # as the providers' own tools read it; an empty key would take the place of a role
    hosts = [_host_of(name, os.environ[name]) for name in _ENDPOINTS[uri.partition("://")[0]] if name in os.environ]
    local = bool(hosts) and all(map(is_loopback, hosts))
    for name in _PARTS_OF_HOSTS:
        if name in os.environ and (":" in os.environ[name] or not is_host(os.environ[name])):
            raise ConfigError(name, os.environ[name], "is no part of a server's name", "correct it, or unset it")
    asked = "AWS_ALLOW_HTTP" in os.environ and os.environ["AWS_ALLOW_HTTP"].lower() in ("1", "true")
    options: Any = {"allow_http": True} if local or asked else {}
    retries: Any = {"retry_config": _FIRST_RETRIES} if is_first else {}
    if is_first:
        options["connect_timeout"] = timedelta(seconds=3)
    try:
        client = from_url(uri, client_options=options, **retries)
    except (BaseError, ValueError) as error:  # variables that are missing, or a name that no bucket can have
        rule = f"cannot be opened ({str(error).splitlines()[0]})"
        remedy = "correct it, or set the variables of its provider, for az:// AZURE_STORAGE_ACCOUNT_NAME"
        raise ConfigError("store", uri, rule, remedy) from None
    _check_credentials(uri)
    return client


def _check_credentials(uri: str) -> None:
    """Raise ConfigError if no credentials are in the environment or the machine's role; clients search for minutes."""
    pattern, variable = _CREDENTIALS[uri.partition("://")[0]]
    if any(re.fullmatch(pattern, name) for name in os.environ):
        return
    if uri.startswith("gs:") and "HOME" in os.environ and Path(os.environ["HOME"], _GCLOUD).is_file():
        return
    try:
        _find_roles(_ROLES)
    except OSError:
        rule = f"has no credentials: {variable} is not set, and this machine has no role of a cloud"
        raise ConfigError("store", uri, rule, f"set {variable} and what belongs to it (docs/cluster.md)") from None


@cache
def _find_roles(address: tuple[str, int]) -> None:
    """Connect to the metadata server of roles, once per process; a failure is not cached."""
    socket.create_connection(address, _ROLES_TIMEOUT_S).close()


def _host_of(name: str, endpoint: str) -> str:
    """The host of the S3 in the variable `name`. Raises ConfigError for an invalid address, on which the client panics."""
    try:
        parts = urlsplit(endpoint)
        may_be = is_server(parts.netloc)
    except ValueError:  # as of http://[::1
        may_be = False
    if not may_be or not re.fullmatch(r"https?://[^\s/@?#]+(/[\x21-\x7e]*)?", endpoint):
        raise ConfigError(name, shown(endpoint), "is no address of a server", "write http://HOST:PORT or https://HOST")
    return parts.hostname or ""
