"""Make a deployment of a profile on the running services (`rlhf deploy`)."""

import argparse
import re
import shlex
from pathlib import Path

import psutil

from pipelines.cli.common import console, print_line
from pipelines.execution.named_profiles import keep_profile
from pipelines.execution.plan import DIGITS, all_specs
from pipelines.execution.summary import shown_overrides
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import parse, profile_digest, profile_table
from pipelines.services.home import Home
from pipelines.services.reconcile import some_prefect
from pipelines.services.running import ServiceError, Services, running
from rlhf_core.errors import ConfigError


def deploy(options: argparse.Namespace) -> None:
    """Keep the profile and make, or update, the deployment that runs it; print how to run it."""
    home = Home.here()
    services = running(home)
    if services is None:
        raise ServiceError("rlhf deploy: no services are running; start them with `rlhf up`")
    _check_folder(options.profile, services)
    table = profile_table(options.profile, options.overrides)
    config = parse(table, origin=options.profile)
    name = options.name or config.name
    if re.search(r"[/%&<>]|\.py$", name):
        raise ConfigError("--name", name, "must have none of / % & < > and not end in .py", "choose another")
    digest, stages = profile_digest(config), list(all_specs(config, lifecycle))
    keep_profile(table, digest, home)
    changes = [word for text in shown_overrides(options.overrides) for word in ("--set", text)]
    named = ["--name", options.name] if options.name else []
    command = shlex.join(["rlhf", "deploy", options.profile, *changes, *named])
    about = f"`{command}` kept this profile. Edits of its file change nothing here before that command runs again."
    with some_prefect(home):
        # Prefect reads its settings when it is imported, and `some_prefect` has just made them.
        from pipelines.prefect_flows.own_deployments import deploy as deploy_profile

        tags = config.project.tags
        found, before = deploy_profile(
            name, digest, about=about, seed=config.seed, stages=stages, cron=options.cron, tags=tags
        )
    print_line(console, f"rlhf-pipeline/{name}: {_change(digest[:DIGITS], before)}")
    print_line(console, f"update:  {command}")
    print_line(console, f"form:    {services.prefect_url}/deployments/deployment/{found}/run")
    print_line(console, f"run it:  {shlex.join(['prefect', 'deployment', 'run', f'rlhf-pipeline/{name}', '--watch'])}")


def _change(version: str, before: str) -> str:
    if not before:
        return f"made of profile {version}"
    return f"unchanged, profile {version}" if version == before else f"profile {version} replaces {before}"


def _check_folder(profile: str, services: Services) -> None:
    """Raise ConfigError if the services run in another folder, where relative paths would mean other files."""
    folder = psutil.Process(services.pid).cwd()
    if Path(folder) != Path.cwd():
        rule = f"the services run in {folder}, where its relative paths would mean other files"
        raise ConfigError("deploy", profile, rule, "run `rlhf deploy` there")
