"""Print the differences of two runs, artifacts or profiles (`rlhf diff`), and remake an artifact (`rlhf reproduce`)."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from pipelines.cli.common import (
    console,
    print_json,
    print_line,
    short,
    store_folder,
)
from pipelines.cli.display import PlainDisplay
from pipelines.execution.diff import (
    Difference,
    Side,
    config_differences,
    different_answers,
    first_difference,
    metric_differences,
    not_compared,
    of_artifact,
    of_planned,
    side_of,
    stage_differences,
)
from pipelines.execution.executor import RunOptions
from pipelines.execution.opening import open_run
from pipelines.execution.plan import DIGITS, plan_stages
from pipelines.execution.run import run_stages
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import load_profile
from pipelines.flows.run_rules import BudgetConfig
from pipelines.services.home import Home
from pipelines.services.user_servers import tracking_uri
from rlhf_core.config.annotators import People
from rlhf_core.errors import ArtifactError, ConfigError
from rlhf_core.stage.stopping import on_signals
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.tracking.memory import MemoryTracker

LONGEST_ANSWER = 400
EXIT_DIFFERENT = 1


def diff(options: argparse.Namespace) -> None:
    """Print the differences in configuration, stages, metrics and answers."""
    if options.samples < 0:
        raise ConfigError("--samples", options.samples, "must be >= 0", "use 0 to show none")
    home = Home.here()
    store, uri = ArtifactStore(store_folder(options)), tracking_uri(home)
    ours = side_of(options.a, [], store, home, uri)
    theirs = side_of(options.b, options.overrides, store, home, uri)
    if options.json:
        print_json(_as_json(ours, theirs, options.samples))
    else:
        _print(ours, theirs, options.samples)


def _as_json(ours: Side, theirs: Side, samples: int) -> dict[str, Any]:
    """All differences as JSON values (docs/command_line.md)."""
    found = stage_differences(ours, theirs)
    first = first_difference(found)
    return {
        "a": {"name": ours.name, "digest": ours.digest, "stages": list(ours.stages)},
        "b": {"name": theirs.name, "digest": theirs.digest, "stages": list(theirs.stages)},
        "config": [dict(zip(("key", "a", "b"), row, strict=True)) for row in config_differences(ours, theirs)],
        "stages": [{"stage": one.label, "own": one.own, "inputs": one.inputs} for one in found],
        "first": first.label if first else "",
        "not_compared": not_compared(ours, theirs),
        "metrics": [
            {"metric": name, "a": None if a is None else asdict(a), "b": None if b is None else asdict(b)}
            for name, a, b in metric_differences(ours, theirs)
        ],
        "answers": [
            {"prompt": one.prompt, "a": one.ours, "b": one.theirs} for one in different_answers(ours, theirs, samples)
        ],
    }


def reproduce(options: argparse.Namespace) -> int:
    """Run a profile up to the stage of an artifact, in an empty store, and compare; return 1 if its bytes differ."""
    source = ArtifactStore(store_folder(options))
    ours = of_artifact(options.artifact, source)
    if not ours.stages or ours.gone:
        rule = "the store has no record of the stage that made it, or of one before it"
        raise ArtifactError("artifact", options.artifact, rule, "name one that a run has made")
    label, home = list(ours.stages)[-1], Home.here()
    folder = Path(options.into).expanduser() if options.into else home.root / "reproduced" / ours.digest[:DIGITS]
    _check_empty(folder, source.root, home.store)
    config = load_profile(options.profile, options.overrides)
    inline = config.runtime.model_copy(update={"execution": "inline"})
    alone = {"store": str(folder), "publish": None, "gates": (), "budget": BudgetConfig(), "notify": None}
    config = config.model_copy(update=alone | {"runtime": inline})
    planned = [stage for stage in plan_stages(config, source, until=label) if stage.label in ours.stages]
    _check_same(ours, Side(options.profile, source, {stage.label: of_planned(stage, source) for stage in planned}))
    for stage in planned:
        if isinstance(getattr(stage.spec.config, "annotator", None), People):
            rule = "was made by people, who would have to judge again"
            raise ConfigError(f"{stage.label}.annotator", "mlflow", rule, "name what does not depend on it")

    wanted, display = RunOptions(until=label), PlainDisplay(console)
    print_line(f"{options.artifact}: {ours.digest[:DIGITS]}, made again in {folder}")
    with (
        on_signals(),
        open_run(config, lifecycle, wanted, home=home, tracker=MemoryTracker(), listener=display) as run,
    ):
        run_stages(run, lifecycle, run.directly, tags={})
    theirs = of_artifact(label, ArtifactStore(folder))
    _print(ours, theirs, samples=0)
    there = {label: stage.record.handle.digest for label, stage in theirs.stages.items() if stage.record}
    other = [
        label for label, stage in ours.stages.items() if stage.record and there.get(label) != stage.record.handle.digest
    ]
    _heading(
        f"not reproduced: the first stage with other bytes is {other[0]}" if other else "reproduced: the same bytes"
    )
    return EXIT_DIFFERENT if other else 0


def _check_empty(folder: Path, *stores: Path) -> None:
    """Raise ConfigError unless a folder is empty, or not there, and outside the stores."""
    if any(folder.resolve().is_relative_to(store.resolve()) for store in stores):
        raise ConfigError("--into", str(folder), "is in a store", "name an empty folder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("--into", str(folder), "is not empty", "name another folder, or remove this one")


def _check_same(ours: Side, theirs: Side) -> None:
    """Raise ConfigError if a profile would not run the stages that were recorded; changed code is compared afterwards."""
    found = [
        f"{one.label}: {phrase}"
        for one in stage_differences(ours, theirs)
        for phrase in one.own
        if not phrase.startswith(("code", "take"))
    ]
    if found:
        rule = f"does not make the stages that were recorded: {'; '.join(found)}"
        remedy = "name the profile and the --set of the run, and restore what has changed"
        raise ConfigError("--profile", theirs.name, rule, remedy)


def _print(ours: Side, theirs: Side, samples: int) -> None:
    print_line(f"A: {ours.name}   B: {theirs.name}")
    found = stage_differences(ours, theirs)
    _print_artifacts(ours, theirs)
    _print_config(ours, theirs)
    _print_stages(found, ours, theirs)
    _print_metrics(ours, theirs)
    for one in different_answers(ours, theirs, samples):
        _heading(f"prompt: {short(one.prompt, LONGEST_ANSWER)}")
        print_line(f"A: {short(one.ours, LONGEST_ANSWER)}")
        print_line(f"B: {short(one.theirs, LONGEST_ANSWER)}")


def _print_artifacts(ours: Side, theirs: Side) -> None:
    if ours.digest and theirs.digest:
        same = ours.digest == theirs.digest
        _heading(
            f"artifacts: the same bytes, {ours.digest[:DIGITS]}"
            if same
            else f"artifacts: different, {ours.digest[:DIGITS]} and {theirs.digest[:DIGITS]}"
        )


def _print_config(ours: Side, theirs: Side) -> None:
    rows = config_differences(ours, theirs)
    if ours.config and theirs.config:
        _heading("configuration" if rows else "configuration: the same")
    _print_table(("key", "A", "B"), rows)


def _print_stages(found: Sequence[Difference], ours: Side, theirs: Side) -> None:
    unknown = not_compared(ours, theirs)
    compared = {label for label in ours.stages if label in theirs.stages} - set(unknown)
    same = len(compared - {one.label for one in found})
    first = first_difference(found)
    _heading(
        f"stages: {same} of {len(compared)} are the same"
        + (f", {len(unknown)} are not compared" if unknown else "")
        + (f"; the first that differs by itself: {first.label}" if first else "")
    )
    for one in found:
        for phrase in (*one.own, *one.inputs):
            print_line(f"{one.label}: {phrase}")
    for reason in dict.fromkeys(unknown.values()):
        print_line(f"not compared, {reason}: {', '.join(label for label, why in unknown.items() if why == reason)}")


def _print_metrics(ours: Side, theirs: Side) -> None:
    rows = [
        (name, *(str(measure) if measure is not None else "" for measure in pair))
        for name, *pair in metric_differences(ours, theirs)
    ]
    if rows:
        _heading("metrics")
    _print_table(("metric", "A", "B"), rows)


def _print_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    table = Table(box=None, pad_edge=False)
    for name in heading:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _heading(text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"), highlight=False, soft_wrap=True)
