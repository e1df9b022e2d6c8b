import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhf_core.errors import ArtifactError
from rlhf_core.store import artifacts, leases, maintenance
from rlhf_core.store.artifacts import ArtifactStore, object_digest
from rlhf_core.store.fingerprint import FileEntry, hash_files, hash_tree, sha256_text, tree_digest
from rlhf_core.store.layout import read_json, write_json
from rlhf_core.store.places import local
from rlhf_core.types import ArtifactRef, DemonstrationsRef, PolicyRef, PreparedDataRef
from tests.support.records import provenance, write_files

PROVENANCE = provenance()
KEY = sha256_text("key")


def _out(store: ArtifactStore, files: dict[str, str], name: str = "out") -> Path:
    return write_files(store.layout.attempts / name, files)


def _commit(store: ArtifactStore, files: dict[str, str], key: str = KEY) -> PolicyRef:
    return store.commit(key, _out(store, files), PolicyRef, children={}, record=PROVENANCE)


def _object(store: ArtifactStore, ref: ArtifactRef) -> Path:
    return store.layout.object(object_digest(ref))


def test_a_commit_moves_the_folder_and_its_digest_is_that_of_the_files(store, tmp_path):
    ref = _commit(store, {"a.txt": "1", "sub/b.txt": "2"})
    assert not (store.root / "attempts" / "out").exists()
    assert (store.path(ref) / "sub" / "b.txt").read_text() == "2"
    (tmp_path / "same" / "sub").mkdir(parents=True)
    (tmp_path / "same" / "a.txt").write_text("1")
    (tmp_path / "same" / "sub" / "b.txt").write_text("2")
    assert ref.digest == tree_digest(hash_tree(tmp_path / "same"))
    assert ref.uri == f"store://{ref.digest}"
    record = store.record(KEY)
    assert record is not None and record.handle == ref and record.metrics == {"loss": 0.5}
    assert [item.key for item in store.records()] == [KEY]


def test_objects_are_read_only(store):
    folder = store.path(_commit(store, {"a": "1", "sub/b": "2"}))
    modes = {path.stat().st_mode & 0o222 for path in (folder, folder / "a", folder / "sub", folder / "sub" / "b")}
    assert modes == {0}


def test_children_are_handles_with_the_digest_of_their_folder(store):
    out = _out(store, {"base/w": "1", "demonstrations/train.parquet": "2", "validation.json": "{}"})
    children: dict[str, tuple[str, type[ArtifactRef]]] = {
        "base": ("base", PolicyRef),
        "demonstrations": ("demonstrations", DemonstrationsRef),
    }
    ref = store.commit(KEY, out, PreparedDataRef, children=children, record=PROVENANCE, parents=("p",))
    alone = _commit(store, {"w": "1"}, key=sha256_text("other"))
    assert ref.base is not None and ref.base.digest == alone.digest and ref.base.parents == ("p",)
    assert (store.path(ref.base) / "w").read_text() == "1"
    assert isinstance(ref.demonstrations, DemonstrationsRef) and ref.prompts is None
    record = store.record(KEY)
    assert record is not None and record.handle == ref


def test_the_same_content_is_kept_once(store):
    first = _commit(store, {"a": "1"})
    second = _commit(store, {"a": "1"}, key=sha256_text("other"))
    assert first == second
    assert len(list(store.layout.objects.glob("*/*"))) == 1
    assert len(store.records()) == 2
    assert not (store.root / "attempts" / "out").exists()


def test_a_commit_replaces_a_damaged_object_of_the_same_content(store):
    ref = _commit(store, {"a": "1"})
    _flip(store.path(ref) / "a", "2")
    _commit(store, {"a": "1"})
    assert (store.path(ref) / "a").read_text() == "1"
    assert store.verify() == []


def _flip(path: Path, content: str) -> None:
    path.chmod(0o644)
    path.write_text(content)


HARMS: dict[str, Callable[[Path, Path], object]] = {
    "weights is missing": lambda folder, record: (folder / "weights").unlink(),
    "weights has 1 bytes, not 3": lambda folder, record: _flip(folder / "weights", "1"),
    "is gone": lambda folder, record: folder.rename(folder.with_name("elsewhere")),
    "has no readable manifest.json": lambda folder, record: (folder / "manifest.json").unlink(),
    "its record has no valid label": lambda folder, record: record.write_text('{"key": "x"}'),
}


