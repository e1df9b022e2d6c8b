"""A folder of a store in a bucket, as the processes of a run find it, each on its own node.

A stage works in its node's mirror of the bucket. Workers on other nodes have mirrors of their own, so they get a `Place`
instead of a path. An artifact is fetched into the cache of the worker's node, once for all processes there. Other folders
(checkpoints, exports) have files that are in no artifact yet: who writes them on another node uploads them, and whoever
reads them gets them from the bucket. A note in the folder names the files of a checkpoint that a rank has uploaded, so
they need not pass through the node of the stage.

On a disk, or where all nodes see one mirror, paths are sent as they are.
"""

import atexit
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf_core.errors import ArtifactError
from rlhf_core.store.fingerprint import hash_tree
from rlhf_core.store.layout import mounted, remove_tree, sweep_temporaries, temporary_for, write_json
from rlhf_core.store.object_check import object_damage
from rlhf_core.store.places.mirror import BLOBS, Files, Mirror, cache_in, store_root

logger = logging.getLogger(__name__)

_NOTE = "elsewhere_"
_marks: dict[Path, Path] = {}
"""Mirror that this process works in -> the file by which others see that they have the same one."""


def work_of(key: str) -> str:
    """Return the prefix in the bucket of the unfinished work of a key."""
    return f"work/{key}/"


@dataclass(frozen=True, slots=True)
class Place:
    """The folder `inside` the mirror `root` of the bucket `uri`.

    `files` has those of an unfinished folder, which lie in the bucket below `under`; None for a folder of an artifact.
    """

    uri: str
    root: Path
    mark: str
    inside: str
    files: Files | None = None

    @property
    def is_here(self) -> bool:
        """Return whether this process has the mirror in which the folder was named."""
        return (self.root / self.mark).exists()

    @property
    def under(self) -> str:
        """Return the prefix in the bucket of its files: what is exported becomes part of an artifact soon."""
        kind, key, work, *_ = (*self.inside.split("/"), "", "")
        return work_of(key) if kind == "attempts" and work.startswith("work-") else BLOBS

    @property
    def is_artifact(self) -> bool:
        return self.inside.startswith("objects/")

    def folder(self) -> Path:
        """Return the folder on this node, for reading. Raises ArtifactError if files are gone or damaged in the bucket."""
        if self.files is None and self.is_here:
            return self.root / self.inside
        mirror = self._mirror()
        if self.files is not None:
            files = self.files
            return _checked(lambda: mirror.gather(files, self.under))
        _, _, digest, *rest = self.inside.split("/")

        def fetch() -> Path:
            mirror.fetch(digest)
            return mirror.layout.object(digest)

        return _checked(fetch).joinpath(*rest)

    def scratch(self) -> Path:
        """Return a new folder of this node in which to write what `upload` takes."""
        root = self._mirror().root / "scratch"
        root.mkdir(parents=True, exist_ok=True)
        sweep_temporaries(root)
        made = temporary_for(root / "part")
        made.mkdir()
        return made

    def upload(self, scratch: Path) -> Files:
        """Upload the files of a folder of `scratch`, which is removed; return them for `receive` or `note_elsewhere`."""
        files = _files(scratch)
        self._mirror().send(scratch, files, self.under)
        remove_tree(scratch)
        return files

    def offered(self) -> "Place":
        """Return the place for readers on other nodes: the files of an unfinished folder are uploaded. Call it where it was named."""
        if self.is_artifact:
            return self
        folder, elsewhere = self.root / self.inside, parts_elsewhere(self.root / self.inside)
        own = {name: entry for name, entry in _files(folder).items() if not Path(name).name.startswith(_NOTE)}
        self._mirror().send(folder, own, self.under)
        return replace(self, files={**elsewhere, **own})

    def receive(self, files: Files) -> None:
        """Write files that another node has uploaded into the folder. Call it where it was named."""
        self._mirror().receive(self.root / self.inside, files, self.under)

    def _mirror(self) -> Mirror:
        return cache_in(self.root if self.is_here else store_root(self.uri), self.uri)


def named(path: Path) -> Place | None:
    """Return the place of a folder that lies in a mirror; None for another one, whose path is the same on all nodes."""
    mirror = mounted(path)
    if not isinstance(mirror, Mirror):
        return None
    if mirror.root not in _marks:
        nodes = mirror.root / "nodes"
        nodes.mkdir(exist_ok=True)
        sweep_temporaries(nodes)
        _marks[mirror.root] = temporary_for(nodes / "driver")
        _marks[mirror.root].touch()
        atexit.register(_marks[mirror.root].unlink, missing_ok=True)
    mark = _marks[mirror.root].relative_to(mirror.root).as_posix()
    return Place(mirror.bucket.uri, mirror.root, mark, path.relative_to(mirror.root).as_posix())


def _files(folder: Path) -> Files:
    return {name: (entry.size, entry.sha256) for name, entry in hash_tree(folder).items()}


def _checked(get: Callable[[], Path]) -> Path:
    """Return a folder of the cache; a damaged copy is removed, and fetched again."""
    for _ in range(2):
        folder = get()
        damage = object_damage(folder, deep=False)
        if not damage:
            return folder
        logger.warning("store: the copy %s is damaged: %s; removed", folder, damage)
        remove_tree(folder)
    raise ArtifactError("artifact", folder.name[:12], f"cannot be fetched ({damage})", "run again to make it again")


# ---------------------------------------------------------------- parts of a checkpoint that another node has uploaded


def note_elsewhere(folder: Path, rank: int, files: Files) -> None:
    """Write down in a folder which files of it a rank has uploaded."""
    table = {name: [size, sha] for name, (size, sha) in files.items()}
    write_json(folder / f"{_NOTE}{rank:05d}.json", {"files": table})


def parts_elsewhere(folder: Path) -> Files:
    """Return the files that ranks have uploaded for the folders below `folder`."""
    found: dict[str, tuple[int, str]] = {}
    for note in folder.rglob(f"{_NOTE}*.json"):
        table: Mapping[str, tuple[int, str]] = json.loads(note.read_text(encoding="utf-8"))["files"]
        found |= {
            (note.parent / name).relative_to(folder).as_posix(): (size, sha) for name, (size, sha) in table.items()
        }
    return found
