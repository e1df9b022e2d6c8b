"""The champions of a model in the registry: which version has the alias `champion`, which ones had it, and why.

MLflow keeps only where an alias is now. So each version gets one tag for each time that it became champion, `champion.<time>`,
with who moved the alias and why; the history of a model is all these tags in order of time.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rlhf_core.errors import ConfigError, nearest
from rlhf_core.interfaces import RegistryState
from rlhf_core.processes.identity import user_name
from rlhf_core.tracking import redaction
from rlhf_core.tracking.mlflow_client import is_missing_database, open_client, tracking_errors
from rlhf_core.tracking.mlflow_delivery import DIGEST_TAG, registry_name
from rlhf_core.types import CHAMPION

# ---------------------------------------------------------------- Write down that a version of a model becomes champion, as a tag of that version

TAG = "champion."
"""Prefix of the tags with the times at which a version became champion."""


def move_tag(how: str, why: str) -> dict[str, str]:
    """The tag of a version that becomes champion now, by the user of this process; `how` names the command."""
    time = datetime.now(UTC)
    move = {"at": time.isoformat(timespec="seconds"), "how": how, "by": user_name(), "why": why}
    return {f"{TAG}{time.strftime('%Y%m%dT%H%M%S.%fZ')}": json.dumps(move)}


# ---------------------------------------------------------------- champions

logger = logging.getLogger(__name__)

ROLLBACK = "rollback"
REGISTRY_URI = "MLFLOW_REGISTRY_URI"
"""Environment variable with a registry elsewhere than the runs."""


@dataclass(frozen=True)
class ChampionMove:
    """A move of the alias `champion` to a version."""

    version: str
    digest: str
    at: str
    """Time in ISO 8601 in UTC."""
    how: str
    """`publish` or `rollback`."""
    by: str
    why: str


@dataclass(frozen=True)
class Champions:
    """The champions of one registered model. `current` is the version that has the alias, "" if none has."""

    name: str
    current: str
    moves: tuple[ChampionMove, ...]
    digests: Mapping[str, str]
    """Version -> digest of its weights in the store."""

    @property
    def previous(self) -> str:
        """The version that a rollback restores: the champion before the current one; "" if it does not exist."""
        line = reign(self.moves)
        if self.current in line:
            line = line[: line.index(self.current)]
        return line[-1] if line else ""

    @property
    def rolled_back(self) -> frozenset[str]:
        """Digests of the versions that were champion until a rollback. Moving the alias by hand clears them."""
        line = {self.current, *reign(self.moves)}
        return frozenset(move.digest for move in self.moves if move.version not in line)


def reign(moves: Sequence[ChampionMove]) -> list[str]:
    """List the versions in the order in which they became champion, without rolled-back ones.

    >>> def moved(how, *versions): return [ChampionMove(one, "", "", how, "", "") for one in versions]
    >>> reign([*moved("publish", "1", "2", "3"), *moved("rollback", "2"), *moved("publish", "4")])
    ['1', '2', '4']
    """
    line: list[str] = []
    for move in moves:
        if move.how == ROLLBACK and move.version in line:
            line = line[: line.index(move.version) + 1]
        elif not line or line[-1] != move.version:
            line = [version for version in line if version != move.version] + [move.version]
    return line


# ---------------------------------------------------------------- the registry


def read_champions(uri: str, name: str) -> Champions | None:
    """Load the champions of a registered model; None if the registry has no model of this name.

    Raises TrackingError if the registry does not answer.
    """
    if is_missing_database(os.environ.get(REGISTRY_URI) or uri):
        return None
    with tracking_errors(uri, name="registry"):
        client = open_client(uri)
        found = client.search_registered_models(filter_string=f"name = '{registry_name(name)}'")
        return _champions(client, found[0]) if found else None


def champion_digests(uri: str, name: str) -> tuple[str, str]:
    """Digests of the weights of the current champion and of the previous one; "" for a missing one.

    Raises ConfigError for a champion whose weights are unknown.
    """
    found = read_champions(uri, name)
    if found is None or not found.current:
        return "", ""
    digest = found.digests.get(found.current, "")
    if not digest:
        rule = f"its champion, version {found.current}, has no tag {DIGEST_TAG}, so its weights are unknown"
        raise ConfigError("publish.challenge", name, rule, "give the alias to a version that `publish` made")
    return digest, found.digests.get(found.previous, "")


def registry_state(uri: str, name: str) -> RegistryState:
    """Look up the champions of a registered model by the digests of their weights, as a stage needs them."""
    found = read_champions(uri, name)
    if found is None:
        return RegistryState()
    current = found.current and (found.digests.get(found.current) or f"version {found.current}")
    return RegistryState(current, found.rolled_back)


def model_names(uri: str) -> list[str]:
    """Names of the registered models that have or had a champion."""
    if is_missing_database(os.environ.get(REGISTRY_URI) or uri):
        return []
    with tracking_errors(uri, name="registry"):
        client = open_client(uri)
        found = [_champions(client, model) for model in client.search_registered_models()]
    return [one.name for one in found if one.current or one.moves]


def roll_back(uri: str, name: str, *, why: str) -> tuple[str, str]:
    """Move the alias `champion` back to the champion before the current one: the version before and the version now.

    Who did so, when and why is written into the tags of the version. Raises ConfigError if there was none before.
    """
    found = read_champions(uri, name)
    if found is None:
        raise ConfigError("champion", name, "the registry has no such model", nearest(name, model_names(uri)))
    if not found.previous:
        rule = "has no champion before the current one" if found.current else "has never had a champion"
        raise ConfigError("champion", name, rule, "publish another policy, or move the alias in MLflow")
    with tracking_errors(uri, name="registry"):
        client = open_client(uri)
        for key, value in redaction.tags(move_tag(ROLLBACK, why)).items():  # first, so that no move lacks its reason
            client.set_model_version_tag(found.name, found.previous, key, value)
        client.set_registered_model_alias(found.name, CHAMPION, found.previous)
    return found.current, found.previous


def _champions(client: Any, model: Any) -> Champions:
    versions = client.search_model_versions(f"name = '{model.name}'")
    moves = sorted((move for version in versions for move in _moves(version)), key=lambda pair: pair[0])
    current = str(model.aliases[CHAMPION]) if CHAMPION in model.aliases else ""
    digests = {str(version.version): str(version.tags.get(DIGEST_TAG, "")) for version in versions}
    return Champions(model.name, current, tuple(move for _, move in moves), digests)


def _moves(version: Any) -> Iterator[tuple[str, ChampionMove]]:
    """Yield time and move for each tag of a version; a tag that cannot be read is reported and left out."""
    for key, value in version.tags.items():
        if key.startswith(TAG):
            digest = str(version.tags.get(DIGEST_TAG, ""))
            try:
                yield key, ChampionMove(version=str(version.version), digest=digest, **json.loads(value))
            except (TypeError, ValueError):
                logger.warning("version %s of %s: the tag %s cannot be read", version.version, version.name, key)
