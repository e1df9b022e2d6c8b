"""Pytest plugin: CPU seconds of each file, of slow tests and of shared fixtures, descendants included.

`tests/seconds.json` has those of the last recorded run (`RECORD_SECONDS=1 .ci/run`). They decide which tests are slow
and in which order files run. `--check-seconds` fails a run in which a file's share differs from its recorded one.
"""

import importlib
import json
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.cpu_seconds import EVERY, CpuClock

SECONDS = Path(__file__).parents[1] / "seconds.json"
SLOW = 0.5
"""CPU seconds from which a test is slow; a test is also slow if it needs a shared fixture of three times as many."""
LEAST = {"files": 0.0, "tests": 0.5, "fixtures": 0.5}
"""CPU seconds below which a test or fixture has no entry in the recorded file."""
BRIEF = 0.05
"""Seconds: a test that ends sooner after the last reading counts with the next one, as a reading takes milliseconds."""
LATE = ("peft", "transformers.models.auto.modeling_auto", "transformers.generation.utils", "pandas")
"""Packages that many tests import late: 4 seconds in all."""
APART = 2.0
"""Largest ratio between a file's share and its recorded share."""
SLACK = 10.0
"""CPU seconds by which any file may differ. What runs on the other core meanwhile can double the seconds of a test, as cores
share caches and units; a file of 7 s took 15.5 once. In longer files this evens out.
"""


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def read_recorded() -> dict[str, dict[str, float]]:
    """Recorded CPU seconds by kind ("files", "tests", "fixtures") and name."""
    found: dict[str, dict[str, float]] = json.loads(SECONDS.read_text(encoding="utf-8"))
    return found


class Clock:
    """CPU seconds of a process that runs tests, read between tests and around shared fixtures.

    If `compared`, large packages that many tests import late are imported first: otherwise their seconds belong to whichever
    file is first, which depends on the order of two processes.
    """

    def __init__(self, *, compared: bool) -> None:
        # Not at the top: a plugin of pytest that is imported before pytest registers it keeps its plain assertions.
        from tests.support.sharing import SHARING

        self._compared, self._sharing = compared, SHARING
        self._clock, self._ended = CpuClock(), threading.Event()
        self._last = self._clock.read()
        self._in_fixtures, self._read_at = 0.0, 0.0
        self._fixtures: Counter[str] = Counter()
        self._shared: set[str] = set()
        threading.Thread(target=self._look, name="CPU seconds", daemon=True).start()

    def pytest_collection_finish(self) -> None:
        """Leave out collection, which imports the modules of all files."""
        if self._compared:
            for name in LATE:
                importlib.import_module(name)
        self._last = self._clock.read()

    def _look(self) -> None:
        """Read often enough that no worker of Ray ends unseen: its parent does not wait for it."""
        while not self._ended.wait(EVERY):
            self._clock.read()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        began, inner = self._clock.read(), self._in_fixtures
        try:
            return (yield)
        finally:
            seconds = self._clock.read() - began - (self._in_fixtures - inner)
            self._in_fixtures += seconds
            self._fixtures[fixturedef.argname] += seconds
            if fixturedef.argname in self._sharing:
                self._shared.add(fixturedef.argname)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: pytest.TestReport = yield
        if call.when == "teardown" and time.monotonic() - self._read_at >= BRIEF:
            now, self._read_at = self._clock.read(), time.monotonic()
            fixtures = {name: [seconds, name in self._shared] for name, seconds in self._fixtures.items()}
            seconds = {"test": now - self._last - self._in_fixtures, "fixtures": fixtures}
            report.user_properties.append(("cpu", seconds))
            self._last, self._in_fixtures, self._fixtures = now, 0.0, Counter()
        return report

    def pytest_sessionfinish(self) -> None:
        self._ended.set()


class Recorder:
    """Adds up the seconds of all test processes; records them, or compares them with the recorded ones.

    What several files share counts for its fixture alone: which of them is the first depends on the order of two processes.
    """

    def __init__(self, *, record: bool, check: bool, in_part: Collection[str] = ()) -> None:
        self._record, self._check = record, check
        self.taken: dict[str, Counter[str]] = {kind: Counter() for kind in LEAST}
        self._skipped = set(in_part)
        self._apart: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._skipped.add(file_of(report.nodeid))
        for seconds in (value for name, value in report.user_properties if name == "cpu"):
            file = file_of(report.nodeid)
            self.taken["tests"][report.nodeid] += seconds["test"]
            self.taken["files"][file] += seconds["test"]
            for name, (taken, shared) in seconds["fixtures"].items():
                self.taken["fixtures"][f"{file}::{name}"] += taken
                if not shared:
                    self.taken["files"][file] += taken

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        recorded = read_recorded()
        if self._record and session.exitstatus == pytest.ExitCode.OK:
            write_recorded(self.taken, recorded, session.config.rootpath)
        if self._check:
            self._apart = [] if self._record else unlike_recorded(self.taken["files"], recorded["files"], self._skipped)
            if self._apart and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        files = self.taken["files"]
        most = ", ".join(f"{name} {seconds:.0f}" for name, seconds in files.most_common(8))
        terminalreporter.line(f"\nCPU seconds of {len(files)} files: {sum(files.values()):.0f}; most: {most}")
        for line in self._apart:
            terminalreporter.line(f"FAILED {line}")
        if self._record and exitstatus != pytest.ExitCode.OK:
            terminalreporter.line("seconds are not recorded: tests failed or did not run; run them again")


def write_recorded(
    taken: Mapping[str, Mapping[str, float]], recorded: Mapping[str, Mapping[str, float]], root: Path
) -> None:
    """Write down the seconds of this run. Files that did not run keep theirs as long as they exist."""
    new: dict[str, Counter[str]] = {kind: Counter(taken[kind]) for kind in LEAST}
    for kind, former in recorded.items():
        for name, seconds in former.items():
            if file_of(name) not in taken["files"] and (root / file_of(name)).exists():
                new[kind][name] = seconds
    rounded = {
        kind: {name: round(seconds, 1) for name, seconds in sorted(new[kind].items()) if seconds >= least}
        for kind, least in LEAST.items()
    }
    SECONDS.write_text(json.dumps(rounded, indent=0) + "\n", encoding="utf-8")


def unlike_recorded(
    taken: Mapping[str, float], recorded: Mapping[str, float], skipped: Collection[str] = ()
) -> list[str]:
    """Files whose share of the session differs from their recorded share by more than `APART`.

    Shares are compared because machines differ in speed. The files that did not run count in neither sum.
    Differences up to `SLACK` do not count. A file with skipped tests may take less: another machine has the program or
    device that they need. So may one whose slow tests are left out.
    """
    known = taken.keys() & recorded.keys()
    known = known.difference(skipped) or known
    speed = sum(taken[name] for name in known) / max(sum(recorded[name] for name in known), 1e-9)
    found = []
    for name, seconds in sorted(taken.items()):
        expected = recorded.get(name, 0.0) * speed
        more = seconds - expected > SLACK and seconds > APART * expected
        less = expected - seconds > SLACK and seconds < expected / APART
        if more or (less and name not in skipped):
            found.append(
                f"{name} = {seconds:.1f} CPU s: must be within a factor of {APART:g} of its recorded share, "
                f"{expected:.1f} s here; find the cause, or record anew with RECORD_SECONDS=1"
            )
    return found
