"""Worker groups over small actors of a real Ray: what a caller sees when a worker fails, hangs or dies."""

import gc
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rlhf_core.errors import (
    DataError,
    SamplerLostError,
    SamplingError,
    TrainerLostError,
    TrainingError,
    WorkerLostError,
)
from rlhf_core.runtime.handles import RayTrainer
from rlhf_core.runtime.shared_sequences import SharedSequences
from rlhf_core.runtime.worker_group import WorkerGroup
from rlhf_core.sequences import Sequences
from tests.support.sharing import SharedRay

pytestmark = pytest.mark.engine


class Worker:
    def double(self, value: int) -> int:
        return 2 * value

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_for(self, path: str) -> str:
        while not pathlib.Path(path).exists():
            time.sleep(0.01)
        return path

    def read_mapped(self, shared: SharedSequences) -> tuple[list[int], dict[str, list[float]], bool]:
        one = shared.map()
        arrays = (one.token_ids, one.loss_mask, one.offsets, *one.fields.values())
        read_only = not any(values.flags.writeable for values in arrays)
        return one.token_ids.tolist(), {name: values.tolist() for name, values in one.fields.items()}, read_only

    def refuse(self) -> None:
        raise DataError("rows = 3: too few; add some")

    def fail_or_die_later(self, dies: bool) -> None:
        if dies:
            time.sleep(1)  # its death is noticed after the failure of the rank that worked with it
            os._exit(9)
        raise RuntimeError("connection closed by peer")

    def read(self, refs: list[object]) -> None:
        import ray

        ray.get(refs[0])

    def exhaust(self) -> None:
        raise RuntimeError("CUDA out of memory")

    def divide(self) -> float:
        return 1 / 0

    def die(self) -> None:
        os._exit(9)

    def die_or_wait(self, dies: bool) -> None:
        if dies:
            os._exit(9)
        time.sleep(60)


@pytest.fixture(scope="module")
def idle(shared_ray: SharedRay) -> list[Any]:
    """Actors that are in order and in no group."""
    return []


@pytest.fixture
def new_group(idle: list[Any]) -> Iterator[Callable[..., WorkerGroup]]:
    import ray

    remote, groups = ray.remote(Worker), []

    def make(
        workers: int, *, timeout_s: float = 60.0, error: type = TrainingError, ray_lost: Callable[[], str] = str
    ) -> WorkerGroup:
        actors = [idle.pop() if idle else remote.options(num_cpus=0).remote() for _ in range(workers)]
        group = WorkerGroup("trainer", actors, error, timeout_s=timeout_s, log_folder="/logs", ray_lost=ray_lost)
        groups.append(group)
        return group

    yield make
    idle.extend(actor for group in groups if not group.broken for actor in group.actors)


def test_results_come_in_rank_order(new_group):
    group = new_group(2)
    assert group.call_each("policy", "double", [(3,), (4,)]) == [6, 8]


def test_each_array_is_put_into_the_object_store_once_while_it_lives_and_actors_map_it(new_group, monkeypatch):
    group, tokens = new_group(2), Sequences.from_token_ids([range(50_000)])
    puts: list[int] = []
    put = group.put
    monkeypatch.setattr(group, "put", lambda arrays: puts.append(list(map(len, arrays))) or put(arrays))
    first = group.share(tokens)
    assert (group.share(tokens), puts) == (first, [[50_000, 50_000, 2]])
    logprobs = -np.arange(50_000, dtype=np.float32)
    [kept] = group.keep([logprobs])
    assert (kept.tolist(), kept.flags.writeable) == (logprobs.tolist(), False)
    measured = tokens.with_fields(old_logprobs=kept)
    second = group.share(measured)
    assert (second.places[:3], second.names) == (first.places, ("old_logprobs",))
    assert puts == [[50_000, 50_000, 2], [50_000]]  # nothing again: `keep` has put the log-probs
    added = measured.with_fields(advantages=logprobs, returns=logprobs.copy())
    assert (group.share(added).places[3], puts[2:]) == (second.places[3], [[50_000, 50_000]])
    del added, logprobs
    read = list(range(50_000)), {"old_logprobs": kept.tolist()}, True
    assert group.call("policy", "read_mapped", second) == [read] * 2
    assert len(group._shared) == 4
    del tokens, measured, kept
    gc.collect()
    assert not group._shared
    other = group.share(Sequences.from_token_ids([range(50_000)]))
    assert other.places[0] != first.places[0]


def test_sequences_that_a_trainer_keeps_are_the_same_and_are_not_put_again(new_group, monkeypatch):
    group, ids = new_group(2), [(5, 7, 2), (4,)]
    tokens = Sequences.from_token_ids(ids).with_fields(rollout_logprobs=np.array([0.0, -1.0, -0.5, -2.0], np.float32))
    kept = RayTrainer(group, "policy", "lease", transfer="").keep(tokens)
    assert [(one.tolist(), one.flags.writeable) for one in kept.arrays] == [
        (one.tolist(), False) for one in tokens.arrays
    ]
    monkeypatch.setattr(group, "put", None)
    shared = group.share(kept)
    assert (
        group.call("policy", "read_mapped", shared)
        == [([5, 7, 2, 4], {"rollout_logprobs": [0, -1, -0.5, -2]}, True)] * 2
    )


