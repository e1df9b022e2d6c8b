"""The artifact store: immutable folders addressed by their content, and key records of the stages that made them.

A folder without a manifest is not an artifact, and an object without a key record does not exist yet: the record,
written last and atomically, is the only commit point. A crash at any instant leaves either no result or a whole one.
"""

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from rlhf_core.errors import ArtifactError
from rlhf_core.store import attempts, leases, maintenance
from rlhf_core.store.attempts import Attempt
from rlhf_core.store.fingerprint import (
    FileEntry,
    hash_files,
    hash_tree,
    list_files,
    regular_status,
    sha256_text,
    tree_digest,
)
from rlhf_core.store.index import Unreadable
from rlhf_core.store.layout import (
    FORBIDDEN,
    MANIFEST,
    StoreLayout,
    bring,
    check_schema,
    fsync_path,
    fsync_tree,
    make_folder,
    make_read_only,
    mark_schema,
    move,
    naming_disk_errors,
    object_of,
    remove_tree,
    write_json,
)
from rlhf_core.store.leases import Lease, Owner
from rlhf_core.store.maintenance import Damage, GcReport
from rlhf_core.store.mirror_upkeep import collect_mirror, verify_mirror
from rlhf_core.store.object_check import object_damage, quarantine_object, set_aside_record
from rlhf_core.store.places import unfinished
from rlhf_core.store.places.local import alone
from rlhf_core.store.places.mirror import Mirror, mirror_of
from rlhf_core.store.records import KeyRecord, Provenance, parse_record
from rlhf_core.store.sharing import give_made, open_to_group
from rlhf_core.store.typed_json import Stored, read_stored
from rlhf_core.types import ArtifactRef, kind_of

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=ArtifactRef)
_STORE = "store://"
_FILE = "file://"
_SETTLED_NS = 2_000_000_000  # two seconds, the coarsest resolution of timestamps (FAT)


class _DamageNote(Stored):
    problem: str


class _LabelNote(Stored):
    key: str = Field(pattern=r"^[0-9a-f]{64}$")
    made: str = ""
    """Key of the last result, while `key` is that of an attempt which has none yet."""


class _RememberedFile(Stored):
    size: int
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    status: dict[str, int] = {}
    """Value of `_identity` for the file; empty in files of older versions."""


class _Memory(Stored):
    files: dict[str, _RememberedFile]


