"""A folder of this node that mirrors a store in a bucket, in the layout of a store on a disk.

Records are files here as there: `refresh` lists those of the bucket and gets what has changed; a change is published by
compare-and-set before it is written here. Leases live in the bucket alone. Objects are a cache: fetched when they are first
read, each file checked against its SHA-256, read-only, and evicted by last use when they take more than `RLHF_CACHE_GIB`.
Unfinished work (`attempts/<key>/work-N`) is of the node; its newest checkpoint is uploaded (`rlhf_core.store.places.unfinished`).

    records/<path of the file>      key records, history of attempts, decisions, labels, pins
    leases/<key>.json
    objects/<digest>.json           the manifest, written when all of its files are there
    blobs/<sha256>                  each content once
    unfinished/<key>.json, work/<key>/<sha256>
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

from rlhf_core.errors import ArtifactError, ConfigError
from rlhf_core.store.fingerprint import FileEntry, sha256_text, tree_digest
from rlhf_core.store.layout import (
    MANIFEST,
    MARKER,
    StoreLayout,
    as_text,
    cache_folder,
    folder_bytes,
    is_inside,
    make_read_only,
    mount,
    read_json,
    remove_tree,
    walk,
    write_text,
)
from rlhf_core.store.places import Conflict, Unreachable, Versioned
from rlhf_core.store.places.buckets import (
    SCHEMES,
    Bucket,
    BucketObjects,
    BucketRecords,
    check_address,
    is_same,
    open_bucket,
    probe,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
SHARED = re.compile(r"keys/[^/]+/[^/]+\.json|attempts/[^/]+/attempt\.json|roots/(?!external/).+\.json|used/[^/]+\.json")
"""Paths of the files that all nodes share; the others are of one node."""
_OWNED = re.compile(r"keys/.*|attempts/.*|roots/gates/[^/]+/answer-.*")
"""Those of which another node's change is an error; of the others the last writer wins."""
FRESH_SECONDS = 1.0
"""How long what was read from the bucket counts as its state, but for what is read under a new lease."""
DAY_SECONDS = 86_400.0
"""Age from which files that no record leads to are removed, and after which a use is written down again."""
THREADS = 8
PATIENCE_SECONDS, RETRY_SECONDS = 180.0, 2.0
"""How long files are tried to be moved while the bucket is away, and how often."""
BLOBS = "blobs/"
VIEWS = "views"
"""Folder with copies of unfinished work of other nodes, which are part of the cache."""
Files = Mapping[str, tuple[int, str]]
"""Path inside a folder -> bytes and SHA-256."""


