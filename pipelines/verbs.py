"""What the verbs of `rlhf` do. Each imports what it needs when it is called."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipelines.home import Home

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


def runs(options: argparse.Namespace) -> None:
    """Print what the store holds, newest first."""
    from pipelines.display import key_metric
    from rlhf_core.artifacts import ArtifactStore

    table = Table(box=None, pad_edge=False)
    for name in ("made (UTC)", "stage", "seconds", "digest", "attempts", ""):
        table.add_column(name, no_wrap=True)
    for record in reversed(ArtifactStore(Home.here().store).records()):
        made = record.started[:16].replace("T", " ")
        cells = (made, record.label, f"{record.seconds:.1f}", record.handle.digest[:12], str(record.attempts))
        table.add_row(*cells, key_metric(record.metrics))
    console.print(table)


def chat(options: argparse.Namespace) -> None:
    """Talk to a policy."""
    from pipelines.chat import talk

    talk(options, console)


def doctor(options: argparse.Namespace) -> int:
    """Check this machine; 1 if something that is needed is missing."""
    from pipelines.doctor import examine

    return examine(console)


def store(options: argparse.Namespace) -> None:
    """Look after the store."""
    from rlhf_core.artifacts import ArtifactStore

    place = ArtifactStore(Home.here().store)
    if options.store_verb == "ls":
        _list_store(place.root)
    elif options.store_verb == "verify":
        damage = place.verify()
        for found in damage:
            console.print(str(found), highlight=False, soft_wrap=True)
        console.print(
            f"{len(damage)} damaged; they are in quarantine and will be made again" if damage else "all sound"
        )
    elif options.store_verb == "pin":
        place.pin(options.target, note=options.note)
        console.print(f"pinned {options.target}", highlight=False)
    elif options.store_verb == "unpin":
        place.unpin(options.target)
        console.print(f"unpinned {options.target}", highlight=False)
    else:
        report = place.gc(options.dry_run, keep_days=options.keep_days)
        for item in report.items:
            console.print(str(item), highlight=False, soft_wrap=True)
        verb = "would free" if options.dry_run else "freed"
        console.print(f"{verb} {report.bytes / 2**20:.1f} MiB in {len(report.items)} items", highlight=False)


def _list_store(root: Path) -> None:
    from rlhf_core.artifacts import ArtifactStore

    place = ArtifactStore(root)
    table = Table(box=None, pad_edge=False)
    for name in ("digest", "kind", "stage", "MiB"):
        table.add_column(name, no_wrap=True)
    for record in place.records():
        folder = place.path(record.handle)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        kind = type(record.handle).__name__.removesuffix("Ref")
        table.add_row(record.handle.digest[:12], kind, record.label, f"{size / 2**20:.1f}")
    console.print(table)


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
