"""Unfinished work in a bucket, so that another node goes on with it: the newest checkpoint, and the files beside it.

While a stage runs on a mirror, a thread uploads each new checkpoint behind it. Links to the files are made first, because a
checkpoint is removed when the next one is whole. The record `unfinished/<key>.json`, written last, names the files of one
state, which lie in `work/<key>/<sha256>`; those of the state before are removed then. Parts that ranks on other nodes have
uploaded themselves (`rlhf_core.store.places.place`) are `apart`: whoever goes on gets them when a rank needs them. An
attempt never replaces the work of a later one. A node that takes the lease of a key gets the work if it has none of this
attempt or a later one.
"""

import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.errors import ArtifactError
from rlhf_core.store.fingerprint import hash_file, list_files
from rlhf_core.store.layout import CHECKPOINTS, is_inside, remove_tree
from rlhf_core.store.places import Conflict, Unreachable
from rlhf_core.store.places.mirror import THREADS, Mirror
from rlhf_core.store.places.place import parts_elsewhere, work_of

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""How often a running stage's folder is looked at for a new checkpoint."""


@dataclass
class Keeper:
    """Uploads the checkpoints of attempt `number` at `key`, which works in the folder `work`."""

    mirror: Mirror
    key: str
    number: int
    work: Path
    _uploaded: str = ""
    """Name of the checkpoint that was uploaded last."""
    _known: set[str] = field(default_factory=set)
    """SHA-256 of the files in the bucket that this attempt has uploaded."""
    _apart: set[str] = field(default_factory=set)
    """SHA-256 of those that ranks on other nodes have uploaded for checkpoints that were there at the last look."""

    def look(self) -> bool:
        """Upload the newest checkpoint if it is a new one. Return False if a later attempt has left its own."""
        newest = max((path.name for path in (self.work / CHECKPOINTS).glob("step-*")), default="")
        if not newest or newest == self._uploaded:
            return True
        links = self.mirror.root / "cache" / f"{self.key}.keep"
        remove_tree(links)
        try:
            _link(self.work, newest, links)
            is_ours = self._upload(links)
        except FileNotFoundError:  # removed meanwhile, because a newer one is whole: the next look finds that
            return True
        finally:
            remove_tree(links)
        self._uploaded = newest
        return is_ours

    def _upload(self, links: Path) -> bool:
        paths = {name: links / name for name in list_files(links)}
        with ThreadPoolExecutor(THREADS) as pool:
            digests = dict(zip(paths, pool.map(hash_file, paths.values())))
            new = {digest: paths[name] for name, digest in digests.items() if digest not in self._known}
            put = self.mirror.objects.put_file
            list(pool.map(lambda item: put(f"{work_of(self.key)}{item[0]}", item[1]), new.items()))
        apart = {sha for _, sha in parts_elsewhere(links).values()}
        table = {"attempt": self.number, "files": digests, "apart": sorted(apart)}
        while True:
            found = self.mirror.unfinished.found(f"{self.key}.json")
            if found is not None and not found.dropped and found.value["attempt"] > self.number:
                return False
            with suppress(Conflict):
                self.mirror.unfinished.put(f"{self.key}.json", table, None if found is None else found.version)
                break
        left = {"files": {}} if found is None or found.dropped else found.value
        before = {*left["files"].values(), *(left["apart"] if "apart" in left else ())}  # older versions had none
        in_use = {*digests.values(), *apart, *(sha for _, sha in parts_elsewhere(self.work).values())}
        for digest in (before | self._apart) - in_use:
            self.mirror.objects.delete(f"{work_of(self.key)}{digest}")
        self._known = set(digests.values())
        self._apart = in_use - self._known
        return True


def _link(work: Path, newest: str, links: Path) -> None:
    """Make links to the files of a checkpoint, and copies of those beside the checkpoints, which may grow."""
    inside = {f"{CHECKPOINTS}/{newest}/{name}": os.link for name in list_files(work / CHECKPOINTS / newest)}
    beside = {name: shutil.copyfile for name in list_files(work) if not name.startswith((f"{CHECKPOINTS}/", "."))}
    for name, take in (inside | beside).items():
        (links / name).parent.mkdir(parents=True, exist_ok=True)
        take(work / name, links / name)


@contextmanager
def keeping(mirror: Mirror, key: str, number: int, work: Path) -> Iterator[None]:
    """Upload the checkpoints of a stage while it runs in the block; if it fails or is interrupted, also the last one.

    A bucket that is away costs the copy, which is logged, and not the stage.
    """
    keeper, stop = Keeper(mirror, key, number, work), threading.Event()

    def look() -> bool:
        try:
            return keeper.look()
        except (Unreachable, OSError) as error:
            logger.warning("could not upload a checkpoint of %s: %s", key[:12], error)
            return True

    def watch() -> None:
        while not stop.wait(LOOK_SECONDS) and look():
            pass

    thread = threading.Thread(target=watch, name=f"keeping {key[:8]}", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        stop.set()
        thread.join()
        look()
        raise
    finally:
        stop.set()
        thread.join()


def bring(mirror: Mirror, key: str) -> None:
    """Let this node have the work that another one has left, if it has none of that attempt or a later one."""
    found = mirror.unfinished.get(f"{key}.json")
    folder = mirror.layout.attempt(key)
    numbers = [int(path.name.partition("-")[2]) for path in folder.glob("work-*") if path.name[5:].isdigit()]
    if found is None or found.value["attempt"] <= max(numbers, default=0):
        return
    number, part = found.value["attempt"], folder / ".brought"
    remove_tree(part)
    try:
        _download(mirror, key, found.value["files"], part)
    except (ArtifactError, FileNotFoundError) as error:
        logger.warning("the work of attempt %d at %s, on another node, cannot be used: %s", number, key[:12], error)
        remove_tree(part)
        return
    logger.info("got the work of attempt %d at %s from another node", number, key[:12])
    part.rename(folder / f"work-{number}")


def _download(mirror: Mirror, key: str, files: Mapping[str, str], part: Path) -> None:
    outside = [name for name in files if not is_inside(name)]
    if outside:
        raise ArtifactError("checkpoint", outside[0], "is no path inside a work folder", "the stage starts anew")
    mirror.receive(part, {name: (0, digest) for name, digest in files.items()}, work_of(key))


def forget(mirror: Mirror, key: str) -> None:
    """Remove the unfinished work of a key from the bucket: its result exists, or nobody goes on with it."""
    found = mirror.unfinished.get(f"{key}.json")
    if found is not None:
        with suppress(Conflict):
            mirror.unfinished.drop(f"{key}.json", found.version)
    for name, _, _ in list(mirror.objects.listed(work_of(key))):
        mirror.objects.delete(name)
