import importlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from rlhf_core.processes.identity import user_name
from rlhf_core.secrets.redaction import ErrorWithoutSecrets, know
from rlhf_core.stage import context, versions
from rlhf_core.stage import decision as deciding
from rlhf_core.stage.decision import Decision, decide, differences
from rlhf_core.stage.key import StageSpec, Strictness, payload_key
from rlhf_core.stage.stopping import StageWaiting
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.attempts import history
from rlhf_core.store.earlier import stored_record
from rlhf_core.store.layout import remove_tree
from rlhf_core.store.leases import name_of
from rlhf_core.store.protocol import discard, update
from tests.support import toy_stage
from tests.support.toy_stage import Inner, ToyConfig, run_toy, stage_key, toy_spec


def _run(store: ArtifactStore, spec: StageSpec, **options: Any) -> Decision:
    return run_toy(store, spec, **options)[1]


def _fail(store: ArtifactStore, trouble: str, **changes: Any) -> None:
    with pytest.raises(ValueError, match="went wrong"):
        _run(store, toy_spec(ToyConfig(trouble=trouble, **changes)))


def _said(store: ArtifactStore, spec: StageSpec, **options: Any) -> tuple[str, str]:
    decision = decide(store, spec, **options)
    return decision.action, decision.reason


def test_the_first_run_says_so_and_deciding_computes_nothing(store):
    assert _said(store, toy_spec()) == ("RUN", "first run")
    assert not store.layout.attempts.exists()


def test_a_decision_is_compared_with_stages_of_the_same_pipeline(store):
    """Also the time it took: that of the last result, whatever was tried since."""
    mine, other = (toy_spec(ToyConfig(kl_coef=0.2), pipeline=name) for name in ("mine", "other"))
    _run(store, toy_spec(pipeline="mine"))
    assert _said(store, mine) == ("RUN", "toy.kl.coef: 0.05 -> 0.2")
    assert _said(store, other) == ("RUN", "first run of other")
    with pytest.raises(ValueError, match="went wrong"):
        _run(store, toy_spec(ToyConfig(kl_coef=0.2, trouble="raise:1"), pipeline="mine"))
    first = store.record(stage_key(toy_spec()))
    assert first is not None
    assert [store.latest(one.label, one.pipeline) for one in (mine, other)] == [first, None]
    assert store.latest("toy", "mine") == first, "an attempt without a result hides none"
    _run(store, other)
    assert _said(store, toy_spec(seed=8, pipeline="other")) == ("RUN", "seed: 7 -> 8, toy.kl.coef: 0.2 -> 0.05")
    assert store.latest("toy") == store.latest(other.label, other.pipeline) != first


def test_a_run_then_hits_with_when_and_how_long(store):
    _run(store, toy_spec())
    decision = decide(store, toy_spec())
    assert decision.action == "HIT" and decision.step is None
    assert decision.reason.startswith("made 20") and decision.reason.endswith(" s")
    assert _said(store, toy_spec(label="somewhere/else"))[0] == "HIT"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"config": ToyConfig(kl_coef=0.1)}, "toy.kl.coef: 0.05 -> 0.1"),
        ({"config": ToyConfig(inner=Inner(rate=0.25))}, "toy.inner.rate: 0.5 -> 0.25"),
        ({"config": ToyConfig(names=("a", "c"))}, "toy.names[1]: b -> c"),
        ({"config": ToyConfig(names=("a",))}, 'toy.names: ["a", "b"] -> ["a"]'),
        ({"config": ToyConfig(kl_coef=0.1, steps=4)}, "toy.kl.coef: 0.05 -> 0.1, toy.steps: 3 -> 4"),
        ({"seed": 8}, "seed: 7 -> 8"),
        ({"version": 2}, "version: 1 -> 2"),
        ({"engines": {"trainer": {"dtype": "bfloat16"}}}, 'engines.trainer: nothing -> {"dtype": "bfloat16"}'),
    ],
)
def test_a_run_names_the_field_that_changed(store, changes, reason):
    _run(store, toy_spec())
    assert _said(store, toy_spec(**changes)) == ("RUN", reason)


