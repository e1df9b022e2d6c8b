"""Threads that wait for each other stay awake for a moment, unless the user wants something else."""

import os
import subprocess
import sys

from rlhf_core.processes.child import SPINS, idle_threads


def test_idle_threads_sleep_sooner_than_by_default():
    assert idle_threads({"PATH": "/bin"}) == {"GOMP_SPINCOUNT": SPINS}
    assert 0 < int(SPINS) < 300_000


def test_the_choice_of_the_user_goes_first():
    for own in (
        {"GOMP_SPINCOUNT": "0"},
        {"OMP_WAIT_POLICY": "ACTIVE"},
        {"OMP_WAIT_POLICY": "a", "GOMP_SPINCOUNT": "7"},
    ):
        assert idle_threads({"PATH": "/bin"} | own) == own


def test_the_openmp_of_torch_reads_it():
    """It prints the settings that it found when it is loaded."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    shown = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env=ours | idle_threads({}) | {"OMP_DISPLAY_ENV": "VERBOSE"},
        check=True,
        text=True,
        capture_output=True,
    ).stderr
    assert f"GOMP_SPINCOUNT = '{SPINS}'" in shown, shown
