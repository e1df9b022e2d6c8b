import json
import os
import time
from pathlib import Path

import pytest

from rlhf_core.errors import ArtifactError
from rlhf_core.stage.gate_decisions import GateDecisions, Question
from rlhf_core.store import attempts, collection, roots
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.attempts import checkpoints
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.leases import name_of
from rlhf_core.store.object_check import object_damage
from rlhf_core.store.protocol import discard
from rlhf_core.store.roots import forget_wait, note_wait
from rlhf_core.types import PolicyRef
from tests.support.records import commit_text, provenance, write_files

DAY = 86400.0


def _make_old(store: ArtifactStore, *contents: str, days: float = 40.0) -> None:
    """Set back the last use of the records and the age of their objects."""
    then = time.time() - days * DAY
    for content in contents:
        path = table_file(store, f"keys/{sha256_text(content)}")
        record = store.record(sha256_text(content))
        assert record is not None
        os.utime(path, (then, then))
        os.utime(store.path(record.handle), (then, then))


def table_file(store: ArtifactStore, name: str) -> Path:
    """The file of a table of a store on a disk."""
    return store.root / "tables" / f"{name}.json"


def _left(store: ArtifactStore) -> list[str]:
    return sorted((path / "a.txt").read_text() for path in store.layout.objects.glob("*/*"))


def flip(path: Path) -> None:
    """Change the content of a file, but neither its size nor its times."""
    before = path.stat()
    path.chmod(0o644)
    path.write_text("13")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_flipped_byte_is_found_by_hashing_and_only_set_aside_on_request(store):
    path = store.path(commit_text(store, "12", label="sft")) / "a.txt"
    commit_text(store, "34")
    flip(path)
    for _ in range(2):
        damages = store.verify()
        assert [(one.problem, one.labels, one.aside) for one in damages] == [
            ("a.txt has other content", ("sft",), False)
        ]
        assert store.record(sha256_text("12")) is not None, "sizes and times cannot tell, and nothing was changed"
    (damage,) = store.verify(set_aside=True)
    assert damage.aside and store.verify() == []
    assert store.record(sha256_text("12")) is None and store.record(sha256_text("34")) is not None
    assert store.damage(sha256_text("12")) == "a.txt has other content"
    commit_text(store, "12", label="sft")
    assert store.record(sha256_text("12")) is not None


def test_what_was_set_aside_can_be_restored_if_it_is_sound(store):
    ref = commit_text(store, "12", label="sft")
    path = store.path(ref) / "a.txt"
    flip(path)
    store.verify(set_aside=True)
    with pytest.raises(ArtifactError, match=r"is damaged \(a.txt has other content\); run the stage again"):
        collection.restore(store.shared, sha256_text("12"))
    (aside,) = (store.root / "quarantine").glob(f"{ref.digest}.*")
    (aside / "a.txt").write_text("12")  # the disk reads right again
    collection.restore(store.shared, sha256_text("12"))
    assert store.record(sha256_text("12")) is not None and store.verify() == []
    with pytest.raises(ArtifactError, match="has no record that was set aside"):
        collection.restore(store.shared, sha256_text("12"))


def test_a_stray_file_in_an_object_and_a_lost_object_are_damage(store):
    folder = store.path(commit_text(store, "1"))
    folder.chmod(0o755)
    (folder / "stray").write_text("x")
    lost = store.path(commit_text(store, "2"))
    lost.chmod(0o755)
    lost.rename(store.root / "elsewhere")
    problems = sorted(damage.problem for damage in store.verify())
    assert problems == sorted(["stray is not listed in it", f"{lost} is gone"])


def test_gc_removes_what_was_not_used_for_long_and_a_dry_run_only_lists_it(store):
    for content in ("old", "new"):
        commit_text(store, content)
    _make_old(store, "old")
    report = store.gc(dry_run=True)
    assert sorted(item.kind for item in report.items) == ["object", "record"]
    assert report.dry_run and report.bytes > 3 and {item.label for item in report.items} == {"toy"}
    for days in (-1.0, float("nan")):
        with pytest.raises(ArtifactError, match=r"keep_days = .*: must be 0 or more"):
            store.gc(dry_run=False, keep_days=days)
    assert _left(store) == ["new", "old"]
    store.gc(dry_run=False)
    assert _left(store) == ["new"]
    assert store.record(sha256_text("old")) is None and store.record(sha256_text("new")) is not None


def test_gc_of_a_project_leaves_results_attempts_and_quarantine_of_others_alone(store):
    for content, project in (("ours", "bot"), ("theirs", "shop"), ("nobody's", "")):
        commit_text(store, content, project=project)
    _make_old(store, "ours", "theirs", "nobody's")
    (store.root / "quarantine" / "x").mkdir(parents=True)
    (store.layout.attempt("k") / "work-1").mkdir(parents=True)
    report = store.gc(dry_run=False, keep_days=0.0, project="bot")
    assert sorted(item.kind for item in report.items) == ["object", "record"]
    assert _left(store) == ["nobody's", "theirs"] and {why for _, why in report.kept} == {"is of another project"}
    assert len(store.gc(dry_run=True, keep_days=0.0).items) == 6
    assert store.verify() == []


