"""Shared parts of benchmarks over seeds: options, and a result file in which the latest result of a seed counts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")


def seeds_parser(about: str | None) -> argparse.ArgumentParser:
    """A parser with the common options of benchmarks over seeds; each benchmark adds more.

    >>> seeds_parser("").parse_args(["--seeds", "5", "--set", "ppo.steps=12"]).overrides
    ['ppo.steps=12']
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="key=value")
    parser.add_argument("--state", type=Path, default=Path(".rlhf"), help="folder whose store is used")
    parser.add_argument("--print", action="store_true", dest="print_only", help="print what is there, train nothing")
    return parser


def add_first(parser: argparse.ArgumentParser, default: int = 17) -> None:
    """Add the option of the first seed; the default is the profiles' seed."""
    parser.add_argument("--first", type=int, default=default, help="the first seed (default %(default)s)")


def keep(result: DataclassInstance, file: Path) -> str:
    """Append a result to the file; returns its line."""
    line = json.dumps(asdict(result))
    with file.open("a", encoding="utf-8") as lines:
        lines.write(line + "\n")
    return line


def read(file: Path, kind: type[R]) -> list[R]:
    """Read the results in the file, oldest first; empty if it does not exist."""
    return (
        [kind(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []
    )


def latest(results: Iterable[R], of: Callable[[R], Any]) -> list[R]:
    """The latest result for each value of `of`, such as a seed or a pair of arm and seed, sorted by that value.

    >>> latest([3, 12, 11], lambda number: number % 10)
    [11, 12, 3]
    """
    found = {of(one): one for one in results}
    return [found[at] for at in sorted(found)]
