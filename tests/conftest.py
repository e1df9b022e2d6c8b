"""Fixtures of every test: a process as it was before, a store, a policy."""

import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from rlhf_core.store.artifacts import ArtifactStore
from tests.support.process_state import process_taken_back

SECONDS = Path(__file__).with_name("seconds.json")
"""Seconds of each file, and of each test and shared fixture that takes a second, when a whole run last recorded them
(RECORD_SECONDS=1)."""
SLOW = 4.0
"""A test that takes so many seconds by itself, or waits three times as long for a fixture that others share, is slow."""
IMPORTED = pytest.StashKey[list[int]]()
SHARED = pytest.StashKey[Counter[str]]()
_taken: dict[str, Counter[str]] = {kind: Counter() for kind in ("files", "tests", "fixtures")}

settings.register_profile("no deadline", deadline=None)  # the machine may be busy with other tests
settings.load_profile("no deadline")


class _Failures:
    """Prints a failure when it happens: a run that is cut off prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._terminal = config.get_terminal_writer()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.line(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Print failures of all workers at once."""
    if session.config.pluginmanager.hasplugin("dsession"):
        session.config.pluginmanager.register(_Failures(session.config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow, and start with the files that take longest, and new ones, so that no worker ends alone."""
    seconds = json.loads(SECONDS.read_text(encoding="utf-8"))
    for item in items:
        shared = (f"{_file(item.nodeid)}::{name}" for name in getattr(item, "fixturenames", ()))
        waits = max((seconds["fixtures"].get(name, 0.0) for name in shared), default=0.0)
        if seconds["tests"].get(item.nodeid, 0.0) >= SLOW or waits >= 3 * SLOW:
            item.add_marker("slow")
    known = {item.path: seconds["files"].get(_file(item.nodeid), float("inf")) for item in items}
    items.sort(key=lambda item: -known[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Leave what tests have imported out of collections, of which the end of each trainer makes one: 0.4 s without this."""
    known = item.session.stash.setdefault(IMPORTED, [0])
    if len(sys.modules) > known[0] + 20:
        gc.collect()
        gc.freeze()
        known[0] = len(sys.modules)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> Iterator[None]:
    """Take the time of a fixture that several tests share."""
    began = time.monotonic()
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            request.session.stash.setdefault(SHARED, Counter())[fixturedef.argname] = time.monotonic() - began


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _taken["files"][_file(report.nodeid)] += report.duration
    if report.when == "call":
        _taken["tests"][report.nodeid] += report.duration
    for name, seconds in dict(report.user_properties).get("shared", {}).items():
        _taken["fixtures"][f"{_file(report.nodeid)}::{name}"] = seconds


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Hand the times of shared fixtures to the process that writes them down."""
    report: pytest.TestReport = yield
    report.user_properties.append(("shared", dict(item.session.stash.get(SHARED, Counter()))))
    item.session.stash[SHARED] = Counter()
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write down the times of this run. A test that did not run keeps its time, as long as its file exists."""
    if os.environ.get("RECORD_SECONDS") and not hasattr(session.config, "workerinput"):
        before = json.loads(SECONDS.read_text(encoding="utf-8"))
        for kind in ("tests", "fixtures"):
            for name in before[kind].keys() - _taken[kind].keys():
                if (session.config.rootpath / _file(name)).exists():
                    _taken[kind][name] = before[kind][name]
                    _taken["files"][_file(name)] += before[kind][name]
        least = {"files": 0.0, "tests": 1.0, "fixtures": 1.0}
        rounded = {
            kind: {name: round(seconds, 1) for name, seconds in sorted(taken.items()) if seconds >= least[kind]}
            for kind, taken in _taken.items()
        }
        SECONDS.write_text(json.dumps(rounded, indent=0) + "\n", encoding="utf-8")


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """Leave the process to the next test as it was.

    Tests share processes in an order that depends on the machine, so that a leftover fails another test now and then.
    """
    with process_taken_back():
        yield


@pytest.fixture
def store(tmp_path) -> ArtifactStore:
    """Return an empty store."""
    return ArtifactStore(tmp_path / "store")


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    """Return the folder of a Llama of one layer with its tokenizer, made once for each file of tests."""
    from tests.support.workshop import make_policy  # imports torch, which most tests do without

    return make_policy(tmp_path_factory.mktemp("policy"))
