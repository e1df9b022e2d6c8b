"""What a test leaves to the next one in its process."""

import os

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
