"""Records and artifacts that tests make without running a stage."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.records import Provenance
from rlhf_core.types import ArtifactRef, PolicyRef

R = TypeVar("R", bound=ArtifactRef)
NO_CHILDREN: Mapping[str, tuple[str, type[ArtifactRef]]] = {}


def provenance(**changes: Any) -> Provenance:
    """Return the provenance of a small result, with `changes`."""
    fields: dict[str, Any] = {
        "label": "toy",
        "stage": "toy",
        "payload": {},
        "inputs": (),
        "code": {},
        "metrics": {"loss": 0.5},
        "engines": {},
        "environment": {},
        "started": "2030-01-01T00:00:00.000+00:00",
        "seconds": 1.0,
        "tracking": {},
        "attempts": 1,
        "resumed_from": None,
    }
    return Provenance(**(fields | changes))


def write_files(folder: Path, files: Mapping[str, str]) -> Path:
    """Write text files by their relative paths; return the folder."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    return folder


def commit(
    store: ArtifactStore,
    key: str,
    out: Path,
    kind: type[R],
    *,
    record: Provenance,
    children: Mapping[str, tuple[str, type[ArtifactRef]]] = NO_CHILDREN,
    parents: Sequence[str] = (),
) -> R:
    """Commit the folder `out` as the result of `key`, under a lease of it."""
    with store.lease(key) as lease:
        return store.commit(lease, out, kind, children=children, record=record, parents=parents)


def commit_text(store: ArtifactStore, content: str, **changes: Any) -> PolicyRef:
    """Commit an artifact of one file `a.txt` under the key `sha256_text(content)`."""
    with store.lease(sha256_text(content)) as lease:
        out = write_files(store.layout.attempts / "out", {"a.txt": content})
        return store.commit(lease, out, PolicyRef, children={}, record=provenance(**changes))
