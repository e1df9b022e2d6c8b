"""The key record: what a finished stage made, from what, with which code, and how long it took."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_serializer, field_validator

from rlhf_core import types
from rlhf_core.errors import ArtifactError, explain
from rlhf_core.store_layout import read_json
from rlhf_core.types import ArtifactRef

_PACKAGES = (
    "torch",
    "transformers",
    "vllm",
    "deepspeed",
    "ray",
    "peft",
    "datasets",
    "numpy",
    "pyarrow",
    "pydantic",
    "prefect",
    "mlflow",
)


class Provenance(BaseModel):
    """What is known about a run of a stage beside the artifact that it made; none of it decides the key but `payload`."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    label: str
    stage: str
    payload: dict[str, Any]
    """The whole value that was hashed to the key."""
    inputs: tuple[str, ...]
    """The uris that the inputs were read from."""
    code: dict[str, str]
    """Module name -> digest of its syntax tree, for the stage and all of ours that it imports."""
    metrics: dict[str, float]
    engines: dict[str, str]
    environment: dict[str, str]
    started: str
    """UTC, ISO 8601."""
    seconds: float
    """Working time of all attempts that ended by themselves."""
    tracking: dict[str, str]
    attempts: int
    resumed_from: int | None
    """Step of the checkpoint that the last attempt went on from."""


class KeyRecord(Provenance):
    """The commit record of a key, as `keys/<aa>/<key>.json` holds it."""

    key: str
    handle: ArtifactRef

    @field_validator("handle", mode="before")
    @classmethod
    def _restore_handle(cls, value: Any) -> Any:
        return value if isinstance(value, ArtifactRef) else restore_handle(value)

    @field_serializer("handle")
    def _store_handle(self, handle: ArtifactRef) -> dict[str, Any]:
        return stored_handle(handle)

    def to_json(self) -> dict[str, Any]:
        """Return what the record's file holds."""
        return self.model_dump(mode="python")


def stored_handle(handle: ArtifactRef) -> dict[str, Any]:
    """Return a handle as a JSON table with the name of its type, from which `restore_handle` makes it again."""
    fields: dict[str, Any] = json.loads(handle.model_dump_json())
    return {"type": type(handle).__name__, "fields": fields}


def restore_handle(stored: Mapping[str, Any]) -> ArtifactRef:
    """Return the handle that `stored_handle` wrote down, with its own type."""
    kind = getattr(types, str(stored["type"]), None)
    if not (isinstance(kind, type) and issubclass(kind, ArtifactRef)):
        raise ArtifactError(
            explain(
                "handle.type", stored["type"], "is not a handle of rlhf_core.types", "use the version that wrote it"
            )
        )
    return kind.model_validate(stored["fields"])


def parse_record(path: Path) -> tuple[KeyRecord | None, str]:
    """Return the record in a file, or what is wrong with the file; neither if the file is gone."""
    stored = read_json(path)
    if stored is None:
        return None, "holds no JSON table" if path.exists() else ""
    try:
        return KeyRecord.model_validate(stored), ""
    except ArtifactError as error:
        return None, str(error)
    except ValidationError as error:
        first = error.errors()[0]
        return None, f"has no valid {'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (KeyError, TypeError) as error:
        return None, f"holds a handle without {error}"


@lru_cache(maxsize=1)
def environment() -> dict[str, str]:
    """Return versions of Python and of the libraries, the platform and the git commit: provenance, never in a key."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | _git()


def _git() -> dict[str, str]:
    here = Path(__file__).resolve().parent
    try:
        sha = _git_output(here, "rev-parse", "HEAD")
        dirty = bool(_git_output(here, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"git_sha": sha, "git_dirty": "yes" if dirty else "no"}


def _git_output(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