@dataclass
class Mirror:
    """The mirror of `bucket` in the folder `root`. Its methods may be called from several threads and processes."""

    root: Path
    bucket: Bucket
    cache_bytes: float
    records: BucketRecords = field(init=False)
    leases: BucketRecords = field(init=False)
    unfinished: BucketRecords = field(init=False)
    objects: BucketObjects = field(init=False)
    _fresh: dict[str, float] = field(default_factory=dict)
    """Name, or folder, -> when it was last read from the bucket, by the monotonic clock."""
    _frozen: int = 0
    """Number of snapshots that are being read."""
    _fences: dict[str, str | None] = field(default_factory=dict)
    """Name of a key record -> its version when this process took the lease of the key."""
    _manifests: set[str] = field(default_factory=set)
    """Digests of the objects that are known to be in the bucket."""
    _held: dict[str, int] = field(default_factory=dict)
    """Digest -> descriptor of the lock by which this process keeps an object in the cache."""
    _threads: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.records = BucketRecords(self.bucket, "records/")
        self.leases = BucketRecords(self.bucket, "leases/")
        self.unfinished = BucketRecords(self.bucket, "unfinished/")
        self.objects = BucketObjects(self.bucket)
        self.layout = StoreLayout(self.root)

    # ------------------------------------------------------------ records

    def refresh(self, under: str = "") -> None:
        """Bring the records whose path begins with `under` to the state of the bucket, and what is known of its objects."""
        with self._alone():
            there = self.records.versions(under)
            found = {name: (version, at) for name, version, at in there if SHARED.fullmatch(name) and is_inside(name)}
            known = {name for name in self._mirrored() if name.startswith(under)}
            changed = [name for name, (version, _) in found.items() if not is_same(self._version(name), version)]
            with ThreadPoolExecutor(THREADS) as pool:
                for name, record in zip(changed, pool.map(self.records.found, changed)):
                    self._take(name, record, found[name][1])
            for name in known - found.keys():
                self._take(name, None, 0.0)
            self._fresh |= dict.fromkeys((under, *found), time.monotonic())
        if not under:
            listed = self.objects.listed("objects/")
            self._manifests = {Path(name).stem for name, _, _ in listed}

    def bring(self, path: Path, *, now: bool = False) -> None:
        """Bring a shared file, or those in a folder, to the present state; `now` asks even if that was done just now."""
        name = path.relative_to(self.root).as_posix()
        if not now and (self._frozen or self._is_fresh(name)):
            return
        if path.suffix != ".json":
            self.refresh(f"{name}/")
            self._fresh[name] = time.monotonic()
        elif SHARED.fullmatch(name):
            with self._alone():
                record = self.records.found(name)
                if not is_same(None if record is None else record.version, self._version(name)):
                    self._take(name, record, time.time())
                self._fresh[name] = time.monotonic()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Bring all records once; inside the block they count as the present ones, but for what a lease needs."""
        if not self._is_fresh(""):
            self.refresh()
        self._frozen += 1
        try:
            yield
        finally:
            self._frozen -= 1

    def _is_fresh(self, name: str) -> bool:
        read = [self._fresh[one] for one in (name, "") if one in self._fresh]
        return bool(read) and time.monotonic() - max(read) < FRESH_SECONDS

    def publish(self, path: Path, table: Mapping[str, Any]) -> bool:
        """See `Mirrors`. Under a lease that this process took, a key record replaces only what was there at that time."""
        name = path.relative_to(self.root).as_posix()
        if not SHARED.fullmatch(name):
            return False
        with self._alone():
            expected = self._fences[name] if name in self._fences else self._version(name)
            version = self._put(name, lambda known: self.records.put(name, table, known), expected)
            self._take(name, Versioned(dict(table), version), time.time())
            self._fences.pop(name, None)
        return True

    def withdraw(self, path: Path) -> bool:
        """See `Mirrors`."""
        name = path.relative_to(self.root).as_posix()
        if not SHARED.fullmatch(name):
            return False
        with self._alone():
            version = self._version(name)
            if version is not None:
                self._put(name, lambda known: self.records.drop(name, known or ""), version)
            self._take(name, self.records.found(name), time.time())
            if name in self._fences:  # what this process removes under its lease, it may make again
                self._fences[name] = self._version(name)
        return True

    def fence(self, key: str) -> None:
        """Remember the present record of a key, whose lease this process has just taken, and read its history."""
        path = self.layout.key(key)
        self.bring(path, now=True)
        self.bring(self.layout.attempt(key) / "attempt.json", now=True)
        self._fences[path.relative_to(self.root).as_posix()] = self._version(path.relative_to(self.root).as_posix())

    def used(self, key: str) -> bool:
        """Write down, at most once a day, that a result is in use. Return False if its record is gone."""
        path, mark = self.layout.key(key), self.root / "used" / f"{key}.json"
        if not path.exists():
            return False
        if not mark.exists() or time.time() - mark.stat().st_mtime > DAY_SECONDS:
            self.publish(mark, {"key": key})
        os.utime(path)
        return True

    def _put(self, name: str, put: Callable[[str | None], Any], expected: str | None) -> str:
        for _ in range(THREADS):
            try:
                return str(put(expected))
            except Conflict:
                if _OWNED.fullmatch(name):
                    rule = "was changed by another node since it was read here"
                    raise ArtifactError("record", name, rule, "run again") from None
                found = self.records.found(name)
                expected = None if found is None else found.version
        raise ArtifactError("record", name, "is changed by other nodes all the time", "run again")

    def _take(self, name: str, record: Versioned | None, at: float) -> None:
        """Let the file of a record be as it is in the bucket; its time is that of its writing there, or of its last use."""
        path, noted = self.root / name, self._note(name)
        noted.unlink(missing_ok=True)  # first: a file without its version is read again
        if record is None or record.dropped:
            path.unlink(missing_ok=True)
        else:
            write_text(path, as_text(record.value), durable=False)
            os.utime(path, (at, at))
        if record is not None:
            write_text(noted, record.version, durable=False)
        if name.startswith("used/") and record is not None:
            with suppress(FileNotFoundError):
                os.utime(self.layout.key(Path(name).stem), (at, at))

    def _version(self, name: str) -> str | None:
        try:
            return self._note(name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def _note(self, name: str) -> Path:
        return self.root / "versions" / f"{name}.version"

    def _mirrored(self) -> Iterator[str]:
        folder = self.root / "versions"
        for path in walk(folder):
            if path.suffix == ".version":
                yield path.relative_to(folder).as_posix().removesuffix(".version")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads and processes of this node from changing files of the mirror."""
        with self._threads, _locked(self.root / ".mirror", fcntl.LOCK_EX):
            yield

    # ------------------------------------------------------------ objects

    def has(self, digest: str) -> bool:
        """Return whether an object is in the bucket."""
        if digest not in self._manifests and self.objects.found(f"objects/{digest}.json") is not None:
            self._manifests.add(digest)
        return digest in self._manifests

    def store(self, digest: str) -> None:
        """Upload an object that lies in this folder: its files, each content once, and the manifest at the end."""
        folder = self.layout.object(digest)
        if self.objects.found(f"objects/{digest}.json") is None:  # not `has`: another node may have condemned it
            self.send(folder, files_of(folder / MANIFEST), BLOBS)
            self.objects.put_file(f"objects/{digest}.json", folder / MANIFEST)
            self._manifests.add(digest)
        self._keep(digest)
        self.evict()

    def fetch(self, digest: str) -> None:
        """Let an object lie in this folder, complete and checked; keep it there while this process lives.

        Raises ArtifactError if it is not in the bucket, or other content arrives than was stored; then nobody gets it again.
        """
        folder = self.layout.object(digest)
        with self._fetching(digest, folder) as is_missing:
            if is_missing and self.has(digest):
                try:
                    self._download(digest, folder)
                except FileNotFoundError:  # another node has removed it since it was listed
                    self.forget(digest)

    def gather(self, files: Files, under: str) -> Path:
        """Return a folder here with files that `send` has put `under` a prefix, checked and kept as objects are.

        Raises ArtifactError if one is missing, or not what was sent.
        """
        digest = tree_digest({name: FileEntry(*entry) for name, entry in files.items()})
        folder = self.root / VIEWS / digest
        with self._fetching(digest, folder) as is_missing:
            if is_missing:
                part = self._part(digest)
                table = {name: {"size": size, "sha256": sha} for name, (size, sha) in files.items()}
                write_text(part / MANIFEST, as_text({"schema": 1, "files": table}), durable=False)
                self.evict(sum(size for size, _ in files.values()))
                self.receive(part, files, under)
                _settle(part, folder)
        return folder

    def send(self, folder: Path, files: Files, under: str) -> None:
        """Upload files of a folder `under` a prefix, each content once."""

        @_patient
        def upload(content: tuple[str, str]) -> None:
            sha, name = content
            size, at = self.objects.found(f"{under}{sha}") or (-1, 0.0)
            if size != files[name][0] or at < time.time() - DAY_SECONDS / 2:  # made young, so that no gc removes it
                self.objects.put_file(f"{under}{sha}", folder / name)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(upload, {sha: name for name, (_, sha) in files.items()}.items()))

    def receive(self, folder: Path, files: Files, under: str) -> None:
        """Write files that `send` has put `under` a prefix into a folder. Raises ArtifactError for damaged ones."""

        @_patient
        def get(item: tuple[str, tuple[int, str]]) -> None:
            name, (_, sha) = item
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.objects.get_file(f"{under}{sha}", path)
                with path.open("rb") as stream:
                    arrived = hashlib.file_digest(stream, "sha256").hexdigest()
            except FileNotFoundError:
                arrived = ""
            if arrived != sha:
                raise Damaged.of(self.bucket.uri, path.name, sha, is_missing=not arrived)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(get, files.items()))

    def drop(self, digest: str, problem: str) -> None:
        """Remove a damaged object from this folder; it is fetched again when it is next read."""
        logger.warning("store: the copy of object %s in %s is damaged: %s; removed", digest[:12], self.root, problem)
        remove_tree(self.layout.object(digest))

    @contextmanager
    def _fetching(self, digest: str, folder: Path) -> Iterator[bool]:
        """Yield whether a folder of the cache has to be fetched, and keep it here from now on; others wait meanwhile."""
        if digest in self._held and folder.is_dir():
            yield False
            return
        self._keep(digest)  # first: nobody evicts it from now on
        with _locked(self.root / "cache" / f"{digest}.fetch", fcntl.LOCK_EX):
            yield not folder.is_dir()

    def _download(self, digest: str, folder: Path) -> None:
        part = self._part(digest)
        self.objects.get_file(f"objects/{digest}.json", part / MANIFEST)
        files = files_of(part / MANIFEST)
        self.evict(sum(size for size, _ in files.values()))
        try:
            self.receive(part, files, BLOBS)
        except Damaged as damage:
            self.condemn(digest, damage.sha, damage.problem)
            raise
        _settle(part, folder)

    def _part(self, digest: str) -> Path:
        part = self.root / "cache" / f"{digest}.part"
        remove_tree(part)
        part.mkdir(parents=True)
        return part

    def manifest(self, digest: str) -> Path | None:
        """Return the file of an object's manifest, which is fetched once; None if the object is not in the bucket."""
        path = self.root / "cache" / f"{digest}.manifest"
        if not path.exists() and self.has(digest):
            part = path.with_suffix(f".{os.getpid()}")
            part.parent.mkdir(parents=True, exist_ok=True)
            self.objects.get_file(f"objects/{digest}.json", part)
            part.rename(path)
        return path if path.exists() and self.has(digest) else None

    def forget(self, digest: str) -> None:
        """Take note that an object is no longer in the bucket."""
        self._manifests.discard(digest)

    def condemn(self, digest: str, sha: str, problem: str) -> None:
        """Remove a damaged file and the manifest of its object, so that the next run makes and stores it again."""
        logger.warning("store: object %s in %s is damaged: %s; removed", digest[:12], self.bucket.uri, problem)
        self.objects.delete(f"objects/{digest}.json")
        if sha:
            self.objects.delete(f"blobs/{sha}")
        self.forget(digest)

    # ------------------------------------------------------------ the cache

    def evict(self, room: float = 0.0) -> list[str]:
        """Remove the objects that were not used for longest until `room` bytes fit below the limit; return their digests.

        What a living process has read, or what is not in the bucket yet, stays. Raises ArtifactError if that is too much.
        """
        paths = [*self.layout.objects.glob("*/*"), *(self.root / VIEWS).glob("*")]
        sizes = {path: folder_bytes(path) for path in paths}
        total, gone = sum(sizes.values()) + room, []
        for path in sorted(sizes, key=self._last_use):
            if total <= self.cache_bytes:
                break
            if (path.parent.name == VIEWS or self.has(path.name)) and self._try_remove(path):
                total -= sizes[path]
                gone.append(path.name)
        if room and total > self.cache_bytes:
            gib = self.cache_bytes / 2**30
            rule = f"{total / 2**30:.1f} GiB are needed at once, and RLHF_CACHE_GIB is {gib:g}"
            raise ArtifactError("cache", str(self.root), rule, "set a higher RLHF_CACHE_GIB, or end other processes")
        return gone

    def _last_use(self, path: Path) -> float:
        with suppress(FileNotFoundError):
            return self._lock_of(path.name).stat().st_mtime
        return 0.0

    def _try_remove(self, path: Path) -> bool:
        with suppress(BlockingIOError), _locked(self._lock_of(path.name), fcntl.LOCK_EX | fcntl.LOCK_NB):
            remove_tree(path)
            return True
        return False

    def _keep(self, digest: str) -> None:
        with self._threads:
            if digest not in self._held:
                lock = self._lock_of(digest)
                lock.parent.mkdir(parents=True, exist_ok=True)
                self._held[digest] = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                fcntl.flock(self._held[digest], fcntl.LOCK_SH)
                os.utime(lock)

    def _lock_of(self, digest: str) -> Path:
        return self.root / "cache" / f"{digest}.use"


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def _patient(move: Callable[[T], None]) -> Callable[[T], None]:
    """Repeat what moves a file while the bucket is away, for at most `PATIENCE_SECONDS`: a stage would lose its work."""

    @wraps(move)
    def call(item: T) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return move(item)
            except Unreachable as error:
                if time.monotonic() > deadline:
                    raise
                logger.warning("%s; trying again", error)
                time.sleep(RETRY_SECONDS)

    return call


