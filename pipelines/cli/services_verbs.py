"""Start and stop the services and say where they are (`rlhf up`, `rlhf down`, `rlhf status`)."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from pipelines.cli.common import console
from pipelines.services import servers
from pipelines.services.home import Home
from pipelines.services.running import Services, running
from pipelines.services.sign_in import sign_in_link
from pipelines.services.user_servers import user_prefect
from rlhf_core.secrets.redaction import shown


def up(options: argparse.Namespace) -> None:
    """Start the services and print their addresses."""
    home = Home.here()
    console.print(f"starting the services (logs in {home.logs}) ...", style="dim", highlight=False)
    found = servers.up(home, foreground=options.foreground)
    console.print(f"Prefect          {_prefect_page(home, found)}", highlight=False, soft_wrap=True)
    console.print(f"MLflow           {found.mlflow_url}", highlight=False)
    command = "prefect deployment run rlhf-pipeline/full --watch"
    if not found.prefect_api:
        file = shlex.quote(str(_short(home.prefect_auth)))
        settings = f"PREFECT_API_URL={found.prefect_url}/api PREFECT_API_AUTH_STRING=$(cat {file})"
        console.print(f"in your shell:   export {settings}", highlight=False, soft_wrap=True)
    console.print(f"trigger a run:   {command}", highlight=False)
    console.print("stop:            rlhf down")


def down(options: argparse.Namespace) -> None:
    """Stop the services."""
    console.print("stopped" if servers.down(Home.here()) else "nothing was running")


def status(options: argparse.Namespace) -> int:
    """Print which services answer; return 1 if one does not."""
    home = Home.here()
    found = running(home)
    if found is None:
        theirs = user_prefect(home)
        where = f" (your own Prefect is at {shown(theirs).removesuffix('/api')})" if theirs else ""
        console.print(f"nothing is running{where}; `rlhf up` starts {'' if theirs else 'Prefect and '}MLflow")
        return 1
    well = servers.states(home, found)
    for name, url in (("Prefect", _prefect_page(home, found)), ("MLflow", found.mlflow_url)):
        said = "answers" if well[name] else "does not answer"
        console.print(f"{name:<8} {url}  {said}", highlight=False, soft_wrap=True)
    return 0 if all(well.values()) else 1


def _prefect_page(home: Home, found: Services) -> str:
    """Return Prefect's address. On a terminal it signs the browser in; elsewhere not, as logs would keep the secret."""
    if found.prefect_api or not sys.stdout.isatty():
        return found.prefect_url
    return sign_in_link(found.prefect_url, home.prefect_auth_string)


def _short(path: Path) -> Path:
    """Return the path relative to the working folder if it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
