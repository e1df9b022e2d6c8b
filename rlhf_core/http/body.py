"""Read the body of an HTTP request within limits of size and time, for the servers of this program."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request


class BodyRefused(Exception):
    """Raised for a body that is too large or too slow. `status` is the HTTP status of the response: 413 or 408."""

    def __init__(self, status: int, rule: str) -> None:
        super().__init__(rule)
        self.status = status


@dataclass(frozen=True)
class BodyLimits:
    """The limits on a request's body."""

    max_bytes: int = 32 * 2**20
    timeout_s: float = 60.0
    """Time from the headers to the last byte: a client that stops halfway must not hold its connection forever."""


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """Return the body. Raises BodyRefused as soon as it exceeds `limits`."""
    body = bytearray()
    try:
        async with asyncio.timeout(limits.timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > limits.max_bytes:
                    raise BodyRefused(413, f"a request may have at most {limits.max_bytes} bytes")
    except TimeoutError:
        raise BodyRefused(408, f"the request body did not arrive within {limits.timeout_s:g} s") from None
    return bytes(body)
