"""Compute the digests of the suites that a stage scores reward models on, and check the files before they are read."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Protocol

from rlhf_core.config.data import Suite
from rlhf_core.errors import ConfigError
from rlhf_core.store.fingerprint import hash_file
from stages.planned_files import read_as_planned


class WithSuites(Protocol):
    """A configuration with suites by name."""

    @property
    def suites(self) -> dict[str, Suite]:
        """The suites by name."""


def suite_digests(config: WithSuites) -> dict[str, str]:
    """SHA-256 of each suite's file, for the stage's key. Raises ConfigError for a missing file."""
    digests = {}
    for name, suite in config.suites.items():
        path = Path(suite.path).expanduser()
        if not path.is_file():
            raise ConfigError(f"suites.{name}.path", suite.path, "is not a file", "give a local file")
        digests[f"suites.{name}"] = hash_file(path)
    return digests


def suites_as_planned(config: WithSuites, planned: Mapping[str, str]) -> AbstractContextManager[None]:
    """Raise ConfigError unless the suites read inside the block match the digests in the key, `planned`."""
    files = {
        f"suites.{name}": (f"suites.{name}.path", Path(suite.path).expanduser())
        for name, suite in config.suites.items()
    }
    return read_as_planned(files, partial(suite_digests, config), planned, ConfigError)
