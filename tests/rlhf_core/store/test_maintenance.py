from __future__ import annotations

import json
import os
import time

import pytest

from rlhf_core.errors import ArtifactError
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.attempts import checkpoints
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.maintenance import object_damage
from rlhf_core.types import PolicyRef
from tests.support.records import provenance

DAY = 86400.0


def _commit(store: ArtifactStore, content: str, *, inputs: tuple[str, ...] = (), label: str = "toy") -> PolicyRef:
    out = store.root / "attempts" / "out"
    out.mkdir(parents=True)
    (out / "a.txt").write_text(content)
    record = provenance(label=label, inputs=inputs, metrics={})
    return store.commit(sha256_text(content), out, PolicyRef, children={}, record=record)


def _make_old(store: ArtifactStore, *contents: str, days: float = 40.0) -> None:
    """Set back the last use of the records and the age of their objects."""
    then = time.time() - days * DAY
    for content in contents:
        path = store.layout.key(sha256_text(content))
        record = store.record(sha256_text(content))
        assert record is not None
        os.utime(path, (then, then))
        os.utime(store.path(record.handle), (then, then))


def _left(store: ArtifactStore) -> list[str]:
    return sorted((path / "a.txt").read_text() for path in store.layout.objects.glob("*/*"))


def test_a_flipped_byte_is_found_by_hashing_and_put_into_quarantine(store: ArtifactStore) -> None:
    path = store.path(_commit(store, "12", label="sft")) / "a.txt"
    _commit(store, "34")
    before = path.stat()
    path.chmod(0o644)
    path.write_text("13")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert store.record(sha256_text("12")) is not None, "sizes and times cannot tell"
    damages = store.verify()
    assert [(damage.problem, damage.labels) for damage in damages] == [("a.txt has other content", ("sft",))]
    assert store.record(sha256_text("12")) is None and store.record(sha256_text("34")) is not None
    assert store.verify() == []
    _commit(store, "12", label="sft")
    assert store.record(sha256_text("12")) is not None


def test_a_stray_file_in_an_object_and_a_lost_object_are_damage(store: ArtifactStore) -> None:
    folder = store.path(_commit(store, "1"))
    folder.chmod(0o755)
    (folder / "stray").write_text("x")
    lost = store.path(_commit(store, "2"))
    lost.chmod(0o755)
    lost.rename(store.root / "elsewhere")
    problems = sorted(damage.problem for damage in store.verify())
    assert problems == sorted(["stray is not listed in it", f"{lost} is gone"])


def test_gc_removes_what_was_not_used_for_long_and_a_dry_run_only_lists_it(store: ArtifactStore) -> None:
    for content in ("old", "new"):
        _commit(store, content)
    _make_old(store, "old")
    report = store.gc(dry_run=True)
    assert sorted(item.kind for item in report.items) == ["object", "record"]
    assert report.dry_run and report.bytes > 3 and {item.label for item in report.items} == {"toy"}
    assert _left(store) == ["new", "old"]
    store.gc(dry_run=False)
    assert _left(store) == ["new"]
    assert store.record(sha256_text("old")) is None and store.record(sha256_text("new")) is not None
    assert store.verify() == []


def test_gc_keeps_what_a_recent_result_was_made_from(store: ArtifactStore) -> None:
    grandparent = _commit(store, "grandparent")
    parent = _commit(store, "parent", inputs=(f"{grandparent.uri}/folder",))
    _commit(store, "child", inputs=(parent.uri,))
    _commit(store, "stranger")
    _make_old(store, "grandparent", "parent", "stranger")
    store.gc(dry_run=False)
    assert _left(store) == ["child", "grandparent", "parent"]


def test_gc_keeps_what_was_used_recently_and_what_is_pinned(store: ArtifactStore) -> None:
    refs = {content: _commit(store, content) for content in ("used", "by digest", "by uri", "by key", "gone")}
    _make_old(store, *refs)
    store.used(sha256_text("used"))
    store.pin(refs["by digest"].digest, note="champion")
    store.pin(f"{refs['by uri'].uri}/base")
    store.pin(sha256_text("by key"))
    assert store.pins()[refs["by digest"].digest] == "champion"
    store.gc(dry_run=False)
    assert _left(store) == ["by digest", "by key", "by uri", "used"]
    assert store.record(sha256_text("by uri")) is not None
    store.unpin(refs["by digest"].digest)
    store.gc(dry_run=False)
    assert _left(store) == ["by key", "by uri", "used"]


def test_only_what_is_there_can_be_pinned_or_unpinned(store: ArtifactStore) -> None:
    with pytest.raises(ArtifactError, match="is neither an object nor a key"):
        store.pin("abcd")
    with pytest.raises(ArtifactError, match="is not pinned"):
        store.unpin("abcd")