def test_gc_keeps_what_a_recent_result_was_made_from(store):
    grandparent = commit_text(store, "grandparent")
    parent = commit_text(store, "parent", inputs=(f"{grandparent.uri}/folder",))
    commit_text(store, "child", inputs=(parent.uri,))
    commit_text(store, "stranger")
    _make_old(store, "grandparent", "parent", "stranger")
    store.gc(dry_run=False)
    assert _left(store) == ["child", "grandparent", "parent"]


def test_gc_keeps_what_was_used_recently_and_what_is_pinned(store):
    refs = {content: commit_text(store, content) for content in ("used", "by digest", "by uri", "by key", "gone")}
    _make_old(store, *refs)
    store.used(sha256_text("used"))
    store.pin(refs["by digest"].digest, note="champion")
    store.pin(f"{refs['by uri'].uri}/base")
    store.pin(sha256_text("by key"))
    assert roots.pins(store.shared)[refs["by digest"].digest] == "champion"
    store.gc(dry_run=False)
    assert _left(store) == ["by digest", "by key", "by uri", "used"]
    assert store.record(sha256_text("by uri")) is not None
    roots.unpin(store.shared, refs["by digest"].digest)
    store.gc(dry_run=False)
    assert _left(store) == ["by key", "by uri", "used"]


def test_only_what_is_there_can_be_pinned_or_unpinned(store):
    ref = commit_text(store, "1")
    for name in ("abcd", "", ref.digest[:2], f"../{store.root.name}"):
        with pytest.raises(ArtifactError, match=r"is neither an object nor a key .* `rlhf store ls --json`"):
            store.pin(name)
    with pytest.raises(ArtifactError, match="is not pinned"):
        roots.unpin(store.shared, "abcd")


def test_gc_leaves_an_object_alone_whose_record_may_be_on_its_way(store):
    ref = commit_text(store, "young")
    discard(store.shared, name_of(sha256_text("young")))
    assert store.gc(dry_run=False).items == ()
    then = time.time() - 7200
    os.utime(store.path(ref), (then, then))
    assert [item.kind for item in store.gc(dry_run=False).items] == ["object"]
    assert _left(store) == []


def test_gc_removes_dead_attempts_but_not_those_of_a_living_owner(store):
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


def test_gc_removes_checkpoints_of_a_key_that_has_its_result(store):
    commit_text(store, "done")
    for key in (sha256_text("done"), sha256_text("not done")):
        (store.layout.attempt(key) / "work-1" / "ckpt" / "step-1").mkdir(parents=True)
    items = store.gc(dry_run=False).items
    assert [(item.kind, item.label) for item in items] == [("attempt", "toy")]
    assert not checkpoints(store.attempts(sha256_text("done"))).exists()
    assert checkpoints(store.attempts(sha256_text("not done"))).exists()


def test_while_a_stage_runs_gc_keeps_the_last_week(store):
    commit_text(store, "input")
    _make_old(store, "input", days=2)
    with store.lease("running"):
        assert store.gc(dry_run=False, keep_days=0.0).items == ()
    assert len(store.gc(dry_run=False, keep_days=0.0).items) == 2


def test_an_unreadable_table_is_damage_that_verify_names_and_sets_aside_on_request(store):
    commit_text(store, "1", label="sft")
    path = table_file(store, f"keys/{sha256_text('1')}")
    path.write_text("{")
    (damage,) = store.verify()
    assert str(path) in str(damage) and "has other content than was written" in str(damage)
    with pytest.raises(ArtifactError, match="verify --set-aside"):
        store.record(sha256_text("1"))
    store.verify(set_aside=True)
    assert store.record(sha256_text("1")) is None and store.verify() == []
    assert len(list((store.root / "quarantine").iterdir())) == 1


def test_gc_of_a_store_with_missing_and_short_objects_leaves_what_is_in_use(store):
    parent = commit_text(store, "parent")
    commit_text(store, "child", inputs=(parent.uri, "store://" + "0" * 64))
    lost = store.path(commit_text(store, "lost"))
    lost.chmod(0o755)
    lost.rename(store.root / "elsewhere")
    (store.path(parent) / "manifest.json").chmod(0o644)
    (store.path(parent) / "manifest.json").write_text("{")
    assert store.gc(dry_run=False).items == ()
    assert _left(store) == ["child", "parent"]


@pytest.mark.parametrize("name", ["a\0b", "../a.txt", "/etc/passwd", "x" * 300, "", "a//b"])
def test_a_manifest_with_a_name_that_no_file_of_an_object_has_is_not_readable(store, name):
    folder = store.path(commit_text(store, "one"))
    folder.chmod(0o755)
    (folder / "manifest.json").chmod(0o644)
    (folder / "manifest.json").write_text(json.dumps({"files": {name: {"size": 3, "sha256": "0"}}}))
    assert object_damage(folder, deep=True) == f"{folder} has no readable manifest.json"


