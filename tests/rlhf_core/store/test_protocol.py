"""Tables and objects, on a disk and in a bucket."""

import threading
import time
from collections import Counter

import pytest

from rlhf_core.store.bucket import BucketStore
from rlhf_core.store.bucket_server import ObstoreServer
from rlhf_core.store.disk import DiskStore
from rlhf_core.store.fingerprint import hash_tree, tree_digest
from rlhf_core.store.protocol import Conflict, DamagedTable, Gone, Store, discard, update
from tests.support.buckets import URI, Nodes, flip
from tests.support.records import write_files


@pytest.fixture(params=["disk", "bucket"])
def shared(request, tmp_path, monkeypatch) -> Store:
    if request.param == "disk":
        return DiskStore(tmp_path / "store")
    Nodes(tmp_path, monkeypatch)
    return BucketStore(ObstoreServer(URI), tmp_path / "cache", URI)


def add(shared: Store, content: str) -> str:
    """Store an object of one file; returns its digest."""
    out = write_files(shared.folder / "out", {"a.txt": content})
    files = hash_tree(out)
    shared.add(tree_digest(files), out, files)
    return tree_digest(files)


def test_a_table_is_replaced_only_at_the_expected_version(shared):
    assert shared.read("keys/k") is None and list(shared.tables("keys/")) == []
    first = shared.write("keys/k", {"n": 1}, None)
    with pytest.raises(Conflict):
        shared.write("keys/k", {"n": 2}, None)
    second = shared.write("keys/k", {"n": 1}, first.version)
    assert second.version != first.version, "the same value is another version"
    for stale in (first.version, '{"e_tag": "nonsense"}'):
        with pytest.raises(Conflict):
            shared.write("keys/k", {"n": 3}, stale)
        with pytest.raises(Conflict):
            shared.remove("keys/k", stale)
    found = shared.read("keys/k")
    assert (found.value, found.version) == ({"n": 1}, second.version)
    assert abs(found.written - shared.now()) < 60.0
    assert [table.name for table in shared.tables("keys/")] == ["keys/k"] == list(shared.versions("keys/"))


def test_a_removed_table_is_none_and_can_be_written_again(shared):
    shared.remove("keys/k", shared.write("keys/k", {"n": 1}, None).version)
    assert shared.read("keys/k") is None and list(shared.tables("")) == []
    again = shared.write("keys/k", {"n": 2}, None)
    with pytest.raises(Conflict):
        shared.write("keys/k", {"n": 3}, None)
    assert shared.read("keys/k").version == again.version
    discard(shared, "keys/k")
    discard(shared, "keys/k")
    assert shared.read("keys/k") is None


def test_threads_that_update_a_table_at_once_lose_nothing(shared):
    start = threading.Barrier(4)

    def count(number: int) -> None:
        start.wait()
        for _ in range(5):
            update(shared, "keys/k", lambda value: value | {str(number): value.get(str(number), 0) + 1})

    threads = [threading.Thread(target=count, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared.read("keys/k").value == {"0": 5, "1": 5, "2": 5, "3": 5}


def test_a_table_that_refers_to_a_missing_object_is_refused(shared):
    with pytest.raises(Gone, match="run again to make it again"):
        shared.write("keys/k", {}, None, refers=["0" * 64])
    digest = add(shared, "one")
    found = shared.read("keys/k")  # a bucket raises after the write
    written = shared.write("keys/k", {"n": 1}, found and found.version, refers=[digest])
    assert written.value == {"n": 1}


def test_an_object_is_stored_once_and_read_back(shared):
    digest = add(shared, "one")
    assert add(shared, "one") == digest
    assert (shared.fetch(digest) / "a.txt").read_text() == "one"
    assert [(one.digest, one.bytes >= 3) for one in shared.objects(but=())] == [(digest, True)]
    assert list(shared.objects(but={digest})) == []
    assert shared.has(digest) and shared.problem(digest, deep=True) == ""


def test_an_object_that_is_set_aside_is_gone_until_it_is_restored_or_stored_anew(shared):
    digest = add(shared, "one")
    shared.set_aside(digest)
    assert not shared.has(digest) and shared.problem(digest) != ""
    shared.restore(digest)
    assert shared.problem(digest, deep=True) == ""
    shared.set_aside(digest)
    assert add(shared, "one") == digest and shared.problem(digest, deep=True) == ""
    shared.restore(digest)  # the new one stays
    assert (shared.fetch(digest) / "a.txt").read_text() == "one"


def test_a_table_whose_checksum_does_not_match_is_an_error_and_others_are_listed(tmp_path, monkeypatch):
    nodes = Nodes(tmp_path, monkeypatch)
    in_bucket = BucketStore(ObstoreServer(URI), tmp_path / "cache", URI)
    on_disk = DiskStore(tmp_path / "store")
    for shared in (in_bucket, on_disk):
        for name in ("keys/a", "keys/b"):
            shared.write(name, {"n": 1}, None)
    raw = bytes(nodes.client.memory.get("v2/tables/keys/a").bytes())
    nodes.client.memory.put("v2/tables/keys/a", flip(raw))
    path = on_disk.folder / "tables" / "keys" / "a.json"
    path.write_bytes(flip(path.read_bytes()))
    for shared in (in_bucket, on_disk):
        with pytest.raises(DamagedTable):
            shared.read("keys/a")
        with pytest.raises(DamagedTable):
            list(shared.tables("keys/"))
        damaged: list[DamagedTable] = []
        assert [table.name for table in shared.tables("keys/", damaged=damaged)] == ["keys/b"]
        assert [one.name for one in damaged] == ["keys/a"]
        shared.set_table_aside("keys/b")  # sound: stays
        shared.set_table_aside("keys/a")
        assert shared.read("keys/a") is None and shared.read("keys/b") is not None


def test_a_snapshot_answers_from_one_listing(tmp_path, monkeypatch):
    nodes = Nodes(tmp_path, monkeypatch)
    shared = BucketStore(ObstoreServer(URI), tmp_path / "cache", URI)
    for number in range(5):
        shared.write(f"keys/{number}", {"n": number}, None)
    other = BucketStore(ObstoreServer(URI), tmp_path / "other", URI)
    nodes.client.requests.clear()
    with other.snapshot():
        assert [other.recent(f"keys/{number}").value["n"] for number in range(5)] == [0, 1, 2, 3, 4]
        assert other.recent("keys/none") is None
    assert nodes.client.requests == Counter(LIST=2, GET=5)


def test_the_time_of_the_store_is_not_that_of_the_node(shared, monkeypatch):
    before = shared.now()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= shared.now() - before < 60.0 and 0 <= shared.now(exact=False) - before < 60.0
