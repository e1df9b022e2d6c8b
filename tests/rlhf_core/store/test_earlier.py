"""Stores that versions with schema 1 wrote: all results are hits, and nothing at the old places is lost."""

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.stage.gate_decisions import GateDecisions, Question
from rlhf_core.store import attempts, roots
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.layout import remove_tree
from tests.support.buckets import Nodes
from tests.support.toy_stage import ToyConfig, run_toy, stage_key, toy_spec

WRITTEN = Path(__file__).parent / "written_by_9b1b25b8.json"
KEY = stage_key(toy_spec())
HALF = stage_key(toy_spec(ToyConfig(steps=4)))
QUESTION = Question(gate="quality", condition={}, digest="d1", run="night")


def fill(store: ArtifactStore) -> Any:
    """A result, an attempt that failed, a pin, and a question with its answer; returns the handle of the result."""
    ref, _ = run_toy(store)
    with pytest.raises(ValueError, match="went wrong"):
        run_toy(store, toy_spec(ToyConfig(steps=4, trouble="raise:3")))
    store.pin(ref.digest, note="champion")
    decisions = GateDecisions(store.shared)
    decisions.decide(decisions.ask(QUESTION, run="night", links={}), "approve", reason="fine", by="ada")
    return ref


def earlier_files(store: ArtifactStore) -> dict[str, dict[str, Any]]:
    """Path -> content of the files in which schema 1 has what the tables of a store hold."""
    files: dict[str, dict[str, Any]] = {}
    for table in store.shared.tables(""):
        kind, _, name = table.name.partition("/")
        value = table.value
        if kind == "keys":
            if value.get("record"):
                files[f"keys/{name[:2]}/{name}.json"] = value["record"]["facts"]
            files[f"attempts/{name}/attempt.json"] = {"label": value["label"], "attempts": value["attempts"]}
        elif kind == "gates":
            files[f"roots/gates/{name}/question.json"] = value["question"]
            files |= {f"roots/gates/{name}/asked-{who}.json": one for who, one in value["askers"].items()}
            answers = enumerate(value["answers"], start=1)
            files |= {f"roots/gates/{name}/answer-{number:06d}.json": one for number, one in answers}
        else:
            files[f"roots/{kind}/{name}.json"] = value
    return files


def check_content(store: ArtifactStore, ref: Any) -> None:
    """Everything that `fill` has made is there."""
    assert store.record(KEY).handle == ref and [one.key for one in store.records()] == [KEY]
    assert store.latest("toy").key == KEY and roots.pins(store.shared) == {ref.digest: "champion"}
    assert [(one.number, one.status) for one in attempts.history(store.attempts(HALF))] == [(1, "failed")]
    answer = GateDecisions(store.shared).find(QUESTION.id).answer
    assert (answer.answer, answer.by) == ("approve", "ada")
    assert total(store, ref) == pytest.approx(21.3)


def total(store: ArtifactStore, ref: Any) -> float:
    """What the result says: 0.05 * (1 + 2 + 3) + 3 * seed."""
    return float((store.path(ref) / "total.txt").read_text())


@pytest.fixture
def disk(store) -> tuple[ArtifactStore, Any]:
    """A store on a disk as schema 1 left it, and the handle of its result."""
    ref = fill(store)
    for path, content in earlier_files(store).items():
        (store.root / path).parent.mkdir(parents=True, exist_ok=True)
        (store.root / path).write_text(json.dumps(content))
    for name in ("tables", "locks"):
        remove_tree(store.root / name)
    (store.root / "store.json").write_text('{"schema": 1}')
    return ArtifactStore(store.root), ref


def test_a_store_and_an_unfinished_attempt_that_commit_9b1b25b8_wrote_are_continued(tmp_path):
    """Its files, as that version left them: a result with a pin, and an attempt with a checkpoint of step 2."""
    for name, text in json.loads(WRITTEN.read_text()).items():
        path = tmp_path / "store" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(text["base64"]) if isinstance(text, dict) else text.encode())
    store = ArtifactStore(tmp_path / "store")
    ref, decision = run_toy(store)
    assert decision.action == "HIT" and "code changed since" in decision.reason
    assert total(store, ref) == pytest.approx(21.3) and roots.pins(store.shared) == {ref.digest: "champion"}
    ref, decision = run_toy(store, toy_spec(ToyConfig(steps=4)))
    assert (decision.action, decision.step) == ("RESUME", 2) and "its code has changed since" in decision.reason
    assert total(store, ref) == pytest.approx(28.5)  # 0.05 * (1 + 2 + 3 + 4) + 4 * seed
    assert store.verify() == []


