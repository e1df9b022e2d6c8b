"""What a test leaves to the next one in its process."""

import os
import sys
from types import SimpleNamespace

from tests.support.process_state import process_taken_back


def test_variables_are_as_before_except_those_that_the_process_has_read_for_good(monkeypatch):
    monkeypatch.setenv("CHANGED", "before")
    monkeypatch.setenv("REMOVED", "before")
    monkeypatch.delenv("MADE", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # so that it is undone
    monkeypatch.delenv("RAY_AUTH_MODE")
    with process_taken_back():
        os.environ |= {"CHANGED": "after", "MADE": "after", "RAY_AUTH_MODE": "token"}
        del os.environ["REMOVED"]
    assert (os.environ["CHANGED"], os.environ["REMOVED"]) == ("before", "before")
    assert "MADE" not in os.environ
    assert os.environ["RAY_AUTH_MODE"] == "token"  # or the next Ray of this process cannot call it


def test_settings_of_prefect_are_read_again_only_if_a_variable_has_changed(monkeypatch):
    read = []
    context = SimpleNamespace(refresh_global_settings_context=lambda: read.append(dict(os.environ)))
    monkeypatch.setitem(sys.modules, "prefect.context", context)
    with process_taken_back():
        os.environ["PYTEST_CURRENT_TEST"] = "another phase"  # as pytest does between set-up and tear-down
    assert read == []
    with process_taken_back():
        os.environ["PREFECT_API_URL"] = "of the test"
    assert len(read) == 1 and "PREFECT_API_URL" not in read[0]
