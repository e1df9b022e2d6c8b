import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlhf_core.store import fingerprint, index
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.collection import forget
from rlhf_core.store.fingerprint import ANALYSES, analysis_of, module_digests, sha256_text
from rlhf_core.store.index import CODE, OBJECTS, RECORDS, remembered_code, rows, states
from rlhf_core.store.layout import cache_folder, remove_tree
from rlhf_core.types import PolicyRef
from rlhf_core.user_code import sources
from rlhf_core.user_code.sources import Source, reached_from
from tests.support.records import provenance

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
        patch.setattr(index, "_read_record", _never)
        assert _labels(store) == ["sft", "sft"]
    _commit(store, "three", label="ppo", started="2031-01-01T00:00:00.000+00:00")
    assert _labels(store) == ["sft", "sft", "ppo"]
    _commit(store, "one", label="dpo", started="2032-01-01T00:00:00.000+00:00")
    assert _labels(store) == ["sft", "ppo", "dpo"]
    forget(store.shared, sha256_text("two"))
    assert _labels(store) == ["ppo", "dpo"]


@pytest.mark.parametrize("harm", ["missing", "empty", "cut", "another version", "changed"])
def test_an_index_that_is_missing_or_damaged_is_made_anew(store, harm):
    digests = {row.object for row in rows(store.shared, store.layout)[0]}
    right = states(store.shared, store.layout, digests)
    for name in (RECORDS, OBJECTS):
        path = store.layout.index / name
        text = path.read_text()
        harmed = {"empty": "", "cut": text[:-20], "another version": f"9{text}", "changed": text.replace("1", "2")}
        if harm == "missing":
            path.unlink()
        else:
            path.write_text(harmed[harm])
    assert [row.seconds for row in rows(store.shared, store.layout)[0]] == [1.0, 1.0]
    assert states(store.shared, store.layout, digests) == right
    assert (store.layout.index / RECORDS).read_text().startswith("2 ")


def test_unreadable_records_are_named_each_time(store):
    (store.root / "tables" / "keys" / f"{sha256_text('two')}.json").write_text("{")
    for _ in range(2):
        found, unreadable, _ = rows(store.shared, store.layout)
        assert len(found) == 1 and "has other content than was written" in str(*unreadable)


def test_damage_is_seen_although_the_manifest_is_known(store):
    digests = {row.object for row in rows(store.shared, store.layout)[0]}
    one = store.layout.object(next(iter(sorted(digests))))
    sound = states(store.shared, store.layout, digests)
    assert {state.damage for state in sound.values()} == {""} and (sound[one.name].bytes or 0) > 3
    file = one / "base" / "a.txt"
    file.chmod(0o644)
    content = file.read_text()
    file.write_text("six")
    assert states(store.shared, store.layout, digests)[one.name].damage == "base/a.txt has other content"
    file.write_text("a longer text")
    assert states(store.shared, store.layout, digests)[one.name].damage == "base/a.txt has 13 bytes, not 3"
    file.write_text(content)
    assert states(store.shared, store.layout, digests)[one.name].damage == ""
    remove_tree(one)
    gone = states(store.shared, store.layout, digests)[one.name]
    assert gone.bytes is None and gone.damage.endswith("is gone")


def test_a_store_that_cannot_be_written_is_listed_all_the_same(tmp_path):
    store = ArtifactStore(tmp_path / "none")
    assert rows(store.shared, store.layout) == ([], [], []) and not store.root.exists()


@pytest.fixture
def module(tmp_path, monkeypatch) -> Path:
    """A module `kept_code`, whose analysis no process knows yet."""
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "kept_code.py"
    file.write_text("import os\nDEPENDS_ON = ('env:MODEL',)\ndef reward(): ...\n")
    return file


def analyses() -> tuple[dict[str, str], Source]:
    """The analyses of `kept_code` in a new process: as a module of this program, and as a user's."""
    ANALYSES.clear()
    with remembered_code():
        return module_digests("kept_code", ("kept_code",)), reached_from("kept_code")[0].source


def test_code_that_another_process_has_analysed_is_not_parsed_again(module, monkeypatch):
    first = analyses()
    assert first[1].functions == ("reward",) and first[1].declared == ("env:MODEL",)
    (module.parent / "copy").mkdir()
    module.rename(module.parent / "copy" / module.name)  # the same content in another place
    monkeypatch.syspath_prepend(module.parent / "copy")
    for parser in (fingerprint, sources):
        monkeypatch.setattr(parser, "parse_source", _never)
    assert analyses() == first


