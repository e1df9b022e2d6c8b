import errno
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import ArtifactError
from rlhf_core.store import roots
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.disk import DiskStore
from rlhf_core.store.fingerprint import FileEntry, hash_files, hash_tree, sha256_text, tree_digest
from rlhf_core.store.layout import read_json, write_json
from rlhf_core.store.leases import Lost, name_of
from rlhf_core.store.protocol import DamagedTable, Files, Gone, update
from rlhf_core.types import ArtifactRef, DemonstrationsRef, PolicyRef, PreparedDataRef
from tests.support.records import provenance, write_files

PROVENANCE = provenance()
KEY = sha256_text("key")


def _out(store: ArtifactStore, files: dict[str, str], name: str = "out") -> Path:
    return write_files(store.layout.attempts / name, files)


def _commit(store: ArtifactStore, files: dict[str, str], key: str = KEY, **options: Any) -> Any:
    given = {"kind": PolicyRef, "children": {}, "record": PROVENANCE} | options
    with store.lease(key) as lease:
        return store.commit(lease, _out(store, files), **given)


def _change_record(store: ArtifactStore, key: str, facts: dict[str, Any]) -> None:
    """Change fields of a record."""

    def edit(value: dict[str, Any]) -> dict[str, Any]:
        return value | {"record": value["record"] | {"facts": value["record"]["facts"] | facts}}

    update(store.shared, name_of(key), edit)


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
    files = {"base/w": "1", "demonstrations/train.parquet": "2", "validation.json": "{}"}
    children: dict[str, tuple[str, type[ArtifactRef]]] = {
        "base": ("base", PolicyRef),
        "demonstrations": ("demonstrations", DemonstrationsRef),
    }
    ref = _commit(store, files, kind=PreparedDataRef, children=children, parents=("p",))
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


HARMS: dict[str, Callable[[Path], object]] = {
    "weights is missing": lambda folder: (folder / "weights").unlink(),
    "weights has 1 bytes, not 3": lambda folder: _flip(folder / "weights", "1"),
    "is gone": lambda folder: folder.rename(folder.with_name("elsewhere")),
    "has no readable manifest.json": lambda folder: (folder / "manifest.json").unlink(),
}


@pytest.mark.parametrize("text", HARMS)
def test_damage_is_named_and_the_next_commit_stores_the_object_anew(store, text, caplog):
    folder = store.path(_commit(store, {"weights": "123", "other": "4"}))
    folder.chmod(0o755)
    HARMS[text](folder)
    with caplog.at_level(logging.WARNING):
        assert store.record(KEY) is None
    assert text in caplog.text and text in store.damage(KEY)
    assert store.shared.read(name_of(KEY)).value["record"], "reading changes nothing"
    ref = _commit(store, {"weights": "123", "other": "4"})
    assert (store.path(ref) / "weights").read_text() == "123"
    assert store.record(KEY) is not None and store.damage(KEY) == ""


def test_a_gone_artifact_and_a_foreign_uri_are_refused_by_name(store):
    with pytest.raises(ArtifactError, match=r"artifact = 'abcd': is not in .*run again"):
        store.path(PolicyRef(uri="store://abcd", digest="abcd"))
    with pytest.raises(ArtifactError, match="must begin with"):
        store.path(PolicyRef(uri="http://x", digest="abcd"))


@pytest.mark.parametrize(
    ("files", "text"),
    [({}, "is empty"), ({"manifest.json": "{}"}, "is a name that the store reserves"), ({"a": "1"}, "no files")],
)
def test_an_artifact_that_cannot_be_kept_is_refused(store, files, text):
    (store.layout.attempts / "out").mkdir(parents=True, exist_ok=True)
    with pytest.raises(ArtifactError, match=text):
        _commit(store, files, kind=PreparedDataRef, children={"base": ("base", PolicyRef)})
    assert store.record(KEY) is None and not store.layout.objects.exists()


def test_links_are_refused(store):
    out = _out(store, {"a": "1"})
    (out / "link").symlink_to(out / "a")
    with pytest.raises(ArtifactError, match="is a symbolic link"):
        _commit(store, {})


def test_a_commit_without_the_lease_writes_no_record(store):
    with store.lease(KEY) as lease:
        update(store.shared, name_of(KEY), lambda value: value | {"lease": value["lease"] | {"token": "thief"}})
        with pytest.raises(Lost, match="took the lease over"):
            store.commit(lease, _out(store, {"a": "1"}), PolicyRef, children={}, record=PROVENANCE)
    assert store.record(KEY) is None and store.shared.read(name_of(KEY)).value["lease"]["token"] == "thief"


