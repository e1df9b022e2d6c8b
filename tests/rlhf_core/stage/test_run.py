import errno
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import ArtifactError
from rlhf_core.stage.decision import Decision
from rlhf_core.stage.key import StageSpec
from rlhf_core.store import attempts, leases
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.attempts import AttemptFolder, history
from rlhf_core.store.leases import Lease, name_of
from rlhf_core.store.protocol import update
from rlhf_core.types import ArtifactRef, PolicyRef, PreparedDataRef
from tests.support.forks import soon
from tests.support.toy_stage import RecordingTracker, ToyConfig, run_toy, stage_key, toy_spec

FORK = multiprocessing.get_context("fork")


def _total(store: ArtifactStore, ref: ArtifactRef) -> str:
    return (store.path(ref) / "total.txt").read_text()


def _work(store: ArtifactStore, spec: StageSpec) -> AttemptFolder:
    return store.attempts(stage_key(spec))


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_stage_runs_once_and_then_hits(store):
    said: list[Decision] = []
    ref, decision = run_toy(store, toy_spec(), on_decision=said.append)
    # kl_coef * (1 + 2 + 3) + 3 * seed = 0.3 + 21
    assert float(_total(store, ref)) == pytest.approx(21.3)
    assert (decision.action, decision.reason) == ("RUN", "first run")
    again, second = run_toy(store, toy_spec(ToyConfig(workers=4)), on_decision=said.append)
    assert again == ref and second.action == "HIT" and type(again) is PolicyRef
    assert said == [decision, second]


def test_a_decision_is_told_once(store, caplog):
    caplog.set_level("INFO", "rlhf_core.stage")
    run_toy(store, toy_spec(label="logged"))
    run_toy(store, toy_spec(label="told"), on_decision=lambda _: None)
    assert [line for line in caplog.messages if "RUN" in line or "HIT" in line] == ["logged: RUN: first run"]


def test_the_record_says_from_what_with_what_and_how_long(store):
    base, _ = run_toy(store, toy_spec(label="base"))
    spec = toy_spec(inputs={"policy": base}, label="ppo")
    ref, _ = run_toy(store, spec, tracking={"mlflow_run": "r1"})
    record = store.record(stage_key(spec))
    assert (record.label, record.stage, record.attempts, record.resumed_from) == ("ppo", "toy", 1, None)
    assert record.handle == ref and ref.parents == (base.digest,) and record.inputs == (base.uri,)
    assert record.metrics == {"total": 1.5} and record.engines == {"none": "1.0"}
    assert record.tracking == {"mlflow_run": "r1"} and record.environment["python"].startswith("3.")
    assert record.payload["config"]["kl_coef"] == 0.05 and "tests.support.toy_stage" in record.code
    assert 0 < record.seconds < 60


def test_children_are_handles_of_their_own(store):
    ref, _ = run_toy(store, toy_spec(ToyConfig(trouble="children")))
    assert isinstance(ref, PreparedDataRef) and isinstance(ref.base, PolicyRef)
    assert (store.path(ref.base) / "config.json").read_text() == "{}"
    again, decision = run_toy(store)
    assert decision.action == "HIT" and again == ref


def test_a_failure_keeps_checkpoints_and_its_reason_and_the_next_run_goes_on(store):
    whole, _ = run_toy(ArtifactStore(store.root.parent / "whole"), toy_spec())
    with pytest.raises(ValueError, match="step 3"):
        run_toy(store, toy_spec(ToyConfig(trouble="raise:3")))
    folder = _work(store, toy_spec())
    assert [(item.status, item.failure) for item in history(folder)] == [("failed", "ValueError: step 3 went wrong")]
    assert _names(folder.path) == ["work-1"]
    assert _names(folder.path / "work-1") == ["ckpt", "failures.jsonl", "metrics.jsonl"]
    assert store.living_owner(stage_key(toy_spec())) is None
    ref, decision = run_toy(store)
    assert (decision.action, decision.step) == ("RESUME", 2)
    assert ref == whole, "a resumed stage makes the same bytes"
    record = store.record(stage_key(toy_spec()))
    assert record is not None and (record.attempts, record.resumed_from) == (2, 2)
    assert _names(folder.path) == ["work-2"]
    assert _names(folder.path / "work-2") == ["metrics.jsonl"], "checkpoints go once the result is there"


