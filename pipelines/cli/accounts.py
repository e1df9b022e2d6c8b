"""Sum the resources used by users and projects (`rlhf usage`), and list the actions of people (`rlhf audit`)."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta

from pipelines.cli.common import print_json, print_line, short, store_folder
from pipelines.cli.store_lists import LONGEST_RESULT, print_columns
from pipelines.services.home import Home
from pipelines.services.user_servers import tracking_uri
from rlhf_core.errors import ConfigError, nearest
from rlhf_core.stage.gate_decisions import GateDecisions
from rlhf_core.store import audit
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.records import KeyRecord
from rlhf_core.tracking.champions import model_names, read_champions

FIELDS = ("user", "project", "stage", "label", "day")
_SPANS = {"h": "hours", "d": "days", "w": "weeks"}
_NAMELESS = "-"


@dataclass(frozen=True)
class GroupUse:
    """The results of one group and the cost of computing them, including all attempts that ended by themselves."""

    group: tuple[str, ...]
    results: int
    hours: float
    cpu_hours: float
    gpu_hours: float


def usage(options: argparse.Namespace) -> None:
    """Print hours of results, times the CPUs and GPUs that they held, by user, project, stage, label or day."""
    by = tuple(options.by.split(","))
    for name in by:
        if name not in FIELDS:
            raise ConfigError("--by", name, f"is none of {', '.join(FIELDS)}", nearest(name, FIELDS))
    if len(set(by)) < len(by):
        raise ConfigError("--by", options.by, "names a field twice", "name each once")
    since, store = moment(options.since), ArtifactStore(store_folder(options))
    rows = used([one for one in store.records() if one.started >= since], by)
    if options.json:
        print_json({"since": since, "usage": [asdict(row) | {"group": dict(zip(by, row.group))} for row in rows]})
        return
    if not rows:
        print_line(f"the store {store.shared.uri} has no results since {since}")
        return
    cells = [
        (*row.group, str(row.results), f"{row.hours:.2f}", f"{row.cpu_hours:.2f}", f"{row.gpu_hours:.2f}")
        for row in rows
    ]
    print_columns((*by, "results", "hours", "CPU hours", "GPU hours"), cells)


def used(records: Sequence[KeyRecord], by: Sequence[str]) -> list[GroupUse]:
    """Sum the use of each group of records, the largest first."""
    groups: dict[tuple[str, ...], list[KeyRecord]] = {}
    for record in records:
        fields = record.model_dump(include=set(FIELDS)) | {"day": record.started[:10]}
        groups.setdefault(tuple(fields[name] or _NAMELESS for name in by), []).append(record)
    found = [
        GroupUse(
            group,
            len(members),
            sum(one.seconds for one in members) / 3600,
            sum(one.seconds * one.cpus for one in members) / 3600,
            sum(one.seconds * one.gpus for one in members) / 3600,
        )
        for group, members in groups.items()
    ]
    return sorted(found, key=lambda use: (-use.gpu_hours, -use.hours, use.group))


def show_audit(options: argparse.Namespace) -> None:
    """Print who pinned, approved, rejected, published, rolled back or collected garbage, and when, newest first."""
    since, uri = moment(options.since), tracking_uri(Home.here())
    store = ArtifactStore(store_folder(options)).shared
    found = audit.deeds(store)
    for request in GateDecisions(store).requests():
        to = f"{request.question.gate} {request.question.digest[:12]}"
        found += [audit.Deed(at=one.at, by=one.by, did=one.answer, to=to, why=one.reason) for one in request.answers]
    for champions in (read_champions(uri, name) for name in model_names(uri)):
        for move in () if champions is None else champions.moves:
            to = f"{champions.name} version {move.version} ({move.digest[:12]})" if champions else ""
            found.append(audit.Deed(at=move.at, by=move.by, did=move.how, to=to, why=move.why))
    shown = [one for one in sorted(found, key=lambda deed: deed.at, reverse=True) if one.at >= since]
    if options.json:
        print_json({"since": since, "audit": [one.model_dump() for one in shown]})
    elif not shown:
        print_line(f"nothing was done since {since} in the store {store.uri}, and no champion changed")
    else:
        rows = [(one.at, one.by, one.did, one.to, short(one.why, LONGEST_RESULT)) for one in shown]
        print_columns(("at (UTC)", "by", "did", "to", "why"), rows)


def moment(text: str) -> str:
    """Convert `30d`, `12h`, `2w` (ago) or a date to a time in ISO 8601 in UTC.

    >>> moment("2030-01-02")
    '2030-01-02T00:00:00+00:00'
    """
    span = re.fullmatch("([0-9]{1,6})([hdw])", text)
    try:
        if span is not None:
            then = datetime.now(UTC) - timedelta(**{_SPANS[span[2]]: int(span[1])})
        else:
            given = datetime.fromisoformat(text)
            then = given.astimezone(UTC) if given.tzinfo else given.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        remedy = "write 30d, 12h, 2w or 2030-01-31"
        raise ConfigError("--since", text, "is neither a time ago nor a date", remedy) from None
    return then.isoformat(timespec="seconds")