@pytest.mark.parametrize("text", HARMS)
def test_damage_is_named_and_put_into_quarantine_so_that_the_key_is_free(store, text, caplog):
    folder = store.path(_commit(store, {"weights": "123", "other": "4"}))
    folder.chmod(0o755)
    HARMS[text](folder, store.layout.key(KEY))
    with caplog.at_level(logging.WARNING):
        assert store.record(KEY) is None
    assert text in caplog.text
    assert not store.layout.key(KEY).exists()
    assert list(store.layout.quarantine.iterdir())
    ref = _commit(store, {"weights": "123", "other": "4"})
    assert (store.path(ref) / "weights").read_text() == "123"
    assert store.record(KEY) is not None


def test_a_gone_artifact_and_a_foreign_uri_are_refused_by_name(store):
    with pytest.raises(ArtifactError, match=r"policy = 'store://abcd'"):
        store.path(PolicyRef(uri="store://abcd", digest="abcd"))
    with pytest.raises(ArtifactError, match="must begin with"):
        store.path(PolicyRef(uri="http://x", digest="abcd"))


@pytest.mark.parametrize(
    ("files", "text"),
    [({}, "is empty"), ({"manifest.json": "{}"}, "is a name that the store reserves"), ({"a": "1"}, "no files")],
)
def test_an_artifact_that_cannot_be_kept_is_refused(store, files, text):
    out = _out(store, files)
    out.mkdir(parents=True, exist_ok=True)
    with pytest.raises(ArtifactError, match=text):
        store.commit(KEY, out, PreparedDataRef, children={"base": ("base", PolicyRef)}, record=PROVENANCE)
    assert store.record(KEY) is None and not store.layout.objects.exists()


def test_links_are_refused(store):
    out = _out(store, {"a": "1"})
    (out / "link").symlink_to(out / "a")
    with pytest.raises(ArtifactError, match="is a symbolic link"):
        store.commit(KEY, out, PolicyRef, children={}, record=PROVENANCE)


def test_a_commit_without_the_lease_writes_no_record(store):
    with store.lease(KEY) as lease:
        stolen = {**{name: getattr(lease.owner, name) for name in lease.owner.__slots__}, "token": "thief"}
        write_json(store.layout.leases / f"{KEY}.json", stolen)
        with pytest.raises(ArtifactError, match="took the lease over"):
            store.commit(KEY, _out(store, {"a": "1"}), PolicyRef, children={}, record=PROVENANCE, lease=lease)
    assert store.record(KEY) is None


def test_from_the_check_of_the_lease_to_the_record_nobody_takes_it_over(store, monkeypatch):
    wrote = []

    def write(path: Path, value: dict[str, object]) -> None:
        if path == store.layout.key(KEY):
            with (store.layout.leases / ".lock").open() as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            wrote.append(path)
        write_json(path, value)

    monkeypatch.setattr(artifacts, "write_json", write)
    with store.lease(KEY) as lease:
        store.commit(KEY, _out(store, {"a": "1"}), PolicyRef, children={}, record=PROVENANCE, lease=lease)
    assert len(wrote) == 1


@pytest.mark.parametrize("reader", ["record", "check_inputs", "verify", "commit"])
def test_who_found_damage_leaves_alone_what_another_process_has_repaired_since(store, monkeypatch, reader):
    ref = _commit(store, {"a": "1"})
    weights = store.path(ref) / "a"
    _flip(weights, "23")
    alone, repaired = local.alone, []

    @contextmanager
    def late(folder: Path) -> Iterator[None]:
        """Let another process repair the object before this one gets the lock."""
        if not repaired:
            repaired.append(folder)
            theirs = _out(store, {"a": "1"}, "theirs")
            store.commit(KEY, theirs, PolicyRef, children={}, record=PROVENANCE)
        with alone(folder):
            yield

    for module in (artifacts, leases, maintenance):
        monkeypatch.setattr(module, "alone", late)
    calls: dict[str, Callable[[], object]] = {
        "record": lambda: store.record(KEY),
        "check_inputs": lambda: store.check_inputs([ref]),
        "verify": store.verify,
        "commit": lambda: _commit(store, {"a": "1"}, sha256_text("other")),
    }
    calls[reader]()
    assert len(repaired) == 1 and weights.read_text() == "1"
    assert store.record(KEY) is not None and store.verify() == []


