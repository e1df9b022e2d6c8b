"""What `rlhf store` and `rlhf runs` print. Damage is named and the rest is listed all the same."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from pipelines.display import key_metric
from rlhf_core.artifacts import ArtifactStore, object_digest
from rlhf_core.store_layout import folder_bytes
from rlhf_core.store_maintenance import object_damage


def look_after(store: ArtifactStore, options: argparse.Namespace, console: Console) -> None:
    """Do what `rlhf store VERB` asks for."""
    if options.store_verb in ("ls", "verify", "gc") and _says_that_it_is_empty(store, console):
        return
    if options.store_verb == "ls":
        print_store(store, console)
    elif options.store_verb == "verify":
        damage = store.verify()
        for found in damage:
            _line(console, str(found))
        said = f"{len(damage)} damaged; they are in quarantine and will be made again"
        console.print(said if damage else "all sound", highlight=False)
    elif options.store_verb == "pin":
        store.pin(options.target, note=options.note)
        console.print(f"pinned {options.target}", highlight=False)
    elif options.store_verb == "unpin":
        store.unpin(options.target)
        console.print(f"unpinned {options.target}", highlight=False)
    else:
        _collect(store, options, console)


def print_store(store: ArtifactStore, console: Console) -> None:
    """Print every artifact with its kind and size, and what is wrong with it."""
    table = Table(box=None, pad_edge=False)
    for name in ("digest", "kind", "stage", "MiB", ""):
        table.add_column(name, no_wrap=True)
    records, unreadable = store.scan()
    damaged = len(unreadable)
    for record in records:
        folder = store.layout.object(object_digest(record.handle))
        damage = object_damage(folder, deep=False)
        damaged += bool(damage)
        size = f"{folder_bytes(folder) / 2**20:.1f}" if folder.is_dir() else "-"
        kind = type(record.handle).__name__.removesuffix("Ref")
        said = f"damaged: {damage.replace(str(folder), 'its object')}" if damage else ""
        table.add_row(record.handle.digest[:12], kind, record.label, size, said)
    console.print(table)
    for found in unreadable:
        _line(console, f"not readable: {found}")
    if damaged:
        _line(
            console,
            f"{damaged} damaged: `rlhf store verify` puts them into quarantine, and the next run makes them again",
        )


def print_runs(store: ArtifactStore, console: Console) -> None:
    """Print the stages that were made, newest first."""
    if _says_that_it_is_empty(store, console):
        return
    table = Table(box=None, pad_edge=False)
    for name in ("made (UTC)", "stage", "seconds", "digest", "attempts", ""):
        table.add_column(name, no_wrap=True)
    records, unreadable = store.scan()
    for record in reversed(records):
        made = record.started[:16].replace("T", " ")
        cells = (made, record.label, f"{record.seconds:.1f}", record.handle.digest[:12], str(record.attempts))
        table.add_row(*cells, key_metric(record.metrics))
    console.print(table)
    for found in unreadable:
        _line(console, f"not readable: {found}")


def _collect(store: ArtifactStore, options: argparse.Namespace, console: Console) -> None:
    report = store.gc(options.dry_run, keep_days=options.keep_days)
    for item in report.items:
        _line(console, str(item))
    for found in report.held_back:
        _line(console, f"not readable: {found}")
    if report.held_back:
        _line(console, "nobody knows what these need, so records and objects stay: `rlhf store verify` first; mend or "
              "remove a pin by hand")  # fmt: skip
    verb = "would free" if options.dry_run else "freed"
    console.print(f"{verb} {report.bytes / 2**20:.1f} MiB in {len(report.items)} items", highlight=False)


def _says_that_it_is_empty(store: ArtifactStore, console: Console) -> bool:
    if (
        any(store.layout.keys.glob("*/*.json"))
        or any(store.layout.objects.glob("*/*"))
        or store.layout.attempts.is_dir()
    ):
        return False
    state = "is empty" if store.root.is_dir() else "is not there yet"
    _line(console, f"the store {store.root} {state}: `rlhf run tiny/full` fills it")
    return True


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
