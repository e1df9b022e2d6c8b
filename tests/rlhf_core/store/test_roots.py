from __future__ import annotations

import os
import time

import pytest

from rlhf_core.errors import ArtifactError
from rlhf_core.store import attempts
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.gate_decisions import GateDecisions, Question
from rlhf_core.store.maintenance import forget_wait, note_wait
from rlhf_core.types import PolicyRef
from tests.support.records import provenance

THEN = time.time() - 400 * 86400
KEY = sha256_text("old")


@pytest.fixture
def old(store: ArtifactStore) -> PolicyRef:
    """An artifact that nobody has used for more than a year."""
    out = store.root / "out"
    out.mkdir(parents=True)
    (out / "a.txt").write_text("old")
    return store.commit(KEY, out, PolicyRef, children={}, record=provenance())


def let_it_be_old(store: ArtifactStore) -> None:
    for path in [*store.root.rglob("*"), store.root]:
        if path.name != "manifest.json":
            os.utime(path, (THEN, THEN))


def ask(store: ArtifactStore, digest: str) -> None:
    question = Question(gate="quality", condition={"after": "toy"}, digest=digest, run="night")
    GateDecisions(store.layout).ask(question, run="night", links={})


def halt(store: ArtifactStore, key: str, *inputs: str) -> None:
    folder = store.layout.attempt(key)
    begun = attempts.begin(folder, label="c", resumed_from=None, code={}, inputs=inputs)
    attempts.end(folder, begun, label="c", status="interrupted", failure="", seconds=1.0, halted=True)


def answer(store: ArtifactStore) -> None:
    decisions = GateDecisions(store.layout)
    decisions.decide(decisions.requests()[0], "approve", reason="fine")


def begin_again(store: ArtifactStore) -> None:
    folder = store.layout.attempt("waits")
    attempts.begin(folder, label="c", resumed_from=None, code={})


WAITS = {
    "a question about the artifact": (lambda store, ref: ask(store, ref.digest), answer, "gate quality of night waits"),
    "a stage that waits for people": (lambda store, ref: halt(store, "waits", ref.uri), begin_again, "has halted"),
    "a run that waits": (
        lambda store, ref: note_wait(store.layout, "night", [KEY]),
        lambda store: forget_wait(store.layout, "night"),
        "the run night waits",
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_gc_keeps_what_a_waiting_run_needs_and_names_why_until_it_goes_on(
    store: ArtifactStore, old: PolicyRef, name: str
) -> None:
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
def test_gc_keeps_the_work_of_a_stage_that_waits(store: ArtifactStore, old: PolicyRef, wait: object) -> None:
    """Also of one that pauses: then the question names its key."""
    for key in ("waits", "dead"):
        work = store.layout.attempt(key) / "work-1"
        work.mkdir(parents=True)
        (work / "shard").write_text("x")
    (halt if wait is halt else ask)(store, "waits")
    let_it_be_old(store)
    removed = [item.path.name for item in store.gc(dry_run=False).items if item.kind == "attempt"]
    assert removed == ["dead"] and len(list(store.layout.attempt("waits").glob("work-*/shard"))) == 1


def test_what_nobody_can_make_again_is_pinned_before_its_record_exists(store: ArtifactStore) -> None:
    out = store.root / "out"
    out.mkdir(parents=True)
    (out / "a.txt").write_text("judgments")
    ref = store.commit(KEY, out, PolicyRef, children={}, record=provenance(), pin="judgments of people")
    assert store.pins() == {ref.digest: "judgments of people"}
    let_it_be_old(store)
    assert store.gc(dry_run=False).items == ()


@pytest.mark.parametrize(
    "file", ["pins/x", "waits/x", "gates/answer-x", "gates/answer-1", "gates/question", "gates/asked-x"]
)
def test_gc_removes_no_object_while_a_root_cannot_be_read(store: ArtifactStore, old: PolicyRef, file: str) -> None:
    what, name = file.split("/")
    folder = getattr(store.layout, what)
    if what == "gates":
        ask(store, old.digest)
        (folder,) = folder.iterdir()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text("{")
    let_it_be_old(store)
    report = store.gc(dry_run=False)
    assert len(report.held_back) == 1 and report.items == ()


@pytest.mark.parametrize("stray", ["answer-x.json", "answer-.json", "answer-000001.json"])
def test_a_stray_or_cut_answer_is_one_error_wherever_answers_are_read(store: ArtifactStore, stray: str) -> None:
    ask(store, "d")
    decisions = GateDecisions(store.layout)
    (request,) = decisions.requests()
    (store.layout.gates / request.id / stray).write_text("{")
    for call in (decisions.requests, lambda: decisions.find(request.id), lambda: decisions.ask(
            request.question, run="night", links={})):  # fmt: skip
        with pytest.raises(ArtifactError, match=rf"^answer = .*{stray}': is not .*; (move|remove) it"):
            call()