def test_an_interrupt_is_noted_as_such(store, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_toy(store, progress=interrupted)
    assert [item.status for item in history(_work(store, toy_spec()))] == ["interrupted"]
    assert run_toy(store)[1].reason == "from step 1 of attempt 1"


def test_metrics_wear_the_label_and_replayed_steps_are_not_recorded_twice(store):
    tracker = RecordingTracker()
    with pytest.raises(ValueError, match="step 2"):
        run_toy(store, toy_spec(ToyConfig(trouble="raise:2"), label="a/b"), tracker=tracker)
    path = attempts.metrics(_work(store, toy_spec()))
    with path.open("a") as stream:
        stream.write('{"step": 3, "val')  # a kill in the middle of a line
    run_toy(store, toy_spec(label="a/b"), tracker=tracker)
    path = attempts.metrics(_work(store, toy_spec()))
    # Attempt 1 recorded steps 1 and 2 and saved step 1; attempt 2 computes 2 and 3 again and records 3.
    assert [step for step, _ in tracker.seen] == [1, 2, 3]
    assert tracker.seen[0][1] == {"a/b/train/total": pytest.approx(7.05)}
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("trouble", "text"),
    [("no commit", "returned without committing an artifact"), ("other handle", "returned another handle")],
)
def test_a_stage_must_return_what_it_committed(store, trouble, text):
    with pytest.raises(ArtifactError, match=text):
        run_toy(store, toy_spec(ToyConfig(trouble=trouble)))


def test_a_disk_that_is_full_before_the_stage_begins_is_named_too(store, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("rlhf_core.store.disk._replace", full)
        with pytest.raises(
            ArtifactError, match=r"the disk is full; free space, or .*run the same command again to resume"
        ):
            run_toy(store)
    assert run_toy(store)[1].action == "RUN"


def test_a_full_disk_in_a_stage_is_named_and_the_next_run_goes_on(store):
    with pytest.raises(ArtifactError, match=r"the disk is full; free space, or .*run the same command again to resume"):
        run_toy(store, toy_spec(ToyConfig(trouble="full")))
    assert store.record(stage_key(toy_spec())) is None
    assert run_toy(store)[1].reason == "from step 3 of attempt 1"


def test_force_starts_from_the_beginning_and_makes_a_new_record(store):
    first, _ = run_toy(store)
    before = store.record(stage_key(toy_spec()))
    with pytest.raises(ValueError, match="step 3"):
        run_toy(store, toy_spec(ToyConfig(trouble="raise:3")), force=True)
    assert store.record(stage_key(toy_spec())) == before, "a forced run that fails leaves the old result"
    tracker = RecordingTracker()
    again, decision = run_toy(store, toy_spec(), force=True, tracker=tracker)
    assert (decision.action, decision.reason) == ("RUN", "forced")
    assert [step for step, _ in tracker.seen] == [1, 2, 3], "it must not go on from the failed attempt's checkpoint"
    after = store.record(stage_key(toy_spec()))
    assert again == first and before is not None and after is not None
    assert (before.attempts, after.attempts) == (1, 3) and after.started > before.started


def test_an_identical_parent_made_again_stops_the_cascade(store):
    first, _ = run_toy(store, toy_spec(ToyConfig(kl_coef=0.0, steps=2), label="base"))
    run_toy(store, toy_spec(inputs={"policy": first}, label="child"))
    # 2 steps of seed 7 and 1 step of seed 14 both add up to 14.0: another key, the same content.
    second, decision = run_toy(store, toy_spec(ToyConfig(kl_coef=0.0, steps=1), label="base", seed=14))
    assert decision.action == "RUN" and second.digest == first.digest
    assert run_toy(store, toy_spec(inputs={"policy": second}, label="child"))[1].action == "HIT"


# ---------------------------------------------------------------- several processes


def _run_in_process(root: Path, config: ToyConfig, results: Any) -> None:
    said: list[str] = []
    ref, decision = run_toy(ArtifactStore(root), toy_spec(config), on_decision=lambda item: said.append(item.action))
    results.put((ref.digest, decision.action, said))


def test_two_processes_share_one_computation(store):
    config = ToyConfig(seconds_a_step=0.2)
    results = FORK.Queue()
    processes = [FORK.Process(target=_run_in_process, args=(store.root, config, results)) for _ in range(2)]
    for process in processes:
        process.start()
    found = sorted((results.get(timeout=20) for _ in processes), key=lambda item: str(item[1]))
    for process in processes:
        process.join()
    (first_digest, first, first_said), (second_digest, second, second_said) = found
    assert (first, second) == ("ATTACH", "RUN") and first_digest == second_digest
    assert (first_said, second_said) == (["ATTACH"], ["RUN"])
    assert len(history(_work(store, toy_spec()))) == 1


def test_a_waiting_process_takes_over_when_the_first_is_killed(store):
    config = ToyConfig(seconds_a_step=0.3)
    results = FORK.Queue()
    first = FORK.Process(target=_run_in_process, args=(store.root, config, results))
    first.start()
    soon(lambda: bool(list(_work(store, toy_spec()).path.glob("work-*/ckpt/step-*"))))
    second = FORK.Process(target=_run_in_process, args=(store.root, config, results))
    second.start()
    time.sleep(0.1)
    os.kill(first.pid or 0, 9)
    first.join()
    _, action, said = results.get(timeout=20)
    second.join()
    assert action == "RESUME" and said in (["ATTACH", "RESUME"], ["RESUME"])
    assert [item.status for item in history(_work(store, toy_spec()))] == ["running", "committed"]


def test_kills_at_any_instant_cost_at_most_a_step_and_the_result_is_the_same(store):
    config = ToyConfig(steps=40, seconds_a_step=0.005, bytes_out=4_000_000)
    whole, _ = run_toy(ArtifactStore(store.root.parent / "whole"), toy_spec(config))
    pause = random.Random(5)
    kills = 0
    while store.record(stage_key(toy_spec(config))) is None and kills < 12:
        process = FORK.Process(target=_run_in_process, args=(store.root, config, FORK.Queue()))
        process.start()
        time.sleep((0.1 + 0.15 * pause.random()) * 1.25**kills)  # a busy machine takes longer to its first step
        process.kill()
        process.join()
        kills += 1
    ref, decision = run_toy(store, toy_spec(config))
    assert ref == whole and decision.action in ("HIT", "RESUME")
    assert kills >= 2 and store.verify() == []
    path = attempts.metrics(_work(store, toy_spec(config)))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 41))