def test_many_changes_are_counted(store):
    _run(store, toy_spec())
    config = ToyConfig(kl_coef=1.0, steps=1, inner=Inner(rate=1.0), names=("x", "y"))
    assert decide(store, toy_spec(config, seed=1)).reason == (
        "seed: 7 -> 1, toy.kl.coef: 0.05 -> 1.0, toy.steps: 3 -> 1, toy.inner.rate: 0.5 -> 1.0 and 2 more"
    )


def test_a_changed_input_is_named_with_both_digests(store):
    first, second = (run_toy(store, toy_spec(ToyConfig(steps=steps), label=f"base-{steps}"))[0] for steps in (1, 2))
    _run(store, toy_spec(inputs={"policy": first}))
    _, reason = _said(store, toy_spec(inputs={"policy": second}))
    assert reason == f"input policy changed: {first.digest[:8]} -> {second.digest[:8]}"
    _, reason = _said(store, toy_spec())
    assert reason == f"input policy changed: {first.digest[:8]} -> nothing"


def test_the_comparison_is_with_what_the_stage_last_was_even_if_that_was_a_hit(store):
    for kl_coef in (0.05, 0.1, 0.05):
        _run(store, toy_spec(ToyConfig(kl_coef=kl_coef)))
    assert decide(store, toy_spec(ToyConfig(kl_coef=0.2))).reason == "toy.kl.coef: 0.05 -> 0.2"


@pytest.mark.parametrize(
    ("trouble", "decision"),
    [
        ("raise:3", ("RESUME", "from step 2 of attempt 1", 2)),
        ("raise:1", ("RUN", "attempt 1 left no checkpoint (ValueError: step 1 went wrong)", None)),
        ("shards", ("RESUME", "from the files of attempt 1: shard-1.txt, shard-2.txt, shard-3.txt", None)),
    ],
)
def test_a_failed_attempt_is_resumed_from_what_it_left(store, trouble, decision):
    _fail(store, trouble)
    found = decide(store, toy_spec())
    assert (found.action, found.reason, found.step) == decision


def test_a_lost_artifact_is_the_reason_to_run(store):
    _run(store, toy_spec())
    remove_tree(store.layout.objects)
    for _ in range(2):
        action, reason = _said(store, toy_spec())
        assert action == "RUN" and reason.startswith("its artifact cannot be used: ") and reason.endswith(" is gone")
    _run(store, toy_spec())
    assert _said(store, toy_spec())[0] == "HIT"
    discard(store.shared, name_of(stage_key(toy_spec())))
    assert _said(store, toy_spec()) == ("RUN", "its artifact is gone")


def test_a_key_under_computation_is_attached_to(store):
    key = decide(store, toy_spec()).key
    with store.lease(key):
        action, reason = _said(store, toy_spec())
        assert action == "ATTACH" and reason == f"process {os.getpid()} on {socket.gethostname()} is computing it"
        elsewhere = {"pid_namespace": "that of another container"}
        update(store.shared, name_of(key), lambda value: value | {"lease": value["lease"] | elsewhere})
        assert _said(store, toy_spec())[1].endswith(
            "is computing it; should that have ended, its lease is taken over 120 s after its last sign"
        )


def test_a_hit_takes_milliseconds(store):
    _run(store, toy_spec())
    decide(store, toy_spec())  # parses the code once per process
    started = time.process_time()
    for _ in range(10):
        assert decide(store, toy_spec()).action == "HIT"
    assert (time.process_time() - started) / 10 < 0.05


# ---------------------------------------------------------------- answers that failed


def _under(timeout_s: float, trouble: str = "") -> StageSpec:
    return toy_spec(ToyConfig(inner=Inner(timeout_s=timeout_s), trouble=trouble))