def test_gc_leaves_an_object_alone_whose_record_may_be_on_its_way(store: ArtifactStore) -> None:
    ref = _commit(store, "young")
    store.layout.key(sha256_text("young")).unlink()
    assert store.gc(dry_run=False).items == ()
    then = time.time() - 7200
    os.utime(store.path(ref), (then, then))
    assert [item.kind for item in store.gc(dry_run=False).items] == ["object"]
    assert _left(store) == []


def test_gc_removes_dead_attempts_but_not_those_of_a_living_owner(store: ArtifactStore) -> None:
    then = time.time() - 40 * DAY
    for name in ("dead", "alive"):
        folder = store.layout.attempt(name)
        folder.mkdir(parents=True)
        (folder / "shard").write_text("x")
        os.utime(folder / "shard", (then, then))
        os.utime(folder, (then, then))
    with store.lease("alive"):
        store.gc(dry_run=False)
    assert [path.name for path in store.layout.attempts.iterdir()] == ["alive"]


def test_gc_removes_checkpoints_of_a_key_that_has_its_result(store: ArtifactStore) -> None:
    _commit(store, "done")
    for key in (sha256_text("done"), sha256_text("not done")):
        (store.layout.attempt(key) / "work-1" / "ckpt" / "step-1").mkdir(parents=True)
    items = store.gc(dry_run=False).items
    assert [(item.kind, item.label) for item in items] == [("attempt", "toy")]
    assert not checkpoints(store.layout.attempt(sha256_text("done"))).exists()
    assert checkpoints(store.layout.attempt(sha256_text("not done"))).exists()


def test_while_a_stage_runs_gc_keeps_the_last_week(store: ArtifactStore) -> None:
    _commit(store, "input")
    _make_old(store, "input", days=2)
    with store.lease("running"):
        assert store.gc(dry_run=False, keep_days=0.0).items == ()
    assert len(store.gc(dry_run=False, keep_days=0.0).items) == 2


def test_an_unreadable_record_is_damage_that_verify_names_and_puts_into_quarantine(store: ArtifactStore) -> None:
    _commit(store, "1", label="sft")
    path = store.layout.key(sha256_text("1"))
    path.write_text("{")
    assert [str(damage) for damage in store.verify()] == [f"record: {path} is not a JSON object"]
    assert store.damage(sha256_text("1")) == "its record is not a JSON object"
    assert store.verify() == []


@pytest.mark.parametrize("what", ["record", "pin"])
def test_gc_removes_no_object_while_nobody_knows_what_an_unreadable_file_reaches(
    store: ArtifactStore, what: str
) -> None:
    for content in ("kept by it", "old"):
        _commit(store, content)
    _make_old(store, "kept by it", "old")
    if what == "record":
        path = store.layout.key(sha256_text("kept by it"))
    else:
        store.pin(sha256_text("kept by it"))
        (path,) = store.layout.pins.iterdir()
    path.write_text("{")
    attempt = store.layout.attempt(sha256_text("old"))
    (attempt / "work-1" / "ckpt").mkdir(parents=True)
    report = store.gc(dry_run=False)
    assert [found.path for found in report.held_back] == [path]
    assert [item.kind for item in report.items] == ["attempt"], "what needs no records still goes"
    assert _left(store) == ["kept by it", "old"]
    if what == "record":
        store.verify()
    else:
        path.unlink()
    assert store.gc(dry_run=False).held_back == () and _left(store) == []


def test_gc_of_a_store_with_missing_and_short_objects_leaves_what_is_in_use(store: ArtifactStore) -> None:
    parent = _commit(store, "parent")
    _commit(store, "child", inputs=(parent.uri, "store://" + "0" * 64))
    lost = store.path(_commit(store, "lost"))
    lost.chmod(0o755)
    lost.rename(store.root / "elsewhere")
    (store.path(parent) / "manifest.json").chmod(0o644)
    (store.path(parent) / "manifest.json").write_text("{")
    assert store.gc(dry_run=False).items == ()
    assert _left(store) == ["child", "parent"]


@pytest.mark.parametrize("name", ["a\0b", "../a.txt", "/etc/passwd", "x" * 300, "", "a//b"])
def test_a_manifest_with_a_name_that_no_file_of_an_object_has_is_not_readable(store: ArtifactStore, name: str) -> None:
    folder = store.path(_commit(store, "one"))
    folder.chmod(0o755)
    (folder / "manifest.json").chmod(0o644)
    (folder / "manifest.json").write_text(json.dumps({"files": {name: {"size": 3, "sha256": "0"}}}))
    assert object_damage(folder, deep=True) == f"{folder} has no readable manifest.json"
