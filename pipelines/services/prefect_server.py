"""Run Prefect's server for this machine's own pages: `python -m pipelines.services.prefect_server DESCRIPTOR`.

Anyone who can create a flow run can run commands, because deployments take agent programs and paths. Every request to
the API therefore needs Prefect's auth string (`Home.prefect_auth`), which Prefect's pages ask for once, or take from a
link. The files of its pages hold nothing, and its WebSockets get the auth string as their first message, from Prefect.
"""

import asyncio
import os
import sys
from itertools import count
from typing import Any

import sqlalchemy as sa
from prefect.server.api.server import create_app
from prefect.server.database.dependencies import provide_database_interface
from prefect.server.schemas.sorting import DeploymentSort
from prefect.settings import get_current_settings
from starlette.responses import HTMLResponse
from starlette.types import Message, Receive, Scope, Send

from pipelines.services.flow_runs import OWN_TAG, PIPELINE_TAG
from pipelines.services.home import SERVER_AUTH, SIGN_IN, basic
from pipelines.services.running import database_problem
from rlhf_core.http.door import Door
from rlhf_core.http.serving import serve_at
from rlhf_core.secrets.redaction import hide_in_logs

FIRST_MESSAGE_S = 20.0  # after which a silent connection is closed
_PROBES = ("/api/health", "/api/ready")
_SIGN_IN_PAGE = """<!doctype html><title>Prefect</title>
<script>localStorage.setItem("prefect-password", location.hash.slice(1)); location.replace("/")</script>
"""
"""Sign-in page. The part after `#` stays in the browser, so no log has it. Prefect's pages read this storage key."""


def prefect_app() -> Door:
    """Prefect's application behind our door; a factory for uvicorn."""
    hide_in_logs()
    DeploymentSort.as_sql_sort = _pipelines_first
    auth, prefect = os.environ[SERVER_AUTH], create_app()

    async def pages(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == SIGN_IN:
            await HTMLResponse(_SIGN_IN_PAGE)(scope, receive, send)
        elif scope["type"] == "websocket":
            await prefect(scope, _first_message_in_time(receive), send)
        elif scope["type"] == "lifespan":
            await prefect(scope, receive, _shown_failure(send))
        else:
            await prefect(scope, receive, send)

    return Door(pages, authorization=f"Basic {basic(auth)}", pages=True, open_to=_is_open, key=auth)


_AS_ASKED = DeploymentSort.as_sql_sort


def _pipelines_first(sort: DeploymentSort) -> list[sa.ColumnElement[Any]]:
    """Sort deployments so that own profiles come first and single stages last, if the page lists them from A to Z.

    The page shows ten of more than thirty.
    """
    tags = sa.cast(provide_database_interface().Deployment.tags, sa.String)
    groups = [tags.contains(f'"{tag}"').desc() for tag in (OWN_TAG, PIPELINE_TAG)]
    return [*(groups if sort is DeploymentSort.NAME_ASC else ()), *_AS_ASKED(sort)]


def _first_message_in_time(receive: Receive) -> Receive:
    """Wrap `receive` of a WebSocket, to close it unless its first message, the auth string, comes in time."""
    received = count()

    async def timed() -> Message:
        if next(received) != 1:  # 0 is the connection
            return await receive()
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                return await receive()
        except TimeoutError:
            return {"type": "websocket.disconnect", "code": 1008}

    return timed


def _shown_failure(send: Send) -> Send:
    """`send` of the start, which prints the reason of a failure: our settings of Prefect's log silence uvicorn's."""

    async def shown(message: Message) -> None:
        if message["type"] == "lifespan.startup.failed":
            failure = message.get("message", "")
            database = get_current_settings().server.database.connection_url
            sys.stderr.write(failure + database_problem(failure, database.get_secret_value() if database else ""))
        await send(message)

    return shown


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    read = scope["type"] == "websocket" or scope["method"] in ("GET", "HEAD")
    return read and (scope["type"] == "websocket" or path in _PROBES or not path.startswith("/api"))


if __name__ == "__main__":
    # A stage may hold Python's global lock for a while; a missed ping does not mean that its process is gone.
    serve_at(int(sys.argv[1]), prefect_app, ws_ping_interval=60.0, ws_ping_timeout=300.0)
