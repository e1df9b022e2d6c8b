"""Fixtures of every test: a process as it was before, a store, a policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from rlhf_core.store.artifacts import ArtifactStore
from tests.support.process_state import process_taken_back

settings.register_profile("no deadline", deadline=None)  # the machine may be busy with other tests
settings.load_profile("no deadline")


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