def test_no_record_is_written_of_an_object_that_is_gone(store, monkeypatch):
    def lose(folder: Path) -> None:
        folder.rename(store.root / "lost")
        folder.mkdir()

    monkeypatch.setattr(artifacts, "make_read_only", lose)
    with pytest.raises(ArtifactError, match="changed while it was committed"):
        _commit(store, {"a": "1"})
    assert store.record(KEY) is None


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_full_disk_in_a_commit_leaves_no_record(store, call, monkeypatch):
    out = _out(store, {"a": "1"})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(ArtifactError, match=r"store = .*: the disk is full; free space, or "):
            store.commit(KEY, out, PolicyRef, children={}, record=PROVENANCE)
    assert store.record(KEY) is None
    assert store.verify() == []


# ---------------------------------------------------------------- folders outside the store


def test_an_external_folder_has_the_digest_of_its_visible_files(store, tmp_path):
    model = tmp_path / "model"
    (model / ".cache").mkdir(parents=True)
    (model / ".cache" / "junk").write_text("x")
    (model / "config.json").write_text("{}")
    ref = store.external(PolicyRef, model)
    assert ref.uri == f"file://{model}" and store.path(ref) == model
    assert ref.digest == _commit(store, {"config.json": "{}"}).digest
    (model / ".cache" / "junk").write_text("y")
    assert store.external(PolicyRef, model) == ref
    (model / "config.json").write_text("[]")
    assert store.external(PolicyRef, model).digest != ref.digest


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """The files that were hashed. The clock is ten seconds ahead: what was written just now is never remembered."""
    found: list[str] = []

    def hashed(folder: Path, paths: Iterable[str]) -> dict[str, FileEntry]:
        wanted = list(paths)
        found.extend(wanted)
        return hash_files(folder, wanted)

    now = time.time_ns
    monkeypatch.setattr("rlhf_core.store.artifacts.hash_files", hashed)
    monkeypatch.setattr("rlhf_core.store.artifacts.time.time_ns", lambda: now() + 10_000_000_000)
    return found


def test_an_unchanged_external_folder_is_not_read_again(store, tmp_path, read):
    store.create()
    model = tmp_path / "model"
    model.mkdir()
    (model / "v").write_text("1")
    (model / "w").write_text("1")
    ref = store.external(PolicyRef, model)
    assert store.external(PolicyRef, model) == ref and read == ["v", "w"]
    (model / "w").write_text("2")
    assert store.external(PolicyRef, model) != ref and read == ["v", "w", "w"]


