"""Ask a server that may be slow, hang or answer without end."""

import email.utils
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx

from rlhf_core.secrets.redaction import without_secrets

CONNECT_S = 5.0
"""Seconds for connecting: a server that is there accepts at once, however busy it is."""
LARGEST_ANSWER = 64 * 2**20
"""Bytes of an answer, which is held in memory."""


class TooLarge(httpx.HTTPError):
    """The answer has more than `LARGEST_ANSWER` bytes."""


class HttpAnswer(NamedTuple):
    """The answer of a server, and how long it asks to wait before the next request (0 if it does not)."""

    status: int
    content: bytes
    after_s: float


def post(client: httpx.Client, url: str, body: Any, *, timeout_s: float, connect_s: float = CONNECT_S) -> HttpAnswer:
    """Send `body` as JSON; return the answer.

    Raises httpx.TimeoutException if the whole answer takes longer than `timeout_s` (the timeout of httpx is for each read,
    and there may be many), TooLarge for one without end, and httpx.HTTPError if there is none.
    """
    deadline, content = time.monotonic() + timeout_s, b""
    timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, connect_s))
    with client.stream("POST", url, json=body, timeout=timeout) as response:
        for piece in response.iter_bytes():
            content += piece
            if len(content) > LARGEST_ANSWER:
                raise TooLarge(f"returned more than {LARGEST_ANSWER} bytes")
            if time.monotonic() > deadline:
                raise httpx.ReadTimeout(f"took longer than {timeout_s:g} s")
    return HttpAnswer(response.status_code, content, retry_after(response.headers))


def retry_after(headers: Mapping[str, str]) -> float:
    """The seconds that a server asks to wait (RFC 9110, 10.2.3: a number of seconds or a date); 0 if it does not.

    Azure and OpenAI give milliseconds in a header of their own. Some proxies write `20s`.

    >>> retry_after({"retry-after": "20"}), retry_after({"retry-after-ms": "1500"})
    (20.0, 1.5)
    """
    said = headers.get("retry-after", "").strip()
    try:
        if milliseconds := headers.get("retry-after-ms"):
            return max(0.0, float(milliseconds) / 1000)
        return max(0.0, float(said.removesuffix("s")) if said[:1].isdigit() else _until(said))
    except (TypeError, ValueError):
        return 0.0


def _until(date: str) -> float:
    return email.utils.parsedate_to_datetime(date).timestamp() - time.time()


def shown_body(content: bytes, most: int) -> str:
    """Return the beginning of an answer for a message, without secrets: a server may repeat what it was sent."""
    return without_secrets(content.decode(errors="replace"))[:most]
