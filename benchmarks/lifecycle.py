"""Measure the time and memory of a profile on this machine: on an empty store, then fully cached."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.processes import Watched, run_watched
from rlhf_core.store.artifacts import ArtifactStore


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", nargs="?", default="tiny/full")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="key=value")
    parser.add_argument("--keep", type=Path, help="state folder to use and keep")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = options.keep or Path(folder)
        command = [sys.executable, "-m", "pipelines.cli.main", "run", options.profile]
        command += [word for override in options.overrides for word in ("--set", override)]
        environment = os.environ | {"RLHF_HOME": str(home)}
        first = run_watched(command, environment)
        if first.status:
            return first.status
        second = run_watched(command, environment)
        _print(options.profile, first, second, ArtifactStore(home / "store"))
        return second.status


def _print(profile: str, first: Watched, second: Watched, store: ArtifactStore) -> None:
    print(f"\n{profile}")
    for record in sorted(store.records(), key=lambda record: record.started):
        print(f"  {record.label:42s} {record.seconds:8.1f} s")
    for name, run in (("empty store", first), ("all in the store", second)):
        print(f"{name}: {run.seconds:.1f} s wall, {run.peak_bytes / 2**30:.2f} GiB at most over all processes")


if __name__ == "__main__":
    sys.exit(main())