def _settle(part: Path, folder: Path) -> None:
    """Let the files that have arrived in `part` be the folder, read-only."""
    os.utime(part / MANIFEST)  # its time is that of the last good check
    make_read_only(part)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part.chmod(0o755)
    part.rename(folder)
    make_read_only(folder)


class Damaged(ArtifactError):
    """A file of a bucket, of content `sha`, is not what was stored there."""

    sha: str
    problem: str

    @classmethod
    def of(cls, uri: str, name: str, sha: str, *, is_missing: bool) -> "Damaged":
        problem = f"{name} {'is missing' if is_missing else 'has other content'}"
        error = cls("artifact", sha[:12], f"is damaged in {uri}: {problem}", "run again")
        error.sha, error.problem = sha, problem
        return error


def files_of(manifest: Path) -> dict[str, tuple[int, str]]:
    """Return path -> size and SHA-256 of the files in a manifest."""
    table = read_json(manifest) or {"files": {}}
    files = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in table["files"].items()}
    outside = [name for name in files if not is_inside(name)]
    if outside:
        raise ArtifactError(
            "manifest", str(manifest), f"names a file outside of its object: {outside[0]!r}", "run again"
        )
    return files


# ---------------------------------------------------------------- opening


def store_root(place: str) -> Path:
    """Return the folder of a store: the one that `place` names, or the one that mirrors the bucket `s3://...` here.

    Raises ConfigError for an address that is no bucket's, and for a bucket that cannot be reached, or whose server has no
    conditional puts.
    """
    if not place:
        raise ConfigError("store", place, "is empty", "name a folder, or a bucket such as s3://BUCKET/FOLDER")
    if "://" not in place and place.partition(":/")[0].lower() not in SCHEMES:
        return _folder(place)
    check_address(place)
    uri = place.rstrip("/")
    root = cache_folder() / f"{uri.rpartition('/')[2]}-{sha256_text(uri)[:8]}"
    if not (root / MARKER).exists():
        probe(open_bucket(uri))
        write_text(root / MARKER, json.dumps({"mirrors": uri, "schema": 1}, indent=1), durable=True)
    return root