def _content(root: Path) -> dict[str, str]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_store_on_a_disk_is_read_where_it_lies_and_reading_changes_nothing(disk):
    store, ref = disk
    before = _content(store.root)
    check_content(store, ref)
    assert store.gc(dry_run=True).items == ()
    assert _content(store.root) == before


def test_the_first_write_marks_the_store_so_that_older_programs_refuse_it(disk):
    store, ref = disk
    assert run_toy(store)[1].action == "HIT"
    assert json.loads((store.root / "store.json").read_text()) == {"schema": 2}
    _, decision = run_toy(store, toy_spec(ToyConfig(steps=4)))
    assert (decision.action, decision.step) == ("RESUME", 2)
    past = attempts.history(store.attempts(HALF))
    assert [(one.number, one.status) for one in past] == [(1, "failed"), (2, "committed")]
    roots.unpin(store.shared, ref.digest)
    assert roots.pins(store.shared) == {} and roots.pins(ArtifactStore(store.root).shared) == {}
    assert store.verify() == [] and store.record(KEY).handle == ref


@pytest.fixture
def nodes(tmp_path, monkeypatch) -> Nodes:
    return Nodes(tmp_path / "nodes", monkeypatch)


@pytest.fixture
def in_bucket(nodes, store) -> tuple[dict[str, bytes], Any]:
    """Names and contents in a bucket as schema 1 left it, and the handle of its result."""
    ref = fill(store)
    put: Callable[[str, bytes], Any] = nodes.client.memory.put
    for path, content in earlier_files(store).items():
        put(f"records/{path}", json.dumps(content | {"_put": "0"}).encode())
    put(f"records/used/{KEY}.json", b'{"_put": "0"}')
    put(f"records/keys/00/{'0' * 64}.json", b'{"_put": "0", "_dropped": true}')
    folder = store.path(ref)
    put(f"objects/{ref.digest}.json", (folder / "manifest.json").read_bytes())
    for name in ("total.txt", "padding.bin"):
        put(f"blobs/{sha256_text((folder / name).read_text())}", (folder / name).read_bytes())
    names = nodes.client.names()
    return {name: bytes(nodes.client.memory.get(name).bytes()) for name in names}, ref


def test_a_bucket_is_read_at_the_old_places_and_changed_below_a_prefix_of_its_own(nodes, in_bucket):
    before, ref = in_bucket
    check_content(nodes.store("ada"), ref)
    assert run_toy(nodes.store("ada"))[1].action == "HIT"
    assert nodes.store("ada").gc(dry_run=False).items == ()
    roots.unpin(nodes.store("ben").shared, ref.digest)
    assert roots.pins(nodes.store("ada").shared) == {}
    assert nodes.store("ada").shared.recent(f"pins/{sha256_text(ref.digest)}") is None, "a removed table hides the file"
    with nodes.store("ben").lease(HALF) as lease:
        folder = nodes.store("ben").attempts(HALF, lease)
        assert attempts.begin(folder, label="toy", resumed_from=None, code={}).number == 2
    after = {name: bytes(nodes.client.memory.get(name).bytes()) for name in before}
    assert after == before, "an older program beside this one finds its files, and a newer one leaves them alone"
    assert all(name.startswith("v2/") for name in set(nodes.client.names()) - before.keys())


def test_an_object_of_a_bucket_is_copied_when_it_is_used_and_outlives_the_old_places(nodes, in_bucket):
    before, ref = in_bucket
    nodes.store("ada").pin(ref.digest, note="again")
    for name in before:
        nodes.client.memory.delete(name)
    assert total(nodes.store("ben"), ref) == pytest.approx(21.3)