def test_code_with_another_content_is_parsed_again_whatever_its_size_and_time(module):
    first, before = analyses(), module.stat()
    module.write_text(module.read_text().replace("reward", "amount"))
    os.utime(module, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert module.stat().st_size == before.st_size
    second = analyses()
    assert second[0] != first[0] and second[1].digest != first[1].digest and second[1].functions == ("amount",)


def test_the_same_content_as_a_module_and_as_a_package_has_two_analyses(module):
    folder = module.parent / "pack"
    (folder / "kept").mkdir(parents=True)
    (folder / "kept.py").write_text("from . import other\n")
    ANALYSES.clear()
    with remembered_code():
        assert reached_from("pack.kept")[0].source.imports == ("pack", "pack.other")
        (folder / "kept.py").rename(folder / "kept" / "__init__.py")
        assert reached_from("pack.kept")[0].source.imports == ("pack", "pack.kept", "pack.kept.other")


@pytest.mark.parametrize("harm", ["missing", "empty", "cut", "changed", "older", "no text", "a folder"])
def test_a_cache_of_code_that_is_damaged_or_of_another_version_is_made_anew(module, harm):
    first = analyses()
    file = cache_folder() / CODE
    sound = file.read_bytes()
    wrong = sound.replace(first[1].digest.encode(), b"0" * 64)  # of a version that computes other digests
    harmed = {"empty": b"", "cut": sound[:-1], "changed": wrong, "no text": b"\xff" + sound, "older": b"0" + wrong}
    if harm in harmed:
        file.write_bytes(harmed[harm])
    else:
        file.unlink()
    if harm == "a folder":
        (file / "inside").mkdir(parents=True)
    assert analyses() == first
    assert harm == "a folder" or file.read_bytes() == sound


def test_code_is_analysed_by_another_version_of_the_analysis(module, monkeypatch):
    analyses()
    parsed: list[str] = []
    monkeypatch.setattr(index, "_maker", lambda: "another")
    parse = fingerprint.parse_source
    monkeypatch.setattr(fingerprint, "parse_source", lambda *given: (parsed.append(given[1]), parse(*given))[1])
    analyses()
    assert parsed == [str(module)]


@pytest.mark.parametrize("folder", ["", __file__, f"{__file__}/inside", "/proc/rlhf", "~no-such-user/cache"])
def test_code_is_analysed_without_a_cache_where_none_can_be_written(module, monkeypatch, folder):
    first = analyses()
    monkeypatch.setenv("RLHF_CACHE", folder)
    assert analyses() == first


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_code_is_analysed_where_this_user_may_read_the_cache_but_not_write_it_or_not_even_look(module, monkeypatch):
    first, content = analyses(), module.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("RLHF_CACHE", f"{folder}/inside")
        for mode in (0o555, 0o000):
            Path(folder).chmod(mode)
            os.seteuid(65534)
            try:
                ANALYSES.clear()
                with remembered_code():
                    again = analysis_of(module, "", content, sources._analyse)
            finally:
                os.seteuid(0)
            assert again[0] == first[1].digest and not list(Path(folder).iterdir())


def test_processes_that_save_at_the_same_time_leave_a_sound_cache_with_the_latest_code(module):
    begin = threading.Barrier(8)

    def analyse(number: int) -> None:
        with remembered_code():
            begin.wait()
            for version in range(20):
                analysis_of(module, "", f"def f{number}_{version}(): ...\n".encode(), sources._analyse)

    ANALYSES.clear()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(analyse, range(8)))
    kept = index._load(cache_folder() / CODE)
    assert kept and all(ANALYSES[key] == analysis for key, analysis in kept.items())
    assert [file.name for file in cache_folder().iterdir()] == [CODE]


def test_the_cache_of_code_keeps_what_was_used_last(module, monkeypatch):
    monkeypatch.setattr(index, "MOST_CODE", 3)
    analyses()  # two analyses
    for number in range(2):
        ANALYSES.clear()
        with remembered_code():
            analysis_of(module, "kept_code", module.read_bytes(), sources._analyse)
            analysis_of(module, "", b"A = %d\n" % number, sources._analyse)
    kept = index._load(cache_folder() / CODE)
    assert [functions for *_, functions in kept.values()] == [[], ["reward"], []]  # A = 0, the module of a user, A = 1


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
