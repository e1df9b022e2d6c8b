"""Helpers shared by the commands: the console, and options of several commands."""

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from pipelines.services.home import Home
from rlhf_core.store.opening import store_root

PIPE_WIDTH = 160


class PipedConsole(Console):
    """A console that leaves the end of a pipe (`rlhf runs | head -1`) to `main`; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


console = PipedConsole() if sys.stdout.isatty() else PipedConsole(width=PIPE_WIDTH)


def store_folder(options: argparse.Namespace) -> Path:
    """Find the store's folder: from the options, from the profile, or in the state folder."""
    if options.store:
        return store_root(options.store)
    if not options.profile:
        return Home.here().store
    from pipelines.execution.opening import store_of  # 0.9 s, and `rlhf runs` takes 0.3 s without
    from pipelines.flows.profile import load_profile

    return store_of(load_profile(options.profile), Home.here()).root


def print_line(text: str, style: str = "", *, to: Console = console) -> None:
    """Print one line without wrapping it; signs that would control the terminal are replaced."""
    to.print(printable(text), style=style, highlight=False, markup=False, soft_wrap=True)


def print_wrapped(text: str, style: str = "", *, to: Console = console) -> None:
    """Print a line. On a terminal it wraps between words, and paths, keys and commands stay whole."""
    if to.is_terminal:
        text = textwrap.fill(text, to.width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    print_line(text, style, to=to)


def printable(text: str, *, also: str = "\t\n") -> str:
    """Replace unprintable signs in a text. The ones in `also`, tabs and ends of lines are kept.

    >>> printable("a\\x1b[31mb")
    'a�[31mb'
    """
    if text.isprintable():  # nearly always, and of a list there are ten thousand lines
        return text
    return "".join(sign if sign.isprintable() or sign in also else "\N{REPLACEMENT CHARACTER}" for sign in text)


def short(text: str, longest: int) -> str:
    """Fit a text into one line of at most `longest` characters.

    >>> short("one two  three", 10)
    'one two...'
    """
    flat = " ".join(text.split())
    return flat if len(flat) <= longest else f"{flat[: longest - 3]}..."


def print_json(value: Mapping[str, Any]) -> None:
    """Print the result of `--json`; the command writes nothing else to standard output (docs/command_line.md)."""
    sys.stdout.write(f"{json.dumps(value, indent=1, default=str)}\n")


# ---------------------------------------------------------------- options of several commands
