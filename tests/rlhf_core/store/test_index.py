import subprocess
import sys

import pytest

from rlhf_core.store import index
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.index import RECORDS, rows, states
from rlhf_core.store.layout import remove_tree
from rlhf_core.store.leases import name_of
from rlhf_core.store.protocol import discard
from rlhf_core.types import PolicyRef
from tests.support.buckets import Nodes, flip
from tests.support.records import commit_text, provenance

PROVENANCE = provenance(label="sft", stage="sft", attempts=2)


@pytest.fixture
def store(tmp_path) -> ArtifactStore:
    store = ArtifactStore(tmp_path / "store")
    for content in ("one", "two"):
        _commit(store, content)
    return store


def _commit(store: ArtifactStore, content: str, **changes: object) -> PolicyRef:
    out = store.root / "out"
    (out / "base").mkdir(parents=True)
    (out / "base" / "a.txt").write_text(content)
    record = PROVENANCE.model_copy(update=changes)
    with store.lease(sha256_text(content)) as lease:
        return store.commit(lease, out, PolicyRef, children={}, record=record)


def _labels(store: ArtifactStore) -> list[str]:
    return [row.label for row in rows(store.shared, store.layout)[0]]


def _never(*_: object) -> None:
    raise AssertionError("a record was read although the index knows it")


def test_a_list_says_what_the_records_say(store):
    for _ in range(2):  # from the records, then from the index
        found, unreadable, _ = rows(store.shared, store.layout)
        assert unreadable == []
        for row, record in zip(found, store.records(), strict=True):
            assert (row.key, row.label, row.kind, row.digest) == (record.key, "sft", "Policy", record.handle.digest)
            assert (row.object, row.started, row.seconds) == (record.handle.digest, record.started, 1.0)
            assert (row.attempts, row.metrics) == (2, {"loss": 0.5})


def test_what_is_known_is_not_read_again_and_what_is_new_changed_or_gone_is_noticed(store, monkeypatch):
    assert _labels(store) == ["sft", "sft"]
    with monkeypatch.context() as patch:
        patch.setattr(index, "_fields", _never)
        assert _labels(store) == ["sft", "sft"]
    _commit(store, "three", label="ppo", started="2031-01-01T00:00:00.000+00:00")
    assert _labels(store) == ["sft", "sft", "ppo"]
    _commit(store, "one", label="dpo", started="2032-01-01T00:00:00.000+00:00")
    assert _labels(store) == ["sft", "ppo", "dpo"]
    discard(store.shared, name_of(sha256_text("two")))
    assert _labels(store) == ["ppo", "dpo"]


@pytest.mark.parametrize("harm", ["missing", "empty", "cut", "another version", "changed"])
def test_an_index_that_is_missing_or_damaged_is_made_anew(store, harm):
    rows(store.shared, store.layout)
    path = store.layout.index / RECORDS
    text = path.read_text()
    harmed = {"empty": "", "cut": text[:-20], "another version": f"9{text}", "changed": text.replace("1", "2")}
    if harm == "missing":
        path.unlink()
    else:
        path.write_text(harmed[harm])
    assert [row.seconds for row in rows(store.shared, store.layout)[0]] == [1.0, 1.0]
    assert (store.layout.index / RECORDS).read_text().startswith(index._maker())


def test_unreadable_records_are_named_each_time(store):
    (store.root / "tables" / "keys" / f"{sha256_text('two')}.json").write_text("{")
    for _ in range(2):
        found, unreadable, _ = rows(store.shared, store.layout)
        assert len(found) == 1 and "has other content than was written" in str(*unreadable)


def test_size_and_damage_of_objects_are_seen_each_time(store):
    digests = {row.object for row in rows(store.shared, store.layout)[0]}
    one = store.layout.object(next(iter(sorted(digests))))
    sound = states(store.shared, digests)
    assert {state.damage for state in sound.values()} == {""} and (sound[one.name].bytes or 0) > 3
    file = one / "base" / "a.txt"
    file.chmod(0o644)
    content = file.read_text()
    file.write_text("six")
    assert states(store.shared, digests)[one.name].damage == "base/a.txt has other content"
    file.write_text("a longer text")
    assert states(store.shared, digests)[one.name].damage == "base/a.txt has 13 bytes, not 3"
    file.write_text(content)
    assert states(store.shared, digests)[one.name].damage == ""
    remove_tree(one)
    gone = states(store.shared, digests)[one.name]
    assert gone.bytes is None and gone.damage.endswith("is gone")


def test_a_store_that_cannot_be_written_is_listed_all_the_same(tmp_path):
    store = ArtifactStore(tmp_path / "none")
    assert rows(store.shared, store.layout) == ([], [], []) and not store.root.exists()


def test_a_list_imports_nothing_that_takes_long(store):
    rows(store.shared, store.layout)
    slow = ["pydantic", "torch", "prefect", "mlflow", "ray", "rlhf_core.store.records"]
    code = (
        "import sys; from pipelines.cli.main import main; main(['store', 'ls', '--store', sys.argv[1]]); "
        f"print([name for name in {slow} if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(store.root)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) == 4 and said[-1] == "[]"


def test_a_damaged_table_of_a_bucket_is_named_and_all_others_are_listed(tmp_path, monkeypatch):
    nodes = Nodes(tmp_path, monkeypatch)
    for content in ("one", "two"):
        commit_text(nodes.store("ada"), content)
    name = f"v2/tables/{name_of(sha256_text('two'))}"
    nodes.client.memory.put(name, flip(bytes(nodes.client.memory.get(name).bytes())))
    ben = nodes.store("ben")
    for _ in range(2):
        found, unreadable, _ = rows(ben.shared, ben.layout)
        assert [row.key for row in found] == [sha256_text("one")]
        assert "does not arrive with the checksum" in str(*unreadable)
