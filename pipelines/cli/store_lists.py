"""List the content of the store (`rlhf runs`, `rlhf store ls`). Damage is reported, and the rest is still listed.

Lists are read from the store's index and printed as plain lines: rich tables take seconds for ten thousand rows. What
checks a store's content is imported with `pipelines.cli.store_verbs` and not here, which makes lists fast.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console

from pipelines.cli.common import console, key_metric, print_line, store_folder
from rlhf_core.store import index
from rlhf_core.store.layout import StoreLayout, check_schema


def runs(options: argparse.Namespace) -> None:
    """Print the stages in the store, newest first."""
    print_runs(_layout(options), console)


def store_ls(options: argparse.Namespace) -> None:
    """Print every artifact with its size and damage."""
    print_store(_layout(options), console)


def print_store(layout: StoreLayout, console: Console) -> None:
    """Print every artifact with its kind, size and problems."""
    if is_empty(layout, console):
        return
    rows, unreadable = index.rows(layout)
    states = index.states(layout, {row.object for row in rows})
    cells = []
    for row in rows:
        state = states[row.object]
        size = "-" if state.bytes is None else f"{state.bytes / 2**20:.1f}"
        said = ""
        if state.damage:
            said = f"damaged: {state.damage.replace(str(layout.object(row.object)), 'its object')}"
        cells.append((row.digest[:12], row.kind, row.label, size, said))
    _print_columns(("digest", "kind", "stage", "MiB", ""), cells, console)
    for found in unreadable:
        print_line(console, f"not readable: {found}")
    damaged = len(unreadable) + sum(bool(states[row.object].damage) for row in rows)
    if damaged:
        print_line(
            console,
            f"{damaged} damaged: `rlhf store verify` puts them into quarantine, and the next run makes them again",
        )


def print_runs(layout: StoreLayout, console: Console) -> None:
    """Print the stages that were made, newest first."""
    if is_empty(layout, console):
        return
    rows, unreadable = index.rows(layout)
    cells = [
        (
            row.started[:16].replace("T", " "),
            row.label,
            f"{row.seconds:.1f}",
            row.digest[:12],
            str(row.attempts),
            key_metric(row.metrics),
        )
        for row in reversed(rows)
    ]
    _print_columns(("made (UTC)", "stage", "seconds", "digest", "attempts", ""), cells, console)
    for found in unreadable:
        print_line(console, f"not readable: {found}")


def _print_columns(heading: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    lines = (" ".join(map(str.ljust, row, widths)).rstrip() for row in (heading, *rows))
    console.file.write("".join(f"{line}\n" for line in lines))


def is_empty(layout: StoreLayout, console: Console) -> bool:
    """Return whether the store is empty; if so, print it."""
    if any(layout.keys.glob("*/*.json")) or any(layout.objects.glob("*/*")) or layout.attempts.is_dir():
        return False
    state = "is empty" if layout.root.is_dir() else "does not exist yet"
    print_line(console, f"the store {layout.root} {state}: fill it with `rlhf run tiny/full`")
    return True


def _layout(options: argparse.Namespace) -> StoreLayout:
    """Return the layout of the store that the options name."""
    root = store_folder(options).absolute()
    check_schema(root)
    return StoreLayout(root)