def test_a_result_without_failures_is_a_hit_under_any_settings_of_them(store):
    _run(store, _under(60.0))
    assert decide(store, _under(5.0)).action == "HIT"


def test_a_result_with_failed_answers_is_a_hit_under_their_settings_alone(store):
    first = _run(store, _under(5.0))
    action, reason = _said(store, _under(5.0))
    assert action == "HIT" and reason.endswith("; 3 of 12 answers failed (inner)")
    why = "toy.inner: 3 of 12 answers failed under timeout_s = 5.0, now 60.0"
    assert _said(store, _under(60.0)) == ("RUN", why)
    second = _run(store, _under(60.0))
    assert (second.action, second.reason, second.key) == ("RUN", why, first.key)
    assert [decide(store, _under(timeout_s)).action for timeout_s in (60.0, 5.0, 7.0)] == ["HIT"] * 3  # nothing failed
    record = store.record(first.key)
    assert record is not None and (record.failures, record.attempts) == ({}, 2)


def test_unfinished_work_is_resumed_under_any_settings_and_counts_for_the_last(store):
    with pytest.raises(ValueError, match="went wrong"):
        _run(store, _under(5.0, "raise:3"))
    said = "from step 2 of attempt 1; 3 of 12 answers failed so far (inner): --force starts over"
    assert _said(store, _under(60.0)) == ("RESUME", said)
    _run(store, _under(60.0))
    record = store.record(stage_key(_under(60.0)))
    assert record is not None and record.failures["inner"].model_dump() == {
        "failed": 2,  # of steps 1 and 2; the third is made again
        "answers": 12,
        "settings": {"timeout_s": 60.0},
    }
    assert decide(store, _under(60.0)).action == "HIT"
    assert decide(store, _under(5.0)).action == "RUN"


def test_the_work_of_a_second_run_survives_a_kill_although_the_first_has_a_record(store):
    key = _run(store, _under(5.0)).key
    with pytest.raises(ValueError, match="went wrong"):
        _run(store, _under(60.0, "raise:3"))
    store.tidy(key)
    assert [item.kind for item in store.gc(dry_run=False).items] == []
    assert _said(store, _under(60.0)) == ("RESUME", "from step 2 of attempt 2")
    assert decide(store, _under(5.0)).action == "HIT"


def test_a_result_that_an_earlier_version_kept_as_a_numbered_take_is_a_hit(store):
    first = _run(store, _under(5.0))
    record = store.record(first.key)
    payload = record.payload | {"take": 2}
    take = record.model_copy(update={"key": payload_key(payload), "payload": payload, "failures": {}})
    facts = json.loads(json.dumps(take.to_json()))
    store.shared.write(name_of(take.key), {"record": stored_record(facts)}, None)
    decision = decide(store, _under(60.0))
    assert (decision.action, decision.key) == ("HIT", take.key)
    assert decide(store, _under(5.0)).key == first.key


def test_a_process_that_waited_for_a_result_which_does_not_fit_computes_its_own(store):
    slow = toy_spec(ToyConfig(inner=Inner(timeout_s=5.0), seconds_a_step=0.3))
    other = threading.Thread(target=_run, args=(store, slow))
    other.start()
    while not history(store.attempts(stage_key(slow))):
        time.sleep(0.01)
    seen: list[Decision] = []
    _run(store, toy_spec(label="second"), on_decision=seen.append)
    other.join()
    assert [decision.action for decision in seen] == ["ATTACH", "RUN"]
    assert seen[1].reason == "second.inner: 3 of 12 answers failed under timeout_s = 5.0, now 60.0"


# ---------------------------------------------------------------- code