class ArtifactStore:
    """A store in the local folder `root`, shared by all processes that see that folder.

    The folder may mirror a bucket that all nodes share (`rlhf_core.store.places.mirror`). Opening it writes nothing, but sets the umask for one that a group shares (`rlhf_core.store.sharing`): the folder is
    created by `create`, or by the first lease or commit. Raises ArtifactError if a newer version wrote the store.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root).absolute()
        self.layout = StoreLayout(self.root)
        check_schema(self.root)
        open_to_group(self.root)
        self._mirror = mirror_of(self.root)

    def create(self) -> None:
        """Create the folder, if it does not exist, and mark it with the schema that this version writes."""
        with naming_disk_errors(self.root):
            mark_schema(self.root)

    # ------------------------------------------------------------ reading

    def path(self, ref: ArtifactRef) -> Path:
        """Return the folder of a handle, which is fetched if it lies in a bucket. Raises ArtifactError if it does not exist."""
        folder = self.folder(ref.uri)
        if self._mirror is not None and not self.is_external(ref):
            self._mirror.fetch(object_digest(ref))
        if not folder.is_dir():
            remedy = "run the pipeline again to make it, or restore the folder"
            raise ArtifactError(kind_of(type(ref)), ref.uri, f"is not in {self.root}", remedy)
        return folder

    def folder(self, uri: str) -> Path:
        """Return the folder of an artifact's uri, whether or not it still exists."""
        if uri.startswith(_FILE):
            return Path(uri.removeprefix(_FILE))
        if not uri.startswith(_STORE):
            raise ArtifactError("uri", uri, "must begin with store:// or file://", "give another handle")
        digest, _, inside = uri.removeprefix(_STORE).partition("/")
        return self.layout.object(digest) / inside

    def holds(self, ref: ArtifactRef) -> bool:
        """Return whether `path` finds the artifact."""
        return self.folder(ref.uri).is_dir() or (not self.is_external(ref) and self.layout.holds(object_digest(ref)))

    def snapshot(self) -> AbstractContextManager[None]:
        """Read records as they are now: of a bucket all at once, instead of one by one."""
        return nullcontext() if self._mirror is None else self._mirror.snapshot()

    def record(self, key: str) -> KeyRecord | None:
        """Return the record of a key if its object exists and all files have the right sizes, else None.

        Damage is logged as a warning, and record and object are moved into quarantine, so that the stage runs again.
        """
        record, damage = self._check(key)
        if not damage:
            return record
        with alone(self.layout.leases):  # a record that another process has put in its place meanwhile stays
            record, damage = self._check(key)
            if not damage:
                return record
            logger.warning("store: the artifact of key %s is damaged: %s; moved to quarantine", key[:12], damage)
            set_aside_record(self.layout, key, damage)
            if record is not None:
                quarantine_object(self.layout, object_digest(record.handle), damage)
        return None

    def damage(self, key: str) -> str:
        """Return why the last artifact of `key` was moved into quarantine, or an empty string if it was not."""
        noted = read_stored(self.layout.damage(key), _DamageNote)
        return "" if noted is None else noted.problem

    def check_inputs(self, refs: Iterable[ArtifactRef]) -> None:
        """Raise ArtifactError for an input that does not match its digest; only files written to are hashed again.

        A damaged object is moved into quarantine. A missing object raises no error here, but where it is read.
        """
        for ref in refs:
            if self.is_external(ref):
                if self.external(type(ref), Path(ref.uri.removeprefix(_FILE))).digest != ref.digest:
                    rule, remedy = "has changed since its digest was taken", "run again to use its current content"
                    raise ArtifactError(kind_of(type(ref)), ref.uri, rule, remedy)
                continue
            digest = object_digest(ref)
            folder = self.layout.object(digest)
            problem = object_damage(folder, deep=False) if folder.exists() else ""
            if problem and self._mirror is not None:
                self._mirror.drop(digest, problem)
            elif problem:
                with alone(self.layout.leases):
                    problem = object_damage(folder, deep=False) if folder.exists() else problem
                    if problem:
                        quarantine_object(self.layout, digest, problem)
            if problem:
                rule = f"is damaged ({problem}) and was moved to quarantine"
                rule = rule if self._mirror is None else f"was damaged on this node ({problem}), and is fetched again"
                raise ArtifactError(kind_of(type(ref)), ref.uri, rule, "run again to make it again")

    def records(self) -> list[KeyRecord]:
        """Return all readable key records, oldest first, without checking their objects."""
        records, unreadable = self.scan()
        for found in unreadable:
            logger.warning("store: %s", found)
        return records

    def scan(self) -> tuple[list[KeyRecord], list[Unreadable]]:
        """Return the key records, oldest first, and the record files that this version cannot read."""
        bring(self.layout.keys)
        records, unreadable = [], []
        for path in sorted(self.layout.keys.glob("*/*.json")):
            record, problem = parse_record(path)
            if record is not None:
                records.append(record)
            elif problem:
                unreadable.append(Unreadable(path, problem))
        return sorted(records, key=lambda record: (record.started, record.key)), unreadable

    def used(self, key: str) -> bool:
        """Mark the record of `key` as just used, so that `gc` keeps it; return False if it is gone.

        Who may not write to the store gets a warning.
        """
        if self._mirror is not None:
            return self._mirror.used(key)
        try:
            with alone(self.layout.leases):
                os.utime(self.layout.key(key))
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in FORBIDDEN:
                raise
            logger.warning("store: could not record the use of key %s: %s", key[:12], error)
        return True

    def external(self, kind: type[R], path: Path) -> R:
        """Return a handle for a user's folder outside the store; unchanged files are hashed only once."""
        folder = Path(path).expanduser().absolute()
        if not folder.is_dir():
            raise ArtifactError("path", str(path), "is not a folder", "fix the path")
        digest = tree_digest(self._hash_external(folder))
        return kind(uri=f"{_FILE}{folder}", digest=digest)

    def latest(self, label: str, pipeline: str = "") -> KeyRecord | None:
        """Return the record that the stage with this label last wrote or reused; None if it has none, or it is gone.

        `pipeline` is the `name` of a profile; "" stands for all of them.
        """
        noted = read_stored(self.layout.label(label, pipeline), _LabelNote)
        found = (self.record(key) for key in (() if noted is None else (noted.key, noted.made)) if key)
        return next((record for record in found if record is not None), None)

    def is_external(self, ref: ArtifactRef) -> bool:
        """Return whether `ref` is a user's own folder, which this store neither keeps nor removes."""
        return ref.uri.startswith(_FILE)

    # ------------------------------------------------------------ writing

    def lease(self, key: str, *, on_wait: Callable[[Owner], None] | None = None) -> AbstractContextManager[Lease]:
        """Hold the lease on computing `key`; see `rlhf_core.store.leases.hold`."""
        self.create()
        held = leases.hold(self.layout.leases, key, on_wait=on_wait)
        return held if self._mirror is None else _fenced(held, self._mirror, key)

    def keeping(self, key: str, number: int, work: Path) -> AbstractContextManager[None]:
        """Let other nodes go on with the checkpoints that attempt `number` writes in the block; on a disk they can."""
        return nullcontext() if self._mirror is None else unfinished.keeping(self._mirror, key, number, work)

    def forget_work(self, key: str) -> None:
        """Remove the work that `keeping` kept for other nodes."""
        if self._mirror is not None:
            unfinished.forget(self._mirror, key)

    def commit(
        self,
        key: str,
        out: Path,
        kind: type[R],
        *,
        children: Mapping[str, tuple[str, type[ArtifactRef]]],
        record: Provenance,
        parents: Sequence[str] = (),
        lease: Lease | None = None,
        fence: Callable[[], None] = lambda: None,
        pin: str = "",
    ) -> R:
        """Move the folder `out` into the store, write the record of `key`, and return the handle.

        `children` maps a field of `kind` to a folder of `out` and the type of its handle. With a `lease` the record is
        written only while it is still held, and if `fence`, which is called in the lock of the store, raises nothing.
        After this call `out` is gone. The object is pinned with the note `pin` if that is not empty. Raises
        ArtifactError, without a record, if the lease was lost, or the object damaged or removed before its record was
        written.
        """
        with naming_disk_errors(self.root):
            self.create()
            files = _seal(out)
            handle = _handle(kind, files, children, tuple(parents))
            self._store_object(out, files, object_digest(handle))
            if self._mirror is not None:
                self._mirror.store(object_digest(handle))
            committed = KeyRecord(key=key, handle=handle, **dict(record)).to_json()
            with alone(self.layout.leases) if lease is None else lease.undisturbed():
                fence()
                damage = object_damage(self.layout.object(object_digest(handle)), deep=False)
                if damage:
                    raise ArtifactError("artifact", key[:12], f"changed while it was committed: {damage}", "run again")
                if pin:
                    maintenance.write_pin(self.layout, object_digest(handle), pin)
                write_json(self.layout.key(key), committed)
                self.layout.damage(key).unlink(missing_ok=True)
        return handle

    def adopt(self, record: KeyRecord, folder: Path) -> bool:
        """Take a result of another store, whose object is `folder`, with its record; return False if its key has one here.

        Raises ArtifactError if the files are not those of its digest.
        """
        digest = object_digest(record.handle)
        with naming_disk_errors(self.root), self.lease(record.key) as lease:
            if self.record(record.key) is not None:
                return False
            out = self.layout.attempt(record.key) / "out-0"
            remove_tree(out)
            make_folder(out.parent)
            shutil.copytree(folder, out, ignore=shutil.ignore_patterns(MANIFEST), copy_function=shutil.copyfile)
            for parent, _, _ in os.walk(out):
                Path(parent).chmod(0o755)
            files = _seal(out)
            if tree_digest(files) != digest:
                remedy = "run `rlhf store verify` on the store that it is from"
                raise ArtifactError("artifact", digest[:12], "has other content than its digest says", remedy)
            self._store_object(out, files, digest)
            if self._mirror is not None:
                self._mirror.store(digest)
            with lease.undisturbed():
                write_json(self.layout.key(record.key), record.to_json())
        return True

    # ------------------------------------------------------------ upkeep

    def verify(self) -> list[Damage]:
        """Hash every object, move damaged ones and their records into quarantine, and return the damage found."""
        if self._mirror is None:
            return maintenance.verify(self.layout, *self.scan())
        self._mirror.refresh()
        return verify_mirror(self._mirror, *self.scan())

    def pin(self, target: str, *, note: str = "") -> None:
        """Protect an object from `gc` until it is unpinned; `target` is a digest, a key or a `store://` uri."""
        maintenance.pin(self.layout, target, note)

    def unpin(self, target: str) -> None:
        """Remove a pin. Raises ArtifactError if there is none."""
        maintenance.unpin(self.layout, target)

    def pins(self) -> dict[str, str]:
        return maintenance.pins(self.layout)

    def gc(self, dry_run: bool, *, keep_days: float = maintenance.KEEP_DAYS, project: str = "") -> GcReport:
        """Remove (or only list) objects that neither a root nor a record used in the last `keep_days` reaches.

        With a `project`, results of others are kept, too, and attempts and quarantine are left to a collection without
        one. Roots are pins and what waiting runs need (`rlhf_core.store.maintenance`). While a record or a root cannot be read,
        what it reaches is unknown: all records and objects are then kept.
        """
        if self._mirror is not None:
            self._mirror.refresh()
        found = maintenance.collect(self.layout, self.scan, dry_run=dry_run, keep_days=keep_days, project=project)
        return found if self._mirror is None else collect_mirror(self._mirror, self.records(), found)

    def tidy(self, key: str) -> tuple[str, Attempt] | None:
        """Clean up after processes that have ended; return label and attempt if one was still recorded as running.

        Checkpoints and shards stay as long as an attempt may resume from them. Nothing is changed while another process
        computes the key.
        """
        folder = self.layout.attempt(key)
        past = attempts.history(folder)
        is_running = bool(past) and past[-1].status == "running"
        is_left = bool(attempts.unfinished_work(folder)) or attempts.checkpoints(folder).exists()
        is_untidy = is_running or is_left or leases.lease_file(self.layout.leases, key).exists()
        if not is_untidy or leases.living_owner(self.layout.leases, key) is not None:
            return None
        with self.lease(key) as lease:  # taking over and releasing the lease removes that of the dead process
            record = self.record(key)
            with lease.undisturbed():
                past = attempts.history(folder)
                # A record of an earlier attempt: this one was to replace it, and was killed before its own commit.
                committed = record is not None and bool(past) and record.attempts == past[-1].number
                ended = attempts.abandon(folder, committed=committed)
                if record is not None and not attempts.is_resumable(folder, record.attempts):
                    attempts.clear(folder, keep_metrics=True)
        return ended

    # ------------------------------------------------------------ private

    def _check(self, key: str) -> tuple[KeyRecord | None, str]:
        """Return the record of a key and its damage."""
        bring(self.layout.key(key))
        record, problem = parse_record(self.layout.key(key))
        if record is None:
            return None, f"its record {problem}" if problem else ""
        digest = object_digest(record.handle)
        damage = object_damage(self.layout.object(digest), deep=False)
        if self._mirror is None or not damage:
            return record, damage
        if self.layout.object(digest).exists():
            self._mirror.drop(digest, damage)
        return record, "" if self._mirror.has(digest) else f"its object is gone from {self._mirror.bucket.uri}"

    def _store_object(self, out: Path, files: Mapping[str, FileEntry], digest: str) -> None:
        write_json(out / MANIFEST, {"schema": 1, "files": {path: asdict(entry) for path, entry in files.items()}})
        target = self.layout.object(digest)
        make_folder(target.parent)
        while True:
            try:
                move(out, target)
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            if self._keep_one(out, target):
                break
        make_read_only(target)
        fsync_path(target.parent)

    def _keep_one(self, out: Path, target: Path) -> bool:
        """Drop `out` in favour of the existing object, or that if it is damaged; False if it has just gone."""
        with suppress(FileNotFoundError):
            checked = target.stat().st_ino
            damage = object_damage(target, deep=True)
            with alone(self.layout.leases):
                if target.stat().st_ino != checked:
                    return False
                if damage:
                    logger.warning("store: object %s is damaged: %s; replaced", target.name[:12], damage)
                    quarantine_object(self.layout, target.name, damage)
                    move(out, target)
                    return True
                os.utime(target)  # makes it young, so that gc keeps it until our record is written
            remove_tree(out)
            return True
        return False

    def _hash_external(self, folder: Path) -> dict[str, FileEntry]:
        memory = self.layout.externals / f"{sha256_text(str(folder))}.json"
        known = (read_stored(memory, _Memory) or _Memory(files={})).files
        paths = [path for path in list_files(folder) if not any(part.startswith(".") for part in path.split("/"))]
        stats = {path: regular_status(folder / path) for path in paths}
        now = time.time_ns()
        same = {
            path: FileEntry(known[path].size, known[path].sha256)
            for path, status in stats.items()
            if path in known and (known[path].size, known[path].status) == (status.st_size, _identity(status))
        }
        files = same | hash_files(folder, [path for path in paths if path not in same])
        # A file written just now may change again within the resolution of its timestamp: it is not remembered.
        settled = {
            path: entry
            for path, entry in files.items()
            if now - max(stats[path].st_mtime_ns, stats[path].st_ctime_ns) > _SETTLED_NS
        }
        table = {path: asdict(entry) | {"status": _identity(stats[path])} for path, entry in settled.items()}
        remembered = {path: entry.model_dump() for path, entry in known.items()}
        if table != remembered and self.root.is_dir():  # reading a folder does not create a store
            write_json(memory, {"folder": str(folder), "files": table}, durable=False)
        return files


