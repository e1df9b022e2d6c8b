"""`mlflow server` for this user's own programs and pages: `python -m pipelines.services.mlflow_server server OPTIONS`.

MLflow's command sets up its stores and then starts uvicorn with its application. It takes another application from
installed plugins alone, and knows none that asks who is there without a user data base; so the command that it builds is
given ours.
"""

from __future__ import annotations

from typing import Any

import mlflow.server
from mlflow.cli import cli

from pipelines.services.own_pages import OwnPages
from pipelines.services.own_user import OwnUser

_build = mlflow.server._build_uvicorn_command


def app() -> Any:
    """Return MLflow's application behind `OwnPages` and `OwnUser`; uvicorn's factory."""
    from mlflow.server.fastapi_app import app as theirs

    return OwnPages(OwnUser(theirs))


def uvicorn_command(
    options: str | None, host: str, port: int, workers: int, name: str, env_file: str | None, is_factory: bool
) -> list[str]:
    """Return the command that MLflow would start, with our application.

    Headers of a proxy say who is there only where a proxy is: anybody could send them.
    """
    direct = f"{options or ''} --no-proxy-headers".strip()
    return _build(direct, host, port, workers, "pipelines.services.mlflow_server:app", env_file, True)  # type: ignore[no-any-return]


if __name__ == "__main__":
    mlflow.server._build_uvicorn_command = uvicorn_command
    cli()
