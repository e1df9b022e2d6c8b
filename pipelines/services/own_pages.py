"""Restrict Prefect's server to pages and programs of this machine.

Anyone who can create a flow run can run commands, because deployments take agent programs and paths. The server listens
on loopback, but any page in a browser can reach it there: with requests that need no preflight, and through a host name
of the page's own that resolves to 127.0.0.1 (DNS rebinding). A request must therefore name this machine in `Host`, and
if a page sent it, the page must be from this server. Programs send no `Origin`. Other users of the machine are kept out
by Prefect's auth string, which every API request must carry (`Home.prefect_auth`); Prefect's pages ask for it once, or
take it from a link.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pipelines.services.sign_in import SIGN_IN

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
_SIGN_IN_PAGE = """<!doctype html><title>Prefect</title>
<script>localStorage.setItem("prefect-password", location.hash.slice(1)); location.replace("/")</script>
"""
"""Sign-in page. The part after `#` stays in the browser, so no log has it. Prefect's pages read this storage key."""


class OwnPages:
    """An application that answers 403 to requests and WebSockets of foreign pages or with foreign host names."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, or refuse it before reading its body."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = [(name.lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        refusal = refused(
            [value for name, value in headers if name == b"host"],
            [value for name, value in headers if name == b"origin"],
        )
        if not refusal and scope["type"] == "http" and scope["path"] == SIGN_IN:
            await HTMLResponse(_SIGN_IN_PAGE)(scope, receive, send)
        elif not refusal:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": refusal})
        else:
            await PlainTextResponse(f"{refusal}\n", status_code=403)(scope, receive, send)


def refused(hosts: list[str], origins: list[str]) -> str:
    """Return why a request with these headers is refused, or "" if it is accepted.

    >>> refused(["127.0.0.1:4200"], []), refused(["localhost:4200"], ["http://127.0.0.1:4200"])
    ('', '')
    >>> refused(["evil.example:4200"], [])
    'this server answers only requests to 127.0.0.1 and localhost'
    >>> refused(["127.0.0.1:4200"], ["https://evil.example"])
    'this server answers only requests from its own pages'
    """
    places = [_place(f"//{host}") for host in hosts]
    if len(places) != 1 or places[0] is None:
        return "this server answers only requests to 127.0.0.1 and localhost"
    if any(_place(origin) != places[0] or not origin.startswith("http://") for origin in origins):
        return "this server answers only requests from its own pages"
    return ""


def _place(address: str) -> int | None:
    """Return the port of an address on this machine; None for any other address."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        return None
    extra = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
    return None if extra or parts.hostname not in LOOPBACK_NAMES else port or 80