@contextmanager
def _fenced(held: AbstractContextManager[Lease], mirror: Mirror, key: str) -> Iterator[Lease]:
    with held as lease:
        mirror.fence(key)
        unfinished.bring(mirror, key)
        yield lease


def object_digest(handle: ArtifactRef) -> str:
    """Return the digest of the object that a `store://` handle lies in."""
    return object_of(handle.uri)


def _seal(out: Path) -> dict[str, FileEntry]:
    """Return the hashed files of `out`, all of them on the disk."""
    if (out / MANIFEST).exists():
        raise ArtifactError("artifact", MANIFEST, "is a name that the store reserves", "use another name")
    links = [path for path in list_files(out) if (out / path).is_symlink()]
    if links:
        raise ArtifactError("artifact", links[0], "is a symbolic link, which may break later", "copy the file")
    files = hash_tree(out)
    if not files:
        raise ArtifactError("artifact", str(out), "is empty", "write the artifact into context.out")
    give_made(out)
    fsync_tree(out)
    return files


def _handle(
    kind: type[R],
    files: Mapping[str, FileEntry],
    children: Mapping[str, tuple[str, type[ArtifactRef]]],
    parents: tuple[str, ...],
) -> R:
    digest = tree_digest(files)
    fields: dict[str, Any] = {"uri": f"{_STORE}{digest}", "digest": digest, "parents": parents}
    for field, (folder, child_kind) in children.items():
        if not any(path.startswith(f"{folder}/") for path in files):
            raise ArtifactError(
                f"children.{field}", folder, "contains no files", "write files into it, or remove this child"
            )
        child_digest = tree_digest(files, under=folder)
        fields[field] = child_kind(uri=f"{_STORE}{digest}/{folder}", digest=child_digest, parents=parents)
    return kind(**fields)


def _identity(status: os.stat_result) -> dict[str, int]:
    """Return values that change when a file is replaced or written to, even if size and modification time stay."""
    return {
        "device": status.st_dev,
        "inode": status.st_ino,
        "modified_ns": status.st_mtime_ns,
        "changed_ns": status.st_ctime_ns,
    }
