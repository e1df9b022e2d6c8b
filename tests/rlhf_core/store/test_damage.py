import os
import time
from typing import Any

import pytest

from rlhf_core.errors import ArtifactError
from rlhf_core.stage.decision import decide
from rlhf_core.stage.key import StageSpec
from rlhf_core.store import collection
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.attempts import history
from rlhf_core.types import PolicyRef
from tests.support.toy_stage import ToyConfig, run_toy, stage_key, toy_spec


def _make(store: ArtifactStore, spec: StageSpec, **options: Any) -> PolicyRef:
    ref, _ = run_toy(store, spec, **options)
    assert isinstance(ref, PolicyRef)
    return ref


def _child(parent: PolicyRef, **config: object) -> StageSpec:
    return toy_spec(ToyConfig.model_validate(config), inputs={"policy": parent}, label="child")


def _decay(store: ArtifactStore, ref: PolicyRef) -> None:
    """Change a byte as a disk does: neither the size nor the times of the file tell."""
    path = store.path(ref) / "total.txt"
    before, content = path.stat(), path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(b"9" + content[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    path.chmod(0o444)


def _edit(store: ArtifactStore, ref: PolicyRef) -> None:
    """Change a byte as a program does, which leaves the time at which it wrote."""
    path = store.path(ref) / "total.txt"
    path.chmod(0o644)
    path.write_bytes(b"9" + path.read_bytes()[1:])


def test_verify_names_damage_and_changes_nothing_until_it_is_asked_to(store):
    parent = _make(store, toy_spec(label="parent"))
    right = (store.path(parent) / "total.txt").read_text()
    _decay(store, parent)
    assert decide(store, toy_spec(label="parent")).action == "HIT", "sizes and times cannot tell"
    for _ in range(2):
        (damage,) = store.verify()
        assert (damage.labels, damage.problem, damage.aside) == (("parent",), "total.txt has other content", False)
    assert decide(store, toy_spec(label="parent")).action == "HIT"
    (damage,) = store.verify(set_aside=True)
    assert damage.aside and store.verify() == []
    decision = decide(store, toy_spec(label="parent"))
    assert decision.action == "RUN" and decision.reason.endswith("total.txt has other content")
    repaired = _make(store, toy_spec(label="parent"))
    assert repaired == parent and (store.path(repaired) / "total.txt").read_text() == right
    (aside,) = (store.root / "quarantine").iterdir()
    assert (aside / "total.txt").read_text() == f"9{right[1:]}", "its files stay"


def test_a_result_that_was_set_aside_by_mistake_can_be_restored(store):
    parent = _make(store, toy_spec(label="parent"))
    key = stage_key(toy_spec(label="parent"))
    file = store.path(parent) / "total.txt"
    right = file.read_bytes()
    _decay(store, parent)
    store.verify(set_aside=True)
    with pytest.raises(ArtifactError, match=r"is damaged \(total\.txt has other content\); run the stage again"):
        collection.restore(store.shared, key)
    (aside,) = (store.root / "quarantine").iterdir()
    (aside / "total.txt").chmod(0o644)
    (aside / "total.txt").write_bytes(right)  # as after a repair of the disk
    collection.restore(store.shared, key)
    assert decide(store, toy_spec(label="parent")).action == "HIT" and store.verify() == []
    with pytest.raises(ArtifactError, match="has no record that was set aside"):
        collection.restore(store.shared, key)


def test_a_write_into_an_object_is_noticed_before_the_next_stage_reads_it(store):
    parent = _make(store, toy_spec(label="parent"))
    _edit(store, parent)
    with pytest.raises(ArtifactError, match=r"total\.txt has other content.* run again to make it again"):
        _make(store, _child(parent))
    assert decide(store, toy_spec(label="parent")).action == "RUN"
    assert history(store.attempts(stage_key(_child(parent)))) == []


def test_a_write_into_an_object_is_noticed_by_the_hit(store):
    parent = _make(store, toy_spec(label="parent"))
    _edit(store, parent)
    decision = decide(store, toy_spec(label="parent"))
    assert decision.action == "RUN" and decision.reason.endswith("total.txt has other content")
    assert store.layout.object(parent.digest).exists(), "a reader changes nothing"
    right = _make(store, toy_spec(label="parent"))
    assert right == parent and store.verify() == []


def test_a_touched_file_with_the_right_content_is_no_damage(store):
    parent = _make(store, toy_spec(label="parent"))
    later = time.time() + 60
    os.utime(store.path(parent) / "total.txt", (later, later))
    assert decide(store, toy_spec(label="parent")).action == "HIT"


def test_a_stage_whose_input_is_damaged_while_it_runs_does_not_commit(store):
    parent = _make(store, toy_spec(label="parent"))
    spec = _child(parent)

    def progress(step: int, *_: object) -> None:
        if step == 2:
            _edit(store, parent)

    with pytest.raises(ArtifactError, match=r"is damaged .* run again"):
        _make(store, spec, progress=progress)
    assert store.record(stage_key(spec)) is None


def test_a_users_folder_that_changed_since_its_digest_was_taken_is_not_read(store, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "total.txt").write_text("1")
    mine = store.external(PolicyRef, tmp_path / "mine")
    (tmp_path / "mine" / "total.txt").write_text("2")
    with pytest.raises(ArtifactError, match="has changed since its digest was taken; run again"):
        _make(store, _child(mine))