@pytest.fixture
def stage_file(tmp_path, monkeypatch) -> Path:
    """A stage module `drifting` that a test may edit."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "drifting.py"
    file.write_text("from tests.support.toy_stage import run\n")
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "drifting", raising=False)
    return file


def _drift(file: Path) -> None:
    """Change the code of a stage, but not its result."""
    file.write_text(f"{file.read_text()}EXTRA = 2\n")


def test_a_hit_names_the_modules_whose_code_has_changed(store, stage_file):
    spec = toy_spec(module="drifting")
    _run(store, spec)
    assert "code changed" not in decide(store, spec).reason
    _drift(stage_file)
    action, reason = _said(store, spec)
    assert action == "HIT" and reason.endswith("; code changed since (drifting)")


def test_strict_code_takes_a_result_of_this_very_code_and_runs_for_any_other(store, stage_file):
    spec = toy_spec(module="drifting")
    _run(store, spec)
    assert decide(store, spec, strict=Strictness(code=True)).action == "HIT"
    _drift(stage_file)
    assert _said(store, spec, strict=Strictness(code=True)) == ("RUN", "code changed (drifting)")
    assert _run(store, spec, strict=Strictness(code=True)).action == "RUN"
    assert decide(store, spec, strict=Strictness(code=True)).action == "HIT"
    assert decide(store, spec).action == "HIT"


def test_a_strict_stage_runs_when_its_code_changes(store, stage_file):
    spec = toy_spec(module="drifting", code="strict")
    _run(store, spec)
    assert decide(store, spec).action == "HIT"
    _drift(stage_file)
    assert _said(store, spec) == ("RUN", "code changed (drifting)")


def test_a_resume_says_that_the_code_has_changed_and_the_record_names_both(store, stage_file):
    before = stage_file.read_text()
    spec = toy_spec(module="drifting")
    with pytest.raises(ValueError, match="went wrong"):
        _run(store, toy_spec(ToyConfig(trouble="raise:2"), module="drifting"))
    assert _said(store, spec) == ("RESUME", "from step 1 of attempt 1")
    _drift(stage_file)
    said = "from step 1 of attempt 1; its code has changed since (drifting): --force starts over"
    assert _said(store, spec) == ("RESUME", said)
    _run(store, spec)
    record = store.record(stage_key(spec))
    assert record is not None and list(record.earlier_code) == ["drifting"]
    assert record.user == user_name()
    assert record.earlier_code["drifting"] != record.code["drifting"]
    stage_file.write_text(before)
    _run(store, spec, force=True)  # a new beginning owes nothing to the attempts before
    record = store.record(stage_key(spec))
    assert record is not None and record.earlier_code == {}


def test_a_forced_attempt_that_waited_goes_on_also_after_a_kill_and_no_longer_once_it_has_committed(store, tmp_path):
    _run(store, toy_spec())
    people = tmp_path / "approved"
    with pytest.raises(StageWaiting):
        _run(store, toy_spec(ToyConfig(trouble=f"people:{people}")), force=True)
    people.touch()
    with pytest.raises(ValueError, match="step 3 went wrong"):
        _run(store, toy_spec(ToyConfig(trouble="raise:3")), force=True)
    folder = store.attempts(stage_key(toy_spec()))
    assert [item.continues for item in history(folder)] == [False, False, True]
    killed = {"status": "running", "failure": ""}
    update(
        store.shared,
        name_of(folder.key),
        lambda value: value | {"attempts": [*value["attempts"][:-1], value["attempts"][-1] | killed]},
    )
    assert _said(store, toy_spec(), force=True) == ("RESUME", "from step 2 of attempt 3")
    assert _run(store, toy_spec(), force=True).step == 2
    assert _said(store, toy_spec(), force=True) == ("RUN", "forced")


def test_a_forced_attempt_that_waits_starts_over_if_its_code_has_changed(store, stage_file, tmp_path):
    with pytest.raises(StageWaiting):
        _run(store, toy_spec(ToyConfig(trouble=f"people:{tmp_path}/never"), module="drifting"), force=True)
    spec = toy_spec(module="drifting")
    assert _said(store, spec, force=True) == ("RESUME", "from step 2 of attempt 1")
    _drift(stage_file)
    assert _said(store, spec, force=True) == ("RUN", "forced; code changed (drifting)")
    assert _said(store, spec)[1].endswith(": --force starts over")
    _run(store, spec, force=True)
    record = store.record(stage_key(spec))
    assert record is not None and record.resumed_from is None


def test_why_a_stage_runs_shows_no_secret_that_an_earlier_version_kept():
    same = {"stage": "score", "version": 1, "seed": 1, "schema": 1, "inputs": {}, "engines": {}, "callables": {}}
    old = same | {"config": {"arguments": {"api_key": "hunter2"}, "at": "https://me:hunter2@host/x"}}
    new = same | {"config": {"arguments": {"api_key": "env:KEY"}, "at": "https://me:${env:KEY}@host/x"}}
    assert list(differences("score", old, new, {}, {})) == [
        "score.arguments.api_key: *** -> env:KEY",
        "score.at: https://***@host/x -> https://me:${env:KEY}@host/x",
    ]


def test_a_failure_is_noted_without_secrets_whatever_raised_it(store):
    know("step 1 went wrong")  # as if that were a secret
    with pytest.raises(ValueError, match=r"^\*\*\*$"):
        _run(store, toy_spec(ToyConfig(trouble="raise:1")))
    (attempt,) = history(store.attempts(stage_key(toy_spec(ToyConfig(trouble="raise:1")))))
    assert attempt.failure == "ValueError: ***"


def test_an_error_whose_text_cannot_be_changed_is_raised_and_noted_as_another(store, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        TypeAdapter(int).validate_python("a-secret-of-a-value")

    spec = toy_spec()
    key = stage_key(spec)
    monkeypatch.setattr(toy_stage, "run", fails)
    know("a-secret-of-a-value")
    with pytest.raises(ErrorWithoutSecrets, match=r"^ValidationError: 1 validation error for int\n") as raised:
        _run(store, spec)
    (attempt,) = history(store.attempts(key))
    printed = "".join(traceback.format_exception(raised.value))
    assert "input_value='***'" in attempt.failure and "input_value='***'" in printed
    assert "a-secret-of-a-value'" not in attempt.failure + printed.replace('validate_python("a-secret-of-a-value")', "")


@pytest.mark.parametrize(
    "changes",
    [{"key": None}, {"payload": []}, {"payload": {}}, {"code": "x"}, {"payload": {"config": 1}}, {"payload": None}],
)
def test_a_note_with_values_of_other_types_says_nothing_of_what_changed(store, changes):
    _run(store, toy_spec())
    table = store.label(toy_spec().label)
    assert table is not None
    nan = {"payload": table["payload"] | {"config": {"kl_coef": float("nan")}}}
    for damage in (changes, nan):
        store.note_label(toy_spec().label, "", table | damage)
        assert _said(store, toy_spec(seed=8)) == ("RUN", "the record of its last configuration cannot be read")


def test_other_versions_are_said_and_count_where_they_are_asked_to(store, monkeypatch):
    spec = toy_spec()
    _run(store, spec)
    assert (
        "versions" not in decide(store, spec).reason
        and decide(store, spec, strict=Strictness(env=True)).action == "HIT"
    )
    numpy = versions.versions()["numpy"]
    other = versions.versions() | {"numpy": "0.1"}
    for module in (versions, deciding):
        monkeypatch.setattr(module, "versions", lambda: other)
    monkeypatch.setattr(versions, "environment", lambda: other)
    monkeypatch.setattr(context, "environment", lambda: other)
    action, reason = _said(store, spec)
    assert action == "HIT" and reason.endswith(f"; other versions now (numpy: {numpy} -> 0.1)")
    assert _said(store, spec, strict=Strictness(env=True)) == ("RUN", f"numpy: {numpy} -> 0.1")
    assert _run(store, spec, strict=Strictness(env=True)).action == "RUN"
    assert decide(store, spec, strict=Strictness(env=True)).action == "HIT"
    assert decide(store, spec).action == "HIT"
