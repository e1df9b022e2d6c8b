"""Implement the verbs of `rlhf`. Each function imports what it needs when it is called."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from pipelines.services.home import Home

if TYPE_CHECKING:
    from pipelines.services.running import Services
    from rlhf_core.stage.key import Strictness
    from rlhf_core.store.artifacts import ArtifactStore
    from rlhf_core.store.layout import StoreLayout

PIPE_WIDTH = 160

console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)


def up(options: argparse.Namespace) -> None:
    """Start the services and print their addresses."""
    from pipelines.services import servers

    home = Home.here()
    console.print(f"starting the services (logs in {home.logs}) ...", style="dim", highlight=False)
    found = servers.up(home, foreground=options.foreground, new_auth=options.new_auth)
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
    from pipelines.services import servers

    console.print("stopped" if servers.down(Home.here()) else "nothing was running")


def status(options: argparse.Namespace) -> int:
    """Print which services answer; return 1 if one does not."""
    from pipelines.services import servers
    from pipelines.services.running import running
    from pipelines.services.user_servers import user_prefect
    from rlhf_core.secrets.redaction import shown

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


def run(options: argparse.Namespace) -> None:
    """Run a pipeline in this process."""
    from pipelines.cli.run_command import run_profile

    run_profile(options, console)


def plan(options: argparse.Namespace) -> None:
    """Print the decision for every stage."""
    from pipelines.cli.display import decisions_table

    planned = _plan(options)
    console.print(decisions_table([(stage.label, stage.decision) for stage in planned], wide=console.is_terminal))


def explain(options: argparse.Namespace) -> None:
    """Print the decision for one stage with its key payload and its record."""
    from pipelines.execution.opening import store_of
    from pipelines.execution.plan import PENDING, check_labels
    from pipelines.execution.versions import version_lines
    from pipelines.flows.profile import load_profile
    from rlhf_core.stage.decision import target_of
    from rlhf_core.user_code.dependencies import DECLARATION, unseen_reads

    planned = _plan(options)
    check_labels(planned, {"explain": [options.stage]})
    stage = next(stage for stage in planned if stage.label == options.stage)
    said = [f"{stage.label}: {stage.decision.action}: {stage.decision.reason}"]
    for function in stage.spec.callables:
        said += [f"not in the key: {phrase}; what counts: {DECLARATION} there" for phrase in unseen_reads(function)]
    console.print("\n".join(said), highlight=False, markup=False, soft_wrap=True)
    if any(ref.uri.startswith(PENDING) for ref in stage.spec.refs()):
        console.print("its key depends on what the stages before it make")
        return
    console.print(f"key {stage.decision.key}", highlight=False)
    store = store_of(load_profile(options.profile, options.overrides), Home.here())
    target = target_of(store, stage.spec, strict=_strictness(options))
    console.print_json(json.dumps(target.payload))
    record = store.record(stage.decision.key)
    for line in version_lines(store, stage.spec, record):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if record is not None:
        console.print_json(json.dumps(record.to_json(), default=str))


def reconcile(options: argparse.Namespace) -> None:
    """Set the true state of everything that killed processes left as running; print each change with its reason."""
    from pipelines.services.reconcile import reconcile_all

    home, count = Home.here(), 0
    for line in reconcile_all(home, [_place(options)]):
        count += 1
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print("nothing to mend: all that is shown at work is at work" if not count else f"{count} set right")


def resume(options: argparse.Namespace) -> None:
    """Run an unfinished run again."""
    from pipelines.services.reconcile import some_prefect, was_used

    home = Home.here()
    if not was_used(home):
        console.print(f"nothing was run yet in {home.root}: `rlhf run tiny/full` is a start", highlight=False)
        return
    with some_prefect(home) as served:
        from pipelines.execution.resume import resume as resume_flow_run

        found = resume_flow_run(options.run, served=served)
    console.print(found.message, highlight=False, markup=False, soft_wrap=True)
    if found.options is not None:
        run(found.options)


def runs(options: argparse.Namespace) -> None:
    """Print what the store holds, newest first."""
    from pipelines.cli.store_verbs import print_runs

    print_runs(_layout(options), console)


def chat(options: argparse.Namespace) -> None:
    """Talk to a policy."""
    from pipelines.cli.chat import talk

    talk(options, _place(options), console)


def serve_reward(options: argparse.Namespace) -> None:
    """Serve a reward over HTTP."""
    from pipelines.cli.serve_reward import serve

    serve(options, _place(options), console)


def doctor(options: argparse.Namespace) -> int:
    """Check this machine; return 1 if something required is missing."""
    from pipelines.cli.doctor import examine

    return examine(console)


def import_openrlhf(options: argparse.Namespace) -> None:
    """Translate a script of OpenRLHF commands to a profile, and print how every flag was translated."""
    from pipelines.importers.openrlhf.importing import import_script

    import_script(options.script, out=options.out, lenient=options.lenient, console=console)


def store(options: argparse.Namespace) -> None:
    """Run a verb of `rlhf store`."""
    from pipelines.cli.store_verbs import look_after, print_store

    if options.store_verb == "ls":
        print_store(_layout(options), console)
    else:
        look_after(_place(options), options, console)


def _place(options: argparse.Namespace) -> ArtifactStore:
    """Return the store that the options name."""
    from rlhf_core.store.artifacts import ArtifactStore

    return ArtifactStore(_store_folder(options))


def _layout(options: argparse.Namespace) -> StoreLayout:
    """Return the layout of the store that the options name, for verbs that only list."""
    from rlhf_core.store.layout import StoreLayout, check_schema

    root = _store_folder(options).absolute()
    check_schema(root)
    return StoreLayout(root)


def _store_folder(options: argparse.Namespace) -> Path:
    """Return the store's folder: from the options, from the profile, or in the state folder."""
    if options.store:
        return Path(options.store).expanduser()
    if not options.profile:
        return Home.here().store
    from pipelines.execution.opening import store_of
    from pipelines.flows.profile import load_profile

    return store_of(load_profile(options.profile), Home.here()).root


def _plan(options: argparse.Namespace):  # type: ignore[no-untyped-def]  # PlannedStage is imported late
    from pipelines.execution.opening import store_of
    from pipelines.execution.plan import plan as make_plan
    from pipelines.flows.profile import load_profile

    config = load_profile(options.profile, options.overrides)
    return make_plan(
        config,
        store_of(config, Home.here()),
        until=options.until,
        force=options.force,
        strict=_strictness(options),
    )


def _strictness(options: argparse.Namespace) -> Strictness:
    from rlhf_core.stage.key import Strictness

    return Strictness(code=options.strict_code, env=options.strict_env)


def _prefect_page(home: Home, found: Services) -> str:
    """Return Prefect's address. On a terminal it signs the browser in; elsewhere not, as logs would keep the secret."""
    from pipelines.services.own_pages import sign_in_link

    if found.prefect_api or not sys.stdout.isatty():
        return found.prefect_url
    return sign_in_link(found.prefect_url, home.prefect_auth_string)


def _short(path: Path) -> Path:
    """Return the path relative to the working folder if it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
