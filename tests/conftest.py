"""Fixtures of every test: a process as it was before, a store, a policy."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from rlhf_core.store.artifacts import ArtifactStore
from tests.support.process_state import process_taken_back

SECONDS = Path(__file__).with_name("seconds.json")
"""Seconds of each test file when they were last recorded, by a whole run with RECORD_SECONDS=1."""
_taken: Counter[str] = Counter()

settings.register_profile("no deadline", deadline=None)  # the machine may be busy with other tests
settings.load_profile("no deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the files that take longest, and new ones, so that no worker ends alone on an engine's file."""
    seconds = json.loads(SECONDS.read_text(encoding="utf-8"))
    known = {item.path: seconds.get(_file(item.nodeid), float("inf")) for item in items}
    items.sort(key=lambda item: -known[item.path])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _taken[_file(report.nodeid)] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("RECORD_SECONDS") and not hasattr(session.config, "workerinput"):
        rounded = {file: round(seconds, 1) for file, seconds in sorted(_taken.items())}
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
def store(tmp_path: Path) -> ArtifactStore:
    """Return an empty store."""
    return ArtifactStore(tmp_path / "store")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Llama of one layer with its tokenizer, made once for each file of tests."""
    from tests.support.workshop import make_policy  # imports torch, which most tests do without

    return make_policy(tmp_path_factory.mktemp("policy"))
