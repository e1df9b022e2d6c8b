"""The server of a bucket, the cache of a node, and what the nodes share besides results."""

import os
import stat
from types import SimpleNamespace
from typing import Any

import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from rlhf_core.errors import ArtifactError, ConfigError
from rlhf_core.stage.gate_decisions import GateDecisions, Question
from rlhf_core.store import attempts, bucket, bucket_server, index, leases
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.bucket_server import PROBES, AccessRefused, ObstoreServer, probe
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.leases import Lost, living_owner, name_of
from rlhf_core.store.protocol import Damaged, Unreachable, pack
from rlhf_core.types import PolicyRef
from tests.support.buckets import URI, Nodes
from tests.support.records import commit_text, provenance, write_files

KEY = sha256_text("12")


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    return Nodes(tmp_path, monkeypatch)


def _served_by(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_server, "open_bucket", lambda uri, **_: client)


# ---------------------------------------------------------------- the server


class _Ignores:
    def __init__(self, ignored: str) -> None:
        self._memory, self._ignored = MemoryStore(), ignored

    def put(self, *args: Any, mode: Any = None, **options: Any) -> Any:
        ignored = mode == "create" if self._ignored == "create" else isinstance(mode, dict)
        return self._memory.put(*args, mode="overwrite" if ignored else mode, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


class _LosesResponses:
    """The client repeats a put whose response was lost, and is told that the name is no longer at its version."""

    def __init__(self) -> None:
        self._memory = MemoryStore()

    def put(self, *args: Any, mode: Any = None, **options: Any) -> Any:
        self._memory.put(*args, mode=mode, **options)
        return self._memory.put(*args, mode=mode, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


def test_a_server_whose_responses_are_lost_is_not_refused(monkeypatch):
    client = _LosesResponses()
    _served_by(client, monkeypatch)
    probe(URI)
    assert len([one for some in client.list() for one in some]) == 1, "the note that the server has passed"


@pytest.mark.parametrize(("ignored", "said"), [("create", PROBES[0]), ("update", PROBES[1])])
def test_a_server_without_conditional_puts_is_refused(ignored, said, monkeypatch):
    _served_by(_Ignores(ignored), monkeypatch)
    with pytest.raises(ConfigError) as error:
        probe(URI)
    assert str(error.value).startswith(
        f"store = '{URI}': on this server {said}, so two runs could compute the same key"
    )


def test_a_bucket_that_is_away_is_named(monkeypatch):
    def fail(*_: Any, **__: Any) -> Any:
        raise GenericError("Connection refused")

    _served_by(SimpleNamespace(get=fail), monkeypatch)
    with pytest.raises(Unreachable, match=r"store = 's3://memory/team': did not .*Connection refused.*check address"):
        ObstoreServer(URI).get("a")


def test_a_bucket_that_does_not_exist_is_named(monkeypatch):
    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("NoSuchBucket")

    _served_by(SimpleNamespace(put=missing, get=missing, list=lambda *_, **__: []), monkeypatch)
    with pytest.raises(AccessRefused, match=r"store = 's3://memory/team': there is no such bucket; create it"):
        probe(URI)


class _Versioned:
    """A bucket that keeps versions: responses name them, listings do not."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, *args: Any, mode: Any = None, **options: Any) -> Any:
        tag = {"e_tag": mode["e_tag"]} if isinstance(mode, dict) else mode
        return {**self._client.put(*args, **({"mode": tag} if tag else {}), **options), "version": "v"}

    def get(self, name: str) -> Any:
        got = self._client.get(name)
        return SimpleNamespace(meta={**got.meta, "version": "v"}, bytes=got.bytes, stream=got.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def test_a_bucket_that_keeps_versions_is_read_as_others(nodes, monkeypatch):
    _served_by(_Versioned(nodes.client), monkeypatch)
    ada, ben = nodes.store("ada"), nodes.store("ben")
    for text in ("1", "2", "3"):
        commit_text(ada, text)
    assert len(ben.records()) == 3
    nodes.client.requests.clear()
    assert len(ben.records()) == 3
    assert nodes.client.requests["GET"] == 0, "nothing has changed"
    ben.note_label("sft", "", {"key": "1"})
    ben.note_label("sft", "", {"key": "2"})
    assert ada.label("sft") == {"key": "2"}


# ---------------------------------------------------------------- objects and the cache


def test_a_result_is_read_from_another_node_with_the_digest_of_a_store_on_a_disk(nodes, store):
    ada, ben = nodes.store("ada"), nodes.store("ben")
    ref = commit_text(ada, "12")
    assert ref == commit_text(store, "12")
    assert ben.record(KEY).handle == ref and not ben.layout.object(ref.digest).exists(), "a record needs no files"
    file = ben.path(ref) / "a.txt"
    assert file.read_text() == "12" and not file.stat().st_mode & stat.S_IWUSR
    assert ben.used(KEY) and ben.holds(ref)
    assert not ben.holds(ref.model_copy(update={"uri": f"store://{'0' * 64}"}))


def test_the_next_stage_on_the_node_does_not_download_what_it_has_committed(nodes):
    ada = nodes.store("ada")
    ref = commit_text(ada, "12")
    nodes.client.requests.clear()
    assert (ada.path(ref) / "a.txt").read_text() == "12" and nodes.client.requests["GET"] == 0


def test_equal_files_of_an_object_are_stored_once(nodes):
    ada = nodes.store("ada")
    with ada.lease(KEY) as lease:
        out = write_files(ada.layout.attempt(KEY) / "out", {"a.txt": "12", "b/c.txt": "12"})
        ada.commit(lease, out, PolicyRef, children={}, record=provenance())
    assert [name.rpartition("/")[2] for name in nodes.client.names("v2/data/")] == [sha256_text("12")]


def test_the_cache_evicts_what_was_not_used_for_longest_and_keeps_what_is_read(nodes, monkeypatch):
    ada = nodes.store("ada")
    refs = [commit_text(ada, f"{number}" * 1000) for number in range(3)]
    monkeypatch.setenv("RLHF_CACHE_GIB", str(2900 / 2**30))  # two objects with their manifests
    ben = nodes.store("ben")
    first = ben.path(refs[0])
    ben.path(refs[1])
    with pytest.raises(ArtifactError, match="are needed at once, and RLHF_CACHE_GIB is"):
        ben.path(refs[2])
    assert first.exists(), "this process reads it"
    _end_process(ben)
    again = nodes.store("ben")
    again.path(refs[1])
    assert (again.path(refs[2]) / "a.txt").read_text() == "2" * 1000
    assert [again.layout.object(ref.digest).exists() for ref in refs] == [False, True, True]


def _end_process(store: ArtifactStore) -> None:
    """Let the cache of a node remove what this process has read, as if the process had ended."""
    held = store.shared._copies._held
    while held:
        os.close(held.popitem()[1])


@pytest.mark.parametrize("given", ["", "much", "nan", "0", "-5"])
def test_a_size_of_the_cache_that_is_none_is_refused(nodes, monkeypatch, given):
    ada = nodes.store("ada")
    ref = commit_text(ada, "12")
    monkeypatch.setenv("RLHF_CACHE_GIB", given)
    said = f"RLHF_CACHE_GIB = '{given}': must be a number of GiB above 0; set it to"
    with pytest.raises(ConfigError, match=said):
        nodes.store("ben").path(ref)


def test_names_in_a_bucket_lead_nowhere_outside_of_the_cache(nodes):
    ref = commit_text(nodes.store("ada"), "12")
    name = f"v2/objects/{ref.digest}"
    state = bucket.unpack(bytes(nodes.client.memory.get(name).bytes()))
    files = {"../../../evil": next(iter(state["files"].values()))}
    nodes.client.memory.put(name, pack(state | {"files": files}))
    with pytest.raises(Damaged, match="has a list of files with another digest"):
        nodes.store("ben").path(ref)
    assert list(nodes.folder.rglob("*evil*")) == []


def test_an_object_in_the_bucket_alone_is_listed_with_its_size(nodes):
    ref = commit_text(nodes.store("ada"), "12")
    ben = nodes.store("ben")
    assert index.states(ben.shared, {ref.digest}) == {ref.digest: index.State(2, "")}


# ---------------------------------------------------------------- leases, attempts and questions of all nodes


def test_a_lease_and_the_history_are_one_for_all_nodes(nodes):
    ada, ben = nodes.store("ada"), nodes.store("ben")
    with ada.lease(KEY) as lease:
        assert living_owner(ben.shared, KEY).token == lease.token
        folder = ada.attempts(KEY, lease)
        first = attempts.begin(folder, label="toy", resumed_from=None, code={})
        attempts.end(folder, first, label="toy", status="failed", failure="no", seconds=1.0)
    assert living_owner(ben.shared, KEY) is None
    with ben.lease(KEY) as again:
        second = attempts.begin(ben.attempts(KEY, again), label="toy", resumed_from=None, code={})
        with pytest.raises(Lost):
            attempts.end(folder, first, label="toy", status="failed", failure="late", seconds=1.0)
        assert (first.number, second.number) == (1, 2)


def test_a_step_asks_for_its_lease_once_a_second(nodes, monkeypatch):
    ada, ben = nodes.store("ada"), nodes.store("ben")
    with ada.lease(KEY) as lease:
        nodes.client.requests.clear()
        for _ in range(100):
            lease.fence()
        assert nodes.client.requests["GET"] == 1
        monkeypatch.setattr(leases, "LOOK_S", 0.0)
        table = ben.shared.read(name_of(KEY))
        ben.shared.write(table.name, {}, table.version)
        with pytest.raises(Lost):
            lease.fence()


def test_an_answer_of_one_node_lets_a_run_of_another_go_on(nodes):
    question = Question(gate="quality", condition={}, digest="d1", run="night")
    asked = GateDecisions(nodes.store("ada").shared).ask(question, run="night", links={})
    (seen,) = GateDecisions(nodes.store("ben").shared).requests()
    GateDecisions(nodes.store("ben").shared).decide(seen, "approve", reason="fine", by="ben")
    found = GateDecisions(nodes.store("ada").shared).find(asked.id)
    assert found.answer.by == "ben"
