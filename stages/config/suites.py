"""Compute the digests of the suites that a stage scores reward models on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rlhf_core.config.data import Suite
from rlhf_core.errors import ConfigError, explain
from rlhf_core.store.fingerprint import hash_file


class WithSuites(Protocol):
    """A configuration with suites by name."""

    @property
    def suites(self) -> dict[str, Suite]:
        """The suites by name."""


def suite_digests(config: WithSuites) -> dict[str, str]:
    """Return the sha256 of each suite's file, for the stage's key. Raises ConfigError for a missing file."""
    digests = {}
    for name, suite in config.suites.items():
        path = Path(suite.path).expanduser()
        if not path.is_file():
            raise ConfigError(explain(f"suites.{name}.path", suite.path, "is not a file", "give a local file"))
        digests[f"suites.{name}"] = hash_file(path)
    return digests


def check_suites(config: WithSuites, planned: Mapping[str, str]) -> None:
    """Raise ConfigError if a suite's file has changed since the run was planned."""
    for name, digest in suite_digests(config).items():
        if name in planned and planned[name] != digest:
            rule, remedy = "has changed since the run was planned", "run again: the new content gets its own key"
            raise ConfigError(explain(name, name, rule, remedy))
