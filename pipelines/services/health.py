"""Check whether servers answer, and wait until they do."""

from __future__ import annotations

import http.client
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from rlhf_core.errors import RlhfError

ANSWER_TIMEOUT_S = 5.0

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opener without proxies: our services are on this machine, which a network proxy cannot reach."""


class ServiceError(RlhfError, RuntimeError):
    """A service could not be started or does not answer; the message names its log."""


def healthy(url: str) -> bool:
    """Return whether `url` answers with status 200 within a few seconds."""
    try:
        with _DIRECT.open(url, timeout=ANSWER_TIMEOUT_S) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return False


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


def await_health(url: str, process: subprocess.Popen[bytes], timeout_s: float, log: Path) -> None:
    """Return when `url` answers; raise ServiceError if the process ends first or the time is up."""
    deadline = time.monotonic() + timeout_s
    while not healthy(url):
        if process.poll() is not None:
            raise ServiceError(f"{url}: its process ended with status {process.returncode}; read {log}")
        if time.monotonic() > deadline:
            raise ServiceError(f"{url}: no answer after {timeout_s:.0f} s; read {log}")
        time.sleep(0.1)
