"""List runs (`rlhf runs`) and artifacts (`rlhf store ls`). Damage is reported, and the rest is still listed.

Lists are read from small files and the store's index, and printed as plain lines: rich tables take seconds for ten
thousand rows. The code that checks a store's content is imported by `pipelines.cli.store_verbs` and not here, which
keeps lists fast.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from pipelines.cli.common import (
    console,
    print_json,
    print_line,
    printable,
    short,
    store_folder,
)
from pipelines.execution.key_metric import key_metric
from pipelines.services.home import Home
from pipelines.services.run_notes import run_records
from rlhf_core.store import index
from rlhf_core.store.index import SetAside
from rlhf_core.store.layout import StoreLayout, check_schema
from rlhf_core.store.opening import open_store
from rlhf_core.store.protocol import Store

LONGEST_NAME, LONGEST_RESULT = 40, 60
MOST_ASIDE = 10
"""Most records that were set aside in a list."""


def runs(options: argparse.Namespace) -> None:
    """Print the runs of this state folder, newest first, with the command that continues each."""
    home = Home.here()
    found = run_records(home)
    if options.store or options.profile:
        root = str(_opened(options).folder.resolve())
        found = [one for one in found if one.store == root]
    else:
        check_schema(home.store)
    if options.json:
        rows = [asdict(one) | {"seconds": one.seconds, "next": one.following} for one in found]
        print_json({"runs": rows})
        return
    if not found:
        print_line(f"no run is recorded in {home.root}: start one with `rlhf run tiny/full`")
        return
    cells = [
        (
            one.state,
            short(one.name, LONGEST_NAME),
            f"{_moment(one.began)}, {one.seconds:.1f} s",
            short(one.headline or one.message, LONGEST_RESULT),
        )
        for one in found
    ]
    heading = ("state", "run", "began (UTC)", "result")
    if not console.is_terminal:
        continued = [(*row, one.following) for row, one in zip(cells, found, strict=True)]
        print_columns((*heading, "next"), continued)
        return
    lines = [
        line if len(line) <= console.width else f"{line[: console.width - 3]}..." for line in columns(heading, cells)
    ]
    for line, following in zip(lines, ["", *(one.following for one in found)], strict=True):
        print_line(line, to=console)
        if following:
            print_line(f"  next: {following}", to=console)


def store_ls(options: argparse.Namespace) -> None:
    """Print every artifact, newest first, with the stage that made it, its size and damage."""
    store = _opened(options)
    layout = StoreLayout(store.folder)
    rows, unreadable, aside = index.rows(store, layout)
    states = index.states(store, {row.object for row in rows})
    if options.json:
        artifacts = [asdict(row) | asdict(states[row.object]) for row in reversed(rows)]
        rest = {"unreadable": unreadable, "quarantine": [asdict(one) for one in aside]}
        print_json({"store": store.uri, "artifacts": artifacts, **rest})
        return
    if report_empty(store):
        return
    cells = []
    for row in reversed(rows):
        state = states[row.object]
        size = "-" if state.bytes is None else f"{state.bytes / 2**20:.1f}"
        said = key_metric(row.metrics)
        if state.damage:
            said = f"damaged: {state.damage.replace(str(layout.object(row.object)), 'its object')}"
        made, seconds = row.started[:16].replace("T", " "), f"{row.seconds:.1f}"
        cells.append((row.digest[:12], row.kind, row.label, made, seconds, str(row.attempts), size, said))
    heading = ("digest", "kind", "stage", "made (UTC)", "seconds", "attempts", "MiB", "")
    print_columns(heading, cells)
    for found in unreadable:
        print_line(f"not readable: {found}")
    damaged = len(unreadable) + sum(bool(states[row.object].damage) for row in rows)
    if damaged:
        print_line(
            f"{damaged} damaged: the next run makes them again, after `rlhf store verify --set-aside` at the latest",
        )
    print_aside(aside)


def print_aside(found: Sequence[SetAside]) -> None:
    """Print the records that were set aside, with the reason."""
    for one in found[:MOST_ASIDE]:
        print_line(f"set aside: {one}")
    if len(found) > MOST_ASIDE:
        print_line(f"and {len(found) - MOST_ASIDE} more")


def _moment(seconds: float) -> str:
    """A time of today without its date, in UTC.

    >>> _moment(1764347820.0)
    '2025-11-28 16:37'
    """
    then, now = datetime.fromtimestamp(seconds, UTC), datetime.now(UTC)
    return f"{then:%H:%M}" if then.date() == now.date() else f"{then:%Y-%m-%d %H:%M}"


def columns(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    return [" ".join(map(str.ljust, row, widths)).rstrip() for row in (heading, *rows)]


def print_columns(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as plain lines."""
    console.file.write("".join(f"{printable(line, also='')}\n" for line in columns(heading, rows)))


def report_empty(store: Store) -> bool:
    """True if the store is empty; if so, print it."""
    if store.versions("keys/") or any(True for _ in store.objects(but=())) or (store.folder / "attempts").is_dir():
        return False
    state = "is empty" if store.folder.is_dir() else "does not exist yet"
    print_line(f"the store {store.uri} {state}: fill it with `rlhf run tiny/full`")
    return True


def _opened(options: argparse.Namespace) -> Store:
    """The store that the options name."""
    root = Path(store_folder(options)).absolute()
    check_schema(root)
    return open_store(root)