def _run_toy(root: Path, ended: Path) -> None:
    try:
        run_toy(ArtifactStore(root), toy_spec(ToyConfig(steps=200, seconds_a_step=0.05)))
        ended.write_text("committed")
    except BaseException as error:
        ended.write_text(f"{type(error).__name__}: {error}")


def test_a_process_that_was_taken_over_ends_with_one_sentence_and_harms_nobody(store, tmp_path, monkeypatch):
    """It stands still for longer than a lease lasts, and comes to itself while another one goes on from its work."""
    whole, _ = run_toy(ArtifactStore(tmp_path / "whole"), toy_spec(ToyConfig(steps=200)))
    monkeypatch.setattr(leases, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(leases, "TTL_S", 0.5)
    old = FORK.Process(target=_run_toy, args=(store.root, tmp_path / "old"), daemon=True)
    new = FORK.Process(target=_run_toy, args=(store.root, tmp_path / "new"), daemon=True)
    folder = _work(store, toy_spec(ToyConfig(steps=200)))
    try:
        old.start()
        soon(lambda: attempts.metrics(folder).exists() and attempts.metrics(folder).read_text().count("\n") > 3)
        os.kill(old.pid or 0, signal.SIGSTOP)
        new.start()
        soon(lambda: len(history(folder)) == 2)
        os.kill(old.pid or 0, signal.SIGCONT)
        for process in (old, new):
            process.join(120)
    finally:
        for process in (old, new):
            if process.pid:
                process.kill()
    assert (tmp_path / "new").read_text() == "committed"
    said = (tmp_path / "old").read_text()
    assert said.startswith("Lost: lease ") and "took the lease over, because this process had not renewed it" in said
    record = store.record(stage_key(toy_spec(ToyConfig(steps=200))))
    assert record is not None and record.handle == whole
    assert [(item.number, item.status) for item in history(folder)] == [(1, "running"), (2, "committed")]
    assert _names(folder.path) == ["work-2"] and _names(folder.path / "work-2") == ["metrics.jsonl"]


def test_a_process_that_was_taken_over_as_it_committed_leaves_its_successor_at_work(store, monkeypatch):
    """It stands still between its last look at the lease and its record."""
    folder = _work(store, toy_spec())
    commit = ArtifactStore.commit

    def commit_late(store: ArtifactStore, lease: Lease, *arguments: Any, **options: Any) -> ArtifactRef:
        handle: ArtifactRef = commit(store, lease, *arguments, **options)
        taken = {"token": "successor"}
        update(store.shared, name_of(lease.key), lambda value: value | {"lease": value["lease"] | taken})
        successor = store.attempts(lease.key, Lease(store.shared, lease.key, "successor"))
        attempt = attempts.begin(successor, label="toy", resumed_from=3, code={})
        (attempts.work(successor, attempt) / "shard-1").write_text("x")
        return handle

    monkeypatch.setattr(ArtifactStore, "commit", commit_late)
    _, decision = run_toy(store)
    assert store.record(decision.key) is not None
    assert [(item.number, item.status) for item in history(folder)] == [(1, "running"), (2, "running")]
    assert attempts.unfinished_work(folder) == ["shard-1"] and (folder.path / "out-2").is_dir()
