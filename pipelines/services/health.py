"""Check whether servers answer, and whether they are ours, and wait until they do."""

from __future__ import annotations

import hmac
import http.client
import secrets
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from rlhf_core.errors import RlhfError
from rlhf_core.http.door import NONCE, PROOF, proof

ANSWER_TIMEOUT_S = 5.0

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opener without proxies: our services are on this machine, which a network proxy cannot reach."""


class ServiceError(RlhfError, RuntimeError):
    """A service could not be started or does not answer; the message names its log."""


def healthy(url: str) -> bool:
    """Return whether `url` answers with status 200 within a few seconds, whoever's server it is."""
    return answered(url, "")[0] == HTTPStatus.OK


def proven(url: str, key: str) -> bool:
    """Return whether `url` answers with status 200 within a few seconds, from a server of ours that knows `key`.

    Anybody may listen at a port, so this comes before any secret is sent there: the server proves that it knows the key
    with an HMAC of a random number and its port.
    """
    nonce = secrets.token_hex(16)
    status, given = answered(url, nonce)
    right = proof(key, nonce, urlsplit(url).port or 80)
    return status == HTTPStatus.OK and hmac.compare_digest(given.encode(), right.encode())


def answered(url: str, nonce: str) -> tuple[int, str]:
    """Return the status of a server's answer, 0 without one, and its proof, which only servers of ours give."""
    try:
        with _DIRECT.open(urllib.request.Request(url, headers={NONCE: nonce}), timeout=ANSWER_TIMEOUT_S) as response:
            return response.status, response.headers.get(PROOF, "")
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get(PROOF, "")
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return 0, ""


def answers(url: str) -> bool:
    """Return whether a remote server answers at all, even with an error such as a missing password. Uses proxies."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_TIMEOUT_S):
            return True
    except urllib.error.HTTPError:
        return True
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return False


def wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether `condition` became true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def await_health(url: str, key: str, process: subprocess.Popen[bytes], timeout_s: float, log: Path) -> None:
    """Return when our server at `url` answers and proves itself; raise ServiceError if the process ends first or the time is up."""
    deadline = time.monotonic() + timeout_s
    while not proven(url, key):
        if process.poll() is not None:
            raise ServiceError(f"{url}: its process ended with status {process.returncode}; read {log}")
        if time.monotonic() > deadline:
            raise ServiceError(f"{url}: no answer after {timeout_s:.0f} s; read {log}")
        time.sleep(0.1)
