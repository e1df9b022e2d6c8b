"""Helpers shared by the commands: the console, the store option and the metric of a table's column."""

import argparse
import json
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console

from pipelines.services.home import Home
from rlhf_core.errors import readable
from rlhf_core.store.places.mirror import store_root

PIPE_WIDTH = 160


class PipedConsole(Console):
    """A console that leaves the end of a pipe (`rlhf runs | head -1`) to `main`; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


console = PipedConsole() if sys.stdout.isatty() else PipedConsole(width=PIPE_WIDTH)


def store_folder(options: argparse.Namespace) -> Path:
    """Return the store's folder: from the options, from the profile, or in the state folder."""
    if options.store:
        return store_root(options.store)
    if not options.profile:
        return Home.here().store
    from pipelines.execution.opening import store_of_profile  # 0.9 s, and `rlhf runs` takes 0.3 s without

    return store_of_profile(options.profile).root


def print_line(console: Console, text: str) -> None:
    """Print one line as it is, however long, but for signs that would control the terminal."""
    console.print(plain(text), highlight=False, markup=False, soft_wrap=True)


def plain(text: str, *, also: str = "\t\n") -> str:
    """Return a text in which signs that do not print are replaced; those in `also`, tabs and ends of lines, stay.

    >>> plain("a\\x1b[31mb")
    'a�[31mb'
    """
    if text.isprintable():  # nearly always, and of a list there are ten thousand lines
        return text
    return "".join(sign if sign.isprintable() or sign in also else "\N{REPLACEMENT CHARACTER}" for sign in text)


def short(text: str, longest: int) -> str:
    """Return a text in one line, cut at `longest` characters.

    >>> short("one two  three", 10)
    'one two...'
    """
    flat = " ".join(text.split())
    return flat if len(flat) <= longest else f"{flat[: longest - 3]}..."


def print_json(value: Mapping[str, Any]) -> None:
    """Print what `--json` prints, which is all that a command writes to standard output (docs/command_line.md)."""
    sys.stdout.write(f"{json.dumps(value, indent=1, default=str)}\n")


# ---------------------------------------------------------------- Choose the most informative metric of a stage, for one column of a table

KEY_METRICS = (
    "accuracy",
    "eval/accuracy",
    "eval/loss",
    "eval/token_loss",
    "reward/mean",
    "loss",
    "rollouts",
    "generations",
    "pairs",
    "demonstrations",
)
"""Ends of metric names, the most informative first; the first one that a stage has is shown."""

DROPPED = "dropped/all"
"""Metric of `prepare_data` that is shown beside its rows."""


def key_metric(metrics: Mapping[str, float]) -> str:
    """Return `name value` of the most informative metric of a stage, or "".

    While a stage runs, its label precedes the name. Metrics measured `before` training are ignored, as they are no
    result.
    """
    name = min(metrics, key=metric_rank, default="")
    rank = metric_rank(name)
    dropped = f", dropped {metrics[DROPPED]:,.0f}" if metrics.get(DROPPED) else ""
    return f"{KEY_METRICS[rank]} {readable(metrics[name])}{dropped}" if rank < len(KEY_METRICS) else ""


@lru_cache(maxsize=4096)  # a list of runs looks up the same names ten thousand times
def metric_rank(name: str) -> int:
    """Return the place in KEY_METRICS of the end of a metric's name; beyond the last if it is none of them."""
    if "before" not in name.split("/"):
        for rank, wanted in enumerate(KEY_METRICS):
            if name == wanted or name.endswith(f"/{wanted}"):
                return rank
    return len(KEY_METRICS)
