"""Fixtures of every test: a process as it was before, a store, a policy."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.workermanage import WorkerController

from rlhf_core.store.artifacts import ArtifactStore
from tests.support.changes import LeftOut, unchanged_tests
from tests.support.full_runs import FullRuns
from tests.support.process_state import process_taken_back
from tests.support.recorded_seconds import SLOW, Clock, Recorder, file_of, read_recorded

pytest_plugins = ["tests.support.sharing"]
LEFT_OUT = pytest.StashKey[LeftOut]()
IMPORTED = pytest.StashKey[list[int]]()

# Ray's C++ part reads once whether this process sends tokens, and every Ray that the product starts requires them. If a
# test changed the variable before the first of them, all later ones in this process would fail.
os.environ.setdefault("RAY_AUTH_MODE", "token")

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
    """Print failures of all workers at once, and leave out tests marked `full`."""
    session.config.pluginmanager.register(FullRuns())
    if session.config.pluginmanager.hasplugin("dsession"):
        session.config.pluginmanager.register(_Failures(session.config))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--by-change",
        action="store_true",
        help="leave out slow tests of unchanged code, and campaigns, benchmarks, contrib",
    )
    parser.addoption("--check-seconds", action="store_true", help="fail if files take other shares of CPU seconds")


def pytest_configure(config: pytest.Config) -> None:
    """Take the CPU seconds of tests where they run, and add them up in the process that reports."""
    runs_tests = hasattr(config, "workerinput") or config.getoption("dist", "no") == "no"
    compared = bool(os.environ.get("RECORD_SECONDS")) or config.getoption("check_seconds")
    if runs_tests:
        config.pluginmanager.register(Clock(compared=compared))
    if not hasattr(config, "workerinput"):
        record, check = bool(os.environ.get("RECORD_SECONDS")), config.getoption("check_seconds")
        some = config.getoption("markexpr") or config.getoption("keyword") or any("::" in word for word in config.args)
        if record and (some or os.environ.get("FULL")):
            raise pytest.UsageError(
                "RECORD_SECONDS: records whole files; leave out -m, -k, :: and FULL, as .ci/run does"
            )
        try:
            config.stash[LEFT_OUT] = unchanged_tests() if config.getoption("by_change") and not record else LeftOut()
        except ValueError as error:  # an unknown $CI_BASE
            raise pytest.UsageError(str(error)) from None
        config.pluginmanager.register(Recorder(record=record, check=check, in_part=config.stash[LEFT_OUT].slow))
    else:
        config.stash[LEFT_OUT] = LeftOut(*config.workerinput["left_out"])


def pytest_configure_node(node: WorkerController) -> None:
    """Tell each worker of pytest-xdist which files to leave out, so that all collect the same tests."""
    left_out = node.config.stash[LEFT_OUT]
    node.workerinput["left_out"] = (left_out.files, left_out.slow, left_out.since)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files whose tests cannot have a new result."""
    left_out = config.stash[LEFT_OUT].files
    return True if left_out and collection_path.relative_to(config.rootpath).as_posix() in left_out else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = config.stash[LEFT_OUT]
    if left_out.files:
        names = " ".join(left_out.files)
        terminalreporter.line(f"left out, since nothing that they import changed since {left_out.since}: {names}")
    if left_out.slow:
        terminalreporter.line(f"and the slow tests of: {' '.join(left_out.slow)}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow tests, and start with the files that take longest and new files, so that no worker ends alone.

    Slow tests that cannot have a new result are left out, but one run of each engine is not.
    """
    seconds = read_recorded()
    for item in items:
        shared = (f"{file_of(item.nodeid)}::{name}" for name in getattr(item, "fixturenames", ()))
        waits = max((seconds["fixtures"].get(name, 0.0) for name in shared), default=0.0)
        if seconds["tests"].get(item.nodeid, 0.0) >= SLOW or waits >= 3 * SLOW:
            item.add_marker("slow")
    in_part = set(config.stash[LEFT_OUT].slow)
    for item in [one for one in items if file_of(one.nodeid) in in_part]:
        if item.get_closest_marker("slow") and not item.get_closest_marker("smoke"):
            items.remove(item)
            config.hook.pytest_deselected(items=[item])
    known = {item.path: seconds["files"].get(file_of(item.nodeid), float("inf")) for item in items}
    items.sort(key=lambda item: -known[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Leave imported modules out of collections, of which the end of each trainer makes one: 0.4 s without this."""
    known = item.session.stash.setdefault(IMPORTED, [0])
    if len(sys.modules) > known[0] + 20:
        gc.collect()
        gc.freeze()
        known[0] = len(sys.modules)


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """Leave the process to the next test as it was.

    Tests share processes in an order that depends on the machine, so that a leftover fails another test now and then.
    """
    with process_taken_back():
        yield


@pytest.fixture
def store(tmp_path) -> ArtifactStore:
    """An empty store."""
    return ArtifactStore(tmp_path / "store")


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    """The folder of a Llama of one layer with its tokenizer, made once for each file of tests."""
    from tests.support.policies import make_policy  # imports torch, which most tests do without

    return make_policy(tmp_path_factory.mktemp("policy"))
