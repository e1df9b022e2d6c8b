"""Run the numeric tests under other instruction sets, math libraries and numbers of threads than this machine's.

    python -m benchmarks.portable
    python -m benchmarks.portable --selection quick
    python -m benchmarks.portable --selection by-batch

Two batches that differ in their composition, threads or instruction set give numbers that are equal only up to rounding
(`docs/keys.md`). A test that forgets this passes here and fails on another machine; this benchmark makes it fail here.
It prints one line per setting; `closest` is the largest fraction of its tolerance that a comparison used. Exit status
0: all passed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = "tests.support.rounding"
THREADS = "OMP_NUM_THREADS"
NEUTRAL = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "MKL_NUM_THREADS", "RLHF_TEST_ROUNDING", THREADS)
"""Variables that no setting inherits."""

SCALAR, AVX2 = {"ATEN_CPU_CAPABILITY": "default"}, {"ATEN_CPU_CAPABILITY": "avx2"}
ONEDNN, MKL = {"ONEDNN_MAX_CPU_ISA": "AVX2"}, {"MKL_CBWR": "COMPATIBLE"}
BY_BATCH = {"RLHF_TEST_ROUNDING": "1"}
"""Rounds linear layers by the shape of their batch, as some machines do, but not ours (`tests/support/rounding.py`)."""
ALL = SCALAR | ONEDNN | MKL
LIBRARIES: tuple[Mapping[str, str], ...] = ({}, SCALAR, AVX2, ONEDNN, MKL, ALL, BY_BATCH)
SETTINGS: dict[str, tuple[Mapping[str, str], ...]] = {
    "full": ({}, *({**library, THREADS: threads} for library in LIBRARIES for threads in ("1", "2"))),
    # In separate settings: combined, other kernels may round differences between batches to the same number.
    "quick": (ALL | {THREADS: "1"}, BY_BATCH | {THREADS: "1"}),
    "by-batch": (BY_BATCH | {THREADS: "1"},),
}
TESTS: dict[str, tuple[str, ...]] = {
    "full": (
        "tests/rlhf_core/algorithms",
        "tests/rlhf_core/models",
        "tests/rlhf_core/training",
        "tests/rlhf_core/sampling/test_hf_sampler.py",
        "tests/rlhf_core/rewards/test_model.py",
        "tests/stages",
        "tests/durability/test_resume_diamond.py",
    ),
    "quick": (
        "tests/rlhf_core/algorithms",
        "tests/rlhf_core/models/test_forward.py",
        "tests/rlhf_core/training/engines/test_deepspeed_engine.py",
        "tests/rlhf_core/training/test_trainer.py",
        "tests/rlhf_core/sampling/test_hf_sampler.py",
        "tests/stages/test_generate.py",
        "tests/stages/test_score.py",
        "tests/stages/test_invariants.py",
        "tests/durability/test_resume_diamond.py",
    ),
    # One file of each room whose results would change if rounding depended on the batch. Continuous integration runs
    # these, and all tests once with the kernels of `ALL`.
    "by-batch": (
        "tests/rlhf_core/models/test_forward.py",
        "tests/rlhf_core/training/test_trainer.py",
        "tests/rlhf_core/sampling/test_hf_sampler.py",
        "tests/stages/test_invariants.py",
        "tests/durability/test_resume_diamond.py",
    ),
}
SEVERAL_PROCESSES = (
    "tests/rlhf_core/training/test_bfloat16.py",
    "tests/rlhf_core/training/test_sequence_parallel.py",
    "tests/rlhf_core/training/engines/test_tensor_parallel.py",
    "tests/rlhf_core/training/test_wide_head.py",
    "tests/stages/test_invariants_engines.py",
)
"""Excluded from most settings of the full selection: engines and ranks in processes, which take most time."""
SETTINGS_OF_SEVERAL: tuple[Mapping[str, str], ...] = (
    {},
    *(ALL | {THREADS: n} for n in "12"),
    BY_BATCH | {THREADS: "1"},
)
"""Settings of the full selection that run `SEVERAL_PROCESSES`."""
NOT_NUMERIC = ("tests/rlhf_contrib/environments/test_external_agents.py",)
COLUMNS = ("setting", "passed", "failed", "skipped", "seconds", "closest")


@dataclass(frozen=True)
class Outcome:
    """Result of pytest under one setting. `closest` is (fraction, test)."""

    passed: int
    failed: tuple[str, ...]
    skipped: int
    seconds: float
    closest: tuple[float, str]
    output: str

    @property
    def good(self) -> bool:
        """Whether tests ran and none failed."""
        return self.passed > 0 and not self.failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--selection", choices=list(TESTS), default="full")
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests side by side")
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("tests", nargs="*", help="instead of the selection's")
    options = parser.parse_args(arguments)
    settings = [one for one in SETTINGS[options.selection] if options.only in name_of(one)]
    if not settings:
        parser.error(
            f"--only {options.only}: no such setting among {[name_of(s) for s in SETTINGS[options.selection]]}"
        )
    width = max(len(name_of(setting)) for setting in settings)
    print(row(width, *COLUMNS), flush=True)
    good = True
    for setting in settings:
        outcome = run(setting, options.tests or selected(options.selection, setting), workers=options.workers)
        counts = (outcome.passed, len(outcome.failed), outcome.skipped, f"{outcome.seconds:.0f}")
        print(row(width, name_of(setting), *counts, f"{outcome.closest[0]:.0%} {outcome.closest[1]}"), flush=True)
        if not outcome.good:
            good = False
            print(outcome.output, file=sys.stderr, flush=True)
    return 0 if good else 1


def selected(selection: str, setting: Mapping[str, str]) -> list[str]:
    """The arguments of pytest: the tests of the selection, without tests that do not run under this setting."""
    left_out = [*NOT_NUMERIC, *(() if setting in SETTINGS_OF_SEVERAL else SEVERAL_PROCESSES)]
    return [*TESTS[selection], *(f"--ignore={test}" for test in left_out)]


def name_of(setting: Mapping[str, str]) -> str:
    """The setting in the form that precedes a command.

    >>> name_of({"MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "2"})
    'MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=2'
    """
    return " ".join(f"{name}={value}" for name, value in setting.items()) or "nothing set"


def row(width: int, setting: str, *cells: object) -> str:
    """One line of the table."""
    *numbers, last = map(str, cells)
    return "  ".join([setting.ljust(width), *(number.rjust(7) for number in numbers), last])


def run(setting: Mapping[str, str], tests: Sequence[str], *, workers: int) -> Outcome:
    """Run `tests` in `workers` processes under `setting`, which replaces this process's own setting."""
    environment = {name: value for name, value in os.environ.items() if name not in NEUTRAL}
    environment |= {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "RAY_USAGE_STATS_ENABLED": "0", **setting}
    # A plugin is imported by every worker before its `sys.path` has the tests.
    inherited = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *inherited])
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        side_by_side = ["-n", str(workers), "--dist", "loadfile"] if workers > 1 else []
        command = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, f"--junitxml={report}", *side_by_side, *tests]
        started = time.monotonic()
        process = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
        output = process.stdout + process.stderr
        if not report.exists():
            return Outcome(0, ("pytest",), 0, time.monotonic() - started, (0.0, ""), output)
        return read(report.read_text(encoding="utf-8"), seconds=time.monotonic() - started, output=output)


def read(report: str, *, seconds: float, output: str) -> Outcome:
    """Parse pytest's report in JUnit's XML."""
    passed, skipped = 0, 0
    failed: list[str] = []
    closest = (0.0, "")
    for case in ElementTree.fromstring(report).iter("testcase"):
        test = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(test)
            continue
        if case.find("skipped") is not None:
            skipped += 1
            continue
        passed += 1
        for share in case.iter("property"):
            if share.get("name") == "closest":
                closest = max(closest, (float(share.get("value", "0")), test))
    return Outcome(passed, tuple(failed), skipped, seconds, closest, output)


if __name__ == "__main__":
    sys.exit(main())
