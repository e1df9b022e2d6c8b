import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from rlhf_core.errors import ArtifactError, ConfigError
from rlhf_core.store import attempts, index, leases, mirror_upkeep
from rlhf_core.store.artifacts import ArtifactStore, object_digest
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.gate_decisions import GateDecisions, Question
from rlhf_core.store.layout import read_json, write_json
from rlhf_core.store.leases import living_owner
from rlhf_core.store.places import Unreachable, mirror
from rlhf_core.store.places.buckets import PROBES, Bucket, BucketObjects, open_bucket, probe
from rlhf_core.types import PolicyRef
from tests.support.buckets import URI, Nodes, mirror_in, release
from tests.support.records import commit_text, provenance, write_files

KEY = sha256_text("12")


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "FRESH_SECONDS", 0.0)
    return Nodes(tmp_path, monkeypatch)


def _names(nodes: Nodes, under: str) -> set[str]:
    return {name for name, _, _ in BucketObjects(nodes.bucket).listed(under)}


def test_what_one_node_commits_another_reads(nodes, store):
    ada, ben = nodes.store("ada"), nodes.store("ben")
    ref = commit_text(ada, "12")
    assert ref == commit_text(store, "12"), "the digest is that of a store on a disk"
    found = ben.record(KEY)
    assert found is not None and found.handle == ref
    assert not ben.layout.object(ref.digest).exists(), "a record needs no files"
    file = ben.path(ref) / "a.txt"
    assert file.read_text() == "12" and not file.stat().st_mode & stat.S_IWUSR
    assert ben.used(KEY) and {one.label for one in nodes.store("cyd").records()} == {"toy"}
    assert read_json(ada.layout.key(KEY)) == read_json(store.layout.key(KEY)) == read_json(ben.layout.key(KEY))


def test_files_of_one_content_are_stored_once(nodes):
    ada = nodes.store("ada")
    out = write_files(ada.layout.attempts / "out", {"a.txt": "12", "b/c.txt": "12"})
    ada.commit("1" * 64, out, PolicyRef, children={}, record=provenance())
    assert _names(nodes, "blobs/") == {f"blobs/{sha256_text('12')}"}


def test_a_flipped_bit_in_the_cache_is_healed(nodes):
    ref = commit_text(nodes.store("ada"), "12")
    ben = nodes.store("ben")
    file = ben.path(ref) / "a.txt"
    file.chmod(0o644)
    file.write_text("13")
    assert ben.record(KEY) is not None and (ben.path(ref) / "a.txt").read_text() == "12"


def test_a_damaged_file_in_the_bucket_is_never_read_and_made_again(nodes):
    ref = commit_text(nodes.store("ada"), "12")
    nodes.bucket.client.put(f"blobs/{sha256_text('12')}", b"13")
    ben = nodes.store("ben")
    with pytest.raises(ArtifactError, match=r"a\.txt has other content; run again"):
        ben.path(ref)
    assert ben.record(KEY) is None and "is gone from s3://memory/team" in ben.damage(KEY)
    assert commit_text(ben, "12") == ref
    assert (nodes.store("cyd").path(ref) / "a.txt").read_text() == "12"


def test_an_object_that_another_node_has_removed_since_is_missing(nodes):
    ada = nodes.store("ada")
    ref = commit_text(ada, "12")
    ben = nodes.store("ben")
    mirror_in(ada).condemn(ref.digest, sha256_text("12"), "rotten")
    with pytest.raises(ArtifactError, match=r"is not in .*run the pipeline again"):
        ben.path(ref)
    assert ben.record(KEY) is None and not ben.holds(ref)


