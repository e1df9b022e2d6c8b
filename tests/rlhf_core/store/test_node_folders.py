import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rlhf_core.stage.checkpoints import Checkpoints, write_part
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.checkpoint_parts import note_elsewhere, parts_elsewhere
from rlhf_core.store.leases import name_of
from rlhf_core.store.node_folders import NodeFolder, named
from rlhf_core.store.protocol import Damaged
from rlhf_core.store.unfinished import _Keeper
from tests.support.buckets import Nodes
from tests.support.records import commit_text, write_files

KEY = "1" * 64


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    return Nodes(tmp_path, monkeypatch)


def _sent(nodes: Nodes, path: Path, to: str) -> NodeFolder:
    """The folder as a process on another node gets it; from here on this process is one there."""
    place = named(path)
    assert place is not None and place.is_here
    nodes.store(to)
    there: NodeFolder = pickle.loads(pickle.dumps(replace(place, root=Path("/on another node"))))
    assert not there.is_here
    return there


def _work(store: ArtifactStore) -> Path:
    work = store.layout.attempt(KEY) / "work-1"
    work.mkdir(parents=True, exist_ok=True)
    return work


def _save(store: ArtifactStore, nodes: Nodes, step: int, *, metric: float = 0.0) -> Checkpoints:
    """Save a checkpoint of two ranks, the second of which is on another node."""
    saved = Checkpoints(_work(store) / "ckpt", keep_best=1)

    def deliver(folder: Path) -> None:
        away = _sent(nodes, folder, "ben")
        scratch = away.scratch()
        write_files(scratch, {"zero/rank_1.pt": f"one {step}"})
        note_elsewhere(folder, 1, away.upload(scratch))

    with saved.saving(step, {}, metric=metric) as folder:
        write_files(folder / "policy", {"rank_0.pt": f"zero {step}"})
        write_part(folder / "policy", "uploaded", partial(deliver, folder / "policy"))
    saved.settle()
    return saved


def test_a_folder_on_a_disk_has_the_same_path_everywhere(tmp_path):
    assert named(tmp_path) is None


def test_an_artifact_is_fetched_into_the_cache_of_the_other_node_and_healed_there(nodes):
    ada = nodes.store("ada")
    place = _sent(nodes, ada.path(commit_text(ada, "12")), "ben").offered()
    assert place.files is None
    folder = place.folder()
    assert folder.is_relative_to(nodes.folder / "ben") and (folder / "a.txt").read_text() == "12"
    (folder / "a.txt").chmod(0o644)
    (folder / "a.txt").write_text("13")
    assert (place.folder() / "a.txt").read_text() == "12"
    here = named(ada.path(commit_text(ada, "12")) / "a.txt")
    assert here is not None and here.folder().read_text() == "12" and here.folder().is_relative_to(ada.root)


def test_each_rank_reads_what_ranks_on_other_nodes_have_saved(nodes):
    ada = nodes.store("ada")
    checkpoint = _save(ada, nodes, 1).to_resume(lambda folder: "")
    assert checkpoint is not None and not (checkpoint.path / "policy" / "zero").exists()
    place = named(checkpoint.path / "policy")
    assert place is not None
    offered = place.offered()
    for root in (ada.root, Path("/on another node")):
        nodes.store("ben")
        folder = replace(offered, root=root).folder()
        assert sorted(path.read_text() for path in folder.rglob("*.pt")) == ["one 1", "zero 1"]
        assert (folder / "zero" / "rank_1.pt").is_file() and not list(folder.glob("elsewhere*"))
    assert not list((nodes.folder / "ben").rglob("scratch/.*")), "what was uploaded is removed"


def test_parts_go_with_their_checkpoint(nodes):
    ada = nodes.store("ada")
    with ada.lease(KEY) as lease:
        keeper = _Keeper(lease, 1, _work(ada))
        for step, metric in ((1, 2.0), (2, 0.0), (3, 1.0)):
            saved = _save(ada, nodes, step, metric=metric)
            keeper.look()
        best, latest = saved.best(), saved.latest()
        assert (best.step, latest.step) == (1, 3)
        work = ada.shared.read(name_of(KEY)).value["work"]
    kept = {(owner, sha) for path in (best.path, latest.path) for _, sha, owner in parts_elsewhere(path).values()}
    found = {tuple(name.split("/")[-2:]) for name in nodes.client.names("v2/work/")}
    assert len(kept) == 2 and found - kept == {(owner, sha) for _, sha, owner in work["files"].values()}
    assert kept < found, "the parts of the best checkpoint, too"


def test_an_export_of_another_node_arrives(nodes):
    ada = nodes.store("ada")
    out = ada.layout.attempt(KEY) / "out-1"
    write_files(out, {"report.json": "{}"})
    here = named(out)
    away = _sent(nodes, out, "ben")
    scratch = away.scratch()
    write_files(scratch, {"model.safetensors": "weights"})
    assert here is not None
    here.receive(away.upload(scratch))
    assert {path.name for path in out.iterdir()} == {"report.json", "model.safetensors"}
    assert nodes.client.names("v2/work/") == []


def test_files_that_are_not_what_was_uploaded_are_never_read(nodes):
    ada = nodes.store("ada")
    write_files(_work(ada) / "reference", {"model.safetensors": "weights"})
    place = named(_work(ada) / "reference")
    assert place is not None
    offered = replace(place.offered(), root=Path("/on another node"))
    for name in nodes.client.names("v2/work/"):
        nodes.client.memory.put(name, b"other")
    nodes.store("ben")
    with pytest.raises(Damaged, match=r"model\.safetensors arrived 3 times with other content"):
        offered.folder()
