"""Fixtures of every test: a process as it was before, a store, a policy."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from rlhf_core.secrets import redaction
from rlhf_core.store.artifacts import ArtifactStore

settings.register_profile("no deadline", deadline=None)  # the machine may be busy with other tests
settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """Take back what a test changed of its process: the program sets variables, and learns secrets, for good.

    Tests share processes in an order that depends on the machine, so that a leftover fails another test now and then.
    """
    environment, factory = dict(os.environ), logging.getLogRecordFactory()
    hooks = sys.excepthook, threading.excepthook
    known = redaction._Known.values, redaction._Known.pattern
    yield
    logging.setLogRecordFactory(factory)
    sys.excepthook, threading.excepthook = hooks
    redaction._Known.values, redaction._Known.pattern = known
    if dict(os.environ) != environment:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        if "prefect.context" in sys.modules:
            sys.modules["prefect.context"].refresh_global_settings_context()


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    """Return an empty store."""
    return ArtifactStore(tmp_path / "store")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Llama of one layer with its tokenizer, made once for each file of tests."""
    from tests.support.workshop import make_policy  # imports torch, which most tests do without

    return make_policy(tmp_path_factory.mktemp("policy"))
