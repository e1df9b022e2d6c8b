"""Make a deployment of a profile (`rlhf deploy`), and run the scheduled runs of a work pool (`rlhf worker`)."""

import argparse
import re
import shlex
from contextlib import chdir
from pathlib import Path
from typing import Any

import psutil

from pipelines.cli.common import print_line
from pipelines.execution.named_profiles import keep_profile
from pipelines.execution.plan import DIGITS, all_specs
from pipelines.execution.summary import shown_overrides
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import PipelineConfig, parse, profile_digest, profile_table
from pipelines.flows.profile_paths import as_read_from
from pipelines.services.home import Home
from pipelines.services.reconcile import some_prefect
from pipelines.services.running import ServiceError, running
from pipelines.services.user_servers import user_prefect
from rlhf_core.errors import ConfigError
from rlhf_core.secrets.redaction import shown


def deploy(options: argparse.Namespace) -> None:
    """Make, or update, the deployment of a profile, for the running services or a work pool; print how to run it."""
    home = Home.here()
    services = running(home)
    if options.pool:
        check_server(home, "deploy --pool")
    elif services is None:
        remedy = "start them with `rlhf up`, or give the --pool of your workers"
        raise ServiceError(f"rlhf deploy: no services are running; {remedy}")
    table = profile_table(options.profile, options.overrides)
    folder = Path.cwd() if services is None or options.pool else Path(psutil.Process(services.pid).cwd())
    table = as_read_from(folder, table)
    with chdir(folder):  # the folder of its runs
        config = parse(table, origin=options.profile)
        digest, stages = profile_digest(config), list(all_specs(config, lifecycle))
    name = options.name or config.name
    if re.search(r"[/%&<>]|\.py$", name):
        raise ConfigError("--name", name, "must have none of / % & < > and not end in .py", "choose another")
    changes = [word for text in shown_overrides(options.overrides) for word in ("--set", text)]
    named = [word for key in ("name", "pool") if (value := getattr(options, key)) for word in (f"--{key}", value)]
    command = shlex.join(["rlhf", "deploy", options.profile, *changes, *named])
    about = f"`{command}` kept this profile. Edits of its file change nothing here before that command runs again."
    with some_prefect(home):
        # Prefect reads its settings when it is imported, and `some_prefect` has just made them.
        from prefect.settings import PREFECT_UI_URL

        from pipelines.prefect_flows import own_deployments

        if options.pool:
            made = own_deployments.in_pool(name, digest, _portable(table, config), options.pool, config)
        else:
            keep_profile(table, digest, home)
            made = own_deployments.of_kept_profile(name, digest, config.project.tags)
        found, before = own_deployments.make_deployment(
            made, about=about, seed=config.seed, stages=stages, cron=options.cron
        )
        pages = shown(PREFECT_UI_URL.value() if services is None else services.prefect_url)
    print_line(f"rlhf-pipeline/{name}: {_change(digest[:DIGITS], before)}")
    print_line(f"update:  {command}")
    print_line(f"form:    {pages}/deployments/deployment/{found}/run")
    watch = [] if options.pool else ["--watch"]  # a proxy before the user's own server may refuse it: docs/cluster.md
    print_line(f"run it:  {shlex.join(['prefect', 'deployment', 'run', f'rlhf-pipeline/{name}', *watch])}")


def worker(options: argparse.Namespace) -> None:
    """Run the scheduled runs of a work pool until this process is stopped."""
    if options.runs_at_once < 1:
        raise ConfigError("--runs-at-once", options.runs_at_once, "must be >= 1", "1 lets each run have all GPUs")
    home = Home.here().make()
    check_server(home, "worker")
    with some_prefect(home):
        # Prefect reads its settings when it is imported, and `some_prefect` has just made them.
        from pipelines.prefect_flows.work_pools import serve_pool

        serve_pool(home, options.pool, options.runs_at_once)


def check_server(home: Home, verb: str) -> None:
    """Raise ServiceError if neither the user's own Prefect server nor the server of `rlhf up` is available."""
    if not user_prefect(home) and running(home) is None:
        remedy = "set PREFECT_API_URL to that of your team, or start one with `rlhf up`"
        raise ServiceError(f"rlhf {verb}: there is no Prefect server; {remedy}")


def _portable(table: dict[str, Any], config: PipelineConfig) -> dict[str, Any]:
    """The table of a profile for Prefect's server. Raises ConfigError for an address that others must not read."""
    if config.notify is not None and not config.notify.webhook.startswith("env:"):
        rule = "would be readable on Prefect's server"
        raise ConfigError("notify.webhook", "...", rule, 'give "env:NAME", a variable that the workers have')
    return table


def _change(version: str, before: str) -> str:
    if not before:
        return f"made of profile {version}"
    return f"unchanged, profile {version}" if version == before else f"profile {version} replaces {before}"
