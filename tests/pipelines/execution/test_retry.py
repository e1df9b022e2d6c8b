"""Which failures are tried again, how often, and what a person reads."""

import logging
from collections.abc import Callable

import psutil
import pytest

from pipelines.execution.executor import Reached, RunOptions, reached, retry_lost_workers
from pipelines.execution.opening import open_run
from pipelines.execution.run import run_stages
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import load_profile
from rlhf_core.errors import ConfigError, TrainerLostError, TrainingError, WorkerLostError
from rlhf_core.stage.checkpoints import Checkpoints
from rlhf_core.stage.key import StageSpec
from rlhf_core.store import attempts
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.leases import name_of
from rlhf_core.store.protocol import discard
from rlhf_core.store.records import KeyRecord
from rlhf_core.tracking.memory import MemoryTracker
from rlhf_core.types import ArtifactRef
from tests.support.listener import Notes
from tests.support.small_pipeline import write_mini

NOWHERE: Reached = (-1, 0)


def failing(*outcomes: Exception | str) -> Callable[[], str]:
    """Return an attempt that raises or returns one outcome a call."""
    left = iter(outcomes)

    def attempt() -> str:
        outcome = next(left)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return attempt


def tried(attempt: Callable[[], str], *where: Reached, retries: int = 2) -> str:
    places = iter([*where, *[where[-1]] * 9])
    return retry_lost_workers(attempt, label="ppo", retries=retries, where=lambda: next(places), sleep=lambda _: None)


def test_a_lost_worker_is_tried_again_with_a_warning_that_says_what_died_and_where_it_goes_on(caplog):
    with caplog.at_level(logging.WARNING):
        assert tried(failing(TrainerLostError("the worker died; run again"), "done"), NOWHERE, (4, 0)) == "done"
    assert caplog.messages == ["ppo: the worker died; retrying from the checkpoint of step 4 (retry 1 of 2)"]


@pytest.mark.parametrize("error", [TrainingError("nan"), ConfigError("no such model"), ValueError("a bug")])
def test_an_error_of_the_user_is_raised_at_once(error):
    with pytest.raises(type(error)) as raised:
        tried(failing(error, "done"), NOWHERE)
    assert raised.value is error


def test_tries_that_get_no_further_end_in_one_error_of_the_same_class_with_fields_to_change():
    lost = [TrainerLostError(f"death {number}") for number in range(5)]
    with pytest.raises(
        TrainerLostError, match=r"ppo = 'lost its workers 3 times.*death 2; .*micro_batch.*kv_cache_gib"
    ):
        tried(failing(*lost), NOWHERE)


def test_a_try_that_got_further_counts_the_retries_anew():
    lost = [TrainerLostError(f"death {number}") for number in range(6)]
    assert tried(failing(*lost, "done"), NOWHERE, *((step, 0) for step in range(6)), retries=1) == "done"


def test_no_retries_means_the_first_error():
    with pytest.raises(WorkerLostError, match=r"^ppo: the worker died$"):
        tried(failing(WorkerLostError("the worker died"), "done"), NOWHERE, retries=0)


def test_checkpoints_and_shards_say_how_far_a_stage_got(tmp_path):
    store = ArtifactStore(tmp_path)
    folder = store.attempts("k")
    assert reached(store, "k") == NOWHERE
    (folder.path / "work-1" / "shards").mkdir(parents=True)
    for index in range(3):
        (folder.path / "work-1" / "shards" / f"{index}.parquet").write_text("x")
    assert reached(store, "k") == (-1, 3)
    checkpoints = Checkpoints(attempts.checkpoints(folder))
    with checkpoints.saving(7, {}):
        pass
    checkpoints.settle()
    assert reached(store, "k") == (7, 3)


@pytest.mark.engine
@pytest.mark.slow
def test_a_stage_whose_trainer_is_killed_ends_with_the_same_bytes_in_the_same_run(tmp_path, home):
    killed: list[int] = []
    assert "raylet" not in {child.name() for child in psutil.Process().children()}, "the Ray that tests share has ended"

    def kill_the_trainer(done: int, total: int, message: str) -> None:
        if done == 2 and not killed:
            workers = psutil.Process().children(recursive=True)
            victim = next(worker for worker in workers if worker.name().startswith("ray::TrainWorke"))
            killed.append(victim.pid)
            victim.kill()

    def run_sft(progress: Callable[[int, int, str], None]) -> KeyRecord:
        def run_stage(spec: StageSpec, kind: type[ArtifactRef]) -> ArtifactRef:
            return run.stage(spec, progress if spec.label == "sft" else lambda *_: None).ref

        run_stages(run, lifecycle, run_stage, tags={})
        return next(record for record in run.context.store.records() if record.label == "sft")

    config = load_profile(write_mini(tmp_path), ["runtime.type=ray", "sft.loop.checkpoint_every=1"])
    notes, tracker, until = Notes(), MemoryTracker(), RunOptions(until="sft")
    with open_run(config, lifecycle, until, home=home, tracker=tracker, listener=notes) as run:
        in_peace = run_sft(lambda *_: None)
        discard(run.context.store.shared, name_of(in_peace.key))
        broken = run_sft(kill_the_trainer)
    assert broken.handle == in_peace.handle
    assert len(killed) == 1 and broken.attempts == in_peace.attempts + 2 and broken.resumed_from in (1, 2)
    assert notes.of("started")[-2:] == [("sft", "RUN"), ("sft", "RESUME")]
    assert [stage.status for stage in tracker.stages.values()] == ["FINISHED", "FINISHED"]  # one a stage, not one a try
