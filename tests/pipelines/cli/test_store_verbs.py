import pytest

from pipelines.cli.main import main
from rlhf_core.errors import ArtifactError
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.types import PolicyRef
from tests.support.buckets import URI, Nodes
from tests.support.records import commit, commit_text, provenance, write_files

KEY = sha256_text("12")


def test_a_result_is_pushed_to_a_bucket_and_pulled_from_it(store, tmp_path, monkeypatch, capsys):
    nodes = Nodes(tmp_path, monkeypatch)
    ref, bucket = commit_text(store, "12", label="sft"), nodes.store("ada")
    away, at = ["--store", str(store.root)], ["--store", URI]
    assert main(["store", "push", "sft", URI, *away]) == main(["store", "push", ref.digest[:12], URI, *away]) == 0
    said = f"sft {ref.digest[:12]}: "
    assert capsys.readouterr().out.splitlines() == [f"{said}copied", f"{said}has a result of this key already"]
    found = bucket.record(KEY)
    assert found is not None and found == store.record(KEY) and (bucket.path(ref) / "a.txt").read_text() == "12"
    monkeypatch.setenv("RLHF_CACHE", str(nodes.folder / "ben"))
    assert main(["store", "pull", "sft", URI, "--store", str(nodes.folder / "pulled")]) == 0
    pulled = ArtifactStore(nodes.folder / "pulled")
    assert pulled.record(KEY) == found and pulled.verify() == []
    assert main(["store", "ls", *at]) == 0 and "sft" in capsys.readouterr().out
    other = ArtifactStore(nodes.folder / "other")
    out = write_files(other.layout.attempts / "out", {"a.txt": "21"})
    commit(other, KEY, out, PolicyRef, record=provenance(label="sft"))
    assert main(["store", "push", "sft", URI, "--store", str(other.root)]) == 0
    assert f"already, which is another, {ref.digest[:12]}, and stays" in capsys.readouterr().out
    assert main(["store", "share", "--group", "root", *at]) == 2
    assert f"store = '{URI}': is a bucket; " in capsys.readouterr().err
    (tmp_path / "folder").mkdir()
    assert main(["store", "push", str(tmp_path / "folder"), URI, *away]) == 2
    assert "is neither label nor digest of an artifact; " in capsys.readouterr().err
    assert not (store.root / "roots" / "external").exists(), "nothing was done"
    folder = store.path(ref)
    (folder / "a.txt").chmod(0o644)
    (folder / "a.txt").write_text("13")
    with pytest.raises(ArtifactError, match="has other content than its digest says"):
        ArtifactStore(nodes.folder / "third").adopt(found, folder)