def test_no_record_is_written_of_an_object_that_is_gone(store, monkeypatch):
    add = DiskStore.add

    def add_and_lose(shared: DiskStore, digest: str, folder: Path, files: Files) -> None:
        add(shared, digest, folder, files)
        shared._object(digest).rename(store.root / "lost")

    monkeypatch.setattr(DiskStore, "add", add_and_lose)
    with pytest.raises(Gone, match="run again to make it again"):
        _commit(store, {"a": "1"})
    assert store.record(KEY) is None


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_full_disk_in_a_commit_leaves_no_record(store, call, monkeypatch):
    out = _out(store, {"a": "1"})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with store.lease(KEY) as lease, monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(ArtifactError, match=r"store = .*: the disk is full; free space, or "):
            store.commit(lease, out, PolicyRef, children={}, record=PROVENANCE)
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
    assert store.record(KEY) is None and store.latest("sft") is None and roots.pins(store.shared) == {}
    assert not store.root.exists()


def test_a_lease_and_a_commit_mark_the_store_with_its_schema(store):
    with store.lease(KEY):
        assert (store.root / "store.json").exists()
    for older in (None, {"schema": 1}):
        (store.root / "store.json").unlink()
        if older is not None:
            write_json(store.root / "store.json", older)
        _commit(ArtifactStore(store.root), {"a": "1"})
        assert read_json(store.root / "store.json") == {"schema": 2}


def test_a_store_of_a_newer_version_is_refused_before_it_is_touched(store):
    write_json(store.root / "store.json", {"schema": 3})
    with pytest.raises(ArtifactError) as caught:
        ArtifactStore(store.root)
    assert str(caught.value) == (
        f"store = {store.root}: was written by a newer version (schema 3, this one knows 2); "
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


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"label": None}, "has no valid label"),
        ({"handle": {"type": "NewRef", "fields": {}}}, "NewRef"),
        ({"key": "0" * 64}, "is the record of another key"),
    ],
)
def test_a_record_that_cannot_be_read_is_named_and_the_others_are_listed(store, facts, problem, caplog):
    _commit(store, {"a": "1"})
    bad = sha256_text("bad")
    _commit(store, {"b": "1"}, key=bad)
    _change_record(store, bad, facts)
    assert [record.key for record in store.records()] == [KEY]
    (said,) = caplog.messages
    assert said.startswith(f"store: {name_of(bad)} ") and problem in said
    assert store.record(bad) is None and problem in store.damage(bad)


def test_a_table_with_other_bytes_than_were_written_is_named_and_verify_sets_it_aside(store, caplog):
    _commit(store, {"a": "1"})
    _commit(store, {"b": "1"}, key=sha256_text("other"))
    path = store.root / "tables" / f"{name_of(KEY)}.json"
    path.write_bytes(path.read_bytes().replace(b"toy", b"tox"))
    with pytest.raises(DamagedTable, match=r"has other content than was written"):
        store.record(KEY)
    assert [record.key for record in store.records()] == [sha256_text("other")]
    assert len(caplog.messages) == 1 and "has other content than was written" in caplog.text
    assert len(store.verify()) == 1 and path.exists()
    assert len(store.verify(set_aside=True)) == 1 and not path.exists()
    assert [file.name.partition(".")[0] for file in (store.root / "quarantine").iterdir()] == [KEY]
    assert store.record(KEY) is None and store.verify() == []


@pytest.mark.parametrize("uri", ["store://", "store://../..", "store://abc", "file:", "store://{digest}/../.."])
def test_a_record_that_points_at_no_object_does_not_count(store, uri):
    _commit(store, {"a": "1"}, key=sha256_text("other"))
    ref = _commit(store, {"b": "2"})
    handle = {"type": "PolicyRef", "fields": {"uri": uri.format(digest=ref.digest), "digest": ref.digest}}
    _change_record(store, KEY, {"handle": handle})
    assert store.record(KEY) is None
    assert "is not the address of an object" in store.damage(KEY)
    assert store.record(sha256_text("other")) is not None


@pytest.mark.parametrize("note", [{}, {"key": "../../x"}, {"key": None}])
def test_a_label_with_values_of_other_types_leads_to_no_record(store, note):
    _commit(store, {"a": "1"})
    store.note_label("toy", "", note)
    assert store.latest("toy") is None


def test_a_damaged_memory_of_an_external_folder_is_forgotten(store, tmp_path, read):
    store.create()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a").write_text("1")
    ref = store.external(PolicyRef, tmp_path / "model")
    (memory,) = store.layout.index.glob("external-*")
    memory.write_text(f"{memory.read_text()} ")
    assert store.external(PolicyRef, tmp_path / "model") == ref and read == ["a", "a"]
