"""Show the content of data files and the tables that `prepare_data` would make of them (`rlhf data`)."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines.cli.common import print_json, print_line
from rlhf_core.config.data import KINDS, DataConfig, Files, Source, Use
from rlhf_core.data.files import make_tables
from rlhf_core.data.inspection import SourceReport, inspect
from rlhf_core.data.limits import DropReport
from rlhf_core.errors import ConfigError, RlhfError

REFUSED = 2
ANY_TABLE = Use(**dict.fromkeys(KINDS, 1 / len(KINDS)))
"""Shares of a file that no profile names, under which nothing is read for one table alone."""
MOST_REASONS = 8
MOST_MALFORMED: float = Files.model_fields["max_bad_fraction"].default


def data(options: argparse.Namespace) -> int:
    """Describe the files, or the sources of a profile; return 2 if prepare_data would fail, or a source has no usable row."""
    if bool(options.files) == bool(options.profile):
        rule, remedy = "files or a profile are needed, and not both", "rlhf data rows.jsonl, or --profile my.toml"
        raise ConfigError("rlhf data", options.profile or options.files, rule, remedy)
    if options.profile:
        sources, tables = _of_profile(options)
    else:
        named = {Path(path).resolve().name or path: path for path in options.files}
        names = named if len(named) == len(options.files) else {path: path for path in options.files}
        sources = [inspect(Source(name=name, path=path, use=ANY_TABLE)) for name, path in names.items()]
        tables = {}
    if options.json:
        print_json({"sources": [_as_json(found) for found in sources]} | ({"tables": tables} if tables else {}))
    else:
        for found in sources:
            for line in _lines(found, whole=not tables):
                print_line(line)
        for line in _tables(tables):
            print_line(line)
    alone = not tables  # a profile has a separate limit for malformed rows
    unusable = any(not found.usable or (alone and _too_many(_malformed(found), found.rows_read)) for found in sources)
    return REFUSED if unusable or "problem" in tables else 0


def _of_profile(options: argparse.Namespace) -> tuple[list[SourceReport], dict[str, Any]]:
    """The sources of a profile, and its tables by name (rows, rows dropped by reason) or why there are none."""
    from pipelines.flows.profile import load_profile  # 0.5 s, and a file alone needs no profile

    config = load_profile(options.profile, options.overrides)
    prepare, report = config.prepare_data, DropReport()
    files = _files(prepare.data)
    sources = [inspect(source) for source in files.sources]
    limits = {"max_prompt_tokens": prepare.max_prompt_tokens, "max_tokens": prepare.max_tokens}
    try:
        made, _ = make_tables(files, seed=config.seed, report=report)
    except RlhfError as error:
        return sources, {"problem": str(error)}
    rows = {name: len(found) for name, found in made.named().items()}
    dropped = [str(reason) for reason in report.reasons()]
    empty = [name for name in files.filled() if not rows[name]]
    return sources, {
        "rows": rows,
        "empty": empty,
        "dropped": dropped,
        "unused": report.unused.total(),
        "limits": limits,
    }


def _files(data: DataConfig) -> Files:
    if not isinstance(data, Files):
        rule = "is a synthetic world, whose rows a program writes"
        raise ConfigError(
            "prepare_data.data.type", data.type, rule, "`rlhf run PROFILE --until prepare_data` writes its rows"
        )
    return data


def _as_json(found: SourceReport) -> dict[str, Any]:
    fields = asdict(found)
    del fields["source"]
    return {"name": found.source.name, "path": found.source.path} | fields


def _lines(found: SourceReport, *, whole: bool) -> Iterator[str]:
    """Yield the description of a source; of its tables only if the `whole` of it could go to each."""
    yield f"{found.source.name}: {found.rows_read:,} rows, format {found.format or 'unknown'}"
    if found.problem:
        yield f"  cannot be read: {found.problem}"
        return
    yield f"  columns read: {', '.join(found.columns_read) or 'none'}"
    if found.columns_not_read:
        unread = ", ".join(f"{name} ({rows:,})" for name, rows in found.columns_not_read.items())
        yield f"  not read (rows): {unread}"
    dropped = sum(reason.rows for reason in found.dropped)
    yield f"  usable {found.usable:,}, dropped {dropped:,}"
    yield from (f"    {reason}" for reason in found.dropped[:MOST_REASONS])
    if len(found.dropped) > MOST_REASONS:
        yield f"    and {len(found.dropped) - MOST_REASONS} more reasons"
    if found.function:
        yield f"  for rows in no known form, {found.function}"
    malformed = _malformed(found)
    if whole and _too_many(malformed, found.rows_read):
        limit = f"data.max_bad_fraction is {MOST_MALFORMED}"
        yield f"  prepare_data would stop: {malformed:,} of {found.rows_read:,} rows are malformed, and {limit}"
    if whole and found.usable:
        yield "  rows that each table of prepare_data would have, if the whole file went there (`use`):"
        yield from (
            f"    {table:<14} {f'{rows:,}' if rows else f'none: {found.empty[table]}'}"
            for table, rows in found.tables.items()
        )
    for number, row in enumerate(found.rows, start=1):
        yield f"  row {number}, with what is trained on inside 【 】:"
        yield from (f"    {line}" for line in row.splitlines())


def _malformed(found: SourceReport) -> int:
    return sum(one.rows for one in found.dropped if one.rule.startswith("malformed"))


def _too_many(malformed: int, rows: int) -> bool:
    return malformed > MOST_MALFORMED * rows


def _tables(tables: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables of a profile, with all that is dropped on the way to them."""
    if not tables:
        yield "prepare_data also drops rows longer than its limits in tokens (max_prompt_tokens, max_tokens)"
    elif "problem" in tables:
        yield f"prepare_data would fail: {tables['problem']}"
    else:
        shown = ", ".join(
            f"{name} {rows:,}" for name, rows in tables["rows"].items() if rows or name in tables["empty"]
        )
        yield f"tables of prepare_data: {shown or 'none'}; {tables['unused']:,} rows in no table"
        yield from (f"  dropped {reason}" for reason in tables["dropped"][:MOST_REASONS])
        limits = ", ".join(f"{name} = {value}" for name, value in tables["limits"].items())
        yield f"before limits in tokens, which need the tokenizer of the run: {limits}"