def test_a_result_of_a_node_that_lost_its_lease_unseen_replaces_nothing(nodes):
    ada, ben = nodes.store("ada"), nodes.store("ben")
    with ada.lease(KEY) as lease:
        theirs = commit_text(ben, "12", label="theirs")
        out = write_files(ada.layout.attempts / "out", {"a.txt": "late"})
        with pytest.raises(ArtifactError, match="was changed by another node since"):
            ada.commit(KEY, out, PolicyRef, children={}, record=provenance(), lease=lease)
    found = nodes.store("cyd").record(KEY)
    assert found is not None and (found.label, found.handle) == ("theirs", theirs)
    with ada.lease(KEY) as lease:  # it sees the other's now, and may replace it
        out = write_files(ada.layout.attempts / "out", {"a.txt": "forced"})
        ada.commit(KEY, out, PolicyRef, children={}, record=provenance(label="ours"), lease=lease)
    found = ben.record(KEY)
    assert found is not None and found.label == "ours"


def test_a_lease_is_one_for_all_nodes_and_leaves_no_file(nodes):
    ada, ben = nodes.store("ada"), nodes.store("ben")
    with ada.lease(KEY) as lease:
        assert living_owner(ben.layout.leases, KEY) == lease.owner
        lease.check()
    assert living_owner(ben.layout.leases, KEY) is None and not list(ada.layout.leases.glob("*.json"))
    with ben.lease(KEY) as again:
        assert not again.waited


def test_the_history_of_attempts_is_one_for_all_nodes(nodes):
    ada, ben = nodes.store("ada"), nodes.store("ben")
    with ada.lease(KEY):
        folder = ada.layout.attempt(KEY)
        first = attempts.begin(folder, label="toy", resumed_from=None, code={})
        attempts.end(folder, first, label="toy", status="failed", failure="no", seconds=1.0)
    with ben.lease(KEY):
        second = attempts.begin(ben.layout.attempt(KEY), label="toy", resumed_from=None, code={})
    assert (first.number, second.number) == (1, 2)
    attempts.history(folder)  # of ada, who has not looked since
    with pytest.raises(ArtifactError, match="was changed by another node"):
        attempts.end(folder, first, label="toy", status="failed", failure="late", seconds=1.0)


def test_an_answer_of_one_node_lets_a_run_of_another_go_on(nodes):
    question = Question(gate="quality", condition={}, digest="d1", run="night")
    asked = GateDecisions(nodes.store("ada").layout).ask(question, run="night", links={})
    (seen,) = GateDecisions(nodes.store("ben").layout).requests()
    GateDecisions(nodes.store("ben").layout).decide(seen, "approve", reason="fine", by="ben")
    found = GateDecisions(nodes.store("ada").layout).find(asked.id)
    assert found is not None and found.answer is not None and found.answer.by == "ben"


def test_of_two_who_note_the_same_the_last_counts(nodes):
    ada, ben = nodes.store("ada"), nodes.store("ben")
    for store, text in ((ada, "1"), (ben, "2"), (ada, "3")):
        write_json(store.layout.label("sft"), {"key": text})
    mirror_in(ben).refresh()
    assert read_json(ben.layout.label("sft")) == {"key": "3"}


def test_the_cache_evicts_what_was_not_used_for_longest_and_keeps_what_is_read(nodes):
    ada = nodes.store("ada")
    refs = [commit_text(ada, f"{number}" * 1000) for number in range(3)]
    ben = nodes.store("ben")
    mirror_in(ben).cache_bytes = 2900.0  # two objects with their manifests
    first = ben.path(refs[0])
    ben.path(refs[1])
    with pytest.raises(ArtifactError, match="are needed at once, and RLHF_CACHE_GIB is"):
        ben.path(refs[2])
    assert first.exists(), "this process reads it"
    release(ben)
    ben.path(refs[1])
    ben.path(refs[2])
    assert [ben.layout.object(object_digest(ref)).exists() for ref in refs] == [False, True, True]
    assert (ben.layout.object(refs[2].digest) / "a.txt").read_text() == "2" * 1000


