"""Hold what several verbs of `rlhf` share: the console, and the store that their options name."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from pipelines.services.home import Home

PIPE_WIDTH = 160

console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)


def store_folder(options: argparse.Namespace) -> Path:
    """Return the store's folder: from the options, from the profile, or in the state folder."""
    if options.store:
        return Path(options.store).expanduser()
    if not options.profile:
        return Home.here().store
    from pipelines.execution.opening import store_of_profile  # 0.9 s, and `rlhf runs` takes 0.3 s without

    return store_of_profile(options.profile).root
