"""Kill everything with SIGKILL in the middle of a stage, run the command again, and compare with an undisturbed run.

    python -m benchmarks.kill_and_resume tiny/full ppo

Both runs share the results of the earlier stages, through one store that is copied. Exit status 0: the artifact of the
resumed stage has the same digest, byte for byte.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.processes import kill_family, reading_lines
from rlhf_core.stage.checkpoints import Checkpoints
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.layout import CHECKPOINTS
from rlhf_core.store.leases import name_of
from rlhf_core.store.protocol import discard
from rlhf_core.store.records import KeyRecord


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", nargs="?", default="tiny/full")
    parser.add_argument("stage", nargs="?", default="ppo")
    parser.add_argument("--before", type=Path, help="a state folder that has the stages before already")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        killed, in_peace = Path(folder) / "killed", Path(folder) / "in_peace"
        if options.before:
            for home in (killed, in_peace):
                _copy_store(options.before, home, without=options.stage)
        print(f"killed in {options.stage}, then resumed:", flush=True)
        _kill_after_a_checkpoint(options.profile, options.stage, killed)
        _run(options.profile, options.stage, killed)
        if not options.before:
            _copy_store(killed, in_peace, without=options.stage)
        print("\nin peace:", flush=True)
        _run(options.profile, options.stage, in_peace)
        resumed, straight = (_record(home, options.stage) for home in (killed, in_peace))
        print(f"\n{options.stage}: resumed from step {resumed.resumed_from} after {resumed.attempts} attempts")
        print(f"  resumed  {resumed.handle.digest}\n  in peace {straight.handle.digest}")
        print(f"  engines {dict(resumed.engines)}")
        same = resumed.handle.digest == straight.handle.digest
        print("the same, bit for bit" if same else "NOT the same")
        return 0 if same and resumed.resumed_from else 1


def _kill_after_a_checkpoint(profile: str, stage: str, home: Path) -> None:
    """Start the run and kill it, with all its processes, at the first progress after a checkpoint of the stage."""
    process = subprocess.Popen(_command(profile, stage), env=_environment(home), stdout=subprocess.PIPE, text=True)
    with reading_lines(process) as lines:
        for line in lines:
            if line.startswith(f"{stage}: ") and _has_checkpoint(home):
                number = kill_family(process.pid)
                print(f"-> SIGKILL to {number} processes", flush=True)
                return
    raise SystemExit(f"{stage} ended before it could be killed")


def _has_checkpoint(home: Path) -> bool:
    folders = (home / "store").glob(f"attempts/*/work-*/{CHECKPOINTS}")
    return any(Checkpoints(folder).latest() is not None for folder in folders)


def _run(profile: str, stage: str, home: Path) -> None:
    subprocess.run(_command(profile, stage), env=_environment(home), check=True)


def _command(profile: str, stage: str) -> list[str]:
    return [sys.executable, "-m", "pipelines.cli.main", "run", profile, "--until", stage]


def _environment(home: Path) -> dict[str, str]:
    return os.environ | {"RLHF_HOME": str(home), "PYTHONUNBUFFERED": "1"}


def _copy_store(source: Path, target: Path, *, without: str) -> None:
    """Copy a state folder's store, but not the result of one stage."""
    shutil.copytree(source / "store", target / "store", symlinks=True)
    store = ArtifactStore(target / "store")
    for record in store.records():
        if record.label == without:
            discard(store.shared, name_of(record.key))


def _record(home: Path, stage: str) -> KeyRecord:
    return next(record for record in ArtifactStore(home / "store").records() if record.label == stage)


if __name__ == "__main__":
    sys.exit(main())
