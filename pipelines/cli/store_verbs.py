"""Print the output of `rlhf store` and `rlhf runs`. Damage is reported, and the rest is still listed.

Lists are read from the store's index and printed as plain lines: rich tables take seconds for ten thousand rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from pipelines.cli.key_metric import key_metric
from rlhf_core.store import index
from rlhf_core.store.layout import StoreLayout

if TYPE_CHECKING:
    from rlhf_core.store.artifacts import ArtifactStore


def look_after(store: ArtifactStore, options: argparse.Namespace, console: Console) -> None:
    """Run `rlhf store VERB`, except for `ls`, which is `print_store`."""
    if options.store_verb in ("verify", "gc") and _says_that_it_is_empty(store.layout, console):
        return
    if options.store_verb == "verify":
        damage = store.verify()
        for found in damage:
            _line(console, str(found))
        said = f"{len(damage)} damaged, now in quarantine; the next run makes them again"
        console.print(said if damage else "no damage found", highlight=False)
    elif options.store_verb == "pin":
        store.pin(options.target, note=options.note)
        _line(console, f"pinned {options.target}")
    elif options.store_verb == "unpin":
        store.unpin(options.target)
        _line(console, f"unpinned {options.target}")
    else:
        _collect(store, options, console)


def print_store(layout: StoreLayout, console: Console) -> None:
    """Print every artifact with its kind, size and problems."""
    if _says_that_it_is_empty(layout, console):
        return
    rows, unreadable = index.rows(layout)
    states = index.states(layout, {row.object for row in rows})
    cells = []
    for row in rows:
        state = states[row.object]
        size = "-" if state.bytes is None else f"{state.bytes / 2**20:.1f}"
        folder = str(layout.object(row.object))
        said = f"damaged: {state.damage.replace(folder, 'its object')}" if state.damage else ""
        cells.append((row.digest[:12], row.kind, row.label, size, said))
    _print_columns(("digest", "kind", "stage", "MiB", ""), cells, console)
    for found in unreadable:
        _line(console, f"not readable: {found}")
    damaged = len(unreadable) + sum(bool(states[row.object].damage) for row in rows)
    if damaged:
        _line(
            console,
            f"{damaged} damaged: `rlhf store verify` puts them into quarantine, and the next run makes them again",
        )


def print_runs(layout: StoreLayout, console: Console) -> None:
    """Print the stages that were made, newest first."""
    if _says_that_it_is_empty(layout, console):
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
        _line(console, f"not readable: {found}")


def _collect(store: ArtifactStore, options: argparse.Namespace, console: Console) -> None:
    report = store.gc(options.dry_run, keep_days=options.keep_days)
    for item in report.items:
        _line(console, str(item))
    for found in report.held_back:
        _line(console, f"not readable: {found}")
    if report.held_back:
        _line(console, "what these need is unknown, so records and objects are kept: run `rlhf store verify` first; fix or "
              "remove a pin by hand")  # fmt: skip
    verb = "would free" if options.dry_run else "freed"
    console.print(f"{verb} {report.bytes / 2**20:.1f} MiB in {len(report.items)} items", highlight=False)


def _print_columns(heading: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    lines = (" ".join(map(str.ljust, row, widths)).rstrip() for row in (heading, *rows))
    console.file.write("".join(f"{line}\n" for line in lines))


def _says_that_it_is_empty(layout: StoreLayout, console: Console) -> bool:
    if any(layout.keys.glob("*/*.json")) or any(layout.objects.glob("*/*")) or layout.attempts.is_dir():
        return False
    state = "is empty" if layout.root.is_dir() else "does not exist yet"
    _line(console, f"the store {layout.root} {state}: fill it with `rlhf run tiny/full`")
    return True


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