def test_a_process_that_calls_workers_visits_all_its_objects_only_after_millions_of_new_ones(new_group):
    new_group(1)  # connected
    gc.collect()
    before = gc.get_stats()
    answers = [[] for _ in range(200_000)]  # by default 285 collections, 2 of them of everything
    counts = [now["collections"] - then["collections"] for now, then in zip(gc.get_stats(), before, strict=True)]
    assert (len(answers), counts[0] in (3, 4, 5), counts[2]) == (200_000, True, 0)


def test_calls_that_were_begun_are_collected_as_they_end(new_group, tmp_path):
    group, file = new_group(2), tmp_path / "now"
    running = {0: group.begin("policy", "wait_for", 0, str(file)), 1: group.begin("policy", "double", 1, 3)}
    assert group.first("policy", "mixed", running) == {1: 6}
    running[1] = group.begin("policy", "double", 1, 4)
    assert group.first("policy", "mixed", running) == {1: 8}
    file.touch()
    assert group.first("policy", "mixed", {0: running[0]}) == {0: str(file)}
    late = group.begin("policy", "sleep", 0, 60.0)
    group._timeout_s = 0.0  # since its beginning
    with pytest.raises(TrainerLostError, match=r"mixed on worker 0'.*no answer within"):
        group.first("policy", "mixed", {0: late})


def test_the_calls_of_several_threads_reach_all_actors_in_one_order(monkeypatch):
    # ranks that did the calls of two threads in different orders would wait for each other in their collectives
    class Method:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def remote(self, value: int) -> int:
            self.seen.append(value)
            time.sleep(0.001)  # here the other thread would come in between
            return value

    class Actor:
        def __init__(self) -> None:
            self.note = Method()

    actors = [Actor() for _ in range(3)]
    group = WorkerGroup("trainer", actors, TrainingError, timeout_s=60.0, log_folder="/logs", ray_lost=str)
    monkeypatch.setattr(group, "_gather", lambda role, method, refs: refs)

    def call(first: int) -> None:
        for value in range(first, first + 20):
            assert group.call("policy", "note", value) == [value] * 3

    threads = [threading.Thread(target=call, args=(first,)) for first in (0, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(actors[0].note.seen) == 40
    assert actors[0].note.seen == actors[1].note.seen == actors[2].note.seen


def test_our_own_errors_pass_as_they_are_and_others_name_role_worker_and_cause(new_group, monkeypatch):
    import ray

    printed: list[str] = []
    monkeypatch.setattr(ray._private.worker.logger, "error", printed.append)
    group = new_group(1)
    with pytest.raises(DataError, match="rows = 3: too few; add some"):
        group.call("policy", "refuse")
    assert printed == []
    with pytest.raises(TrainingError, match=r"trainer\.policy = 'divide on worker 0': ZeroDivisionError"):
        group.call("policy", "divide")
    with pytest.raises(TrainingError, match=r"out of memory; lower runtime\.trainer\.micro_batch") as raised:
        group.call("policy", "exhaust")
    assert not isinstance(raised.value, WorkerLostError)  # it would fail again
    assert not group.broken  # a single worker that raised is still in order


def test_a_call_past_its_deadline_fails_and_its_worker_is_ended(new_group):
    group = new_group(1, timeout_s=60, error=SamplingError)
    group.call("policy", "double", 1)  # wait for the process
    group._timeout_s = 0.5
    start = time.monotonic()
    with pytest.raises(SamplerLostError, match=r"no answer within runtime.worker_timeout_s = 0.5"):
        group.call("policy", "sleep", 30.0)
    assert time.monotonic() - start < 10
    assert group.broken


def test_a_dead_rank_is_seen_while_the_others_wait_for_it(new_group):
    group = new_group(2)
    group.call("policy", "double", 1)
    start = time.monotonic()
    with pytest.raises(TrainerLostError, match=r"die_or_wait on worker 1'.*worker died.*last checkpoint.*/logs"):
        group.call_each("policy", "die_or_wait", [(False,), (True,)])
    assert time.monotonic() - start < 20
    with pytest.raises(TrainingError, match="its worker has been stopped"):
        group.call("policy", "double", 1)


def test_a_rank_that_failed_because_another_died_is_a_lost_worker(new_group):
    group = new_group(2)
    group.call("policy", "double", 1)
    with pytest.raises(TrainerLostError, match=r"fail_or_die_later on worker 1'.*worker died"):
        group.call_each("policy", "fail_or_die_later", [(False,), (True,)])
    assert group.broken


def test_what_died_with_another_worker_is_a_lost_worker(new_group):
    import ray

    owner = new_group(1)
    owner.call("policy", "double", 1)
    owner.kill()
    with pytest.raises(ray.exceptions.RayActorError):
        while True:  # it takes a moment to die
            waiting = owner.actors[0].double.remote(1)
            ray.get(waiting)
    group = new_group(1)
    with pytest.raises(TrainerLostError, match=r"read on worker 0'.*died"):
        group.call("policy", "read", [waiting])
    assert group.broken


def test_a_call_that_waits_ends_soon_after_ray_is_lost(new_group):
    lost: list[str] = []
    group = new_group(1, ray_lost=lambda: "".join(lost))
    group.call("policy", "double", 1)
    threading.Timer(1.0, lost.append, ["the raylet is gone"]).start()
    start = time.monotonic()
    with pytest.raises(TrainerLostError, match=r"trainer\.policy = 'sleep': the raylet is gone; run again.*/logs"):
        group.call("policy", "sleep", 30.0)
    assert time.monotonic() - start < 10
    assert group.broken
    lost.clear()
    group.kill()
