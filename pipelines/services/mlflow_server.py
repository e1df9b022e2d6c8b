"""Run `mlflow server` for this user's programs and pages: `python -m pipelines.services.mlflow_server server OPTIONS`.

MLflow's command sets up its stores and then starts uvicorn with its application. It takes other applications only from
installed plugins, and has none that checks the caller without a user database. We therefore replace the application in
the command that it builds.
"""

from __future__ import annotations

from typing import Any

import mlflow.server
from mlflow.cli import cli

from pipelines.services.own_pages import OwnPages
from pipelines.services.own_user import OwnUser

_build = mlflow.server._build_uvicorn_command


def app() -> Any:
    """Return MLflow's application behind `OwnPages` and `OwnUser`; a factory for uvicorn."""
    from mlflow.server.fastapi_app import app as theirs  # reads the settings that the command made for its workers

    return OwnPages(OwnUser(theirs))


def uvicorn_command(
    options: str | None, host: str, port: int, workers: int, name: str, env_file: str | None, is_factory: bool
) -> list[str]:
    """Return the command that MLflow would start, with our application.

    Proxy headers that name the client are ignored, because without a proxy anybody could send them.
    """
    direct = f"{options or ''} --no-proxy-headers".strip()
    return _build(direct, host, port, workers, "pipelines.services.mlflow_server:app", env_file, True)  # type: ignore[no-any-return]


if __name__ == "__main__":
    mlflow.server._build_uvicorn_command = uvicorn_command
    cli()
