"""Cause faults of a full disk: a real file system of a few megabytes in memory. Needs root or the right to mount."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

from campaigns.faults.fault import Fault, Outcome

DISK_BYTES = 60 << 20
TIMEOUT_S = 500.0
MOUNT = 'mount -t tmpfs -o size="$1" none "$2" && exec "$3" -m campaigns.faults.full_disk "$2"'


@cache
def _outcomes(folder: Path) -> dict[str, Outcome]:
    """Run all faults in one process, because imports take longer than the faults; returns the outcomes by name."""
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    command = ["unshare", "--mount", "sh", "-c", MOUNT, "sh", str(DISK_BYTES), str(disk), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("name"): Outcome(**line) for line in lines}


@cache
def _can_mount(folder: Path) -> bool:
    place = folder / "mount"
    place.mkdir()
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", str(place)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _full(name: str, folder: Path) -> Outcome:
    if not _can_mount(folder):
        return Outcome("skipped", None, None, "needs root, to mount a small disk")
    return _outcomes(folder)[name]


FAULTS: list[Fault] = [
    Fault("disk full while a checkpoint is written", 30.0, partial(_full, "checkpoint")),
    Fault("disk full while an artifact is written", 30.0, partial(_full, "artifact")),
    Fault("disk full under MLflow's database and spool", 5.0, partial(_full, "mlflow")),
]
