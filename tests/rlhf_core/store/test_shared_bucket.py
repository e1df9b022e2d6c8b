"""Several nodes share a bucket: one of them reads wrong bytes, loses power, collects, or finds damage."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from rlhf_core.store import artifacts, collection, leases
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.bucket import BucketStore
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.leases import name_of
from rlhf_core.store.protocol import Damaged, Unreachable, pack
from rlhf_core.types import PolicyRef
from tests.support import buckets
from tests.support.buckets import Nodes, flip
from tests.support.records import commit_text
from tests.support.toy_stage import ToyConfig, run_toy, stage_key, toy_spec

TEXTS = ("one", "two", "three")
KEY = sha256_text("one")


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    return Nodes(tmp_path, monkeypatch)


@pytest.fixture
def refs(nodes) -> dict[str, PolicyRef]:
    """Three results that a node has committed."""
    ada = nodes.store("ada")
    return {text: commit_text(ada, text) for text in TEXTS}


def read_all(store: ArtifactStore, refs: dict[str, PolicyRef]) -> dict[str, str]:
    """The content of each result whose record counts."""
    return {
        text: (store.path(ref) / "a.txt").read_text()
        for text, ref in refs.items()
        if store.record(sha256_text(text)) is not None
    }


def assert_intact(nodes: Nodes, refs: dict[str, PolicyRef]) -> None:
    assert read_all(nodes.store("fresh"), refs) == {text: text for text in refs}


# ---------------------------------------------------------------- one node alone


@pytest.mark.parametrize("prefix", ["data/", "objects/", "tables/"])
def test_a_node_that_reads_wrong_bytes_gets_an_error_and_changes_nothing(nodes, refs, prefix):
    bad, before = nodes.store("bad"), nodes.client.names()
    nodes.client.receive = lambda name, content: flip(content) if prefix in name else content
    for text, ref in refs.items():
        with pytest.raises(Damaged):
            bad.record(sha256_text(text))
            bad.path(ref)
    with suppress(Damaged):
        bad.gc(dry_run=False)
    nodes.client.receive = lambda name, content: content
    assert [name for name in before if name not in nodes.client.names()] == []
    assert_intact(nodes, refs)


def test_a_wrong_bit_that_one_more_request_heals_is_no_error(nodes, refs):
    """The first response is wrong, the second one is right."""
    seen: set[str] = set()

    def receive(name: str, content: bytes) -> bytes:
        first = name not in seen
        seen.add(name)
        return flip(content) if first else content

    nodes.client.receive = receive
    assert read_all(nodes.store("ben"), refs) == {text: text for text in TEXTS}
    assert len(seen) >= 3 * 3, "table, object and file of each result"


@pytest.mark.parametrize("first", ["records", "path", "verify"])
def test_a_node_whose_cache_was_emptied_by_a_power_cut_reads_everything_again(nodes, refs, first):
    ben = nodes.store("ben")
    assert len(ben.records()) == 3 and len(read_all(ben, refs)) == 3
    before = nodes.client.names()
    assert nodes.cut_power("ben") >= 6
    again = nodes.store("ben")
    if first == "records":
        assert len(again.records()) == 3
    elif first == "verify":
        assert again.verify() == []
    assert read_all(again, refs) == {text: text for text in TEXTS}
    assert nodes.client.names() == before
    assert_intact(nodes, refs)


def test_a_flipped_bit_in_the_cache_of_a_node_is_fetched_again(nodes, refs):
    ben = nodes.store("ben")
    file = ben.path(refs["one"]) / "a.txt"
    file.chmod(0o644)
    file.write_text("onE")
    assert (nodes.store("ben").path(refs["one"]) / "a.txt").read_text() == "one"


# ---------------------------------------------------------------- listings that are older than a lease


def list_when_uploaded(nodes: Nodes, store: ArtifactStore) -> list[list[Any]]:
    """Let `store` list the bucket when another node uploads its first file; returns what LIST gave it then."""
    put, listed = nodes.client.put, []

    def put_and_list(name: str, content: Any, **options: Any) -> Any:
        if "data/" in name and not listed:
            listed.append(list(nodes.client.memory.list()))
            with store.shared.snapshot(within_s=0.0):
                pass
        return put(name, content, **options)

    nodes.client.put = put_and_list
    return listed


def test_a_result_whose_upload_a_node_has_seen_begin_is_a_hit_for_it(nodes):
    ben = nodes.store("ben")
    listed = list_when_uploaded(nodes, ben)
    first, _ = run_toy(nodes.store("ada"), toy_spec())
    ref, decision = run_toy(ben, toy_spec())
    assert listed and (ref, decision.action) == (first, "HIT")


def test_a_node_that_holds_a_lease_does_not_believe_an_outdated_listing(nodes, monkeypatch):
    ben, key = nodes.store("ben"), stage_key(toy_spec())
    listed = list_when_uploaded(nodes, ben)
    first, _ = run_toy(nodes.store("ada"), toy_spec())
    with ben.lease(key) as lease:
        monkeypatch.setattr(nodes.client, "list", lambda prefix, **_: _below(prefix, listed[0]))
        with ben.shared.snapshot(within_s=0.0):
            assert ben.record(key) is None, "the listing is older than the result"
            assert ben.record(key, lease).handle == first and ben.used(key, lease)


def _below(prefix: str, listed: list[Any]) -> Iterator[Any]:
    yield [one for some in listed for one in some if one["path"].startswith(prefix)]


# ---------------------------------------------------------------- collections


def test_a_commit_survives_a_collection_that_stands_still_before_its_removal(nodes, monkeypatch):
    ada, ben = nodes.store("ada"), nodes.store("ben")
    commit_text(ada, "one")
    table = ada.shared.read(name_of(KEY))
    ada.shared.remove(table.name, table.version)  # the record was collected long ago
    monkeypatch.setattr(BucketStore, "grace_s", -60.0)
    assert [item.kind for item in ada.gc(dry_run=False).items] == ["marked"]
    delete, done = BucketStore.delete, []

    def delete_later(store, one):
        refs = commit_text(ben, "one")
        done.append((refs, delete(store, one)))
        return done[-1][1]

    monkeypatch.setattr(BucketStore, "delete", delete_later)
    assert ada.gc(dry_run=False).items == ()
    assert [deleted for _, deleted in done] == [False]
    assert_intact(nodes, {"one": done[0][0]})


def test_two_collections_whose_listings_are_older_than_a_result_do_not_remove_it(nodes, monkeypatch):
    """Both have listed the results before this one is committed; the first marks its object afterwards."""
    ada, ben, cy = nodes.store("ada"), nodes.store("ben"), nodes.store("cy")
    commit_text(ada, "one")
    table = ada.shared.read(name_of(KEY))
    ada.shared.remove(table.name, table.version)  # the record was collected long ago
    assert cy.records() == [], "it has the table at this version"
    monkeypatch.setattr(BucketStore, "grace_s", 0.0)
    condemn, list_anew, done = BucketStore.condemn, nodes.client.list, []

    def condemn_later(store, one):
        done.append(commit_text(ben, "one"))
        return condemn(store, one)

    def list_early(prefix, **options):
        listed = list(list_anew(prefix, **options))
        if prefix.endswith("tables/") and not done:
            monkeypatch.setattr(nodes.client, "list", list_anew)
            assert [item.kind for item in ada.gc(dry_run=False).items] == ["marked"]
        return iter(listed)

    monkeypatch.setattr(BucketStore, "condemn", condemn_later)
    monkeypatch.setattr(nodes.client, "list", list_early)
    assert cy.gc(dry_run=False).items == () and len(done) == 1
    assert_intact(nodes, {"one": done[0]})


def test_an_object_is_deleted_by_the_second_collection_after_the_grace_period(nodes, monkeypatch):
    ada = nodes.store("ada")
    kept, gone = commit_text(ada, "one"), commit_text(ada, "two")
    ada.pin(kept.digest)
    monkeypatch.setattr(collection, "DAY_S", -60.0)
    removed = [item.kind for item in ada.gc(dry_run=False, keep_days=1.0).items]
    assert removed == ["record", "attempt", "attempt"]
    ben = nodes.store("ben")
    assert ben.record(KEY) is not None and ben.record(sha256_text("two")) is None
    assert ben.gc(dry_run=False).items == (), "it is younger than the grace period"
    monkeypatch.setattr(BucketStore, "grace_s", -60.0)
    for dry_run in (True, False):
        assert [(item.kind, item.name) for item in ben.gc(dry_run).items] == [("marked", gone.digest)]
    assert len(nodes.client.names("v2/data")) == 2
    assert [(item.kind, item.name) for item in ada.gc(dry_run=False).items] == [("object", gone.digest)]
    assert [name for name in nodes.client.names("v2/data") if gone.digest in name] == []
    assert_intact(nodes, {"one": kept})


# ---------------------------------------------------------------- damage


def test_only_verify_sets_damage_aside_and_its_files_stay(nodes, refs):
    damaged = next(name for name in nodes.client.names("v2/data") if refs["one"].digest in name)
    nodes.client.memory.put(damaged, b"rotten")
    ben = nodes.store("ben")
    with pytest.raises(Damaged):
        ben.path(refs["one"])
    assert [(one.digest, one.aside) for one in ben.verify()] == [(refs["one"].digest, False)]
    assert len(ben.records()) == 3
    assert [(one.digest, one.aside) for one in ben.verify(set_aside=True)] == [(refs["one"].digest, True)]
    assert nodes.store("cy").record(KEY) is None and len(ben.records()) == 2
    assert commit_text(nodes.store("ben"), "one") == refs["one"]
    assert ben.verify() == [] and damaged in nodes.client.names("v2/data")
    assert_intact(nodes, refs)


def test_gc_deletes_what_was_set_aside_long_ago_and_nothing_else(nodes, refs, monkeypatch):
    damaged = next(name for name in nodes.client.names("v2/data") if refs["one"].digest in name)
    table = f"v2/tables/keys/{sha256_text('two')}"
    for name in (damaged, table):
        nodes.client.memory.put(name, b"rotten")
    ben = nodes.store("ben")
    ben.verify(set_aside=True)
    for text in ("one", "two"):
        assert commit_text(nodes.store("ben"), text) == refs[text]
    before = nodes.client.names("v2/data")
    assert ben.gc(dry_run=False, keep_days=1.0).items == (), "it is set aside for less than a day"
    monkeypatch.setattr(collection, "DAY_S", -60.0)  # a day ago is a minute from now
    (quarantined,) = nodes.client.names("v2/quarantine")
    ada = nodes.store("ada")
    for text in refs:
        ada.pin(refs[text].digest)
    for dry_run in (True, False):
        assert damaged in nodes.client.names("v2/data") and nodes.client.names("v2/quarantine") == [quarantined]
        gone = [(one.name, one.bytes) for one in ada.gc(dry_run, keep_days=1.0).items if one.kind == "quarantine"]
        assert gone == [(refs["one"].digest, len("one")), (quarantined.removeprefix("v2/"), len("rotten"))]
    assert nodes.client.names("v2/data") == [name for name in before if name != damaged]
    assert nodes.client.names("v2/quarantine") == []
    assert_intact(nodes, refs)


def test_a_checkpoint_that_a_node_cannot_read_ends_the_run_and_stays(nodes):
    spec = toy_spec(ToyConfig(steps=4, trouble="raise:3"))
    with pytest.raises(ValueError, match="step 3 went wrong"):
        run_toy(nodes.store("ada"), spec)
    whole = toy_spec(ToyConfig(steps=4))
    nodes.client.receive = lambda name, content: flip(content) if "work/" in name else content
    bad = nodes.store("bad")
    with pytest.raises(Damaged):
        run_toy(bad, whole)
    nodes.client.receive = lambda name, content: content
    _, decision = run_toy(nodes.store("ben"), whole)
    assert (decision.action, decision.step) == ("RESUME", 2)


# ---------------------------------------------------------------- leases


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_a_release_that_fails_once_does_not_let_the_process_wait_for_itself(nodes, store, monkeypatch, where, caplog):
    monkeypatch.setattr(leases, "TTL_S", 0.6)
    monkeypatch.setattr(leases, "HEARTBEAT_S", 0.2)
    one = store if where == "disk" else nodes.store("ada")
    with monkeypatch.context() as patch, one.lease(KEY) as lease:
        patch.setattr(lease.store.__class__, "write", _broken)
    assert "could not release lease" in caplog.text
    monkeypatch.setattr(leases, "POLL_S", 0.05)
    with one.lease(KEY) as again:
        again.check()


def _broken(*_: object, **__: object) -> None:
    raise Unreachable("store", "s3://memory/team", "did not answer", "try again")


# ---------------------------------------------------------------- requests


def count(nodes: Nodes) -> int:
    """Requests since the last call."""
    made = nodes.client.requests.total()
    nodes.client.requests.clear()
    return made


def test_a_hit_on_a_warm_node_takes_two_requests_however_large_the_store(nodes, monkeypatch):
    monkeypatch.setattr(buckets, "PAGE", 10)
    fill(nodes, 50)
    spec = replace(toy_spec(), pipeline="night")
    run_toy(nodes.store("ada"), spec)
    assert run_toy(nodes.store("ben"), spec)[1].action == "HIT"  # which notes the labels on this node
    count(nodes)
    assert run_toy(nodes.store("ben"), spec)[1].action == "HIT"
    assert count(nodes) <= 2


def test_a_hit_moves_a_label_back_once_its_node_has_not_noted_it_for_minutes(nodes, monkeypatch):
    first, _ = run_toy(nodes.store("ada"))
    other, _ = run_toy(nodes.store("ben"), toy_spec(ToyConfig(steps=4)))
    for age_s, newest in ((600.0, other), (0.0, first)):
        monkeypatch.setattr(artifacts, "LABEL_S", age_s)
        assert run_toy(nodes.store("ada"))[1].action == "HIT"
        assert nodes.store("cy").latest("toy").handle == newest


def test_a_label_means_what_was_made_last_however_recently_its_node_has_noted_it(nodes):
    run_toy(nodes.store("ada"))
    run_toy(nodes.store("ben"), toy_spec(ToyConfig(steps=4)))
    made, _ = run_toy(nodes.store("ada"), force=True)
    assert nodes.store("cy").latest("toy").handle == made


def test_a_cache_that_cannot_be_written_costs_no_label(nodes):
    ada = nodes.store("ada")
    ada.create()
    (ada.root / "cache").mkdir()
    (ada.root / "cache" / "labels").write_text("a file in place of the folder")
    made, _ = run_toy(ada, replace(toy_spec(), pipeline="night"))
    cy = nodes.store("cy")
    assert [cy.latest("toy", name).handle for name in ("", "night")] == [made, made]


def test_a_short_stage_with_four_checkpoints_takes_thirty_requests(nodes):
    ada = nodes.store("ada")
    run_toy(ada)
    count(nodes)
    _, decision = run_toy(ada, toy_spec(ToyConfig(steps=4)))
    assert decision.action == "RUN"
    assert count(nodes) <= 30


def fill(nodes: Nodes, many: int) -> list[str]:
    """Put `many` results into the bucket, all with one object; returns their keys."""
    ada = nodes.store("ada")
    ref = commit_text(ada, "one")
    value = ada.shared.read(name_of(KEY)).value
    keys = [sha256_text(f"key {number}") for number in range(many)]
    for key in keys:
        put_record(nodes, key, value)
    assert ada.record(keys[0]) is not None and ref.digest
    return keys


def put_record(nodes: Nodes, key: str, value: dict) -> None:
    changed = json.loads(json.dumps(value))
    changed["record"]["facts"]["key"] = key
    prefix = next(name for name in nodes.client.names() if name.endswith(name_of(KEY))).removesuffix(name_of(KEY))
    nodes.client.memory.put(f"{prefix}{name_of(key)}", pack(changed))


def test_a_plan_of_a_store_with_5000_keys_takes_twelve_requests_and_one_for_each_changed_table(nodes, monkeypatch):
    """500 keys in pages of 100 are listed with as many requests as 5,000 keys in pages of 1,000."""
    monkeypatch.setattr(buckets, "PAGE", 100)
    keys = fill(nodes, 500)
    ben = nodes.store("ben")
    with ben.shared.snapshot():
        assert ben.record(keys[0]) is not None
    value = ben.shared.read(name_of(KEY)).value
    for key in keys[:3]:
        put_record(nodes, key, value)
    for changed in (3, 0):
        again = nodes.store("ben")
        count(nodes)
        with again.shared.snapshot():
            assert all(again.record(key) is not None for key in keys[:20])
        assert count(nodes) <= 12 + changed


def test_a_collection_takes_twenty_requests_and_those_of_its_changes(nodes):
    ada = nodes.store("ada")
    for number in range(10):
        commit_text(ada, f"{number}")
    ada.gc(dry_run=False)
    count(nodes)
    ada.gc(dry_run=False)
    assert count(nodes) <= 20
