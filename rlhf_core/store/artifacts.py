"""The artifact store: immutable folders addressed by their content, and key records of the stages that made them.

The record, written last and by compare-and-set, is the only commit point. A crash at any instant leaves either no result or a
complete one. Stages get folders; whether the store lies on a disk or in a bucket is hidden behind `rlhf_core.store.protocol`.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from rlhf_core.errors import ArtifactError, ConfigError
from rlhf_core.store import attempts, collection, roots
from rlhf_core.store.attempts import Attempt, AttemptFolder
from rlhf_core.store.collection import KEEP_DAYS, Damage, GcReport, note_use
from rlhf_core.store.earlier import stored_record
from rlhf_core.store.fingerprint import (
    FileEntry,
    hash_files,
    hash_tree,
    list_files,
    regular_status,
    sha256_text,
    tree_digest,
)
from rlhf_core.store.index import load_entries, save_entries
from rlhf_core.store.layout import (
    FORBIDDEN,
    MANIFEST,
    StoreLayout,
    check_schema,
    fsync_tree,
    make_folder,
    mark_schema,
    naming_disk_errors,
    object_of,
    read_json,
    remove_tree,
    write_json,
)
from rlhf_core.store.leases import Lease, Owner, hold, living_owner, name_of, owner_in
from rlhf_core.store.opening import open_store
from rlhf_core.store.protocol import DamagedTable, Gone, StoredTable, update
from rlhf_core.store.records import KeyRecord, Provenance, parse_record
from rlhf_core.store.sharing import give_made, open_to_group, reaching, share
from rlhf_core.store.unfinished import note_holder
from rlhf_core.types import ArtifactRef, kind_of

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=ArtifactRef)
_STORE = "store://"
_FILE = "file://"
LABEL_S = 600.0
"""How long hits of a node do not read a label again that the node has noted. Another node may have replaced it."""
_SETTLED_NS = 2_000_000_000  # two seconds, the coarsest resolution of timestamps (FAT)


class ArtifactStore:
    """The store in the folder `root`, or in the bucket that this folder caches.

    Opening it writes nothing, but sets the umask for a store that a group shares (`rlhf_core.store.sharing`). The folder is
    created by `create`, or by the first lease. Raises ArtifactError if a newer version wrote the store.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root).absolute()
        self.layout = StoreLayout(self.root)
        check_schema(self.root)
        open_to_group(self.root)
        self.shared = open_store(self.root)

    def create(self) -> None:
        """Create the folder, if it does not exist, and mark it with the schema that this version writes."""
        with naming_disk_errors(self.root):
            mark_schema(self.root)

    # ------------------------------------------------------------ reading

    def path(self, ref: ArtifactRef) -> Path:
        """The folder of a handle on this node. Raises ArtifactError if it does not exist or cannot be read."""
        if self.is_external(ref):
            folder = self.folder(ref.uri)
            if not folder.is_dir():
                raise ArtifactError(kind_of(type(ref)), ref.uri, "is gone", "restore the folder")
            return folder
        self.folder(ref.uri)  # for an invalid uri
        folder = self.shared.fetch(object_digest(ref)) / ref.uri.removeprefix(_STORE).partition("/")[2]
        if not folder.is_dir():
            raise ArtifactError(kind_of(type(ref)), ref.uri, f"is not in {self.shared.uri}", "run the pipeline again")
        return folder

    def folder(self, uri: str) -> Path:
        """The folder of an artifact's uri, whether or not it exists on this node."""
        if uri.startswith(_FILE):
            return Path(uri.removeprefix(_FILE))
        if not uri.startswith(_STORE):
            raise ArtifactError("uri", uri, "must begin with store:// or file://", "give another handle")
        digest, _, inside = uri.removeprefix(_STORE).partition("/")
        return self.layout.object(digest) / inside

    def holds(self, ref: ArtifactRef) -> bool:
        """True if `path` finds the artifact."""
        return self.folder(ref.uri).is_dir() if self.is_external(ref) else self.shared.has(object_digest(ref))

    def attempts(self, key: str, lease: Lease | None = None) -> AttemptFolder:
        """The attempts at a key. With the lease, their history can be written."""
        return AttemptFolder(self.shared, key, self.layout.attempt(key), lease)

    def record(self, key: str, lease: Lease | None = None) -> KeyRecord | None:
        """The record of a key if its object is in the store, with all files in their sizes; else None.

        With the lease of the key it is the record as of now; without, it may be as old as the last listing of a bucket. Damage
        is logged as a warning, and the stage runs again. The damaged object stays until it is stored anew.
        """
        return self._look_up(key, lease)[0]

    def damage(self, key: str) -> str:
        """Why the record of a key does not count, or ""."""
        return self._look_up(key)[1]

    def check_inputs(self, refs: Iterable[ArtifactRef]) -> None:
        """Raise ArtifactError for an input that does not match its digest; only files written to are hashed again.

        A missing object raises no error here, but where it is read.
        """
        for ref in refs:
            if self.is_external(ref):
                if self.external(type(ref), Path(ref.uri.removeprefix(_FILE))).digest != ref.digest:
                    rule, remedy = "has changed since its digest was taken", "run again to use its current content"
                    raise ArtifactError(kind_of(type(ref)), ref.uri, rule, remedy)
            else:
                with suppress(Gone):
                    self.shared.fetch(object_digest(ref))

    def records(self) -> list[KeyRecord]:
        """All readable key records, oldest first, without checking their objects. The others are logged."""
        damaged: list[DamagedTable] = []
        records = []
        for table in self.shared.tables("keys/", damaged=damaged):
            record, problem = parse_record(table)
            if record is not None:
                records.append(record)
            elif problem:
                logger.warning("store: %s %s", table.name, problem)
        for error in damaged:
            logger.warning("store: %s", error)
        return sorted(records, key=lambda record: (record.started, record.key))

    def used(self, key: str, lease: Lease | None = None) -> bool:
        """Note that the result of `key` is in use, so that `gc` keeps it; False if it is gone.

        A user who may not write to the store gets a warning.
        """
        try:
            return note_use(self.shared, self._table(key, lease))
        except OSError as error:
            if error.errno not in FORBIDDEN:
                raise
            logger.warning("store: could not record the use of key %s: %s", key[:12], error)
            return True

    def external(self, kind: type[R], path: Path) -> R:
        """A handle for a user's folder outside the store; unchanged files are hashed only once."""
        folder = Path(path).expanduser().absolute()
        if not folder.is_dir():
            raise ArtifactError("path", str(path), "is not a folder", "fix the path")
        digest = tree_digest(self._hash_external(folder))
        return kind(uri=f"{_FILE}{folder}", digest=digest)

    def latest(self, label: str, pipeline: str = "") -> KeyRecord | None:
        """The record that the stage with this label last wrote or reused; None if it has none, or it is gone.

        `pipeline` is the `name` of a profile; "" stands for all of them.
        """
        noted = self.label(label, pipeline) or {}
        keys = [noted[name] for name in ("key", "made") if isinstance(noted.get(name), str) and noted[name]]
        return next((record for record in map(self.record, keys) if record is not None), None)

    def label(self, label: str, pipeline: str = "") -> dict[str, Any] | None:
        """Key, payload and code of the last decision for the stage with this label, in one pipeline or in any."""
        found = self.shared.recent(_label(label, pipeline))
        return None if found is None else found.value

    def note_label(self, label: str, pipeline: str, value: Mapping[str, Any]) -> None:
        """Replace the value that `label` returns, unless it is this one."""
        name = _label(label, pipeline)
        if self.label(label, pipeline) != value:
            update(self.shared, name, lambda _: value)
        if not self.shared.folder_is_shared:
            with suppress(OSError):  # without the note, the next hit reads the label
                write_json(self.root / "cache" / f"{name}.json", value, durable=False)

    def has_noted(self, label: str, pipeline: str, value: Mapping[str, Any]) -> bool:
        """True if this node noted this value less than LABEL_S ago. Reading a label on a disk costs nothing: False."""
        note = self.root / "cache" / f"{_label(label, pipeline)}.json"
        known = None if self.shared.folder_is_shared else read_json(note)
        if known is None or not value.items() <= known.items():
            return False
        return 0 <= time.time() - note.stat().st_mtime < LABEL_S

    def is_external(self, ref: ArtifactRef) -> bool:
        """True if `ref` is a user's own folder, which this store neither keeps nor removes."""
        return ref.uri.startswith(_FILE)

    def living_owner(self, key: str, *, fresh: bool = False) -> Owner | None:
        """The process that computes `key`: now if `fresh`, else as of the last listing of a bucket."""
        return living_owner(self.shared, key, fresh=fresh)

    # ------------------------------------------------------------ writing

    @contextmanager
    def lease(self, key: str, *, on_wait: Callable[[Owner], None] | None = None) -> Iterator[Lease]:
        """Hold the lease on computing `key`; see `rlhf_core.store.leases.hold`."""
        self.create()
        with hold(self.shared, key, on_wait=on_wait) as lease:
            note_holder(lease, self.layout.attempt(key))
            yield lease

    def commit(
        self,
        lease: Lease,
        out: Path,
        kind: type[R],
        *,
        children: Mapping[str, tuple[str, type[ArtifactRef]]],
        record: Provenance,
        parents: Sequence[str] = (),
        pin: str = "",
    ) -> R:
        """Move the folder `out` into the store, write the record of the lease's key, and return the handle.

        `children` maps a field of `kind` to a folder of `out` and the type of its handle. After this call `out` is gone. The
        object is pinned with the note `pin` if that is not empty. Raises Lost, without a record, if the lease was lost.
        """
        with naming_disk_errors(self.root):
            files = _seal(out)
            handle = _handle(kind, files, children, tuple(parents))
            digest = object_digest(handle)
            stored = stored_record(KeyRecord(key=lease.key, handle=handle, **dict(record)).to_json())

            def protect() -> None:
                if pin:
                    roots.pin(self.shared, digest, pin)

            work = attempts.stored_metrics(self.attempts(lease.key, lease), record.attempts)
            lease.commit(digest, out, files, stored, work=work, when_added=protect)
        return handle

    def adopt(self, record: KeyRecord, folder: Path) -> bool:
        """Take a result of another store, whose object is `folder`, with its record; False if its key has one here.

        Raises ArtifactError if the files do not match the digest.
        """
        digest = object_digest(record.handle)
        with naming_disk_errors(self.root), self.lease(record.key) as lease:
            if self.record(record.key, lease) is not None:
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
            lease.commit(digest, out, files, stored_record(record.to_json()))
        return True

    # ------------------------------------------------------------ upkeep

    def verify(self, *, set_aside: bool = False) -> list[Damage]:
        """Read every byte of all objects; with `set_aside`, damaged objects and their records no longer count."""
        return collection.verify(self.shared, set_aside=set_aside)

    def share(self, group: str) -> None:
        """Share the store with a Unix group, after a check that its members can reach it."""
        if not self.shared.folder_is_shared:
            raise ConfigError("store", self.shared.uri, "is a bucket", "give people access to it where it is served")
        reaching(self.root, group)  # before a folder is made
        self.create()
        share(self.root, group)

    def pin(self, target: str, *, note: str = "") -> None:
        """Protect an object from `gc` until it is unpinned; `target` is a digest, a key or a `store://` uri."""
        roots.pin(self.shared, target, note)

    def gc(self, dry_run: bool, *, keep_days: float = KEEP_DAYS, project: str = "") -> GcReport:
        """Remove (or only list) results that neither a root nor a record used in the last `keep_days` reaches."""
        return collection.collect(self.shared, keep_days=keep_days, dry_run=dry_run, project=project)

    def tidy(self, key: str) -> tuple[str, Attempt] | None:
        """Clean up after processes that have ended; label and attempt if one was still recorded as running.

        Checkpoints and shards stay as long as an attempt may resume from them. Nothing is changed while another process
        computes the key.
        """
        folder, found = self.attempts(key), self.shared.recent(name_of(key))
        past = attempts.history(folder)
        is_running = bool(past) and past[-1].status == "running"
        is_left = bool(attempts.unfinished_work(folder)) or attempts.checkpoints(folder).exists()
        is_leased = found is not None and owner_in(found.value) is not None
        if not (is_running or is_left or is_leased) or self.living_owner(key) is not None:
            return None
        with self.lease(key) as lease:
            folder, record = self.attempts(key, lease), self.record(key, lease)
            past = attempts.history(folder)
            # A record of an earlier attempt: this one was to replace it, and was killed before its own commit.
            committed = record is not None and bool(past) and record.attempts == past[-1].number
            ended = attempts.abandon(folder, committed=committed)
            if record is not None and not attempts.is_resumable(folder, record.attempts):
                attempts.clear(folder, keep_metrics=True)
                lease.forget_work(after=record.attempts)
        return ended

    # ------------------------------------------------------------ private

    def _table(self, key: str, lease: Lease | None) -> StoredTable | None:
        """The table of a key. Who holds its lease must not look at a listing, which may be older than the lease."""
        return self.shared.recent(name_of(key)) if lease is None else lease.latest()

    def _look_up(self, key: str, lease: Lease | None = None) -> tuple[KeyRecord | None, str]:
        """The record of a key, or why it does not count."""
        table = self._table(key, lease)
        if table is None:
            return None, ""
        if not table.value.get("record"):
            return None, str((table.value.get("aside") or {}).get("problem", ""))
        record, problem = parse_record(table)
        problem = f"its record {problem}" if record is None else self.shared.problem(object_digest(record.handle))
        if problem:
            logger.warning("store: the artifact of key %s cannot be used: %s", key[:12], problem)
            return None, problem
        return record, ""

    def _hash_external(self, folder: Path) -> dict[str, FileEntry]:
        memory = self.layout.index / f"external-{sha256_text(str(folder))}.json"
        known = load_entries(memory)
        paths = [path for path in list_files(folder) if not any(part.startswith(".") for part in path.split("/"))]
        stats = {path: regular_status(folder / path) for path in paths}
        now = time.time_ns()
        same = {
            path: FileEntry(*known[path][1])
            for path, status in stats.items()
            if path in known and known[path][0] == _identity(status)
        }
        files = same | hash_files(folder, [path for path in paths if path not in same])
        # A file written just now may change again within the resolution of its timestamp: it is not remembered.
        settled = {
            path: [_identity(stats[path]), [entry.size, entry.sha256]]
            for path, entry in files.items()
            if now - max(stats[path].st_mtime_ns, stats[path].st_ctime_ns) > _SETTLED_NS
        }
        if settled != known and self.root.is_dir():  # reading a folder does not create a store
            save_entries(memory, settled)
        return files


def _label(label: str, pipeline: str) -> str:
    return f"labels/{sha256_text(f'{pipeline}{chr(10)}{label}' if pipeline else label)}"


def object_digest(handle: ArtifactRef) -> str:
    """The digest of the object that contains a `store://` handle."""
    return object_of(handle.uri)


def _seal(out: Path) -> dict[str, FileEntry]:
    """Hash the files of `out`, and wait until all of them are on the disk."""
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


def _identity(status: os.stat_result) -> list[int]:
    """Values that change when a file is replaced or written to, even if its modification time stays.

    They are inode, size in bytes, times of modification and of change in nanoseconds, and device.
    """
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev]