def test_gc_removes_from_the_bucket_what_no_record_leads_to_and_nothing_young(nodes, monkeypatch):
    ada = nodes.store("ada")
    kept, gone = (commit_text(ada, text) for text in ("kept", "gone"))
    ada.pin(kept.digest)
    assert {item.kind for item in ada.gc(dry_run=False, keep_days=0.0).items} == {"record", "object"} - {"object"}
    assert len(_names(nodes, "objects/")) == 2, "they are young"
    monkeypatch.setattr(mirror_upkeep, "DAY_SECONDS", -60.0)
    ben = nodes.store("ben")
    assert [item.kind for item in ben.gc(dry_run=True).items] == ["manifest", "file"]
    assert len(_names(nodes, "objects/")) == 2
    ben.gc(dry_run=False)
    assert _names(nodes, "objects/") == {f"objects/{kept.digest}.json"}
    assert _names(nodes, "blobs/") == {f"blobs/{sha256_text('kept')}"}
    assert ben.record(sha256_text("kept")) is not None and ben.record(sha256_text("gone")) is None and gone != kept


def test_verify_finds_what_the_bucket_has_lost(nodes):
    ada = nodes.store("ada")
    commit_text(ada, "12", label="sft")
    commit_text(ada, "34")
    assert ada.verify() == []
    BucketObjects(nodes.bucket).delete(f"blobs/{sha256_text('12')}")
    (damage,) = nodes.store("ben").verify()
    assert (damage.problem, damage.labels) == ("a.txt is missing", ("sft",))
    assert ada.record(KEY) is None and ada.record(sha256_text("34")) is not None


