import threading
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from rlhf_core.store.layout import read_json
from rlhf_core.store.places import Conflict, Records
from rlhf_core.store.places.buckets import Bucket, BucketRecords
from rlhf_core.store.places.local import LocalRecords

PLACES = ("folder", "memory")


def records_at(name: str, folder: Path) -> Records:
    """Return empty records in a place of this kind."""
    return LocalRecords(folder) if name == "folder" else BucketRecords(in_memory(), "leases/")


def in_memory() -> Bucket:
    """Return a bucket of this process."""
    return Bucket("s3://memory", MemoryStore())


@pytest.fixture(params=PLACES)
def records(request, tmp_path):
    return records_at(request.param, tmp_path)


def test_a_record_is_written_only_where_nobody_has_changed_it(records):
    assert records.get("k.json") is None and list(records.names()) == []
    first = records.put("k.json", {"n": 1}, None)
    with pytest.raises(Conflict):
        records.put("k.json", {"n": 2}, None)
    second = records.put("k.json", {"n": 1}, first)
    assert second != first, "the same content is another version"
    for stale in (first, "nonsense"):
        with pytest.raises(Conflict):
            records.put("k.json", {"n": 3}, stale)
        with pytest.raises(Conflict):
            records.drop("k.json", stale)
    found = records.get("k.json")
    assert found is not None and (found.value, found.version) == ({"n": 1}, second)
    assert list(records.names()) == ["k.json"]


def test_a_dropped_record_is_none_and_can_be_made_again(records):
    records.drop("k.json", records.put("k.json", {"n": 1}, None))
    assert records.get("k.json") is None
    again = records.put("k.json", {"n": 2}, None)
    with pytest.raises(Conflict):
        records.put("k.json", {"n": 3}, None)
    found = records.get("k.json")
    assert found is not None and (found.value, found.version) == ({"n": 2}, again)


def test_of_many_who_write_at_once_one_wins(records):
    version, wins, start = records.put("k.json", {"by": -1}, None), [], threading.Barrier(8)

    def write(number: int) -> None:
        start.wait()
        try:
            records.put("k.json", {"by": number}, version)
        except Conflict:
            return
        wins.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = records.get("k.json")
    assert found is not None and [found.value["by"]] == wins


def test_a_folder_holds_the_table_itself(tmp_path):
    records = LocalRecords(tmp_path)
    version = records.put("k.json", {"n": 1}, None)
    assert read_json(tmp_path / "k.json") == {"n": 1} and records.age("k.json") < 60.0
    (tmp_path / "k.json").write_text("{")
    torn = records.get("k.json")
    assert torn is not None and torn.value == {} and torn.version != version
    records.put("k.json", {"n": 2}, torn.version)