# ---------------------------------------------------------------- roots


THEN = time.time() - 400 * 86400
KEY = sha256_text("old")


@pytest.fixture
def old(store: ArtifactStore) -> PolicyRef:
    """An artifact that was not used for more than a year."""
    return commit_text(store, "old")


def let_it_be_old(store: ArtifactStore) -> None:
    for path in [*store.root.rglob("*"), store.root]:
        if path.name != "manifest.json":
            os.utime(path, (THEN, THEN))


def ask(store: ArtifactStore, digest: str) -> None:
    question = Question(gate="quality", condition={"after": "toy"}, digest=digest, run="night")
    GateDecisions(store.shared).ask(question, run="night", links={})


def halt(store: ArtifactStore, key: str, *inputs: str) -> None:
    with store.lease(key) as lease:
        folder = store.attempts(key, lease)
        begun = attempts.begin(folder, label="c", resumed_from=None, code={}, inputs=inputs)
        attempts.end(folder, begun, label="c", status="interrupted", failure="", seconds=1.0, halted=True)


def answer(store: ArtifactStore) -> None:
    decisions = GateDecisions(store.shared)
    decisions.decide(decisions.requests()[0], "approve", reason="fine")


def begin_again(store: ArtifactStore) -> None:
    with store.lease("waits") as lease:
        attempts.begin(store.attempts("waits", lease), label="c", resumed_from=None, code={})


WAITS = {
    "a question about the artifact": (lambda store, ref: ask(store, ref.digest), answer, "gate quality of night waits"),
    "a stage that waits for people": (lambda store, ref: halt(store, "waits", ref.uri), begin_again, "has halted"),
    "a run that waits": (
        lambda store, ref: note_wait(store.shared, "night", [KEY]),
        lambda store: forget_wait(store.shared, "night"),
        "the run night waits",
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_gc_keeps_what_a_waiting_run_needs_and_names_why_until_it_goes_on(store, old, name):
    wait, go_on, why = WAITS[name]
    wait(store, old)
    let_it_be_old(store)
    (kept,) = store.gc(dry_run=True).kept
    assert kept[0] == f"toy {KEY[:12]}" and why in kept[1]
    assert [item.kind for item in store.gc(dry_run=False).items] == []
    assert store.record(KEY) is not None
    go_on(store)
    let_it_be_old(store)
    removed = {item.kind: str(item) for item in store.gc(dry_run=True).items}
    assert "(toy): not used for 400 days" in removed["record"] and "its records are removed" in removed["object"]
    store.gc(dry_run=False)
    assert store.record(KEY) is None and not store.layout.object(old.digest).exists()


@pytest.mark.parametrize("wait", [ask, halt])
def test_gc_keeps_the_work_of_a_stage_that_waits(store, old, wait):
    """Also of one that pauses: then the question names its key."""
    for key in ("waits", "dead"):
        work = store.layout.attempt(key) / "work-1"
        work.mkdir(parents=True)
        (work / "shard").write_text("x")
    (halt if wait is halt else ask)(store, "waits")
    let_it_be_old(store)
    removed = [Path(item.name).name for item in store.gc(dry_run=False).items if item.kind == "attempt"]
    assert removed == ["dead"] and len(list(store.layout.attempt("waits").glob("work-*/shard"))) == 1


def test_an_artifact_can_be_pinned_before_its_record_exists(store):
    out = write_files(store.root / "out", {"a.txt": "judgments"})
    with store.lease(KEY) as lease:
        ref = store.commit(lease, out, PolicyRef, children={}, record=provenance(), pin="judgments of people")
    assert roots.pins(store.shared) == {ref.digest: "judgments of people"}
    let_it_be_old(store)
    assert store.gc(dry_run=False).items == ()


@pytest.mark.parametrize("name", ["keys/x", "pins/x", "waits/x", "gates/x"])
def test_gc_removes_no_object_while_a_table_of_a_key_or_root_cannot_be_read(store, old, name):
    path = table_file(store, name)
    write_files(path.parent, {path.name: "{"})
    (store.layout.attempt(KEY) / "work-1" / "ckpt").mkdir(parents=True)
    let_it_be_old(store)
    report = store.gc(dry_run=False)
    assert len(report.held_back) == 1
    assert {item.kind for item in report.items} == {"attempt"}, "work is removed without records"
    assert _left(store) == ["old"]
    path.unlink()
    assert store.gc(dry_run=False).held_back == ()


@pytest.mark.parametrize("file", ["keys/00/00x", "roots/pins/x", "roots/waits/x", "roots/gates/q/question"])
def test_gc_removes_no_object_while_a_file_with_schema_1_cannot_be_read(store, old, file):
    path = store.root / f"{file}.json"
    write_files(path.parent, {path.name: "{"})
    let_it_be_old(store)
    assert len(store.gc(dry_run=False).held_back) == 1 and _left(store) == ["old"]
