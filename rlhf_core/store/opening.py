"""Open the store that lies in a folder, or in the bucket that the folder caches."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from rlhf_core.store.bucket import BucketStore
from rlhf_core.store.disk import DiskStore
from rlhf_core.store.layout import MARKER, object_of, read_json
from rlhf_core.store.protocol import Store, Table


def open_store(root: Path) -> Store:
    """The store behind a folder. A folder that caches a bucket has a marker with its address."""
    uri = (read_json(root / MARKER) or {}).get("mirrors") if (root / MARKER).is_file() else None
    if uri is None:
        return EarlierDiskStore(root)
    from rlhf_core.store.bucket_server import ObstoreServer

    return BucketStore(ObstoreServer(uri), root, uri)


class EarlierDiskStore(DiskStore):
    """A store on a disk that also reads what versions with schema 1 left: records and histories in files of their own."""

    def read(self, name: str) -> Table | None:
        return super().read(name) or (self._earlier(name.partition("/")[2]) if name.startswith("keys/") else None)

    def tables(self, prefix: str) -> Iterator[Table]:
        yield from super().tables(prefix)
        for path in sorted(self.folder.glob("keys/*/*.json")) if prefix == "keys/" else ():
            if not self._table(f"keys/{path.stem}").exists() and (found := self._earlier(path.stem)) is not None:
                yield found

    def _earlier(self, key: str) -> Table | None:
        path = self.folder / "keys" / key[:2] / f"{key}.json"
        facts, past = read_json(path), read_json(self.folder / "attempts" / key / "attempt.json")
        value = {} if past is None else {"label": past["label"], "attempts": past["attempts"]}
        if facts is not None:
            inputs = [object_of(uri) for uri in facts["inputs"] if uri.startswith("store://")]
            record = {"object": object_of(facts["handle"]["fields"]["uri"]), "inputs": inputs, "facts": facts}
            value["record"] = record
        if not value:
            return None
        written = (
            (path if facts is not None else path.parent.parent.parent / "attempts" / key / "attempt.json")
            .stat()
            .st_mtime
        )
        return Table(f"keys/{key}", value, f"earlier {hashlib.sha256(json.dumps(value).encode()).hexdigest()}", written)