def test_a_file_replaced_by_one_of_its_size_and_time_is_seen(store, tmp_path, read):
    store.create()
    model = tmp_path / "model"
    model.mkdir()
    (model / "w").write_text("old")
    before = store.external(PolicyRef, model)
    status = (model / "w").stat()
    (tmp_path / "new").write_text("new")
    (tmp_path / "new").replace(model / "w")
    os.utime(model / "w", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (model / "w").stat().st_mtime_ns == status.st_mtime_ns
    assert store.external(PolicyRef, model).digest != before.digest
    (model / "w").write_text("old")  # in place, and put back to its time
    os.utime(model / "w", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert store.external(PolicyRef, model).digest == before.digest


def test_an_external_folder_must_be_there(store, tmp_path):
    with pytest.raises(ArtifactError, match="is not a folder"):
        store.external(PolicyRef, tmp_path / "nowhere")


# ---------------------------------------------------------------- which version wrote it


def test_looking_at_a_store_that_is_not_there_does_not_make_it(store, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w").write_text("1")
    store.external(PolicyRef, tmp_path / "model")
    assert store.records() == [] and store.verify() == [] and store.gc(dry_run=False).items == ()
    assert store.record(KEY) is None and store.latest("sft") is None and store.pins() == {}
    assert not store.root.exists()


def test_a_lease_and_a_commit_mark_the_store_with_its_schema(store):
    with store.lease(KEY):
        assert (store.root / "store.json").exists()
    (store.root / "store.json").unlink()  # as in a store of the time before the marker: schema 1
    _commit(ArtifactStore(store.root), {"a": "1"})
    assert read_json(store.root / "store.json") == {"schema": 1}


def test_a_store_of_a_newer_version_is_refused_before_it_is_touched(store):
    write_json(store.root / "store.json", {"schema": 2})
    with pytest.raises(ArtifactError) as caught:
        ArtifactStore(store.root)
    assert str(caught.value) == (
        f"store = {store.root}: was written by a newer version (schema 2, this one knows 1); "
        "upgrade, or choose another folder with RLHF_HOME or `store`"
    )
    assert [path.name for path in store.root.iterdir()] == ["store.json"]


def test_a_file_is_no_store(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match="is a file; name a folder"):
        ArtifactStore(tmp_path / "file")


@pytest.mark.parametrize("content", ["", "{}", '{"schema": "x"}'])
def test_a_marker_that_cannot_be_read_is_refused_with_what_to_do(store, content):
    store.create()
    (store.root / "store.json").write_text(content)
    with pytest.raises(
        ArtifactError, match=r"the file store\.json in it cannot be read; delete .*store\.json if this version"
    ):
        ArtifactStore(store.root)


def test_a_record_that_cannot_be_read_is_named_and_the_others_are_listed(store):
    _commit(store, {"a": "1"})
    bad = {"no table": "{", "no fields": "{}", "unknown handle": '{"handle": {"type": "NewRef", "fields": {}}}'}
    for name, content in bad.items():
        path = store.layout.key(sha256_text(name))
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    records, unreadable = store.scan()
    assert [record.key for record in records] == [KEY]
    said = {found.path.stem: found.problem for found in unreadable}
    assert said[sha256_text("no table")] == "is not a JSON object"
    assert said[sha256_text("no fields")].startswith("has no valid label: ")
    assert "NewRef" in said[sha256_text("unknown handle")]
    assert store.record(sha256_text("no table")) is None
    assert store.damage(sha256_text("no table")) == "its record is not a JSON object"


@pytest.mark.parametrize("uri", ["store://", "store://../..", "store://abc", "file:", "store://{digest}/../.."])
def test_a_record_that_points_at_no_object_is_put_aside_alone(store, uri):
    other = _commit(store, {"a": "1"}, key=sha256_text("other"))
    ref = _commit(store, {"b": "2"})
    table = read_json(store.layout.key(KEY))
    table["handle"]["fields"]["uri"] = uri.format(digest=ref.digest)
    write_json(store.layout.key(KEY), table)
    assert store.record(KEY) is None
    assert "is not the address of an object" in store.damage(KEY)
    assert _object(store, other).is_dir() and _object(store, ref).is_dir()
    assert store.record(sha256_text("other")) is not None


def test_a_record_in_the_place_of_another_is_put_aside(store):
    _commit(store, {"a": "1"}, key=sha256_text("other"))
    table = read_json(store.layout.key(sha256_text("other")))
    assert table is not None
    write_json(store.layout.key(KEY), table)
    assert store.record(KEY) is None
    assert "is the record of another key" in store.damage(KEY)


@pytest.mark.parametrize("note", [{}, {"problem": 5, "key": "../../x"}, {"key": "k" * 300}, {"key": None}])
def test_notes_with_values_of_other_types_are_none(store, note):
    _commit(store, {"a": "1"})
    write_json(store.layout.damage(KEY), note)
    write_json(store.layout.label("toy"), note)
    assert store.damage(KEY) == ""
    assert store.latest("toy") is None


@pytest.mark.parametrize("table", [{}, {"files": []}, {"files": {"a": {"size": 1}}}, {"files": {"a": 5}}])
def test_a_memory_of_an_external_folder_with_other_types_is_forgotten(store, tmp_path, table):
    model = tmp_path / "model"
    model.mkdir()
    (model / "a").write_text("1")
    ref = store.external(PolicyRef, model)
    write_json(store.layout.externals / f"{sha256_text(str(model))}.json", table)
    assert store.external(PolicyRef, model) == ref
