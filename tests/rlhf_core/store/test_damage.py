import os
import time
from collections.abc import Iterable
from typing import Any

import pytest

from rlhf_core.errors import ArtifactError
from rlhf_core.stage.decision import decide
from rlhf_core.stage.key import StageSpec
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.attempts import history
from rlhf_core.store.object_check import CLOCKS_APART_S, last_good, quarantine_object
from rlhf_core.types import ArtifactRef, PolicyRef
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


def test_what_was_made_from_damaged_weights_is_made_again_once_they_are_repaired(store):
    parent = _make(store, toy_spec(label="parent"))
    right = (store.path(parent) / "total.txt").read_text()
    _decay(store, parent)
    wrong = _make(store, _child(parent))
    grandchild = toy_spec(inputs={"policy": wrong}, label="grandchild")
    _make(store, grandchild)

    (damage,) = store.verify()
    assert (damage.labels, damage.suspects) == (("parent",), ("child",))
    assert "made from it since it was last known to be good: child" in str(damage)
    repaired = _make(store, toy_spec(label="parent"))
    assert repaired == parent and (store.path(repaired) / "total.txt").read_text() == right

    decision = decide(store, _child(parent))
    assert decision.action == "RUN"
    assert f"made from object {parent.digest[:12]}, which was found damaged (total.txt has other" in decision.reason
    made = _make(store, _child(parent))
    assert (store.path(made) / "total.txt").read_text().endswith(right) and made != wrong
    assert decide(store, _child(parent)).action == "HIT"
    assert decide(store, toy_spec(inputs={"policy": made}, label="grandchild")).action == "RUN"


def test_a_result_that_was_finished_before_the_last_good_check_stays_a_hit(store):
    parent = _make(store, toy_spec(label="parent"))
    _make(store, _child(parent))
    manifest = store.path(parent) / "manifest.json"
    assert store.verify() == [] and last_good(store.path(parent)) == pytest.approx(time.time(), abs=60)
    later = time.time() + 2 * CLOCKS_APART_S
    os.utime(manifest, (later, later))  # a good check that came later than clocks may differ
    _decay(store, parent)
    (damage,) = store.verify()
    assert damage.suspects == ()
    _make(store, toy_spec(label="parent"))
    assert decide(store, _child(parent)).action == "HIT"


def test_a_write_into_an_object_is_noticed_before_the_next_stage_reads_it(store):
    parent = _make(store, toy_spec(label="parent"))
    _edit(store, parent)
    with pytest.raises(ArtifactError, match=r"total\.txt has other content.* run again to make it again"):
        _make(store, _child(parent))
    assert decide(store, toy_spec(label="parent")).action == "RUN"
    assert history(store.layout.attempt(stage_key(_child(parent)))) == []


def test_a_write_into_an_object_is_noticed_by_the_hit(store):
    parent = _make(store, toy_spec(label="parent"))
    _edit(store, parent)
    decision = decide(store, toy_spec(label="parent"))
    assert decision.action == "RUN" and decision.reason.endswith("total.txt has other content")
    assert not store.layout.object(parent.digest).exists()


def test_a_touched_file_with_the_right_content_is_no_damage(store):
    parent = _make(store, toy_spec(label="parent"))
    later = time.time() + 60
    os.utime(store.path(parent) / "total.txt", (later, later))
    assert decide(store, toy_spec(label="parent")).action == "HIT"


@pytest.mark.parametrize(
    ("finds", "text"),
    [
        (lambda store, ref: _edit(store, ref), r"is damaged .* run again"),  # nobody but the commit notices it
        (
            lambda store, ref: quarantine_object(store.layout, ref.digest, "bad"),
            r"child\.inputs = .*found damaged .* run it",
        ),
    ],
)
def test_a_stage_whose_input_is_damaged_while_it_runs_does_not_commit(store, finds, text):
    parent = _make(store, toy_spec(label="parent"))
    spec = _child(parent)

    def progress(step: int, *_: object) -> None:
        if step == 2:
            finds(store, parent)

    with pytest.raises(ArtifactError, match=text):
        _make(store, spec, progress=progress)
    assert store.record(stage_key(spec)) is None
    assert decide(store, spec).action == "RUN", "its checkpoints are not resumed"


def test_damage_that_is_found_between_the_last_check_and_the_record_is_noticed_in_the_lock(store, monkeypatch):
    parent = _make(store, toy_spec(label="parent"))
    check = ArtifactStore.check_inputs

    def check_then_damage(store: ArtifactStore, refs: Iterable[ArtifactRef]) -> None:
        check(store, refs)
        if store.layout.attempt(stage_key(_child(parent))).exists():  # the check of the commit, not of the beginning
            quarantine_object(store.layout, parent.digest, "bad")

    monkeypatch.setattr(ArtifactStore, "check_inputs", check_then_damage)
    with pytest.raises(ArtifactError, match=r"child\.inputs = .*found damaged"):
        _make(store, _child(parent))
    assert store.record(stage_key(_child(parent))) is None


def test_checkpoints_of_an_attempt_that_read_damaged_inputs_are_not_gone_on_from(store):
    parent = _make(store, toy_spec(label="parent"))
    _decay(store, parent)
    with pytest.raises(ValueError, match="went wrong"):
        _make(store, _child(parent, trouble="raise:3"))
    assert decide(store, _child(parent)).action == "RESUME"
    store.verify()
    _make(store, toy_spec(label="parent"))
    decision = decide(store, _child(parent))
    assert decision.action == "RUN"
    assert decision.reason.startswith(f"attempt 1 was made from object {parent.digest[:12]}, which was found damaged")
    made = _make(store, _child(parent))
    record = store.record(stage_key(_child(parent)))
    assert record is not None and record.handle == made and record.resumed_from is None


def test_a_users_folder_that_changed_since_its_digest_was_taken_is_not_read(store, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "total.txt").write_text("1")
    mine = store.external(PolicyRef, tmp_path / "mine")
    (tmp_path / "mine" / "total.txt").write_text("2")
    with pytest.raises(ArtifactError, match="has changed since its digest was taken; run again"):
        _make(store, _child(mine))
