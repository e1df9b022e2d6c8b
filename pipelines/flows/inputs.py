"""Find an artifact by the label of the stage that made it, by its digest, or by the path of a folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rlhf_core.errors import ArtifactError, nearest
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef, PolicyRef, kind_of, title

R = TypeVar("R", bound=ArtifactRef)

SHORTEST_DIGEST = 8


@dataclass(frozen=True)
class Opponents:
    """The champion that a published policy has to beat, and the champion before it."""

    current: PolicyRef
    previous: PolicyRef | None = None

    def of(self, policy: PolicyRef) -> PolicyRef | None:
        """The opponent of a policy; for the champion itself it is the previous champion, which it has beaten."""
        return self.previous if self.current.digest == policy.digest else self.current


def find_artifact(store: ArtifactStore, kind: type[R], name: str, *, given: str = "", outside: bool = True) -> R:
    """Find the newest artifact with this name: `sft`, `prepare_data.base`, `3fa9c1d2`, or a folder's path.

    A label that was made several times means the last result that its stage made or found. Raises ArtifactError if no
    artifact of `kind` has the name; the error shows the name that was `given` for this one. Paths of folders are
    accepted only if `outside`.
    """
    label, _, part = name.partition(".")
    latest = store.latest(label)
    for record in (*([latest] if latest else []), *reversed(store.records())):
        wanted = record is latest or (record.label == label and store.record(record.key) is not None)
        named = getattr(record.handle, part, None) if part else record.handle
        by_digest = [
            ref
            for ref in (record.handle, *parts(record.handle))
            if len(name) >= SHORTEST_DIGEST and ref.digest.startswith(name)
        ]
        for found in (*([named] if wanted else []), *by_digest):
            if isinstance(found, kind):
                store.used(record.key)
                return found
    folder = Path(name).expanduser()
    if outside and name and folder.is_dir():
        return store.external(kind, folder)
    names = {
        f"{record.label}.{field}" if field else record.label
        for record in store.records()
        for field, ref in (("", record.handle), *record.handle)
        if isinstance(ref, kind)
    }
    remedy = nearest(name, sorted(names)) if names else "the store has none: run `rlhf run tiny/full` first"
    other = next((record for record in store.records() if name in (record.label, record.handle.digest)), None)
    rule = f"is neither label nor digest of {title(kind)}{', nor the path of a folder' if outside else ''}"
    if other is not None:
        rule = f"is {title(type(other.handle))}, and must be {title(kind)}"
    raise ArtifactError(kind_of(kind), given or name, rule, remedy)


def parts(ref: ArtifactRef) -> list[ArtifactRef]:
    """The handles inside a handle: the tables and the base model of prepared data."""
    return [value for _, value in ref if isinstance(value, ArtifactRef)]
