"""Compute the digests of the suites that a stage scores reward models on, and check that these files are read."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rlhf_core.config.data import Suite
from rlhf_core.errors import ConfigError
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
            raise ConfigError(f"suites.{name}.path", suite.path, "is not a file", "give a local file")
        digests[f"suites.{name}"] = hash_file(path)
    return digests


@contextmanager
def suites_as_planned(config: WithSuites, planned: Mapping[str, str]) -> Iterator[None]:
    """Raise ConfigError unless the suites that are read inside are those whose digests are in the key, `planned`.

    They are hashed once more before; a file that was neither replaced nor written to from then on is what was hashed.
    """
    before = {name: _status(suite) for name, suite in config.suites.items()}
    for name, digest in suite_digests(config).items():
        if name in planned and planned[name] != digest:
            rule, remedy = "has changed since the run was planned", "run again: the new content gets its own key"
            raise ConfigError(name, name, rule, remedy)
    try:
        yield
    finally:  # also where reading failed: a file that changed under it is the reason
        for name, suite in config.suites.items():
            if _status(suite) != before[name]:
                rule, remedy = "changed while it was read", "run again when no other process writes to it"
                raise ConfigError(f"suites.{name}.path", suite.path, rule, remedy)


def _status(suite: Suite) -> tuple[int, ...]:
    """Return a stamp that changes with every write to the file of a suite; empty if it is gone."""
    path = Path(suite.path).expanduser()
    if not path.is_file():
        return ()
    status = path.stat()
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