def _folder(place: str) -> Path:
    """The folder of a store on a disk; ConfigError for a text that is the name of none."""
    try:
        found = Path(place).expanduser()
        found.is_dir()  # UnicodeEncodeError and ValueError for signs that no name has
    except (RuntimeError, ValueError, OSError) as error:  # a user that is none; a name that is too long
        rule = f"cannot be a folder ({getattr(error, 'strerror', '') or error})"
        raise ConfigError("store", place, rule, "name a folder, or s3://BUCKET/FOLDER") from None
    return found


_OPEN: dict[Path, Mirror] = {}


def mirror_of(root: Path) -> Mirror | None:
    """Return the mirror in a folder, refreshed if this process has not used it yet; None for a store on a disk."""
    if root in _OPEN:
        return _OPEN[root]
    uri = (read_json(root / MARKER) or {}).get("mirrors") if (root / MARKER).is_file() else None
    if uri is None:
        return None
    mirror = cache_in(root, uri)
    mirror.refresh()
    mount(root, mirror)
    _OPEN[root] = mirror
    return mirror


@cache
def cache_in(root: Path, uri: str) -> Mirror:
    """Return the mirror in a folder for its objects alone: none of its records is read."""
    return Mirror(root, open_bucket(uri), _cache_bytes())


def open_layout(root: Path) -> StoreLayout:
    """Return the paths of the store in a folder; if that mirrors a bucket, its records are brought, now and by later readers."""
    mirror_of(root)
    return StoreLayout(root)


def place_of(root: Path) -> str:
    """Return what names the store in a folder on any node: the address of the bucket that it mirrors, or its path."""
    return str((read_json(root / MARKER) or {}).get("mirrors", root))


def _cache_bytes() -> float:
    given = os.environ["RLHF_CACHE_GIB"] if "RLHF_CACHE_GIB" in os.environ else "500"
    try:
        gib = float(given)
    except ValueError:
        gib = 0.0
    if not gib > 0:  # NaN, too, below which no size is
        raise ConfigError("RLHF_CACHE_GIB", given, "must be a number of GiB above 0", "set it to 500, for example")
    return gib * 2**30