class _Ignores:
    def __init__(self, ignored: str) -> None:
        self._memory, self._ignored = MemoryStore(), ignored

    def put(self, *args: Any, mode: Any = None, **options: Any) -> Any:
        ignored = mode == "create" if self._ignored == "create" else isinstance(mode, dict)
        return self._memory.put(*args, mode="overwrite" if ignored else mode, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


@pytest.mark.parametrize(("ignored", "said"), [("create", PROBES[0]), ("update", PROBES[1])])
def test_a_server_without_conditional_puts_is_refused(ignored, said):
    with pytest.raises(ConfigError) as error:
        probe(Bucket(URI, _Ignores(ignored)))
    assert str(error.value).startswith(
        f"store = '{URI}': on this server {said}, so two runs could compute the same key"
    )
    probe(Bucket(URI, MemoryStore()))


@pytest.mark.parametrize("place", ["s3://", "gs:///x"])
def test_an_address_without_a_bucket_is_refused(place):
    with pytest.raises(ConfigError, match="is no bucket; known are s3://, gs://, az://"):
        open_bucket(place)


def test_a_bucket_that_is_away_is_named():
    def fail(*_: Any) -> Any:
        raise GenericError("Connection refused")

    bucket = Bucket("s3://team/x", SimpleNamespace(head=fail))
    with pytest.raises(Unreachable, match=r"store = 's3://team/x': does not .*Connection refused.*check address"):
        BucketObjects(bucket).found("a")


def test_a_store_on_a_disk_has_no_mirror(tmp_path):
    assert ArtifactStore(tmp_path)._mirror is None and mirror.store_root(str(tmp_path)) == Path(tmp_path)


@pytest.mark.parametrize("place", ["", "ftp://x/y", "S3://x", "s3:///folder", "s3s://x", "s3:/x/y", "GS:/x"])
def test_a_place_that_is_neither_folder_nor_bucket_is_refused_before_a_folder_of_that_name_is_made(place):
    with pytest.raises(
        ConfigError, match=rf"store = '{place}': (is empty; name a folder|is no bucket; known are s3://)"
    ):
        mirror.store_root(place)


@pytest.mark.parametrize(
    ("place", "rule"),
    [
        ("s3://team/x?region=y", "has '?', so it may mean another"),
        ("s3://team/x#y", "has '#'"),
        ("s3://team/%2e%2e/x", "has '%'"),
        ("s3://team:80/x", "has ':'"),
        ("s3://key:secret@team/x", "has credentials"),
        ("s3://team/../x", "has a folder '..'"),
        ("s3://team/a//b", "has a folder ''"),
        (f"s3://team/{'x' * 201}", "1 to 200 bytes"),
    ],
)
def test_an_address_that_a_client_would_read_as_another_is_refused(place, rule):
    with pytest.raises(ConfigError) as refused:
        mirror.store_root(place)
    assert rule in str(refused.value) and "secret" not in str(refused.value)


@pytest.mark.parametrize(("given", "rule"), [("", "is empty"), (__file__, "test_mirror.py is a file")])
def test_a_cache_that_is_no_folder_is_refused(nodes, monkeypatch, given, rule):
    monkeypatch.setenv("RLHF_CACHE", given)
    with pytest.raises(ConfigError, match=rf"RLHF_CACHE = '{given}': .*{rule}; name a folder, or unset it"):
        mirror.store_root(URI)


@pytest.mark.parametrize(
    "given", ["127.0.0.1:9000", "http://", "http://x:y", "http://[::1", "http://x ", "http://k:secret@x"]
)
def test_an_endpoint_that_is_no_address_is_refused_before_the_client_panics(monkeypatch, given):
    monkeypatch.setenv("AWS_ENDPOINT_URL", given)
    with pytest.raises(
        ConfigError, match=r"AWS_ENDPOINT_URL = .*: is no address of a server; write http://"
    ) as refused:
        open_bucket(URI)
    assert "secret" not in str(refused.value)


def test_an_empty_variable_of_a_bucket_is_unset_for_the_client_which_would_sign_with_it(monkeypatch):
    monkeypatch.setenv("AWS_REGION", "somewhere")
    for name in (empty := {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"}):
        monkeypatch.setenv(name, "")
    open_bucket(URI)
    assert not empty & set(os.environ) and os.environ["AWS_REGION"] == "somewhere"


@pytest.mark.parametrize("given", ["", "much", "nan", "0", "-5"])
def test_a_size_of_the_cache_that_is_none_is_refused(nodes, monkeypatch, given):
    monkeypatch.setenv("RLHF_CACHE_GIB", given)
    with pytest.raises(ConfigError, match=f"RLHF_CACHE_GIB = '{given}': must be a number of GiB above 0; set it to"):
        nodes.store("ada")


def test_a_step_asks_for_its_lease_once_a_second(nodes, monkeypatch):
    ada, asked = nodes.store("ada"), []
    with ada.lease(KEY) as lease:
        get = mirror_in(ada).leases.__class__.get
        monkeypatch.setattr(
            mirror_in(ada).leases.__class__, "get", lambda self, name: asked.append(name) or get(self, name)
        )
        assert all(lease.may_be_ours() for _ in range(100)) and len(asked) == 1
        monkeypatch.setattr(leases, "LOOK_SECONDS", 0.0)
        mirror_in(nodes.store("ben")).leases.drop(
            f"{KEY}.json", (get(mirror_in(ada).leases, f"{KEY}.json") or asked).version
        )
        assert not lease.may_be_ours()


class _Counted:
    """A client that counts what is asked of the server."""

    def __init__(self, client: Any) -> None:
        self._client, self.requests = client, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self._client, name)


def test_a_plan_of_many_stages_takes_few_requests(nodes):
    ada = nodes.store("ada")
    for number in range(21):
        commit_text(ada, f"{number}")
    client = _Counted(nodes.bucket.client)
    nodes.bucket = Bucket(URI, client)
    ben = nodes.store("ben")
    made, client.requests = client.requests, 0
    for _ in range(2):
        with ben.snapshot():
            assert all(ben.record(sha256_text(f"{number}")) is not None for number in range(21))
        assert client.requests <= 2, "of lists: nothing has changed"
        client.requests = 0
    assert made <= 21 + 3, "whether it was probed, lists, and each record once"
    assert ben.record(sha256_text("1")) is not None and client.requests == 1, "outside of a snapshot, as it is now"


def test_what_lies_in_the_bucket_alone_is_listed_as_sound(nodes):
    ref = commit_text(nodes.store("ada"), "12")
    ben = nodes.store("ben")
    assert index.states(ben.layout, {ref.digest}) == {ref.digest: index.State(None, "")}
    assert ben.holds(ref) and not ben.holds(ref.model_copy(update={"uri": f"store://{'0' * 64}"}))


def test_a_lease_that_cannot_be_released_fails_nothing(nodes, monkeypatch, caplog):
    ada = nodes.store("ada")
    with ada.lease(KEY):
        monkeypatch.setattr(nodes.bucket.client.__class__, "get", _away)
    assert "could not release lease" in caplog.text


def _away(*_: Any, **__: Any) -> Any:
    raise GenericError("Connection refused")


class _Versioned:
    """A bucket that keeps versions: answers name them, lists do not."""

    def __init__(self) -> None:
        self._memory = MemoryStore()

    def put(self, *args: Any, mode: Any = None, **options: Any) -> Any:
        tag = {"e_tag": mode["e_tag"]} if isinstance(mode, dict) else mode
        return {**self._memory.put(*args, mode=tag, **options), "version": "v"}

    def get(self, name: str) -> Any:
        got = self._memory.get(name)
        return SimpleNamespace(meta={**got.meta, "version": "v"}, bytes=got.bytes, stream=got.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


def test_a_bucket_that_keeps_versions_is_read_as_others(nodes):
    client = _Counted(_Versioned())
    nodes.bucket = Bucket(URI, client)
    ada, ben = nodes.store("ada"), nodes.store("ben")
    for text in ("1", "2", "3"):
        commit_text(ada, text)
    mirror_in(ben).refresh()
    client.requests = 0
    mirror_in(ben).refresh()
    assert client.requests == 2, "two lists, and nothing has changed"
    write_json(ben.layout.label("sft"), {"key": "1"})
    write_json(ben.layout.label("sft"), {"key": "2"})
    mirror_in(ada).refresh()
    assert read_json(ada.layout.label("sft")) == {"key": "2"}


def test_a_record_that_is_set_aside_under_the_lease_may_be_made_again(nodes):
    ada = nodes.store("ada")
    ref = commit_text(ada, "12")
    with ada.lease(KEY) as lease:
        mirror_in(ada).condemn(ref.digest, sha256_text("12"), "rotten")
        assert ada.layout.object(ref.digest).exists() and mirror_in(ada).evict() == []
        release(ada)
        mirror_in(ada).drop(ref.digest, "gone")
        assert ada.record(KEY) is None
        out = write_files(ada.layout.attempts / "out", {"a.txt": "12"})
        assert ada.commit(KEY, out, PolicyRef, children={}, record=provenance(), lease=lease) == ref
    assert (nodes.store("ben").path(ref) / "a.txt").read_text() == "12"


def test_names_in_a_bucket_lead_nowhere_outside_of_the_mirror(nodes):
    ref = commit_text(nodes.store("ada"), "12")
    nodes.bucket.client.put("records/other.json", b"{}")
    manifest = {"files": {"../../../evil": {"size": 2, "sha256": sha256_text("12")}}}
    nodes.bucket.client.put(f"objects/{ref.digest}.json", json.dumps(manifest).encode())
    ben = nodes.store("ben")
    with pytest.raises(ArtifactError, match=r"names a file outside of its object: '\.\./\.\./\.\./evil'"):
        ben.path(ref)
    assert list(nodes.folder.rglob("*evil*")) == [] and not (ben.root / "other.json").exists()


def test_a_bucket_that_is_not_there_is_named():
    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("NoSuchBucket")

    with pytest.raises(Unreachable, match=r"store = 's3://team/x': there is no such bucket; create it"):
        probe(Bucket("s3://team/x", SimpleNamespace(head=missing, put=missing, get=missing, list=lambda *_, **__: [])))
