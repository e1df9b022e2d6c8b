"""Leaves the tests that are marked `full` out of a run, unless the environment variable FULL is set."""

import os
from typing import Any

import pytest


class FullRuns:
    """A plugin of pytest; workers of pytest-xdist tell the process that reports how many tests they left out."""

    def __init__(self) -> None:
        self._left_out = 0

    @pytest.hookimpl(trylast=True)  # after -m and -k, so that it counts only what these select
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        full = [item for item in items if item.get_closest_marker("full")]
        if full and not os.environ.get("FULL"):
            items[:] = [item for item in items if item not in full]
            config.hook.pytest_deselected(items=full)
            self._left_out = len(full)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            session.config.workeroutput["full"] = self._left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._left_out = max(self._left_out, getattr(node, "workeroutput", {}).get("full", 0))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left_out:
            count = f"{self._left_out} tests" if self._left_out > 1 else "1 test"
            terminalreporter.line(f"left out {count} marked `full`: make test-all FULL=1 runs everything")
