"""The key record of a finished stage: its artifact, inputs, code and duration."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_serializer, field_validator

from rlhf_core import types
from rlhf_core.errors import ArtifactError
from rlhf_core.store.protocol import StoredTable
from rlhf_core.types import ArtifactRef

_URI = re.compile(r"store://[0-9a-f]{64}(/(?!\.\.?(/|$))[^/]+)*|file:///.*", re.DOTALL)
"""Pattern of a valid uri: an object of a store, a folder inside one, or a user's own folder."""


class Failed(BaseModel):
    """The number of failed answers and of all answers in one place, and the settings that the result counts for."""

    model_config = ConfigDict(frozen=True)
    failed: int
    answers: int
    settings: dict[str, Any]

    def share(self) -> str:
        """The number of failed answers as a phrase for people."""
        return f"{self.failed} of {self.answers} answers failed"


class Provenance(BaseModel):
    """The facts about a run of a stage besides its artifact; only `payload` decides the key."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    label: str
    stage: str
    payload: dict[str, Any]
    """Complete value whose hash is the key."""
    config: dict[str, Any] = {}
    """The stage's whole configuration, with the options and the names of functions that are not in the key; {} in
    records of earlier versions."""
    inputs: tuple[str, ...]
    """Uris from which the inputs were read."""
    code: dict[str, str]
    """Module name -> digest of its syntax tree, for the stage and all modules of this program that it imports."""
    earlier_code: dict[str, str] = {}
    """Module name -> digest in the attempts that the last one resumed from, where it differs from `code`."""
    failures: dict[str, Failed] = {}
    """Failed answers by their path in the configuration, with counts and settings; {} if none failed."""
    unseen: tuple[str, ...] = ()
    """Reads, connections and processes of user code beyond the key; () in records of earlier versions."""
    metrics: dict[str, float]
    engines: dict[str, str]
    environment: dict[str, str]
    user: str = ""
    """Name of the user whose process computed it; "" in records of earlier versions."""
    project: str = ""
    """Name of the project in the profile that computed it; "" if it has none."""
    cpus: float = 0.0
    """Number of processes with a separate CPU, the driver's included; 0 in records of earlier versions."""
    gpus: float = 0.0
    """Number of GPUs that its engines held; 0 also in records of earlier versions."""
    started: str
    """Start of the last attempt as ISO 8601 in UTC."""
    seconds: float
    """Total run time of all attempts that ended by themselves."""
    tracking: dict[str, str]
    attempts: int
    resumed_from: int | None
    """Step of the checkpoint from which the last attempt resumed."""


class KeyRecord(Provenance):
    """The commit record of a key, part of the table `keys/<key>`."""

    key: str
    handle: ArtifactRef

    @field_validator("handle", mode="before")
    @classmethod
    def _restore_handle(cls, value: Any) -> Any:
        return value if isinstance(value, ArtifactRef) else restore_handle(value)

    @field_serializer("handle")
    def _store_handle(self, handle: ArtifactRef) -> dict[str, Any]:
        return stored_handle(handle)

    @property
    def made(self) -> str:
        """The start of the last attempt, for readers."""
        return f"{self.started[:16].replace('T', ' ')} UTC"

    def to_json(self) -> dict[str, Any]:
        """The record as a JSON value."""
        value: dict[str, Any] = json.loads(json.dumps(self.model_dump(mode="python")))
        return value


def stored_handle(handle: ArtifactRef) -> dict[str, Any]:
    """Serialize a handle as a JSON table with the name of its type, to be read by `restore_handle`."""
    return {"type": type(handle).__name__, "fields": handle.model_dump(mode="json")}


def restore_handle(stored: Mapping[str, Any]) -> ArtifactRef:
    """Restore the handle that `stored_handle` serialized, with its original type."""
    kind = getattr(types, str(stored["type"]), None)
    if not (isinstance(kind, type) and issubclass(kind, ArtifactRef)):
        raise ArtifactError(
            "handle.type",
            stored["type"],
            "is not a handle of rlhf_core.types",
            "use the version of this program that wrote it",
        )
    return kind.model_validate(stored["fields"])


def parse_record(table: StoredTable) -> tuple[KeyRecord | None, str]:
    """The record in the table of a key, or a description of its damage; neither if the key has no record."""
    stored = table.value.get("record")
    if not stored:
        return None, ""
    try:
        record = KeyRecord.model_validate(stored["facts"])
    except ArtifactError as error:
        return None, str(error)
    except ValidationError as error:
        first = error.errors()[0]
        return None, f"has no valid {'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (KeyError, TypeError) as error:
        return None, f"contains a handle without {error}"
    if table.name != f"keys/{record.key}":
        return None, f"is the record of another key, {record.key[:12]}"
    bad = next((uri for uri in _uris(record.handle) if not _URI.fullmatch(uri)), None)
    return (record, "") if bad is None else (None, f"has no valid handle.uri: {bad!r} is not the address of an object")


def _uris(handle: ArtifactRef) -> Iterator[str]:
    yield handle.uri
    for name in type(handle).model_fields:
        child = getattr(handle, name)
        if isinstance(child, ArtifactRef):
            yield from _uris(child)
