"""Print what differs between two runs, artifacts or profiles (`rlhf diff`)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from pipelines.cli.common import console, store_folder
from pipelines.execution.diff import (
    DIGITS,
    Difference,
    Side,
    answers,
    config_differences,
    first_difference,
    metric_differences,
    not_compared,
    side_of,
    stage_differences,
)
from pipelines.services.home import Home
from pipelines.services.user_servers import tracking_uri
from rlhf_core.errors import ConfigError, explain
from rlhf_core.store.artifacts import ArtifactStore

LONGEST_ANSWER = 400


def diff(options: argparse.Namespace) -> None:
    """Print the differences in configuration, stages, metrics and answers."""
    if options.samples < 0:
        raise ConfigError(explain("--samples", options.samples, "must be >= 0", "use 0 to show none"))
    home = Home.here()
    store, uri = ArtifactStore(store_folder(options)), tracking_uri(home)
    ours = side_of(options.a, [], store, home, uri)
    theirs = side_of(options.b, options.overrides, store, home, uri)
    _say(f"A: {ours.name}   B: {theirs.name}")
    found = stage_differences(ours, theirs)
    _print_artifacts(ours, theirs)
    _print_config(ours, theirs)
    _print_stages(found, ours, theirs)
    _print_metrics(ours, theirs)
    for one in answers(ours, theirs, options.samples):
        _heading(f"prompt: {_short(one.prompt)}")
        _say(f"A: {_short(one.ours)}")
        _say(f"B: {_short(one.theirs)}")


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
    shared = [label for label in ours.stages if label in theirs.stages]
    unknown = not_compared(ours, theirs)
    same = len(set(shared) - {one.label for one in found} - set(unknown))
    first = first_difference(found)
    _heading(
        f"stages: {same} of {len(shared)} are the same"
        + (f"; the first that differs by itself: {first.label}" if first else "")
    )
    for one in found:
        for phrase in (*one.own, *one.inputs):
            _say(f"{one.label}: {phrase}")
    for reason in dict.fromkeys(unknown.values()):
        _say(f"not compared, {reason}: {', '.join(label for label, why in unknown.items() if why == reason)}")


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


def _say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= LONGEST_ANSWER else f"{flat[: LONGEST_ANSWER - 3]}..."
