"""Find the stages that an artifact was made by, from the key records of the store."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_core.secrets.redaction import hidden
from rlhf_core.store.records import KeyRecord
from rlhf_core.types import ArtifactRef


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A stage that led to an artifact. `parents` are labels of other stages, or digests of artifacts made by no stage.

    >>> Ancestor("sft", "sft", "key", "digest", ("prepare_data",), {}).label
    'sft'
    """

    label: str
    stage: str
    key: str
    digest: str
    parents: tuple[str, ...]
    config: dict[str, Any]

    def plain(self) -> dict[str, Any]:
        """The fields as JSON-compatible values."""
        return asdict(self)


def lineage(records: Sequence[KeyRecord], digests: Iterable[str]) -> list[Ancestor]:
    """Find the stages that led to the artifacts with `digests`, each stage once and after its parents.

    An artifact that several stages made with equal content is assigned to the newest of them.
    """
    makers = {ref.digest: record for record in records for ref in handles(record.handle)}
    found: dict[str, Ancestor] = {}

    def visit(digest: str, path: tuple[str, ...]) -> str:
        record = makers.get(digest)
        if record is None or digest in path:
            return digest[:12]
        if record.key not in found:
            parents = tuple(dict.fromkeys(visit(parent, (*path, digest)) for parent in record.handle.parents))
            config = hidden("config", record.payload["config"])  # earlier versions stored secrets in plain text
            found[record.key] = Ancestor(record.label, record.stage, record.key, record.handle.digest, parents, config)
        return record.label

    for digest in digests:
        visit(digest, ())
    return list(found.values())


def handles(handle: ArtifactRef) -> list[ArtifactRef]:
    """List `handle` and the handles of its folders."""
    fields = [getattr(handle, name) for name in type(handle).model_fields]
    return [handle, *(field for field in fields if isinstance(field, ArtifactRef))]
