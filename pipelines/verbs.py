"""What the verbs of `rlhf` do. Each imports what it needs when it is called."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from pipelines.home import Home

if TYPE_CHECKING:
    from rlhf_core.artifacts import ArtifactStore

PIPE_WIDTH = 160

console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)


def up(options: argparse.Namespace) -> None:
    """Start the services and say where they are."""
    from pipelines import services

    home = Home.here()
    console.print(f"starting Prefect and MLflow (logs in {home.logs}) ...", style="dim", highlight=False)
    found = services.up(home, foreground=options.foreground)
    _say_where(found.prefect_url, found.mlflow_url)
    environment = f"PREFECT_API_URL={found.prefect_url}/api"
    console.print(f"trigger a run:   {environment} prefect deployment run rlhf-pipeline/full --watch", highlight=False)
    console.print("stop:            rlhf down")


def down(options: argparse.Namespace) -> None:
    """Stop the services."""
    from pipelines import services

    console.print("stopped" if services.down(Home.here()) else "nothing was running")


def status(options: argparse.Namespace) -> int:
    """Say which services answer; 1 if one does not."""
    from pipelines import services

    found = services.running(Home.here())
    if found is None:
        console.print("nothing is running; `rlhf up` starts Prefect and MLflow")
        return 1
    answers = [services.healthy(url) for url in found.health]
    for name, url, well in zip(("Prefect", "MLflow"), (found.prefect_url, found.mlflow_url), answers, strict=True):
        console.print(f"{name:<8} {url}  {'answers' if well else 'does not answer'}", highlight=False)
    return 0 if all(answers) else 1


def run(options: argparse.Namespace) -> None:
    """Run a pipeline in this process."""
    from pipelines.foreground import run_profile

    run_profile(options, console)


def plan(options: argparse.Namespace) -> None:
    """Print the decision for every stage."""
    from pipelines.display import decisions_table

    planned = _plan(options)
    console.print(decisions_table([(stage.label, stage.decision) for stage in planned], wide=console.is_terminal))


def explain(options: argparse.Namespace) -> None:
    """Print the decision for one stage with its whole key and its record."""
    from pipelines.plan import PENDING, check_labels
    from pipelines.profile import load_profile
    from pipelines.run import store_of
    from rlhf_core.stage import key_payload

    planned = _plan(options)
    check_labels(planned, {"explain": [options.stage]})
    stage = next(stage for stage in planned if stage.label == options.stage)
    console.print(f"{stage.label}: {stage.decision.action}: {stage.decision.reason}", highlight=False, soft_wrap=True)
    if any(ref.uri.startswith(PENDING) for ref in stage.spec.refs()):
        console.print("its key depends on what the stages before it make")
        return
    console.print(f"key {stage.decision.key}", highlight=False)
    console.print_json(json.dumps(key_payload(stage.spec, strict_code=options.strict_code)))
    store = store_of(load_profile(options.profile, options.overrides), Home.here())
    record = store.record(stage.decision.key)
    if record is not None:
        console.print_json(json.dumps(record.to_json(), default=str))


def reconcile(options: argparse.Namespace) -> None:
    """Give everything that a kill left standing as if it were at work its true state, and say what and why."""
    from pipelines.mend import mend

    home, count = Home.here(), 0
    for line in mend(home, [_place(options)]):
        count += 1
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print("nothing to mend: all that is shown at work is at work" if not count else f"{count} set right")


def resume(options: argparse.Namespace) -> None:
    """Run again what did not come to its end."""
    from pipelines.mend import some_prefect

    home = Home.here()
    if not (home.prefect / "prefect.db").exists():
        console.print(f"nothing was run yet in {home.root}: `rlhf run tiny/full` is a start", highlight=False)
        return
    with some_prefect(home) as served:
        from pipelines.resume import resume as resume_flow_run

        found = resume_flow_run(options.run, served=served)
    console.print(found.said, highlight=False, markup=False, soft_wrap=True)
    if found.options is not None:
        run(found.options)


def runs(options: argparse.Namespace) -> None:
    """Print what the store holds, newest first."""
    from pipelines.store_verbs import print_runs

    print_runs(_place(options), console)


def chat(options: argparse.Namespace) -> None:
    """Talk to a policy."""
    from pipelines.chat import talk

    talk(options, _place(options), console)


def serve_reward(options: argparse.Namespace) -> None:
    """Serve a reward over HTTP."""
    from pipelines.reward_service import serve

    serve(options, _place(options), console)


def doctor(options: argparse.Namespace) -> int:
    """Check this machine; 1 if something that is needed is missing."""
    from pipelines.doctor import examine

    return examine(console)


def import_openrlhf(options: argparse.Namespace) -> None:
    """Translate a script of OpenRLHF commands to a profile, and say what became of every flag."""
    from pipelines.openrlhf.importing import import_script

    import_script(options.script, out=options.out, lenient=options.lenient, console=console)


def store(options: argparse.Namespace) -> None:
    """Look after the store."""
    from pipelines.store_verbs import look_after

    look_after(_place(options), options, console)


def _place(options: argparse.Namespace) -> ArtifactStore:
    """Return the store that the options name: a folder, that of a profile, or the one in the state folder."""
    from pipelines.profile import load_profile
    from pipelines.run import store_of
    from rlhf_core.artifacts import ArtifactStore

    if options.store:
        return ArtifactStore(Path(options.store).expanduser())
    return store_of(load_profile(options.profile), Home.here()) if options.profile else ArtifactStore(Home.here().store)


def _plan(options: argparse.Namespace):  # type: ignore[no-untyped-def]  # PlannedStage is imported late
    from pipelines.plan import plan as make_plan
    from pipelines.profile import load_profile
    from pipelines.run import store_of

    config = load_profile(options.profile, options.overrides)
    return make_plan(
        config,
        store_of(config, Home.here()),
        until=options.until,
        force=options.force,
        strict_code=options.strict_code,
    )


def _say_where(prefect_url: str, mlflow_url: str) -> None:
    console.print(f"Prefect          {prefect_url}", highlight=False)
    console.print(f"MLflow           {mlflow_url}", highlight=False)
