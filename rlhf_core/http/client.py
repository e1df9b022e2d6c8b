"""Send requests to a server that may be slow, hang or respond without end."""

import email.utils
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx

from rlhf_core.secrets.redaction import without_secrets

CONNECT_S = 5.0
"""Seconds for connecting: a running server accepts at once, even under load."""
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

    Raises httpx.TimeoutException if the whole answer takes longer than `timeout_s` (the timeout of httpx is for each
    read, and an answer may need many), TooLarge for an endless answer, and httpx.HTTPError without an answer.
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

    Azure and OpenAI give milliseconds in a separate header. Some proxies write `20s`.

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
    """The beginning of an answer for a message, without secrets, because a server may repeat the request."""
    return without_secrets(content.decode(errors="replace"))[:most]
