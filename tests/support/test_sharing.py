"""What tests share starts once, and ends when the next test is of another group."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import sharing
from tests.support.sharing import SHARING, group_of, share
from tests.support.warm_programs import ROOT

RAY = SHARING["shared_ray"]


def test_all_places_that_share_exist():
    for place in (place for places in SHARING.values() for place in places):
        file, _, test = place.partition("::")
        assert f"def {test}" in (ROOT / file).read_text(), place


def test_a_group_has_whole_files_and_single_tests_with_any_parameters():
    assert group_of(f"{RAY[0]}::test_this[1-2]") == "shared_ray"
    assert group_of(f"{RAY[-1]}[a::b]") == "shared_ray"
    assert group_of("tests/stages/test_ppo.py::test_that[1]") == "tests/stages/test_ppo.py"


def item_of(nodeid: str, session: Any) -> Any:
    return SimpleNamespace(nodeid=nodeid, session=session)


def test_files_of_a_group_are_neighbors_in_the_place_of_the_first():
    names = ["tests/a.py::one", f"{RAY[0]}::one", "tests/b.py::one", f"{RAY[1]}::one", RAY[-1], "tests/a.py::two"]
    items = [item_of(name, None) for name in names]
    sharing.pytest_collection_modifyitems(items)
    assert [names.index(item.nodeid) for item in items] == [0, 5, 1, 3, 4, 2]


def test_a_test_that_uses_what_a_group_shares_must_be_in_it():
    items = [SimpleNamespace(nodeid="tests/a.py::one", fixturenames=["tmp_path", "shared_ray"])]
    with pytest.raises(pytest.UsageError, match=r"SHARING .*: \[\('tests/a.py::one', 'shared_ray'\)\]"):
        sharing.pytest_collection_modifyitems(items)


def test_what_is_shared_starts_once_and_ends_with_its_group():
    session: Any = SimpleNamespace(stash=pytest.Stash())
    log: list[str] = []

    @contextmanager
    def engine() -> Iterator[int]:
        log.append("started")
        yield len(log)
        log.append("ended")

    def run(nodeid: str, following: str) -> None:
        log.append(str(share(session, "shared_ray", engine)))
        teardown = sharing.pytest_runtest_teardown(
            item_of(nodeid, session), item_of(following, session) if following else None
        )
        next(teardown)
        with pytest.raises(StopIteration):
            teardown.send(None)

    run(f"{RAY[0]}::one", f"{RAY[0]}::two")
    run(f"{RAY[0]}::two", f"{RAY[1]}::one")
    run(f"{RAY[1]}::one", "tests/a.py::one")
    assert log == ["started", "1", "1", "1", "ended"]
    run(RAY[-1], "")
    assert log[5:] == ["started", "6", "ended"]
