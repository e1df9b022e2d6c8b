"""Run `mlflow server` at a socket of ours: `python -m pipelines.services.mlflow_server DESCRIPTOR server OPTIONS`.

MLflow's command sets up its stores and then starts uvicorn with its application. It takes other applications only from
installed plugins, and has none that checks the caller without a user database. This module therefore replaces the
server process that the command would start.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

import mlflow.server
from mlflow.cli import cli

from pipelines.services.home import PROOF_KEY
from rlhf_core.http.door import Door
from rlhf_core.http.serving import serve_at
from rlhf_core.secrets.redaction import hide_in_logs

LISTEN = "listen"
"""Second argument of the process in which the application runs, with the variables that MLflow's command made for it."""


def mlflow_app() -> Door:
    """MLflow's application for this user and its own pages; a factory for uvicorn."""
    from mlflow.server.fastapi_app import app as theirs  # reads the settings that the command made for its workers

    hide_in_logs()
    return Door(theirs, pages=True, key=os.environ[PROOF_KEY] if PROOF_KEY in os.environ else "")


def become_server(_: list[str], *, extra_env: Mapping[str, str], **__: Any) -> None:
    """Replace this process, which MLflow's command would only keep waiting, by the server process."""
    command = [sys.executable, "-P", "-m", "pipelines.services.mlflow_server", sys.argv[1], LISTEN]
    os.execve(sys.executable, command, os.environ | extra_env)


if __name__ == "__main__":
    if sys.argv[2] == LISTEN:
        serve_at(int(sys.argv[1]), mlflow_app)
    else:
        mlflow.server._exec_cmd = become_server
        cli(sys.argv[2:])
