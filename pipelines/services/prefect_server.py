"""Prefect's server for this machine's own pages: `uvicorn --factory pipelines.services.prefect_server:app`."""

from __future__ import annotations

from prefect.server.api.server import create_app

from pipelines.services.own_pages import OwnPages


def app() -> OwnPages:
    """Return Prefect's application behind `OwnPages`; a factory for uvicorn."""
    return OwnPages(create_app())
