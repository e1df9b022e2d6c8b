"""A folder of a store in a bucket, as the processes of a run find it, each on its node.

A stage works in the folder of its node. Workers on other nodes have separate caches, so they get a `NodeFolder` instead
of a path. An artifact is fetched into the cache of the worker's node, once for all processes there. The files of other
folders (checkpoints, exports) belong to no object yet: a rank on another node uploads the files that it writes, under
the token of the lease, and readers download them. A note in the folder names the files of a checkpoint that a rank has
uploaded, so they need not pass through the node of the stage.

On a disk, or where all nodes see one cache, paths are sent unchanged.
"""

import atexit
import secrets
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from rlhf_core.store.bucket import BucketStore
from rlhf_core.store.checkpoint_parts import NOTE, Parts, parts_elsewhere
from rlhf_core.store.fingerprint import list_files
from rlhf_core.store.layout import MARKER, read_json, remove_tree, sweep_temporaries, temporary_for
from rlhf_core.store.opening import bucket_of, open_store, store_root
from rlhf_core.store.unfinished import HOLDER


@dataclass(frozen=True, slots=True)
class NodeFolder:
    """The folder `inside` the cache `root` of the bucket `uri`.

    `files` names the files of an unfinished folder in the bucket; it is None for a folder of an artifact.
    """

    uri: str
    root: Path
    mark: str
    inside: str
    token: str = ""
    """Token of the lease under which unfinished files are uploaded."""
    files: Parts | None = None

    @property
    def is_here(self) -> bool:
        """True if this process sees the cache in which the folder was named."""
        return (self.root / self.mark).exists()

    @property
    def key(self) -> str:
        """Key of the stage whose unfinished work it belongs to."""
        return self.inside.split("/")[1]

    def folder(self) -> Path:
        """The folder on this node, for reading. Raises ArtifactError if files are gone or damaged."""
        if self.files is None and self.is_here:
            return self.root / self.inside
        if self.files is not None:
            return self._store().gather(self.key, self.files)
        _, _, digest, *rest = self.inside.split("/")
        return self._store().fetch(digest).joinpath(*rest)

    def scratch(self) -> Path:
        """A new folder of this node for files that `upload` takes."""
        return self._store().scratch()

    def upload(self, scratch: Path) -> Parts:
        """Upload the files of a folder of `scratch`, which is removed; returns them for `receive` or `note_elsewhere`."""
        owner = f"{self.token}.{secrets.token_hex(8)}"  # never used again
        files = self._store().send(scratch, self.key, owner, {})
        remove_tree(scratch)
        return files

    def offered(self) -> "NodeFolder":
        """The folder for readers on other nodes: its unfinished files are uploaded. Call it where it was named."""
        if self.inside.startswith("objects/"):  # of an artifact
            return self
        folder = self.root / self.inside
        there = {path: entry for path, entry in parts_elsewhere(folder).items() if not (folder / path).exists()}
        links = self.scratch()
        for name in list_files(folder):
            if not Path(name).name.startswith(NOTE):
                (links / name).parent.mkdir(parents=True, exist_ok=True)
                (links / name).hardlink_to(folder / name)
        return replace(self, files={**there, **self.upload(links)})

    def receive(self, files: Parts) -> None:
        """Write files that another node has uploaded into the folder, and delete them there. Call it where it was named."""
        store = self._store()
        store.receive(self.root / self.inside, self.key, files)
        store.drop_work(self.key, {"files": files}, {})

    def _store(self) -> BucketStore:
        """The store of the node that this process runs on."""
        store = open_store(self.root if self.is_here else store_root(self.uri))
        assert isinstance(store, BucketStore)  # `named` gives the folders of no other store
        return store


def named(path: Path) -> NodeFolder | None:
    """The folder at a path of a store in a bucket; None for another one, whose path is the same on all nodes."""
    root = next((one for one in path.absolute().parents if (one / MARKER).is_file()), None)
    uri = None if root is None else bucket_of(root)
    if root is None or uri is None:
        return None
    inside = path.absolute().relative_to(root).as_posix()
    holder = read_json(root / "/".join(inside.split("/")[:2]) / HOLDER) or {"token": ""}
    return NodeFolder(uri, root, _mark_of(root), inside, holder["token"])


@cache
def _mark_of(root: Path) -> str:
    """Name of a file by which other processes see that they have the same cache."""
    nodes = root / "nodes"
    nodes.mkdir(exist_ok=True)
    sweep_temporaries(nodes)
    mark = temporary_for(nodes / "driver")
    mark.touch()
    atexit.register(mark.unlink, missing_ok=True)
    return mark.relative_to(root).as_posix()
