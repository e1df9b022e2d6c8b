"""Where the parts of a store that processes share are kept: a folder, or a bucket of an object store.

A store needs two things of a place. `Records` are small JSON tables, changed by compare-and-set alone: leases, key records,
the history of attempts, decisions at gates. `Objects` are files that never change, under names made of their content.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rlhf_core.errors import ArtifactError


class Unreachable(ArtifactError, OSError):
    """A place could not be reached, or refused what it was asked for."""


class Conflict(Exception):
    """The record is not at the expected version: another process has changed it."""


@dataclass(frozen=True, slots=True)
class Versioned:
    """A record, and its version: no two contents of a name ever have the same one."""

    value: dict[str, Any]
    version: str
    dropped: bool = False
    """Whether this says that there is no record any more; `Records.get` returns None then."""


class Records(Protocol):
    """Small JSON tables by name. `has_clock`: whether `age` tells how old a record is. A place that cannot be reached raises Unreachable, a disk OSError."""

    has_clock: ClassVar[bool]

    def get(self, name: str) -> Versioned | None:
        """Return the record of this name; None if there is none."""

    def put(self, name: str, value: Mapping[str, Any], expected: str | None) -> str:
        """Write the record if it is at the version `expected` (None: if there is none); return its new version.

        Raises Conflict otherwise.
        """

    def drop(self, name: str, expected: str) -> None:
        """Remove the record if it is at the version `expected`. Raises Conflict otherwise."""

    def names(self) -> Iterator[str]:
        """Yield the names of all records, in order."""

    def age(self, name: str) -> float:
        """Return the seconds since the record was written by the place's own clock; inf if it has none."""


class Objects(Protocol):
    """Files that never change, by name. A place that cannot be reached raises Unreachable, a disk OSError."""

    def put_file(self, name: str, path: Path) -> None:
        """Store a file. The same name again has the same content, and is no error."""

    def get_file(self, name: str, path: Path) -> None:
        """Write the object to the file `path`. Raises FileNotFoundError if there is none."""

    def found(self, name: str) -> tuple[int, float] | None:
        """Return the bytes of an object and when it was written (seconds since 1970); None if there is none."""

    def listed(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        """Yield name, bytes and time of writing of all objects whose name begins with `prefix`."""

    def delete(self, name: str) -> None:
        """Remove an object; it may not exist."""
