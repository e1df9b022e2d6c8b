import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from campaigns.durability import checks, instants, lives, processes, takeovers
from campaigns.durability.instants import AtOperation
from campaigns.durability.pipeline import LOG, Setup, read_events
from rlhf_core.store import attempts
from rlhf_core.store.artifacts import ArtifactStore
from tests.support.toy_runs import run_toy
from tests.support.toy_stage import ToyConfig, toy_spec

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="paths of open files are read from /proc")

WHEN = [
    *(AtOperation("labels and pins", number) for number in (1, 5)),
    AtOperation("artifact", 1),
    AtOperation("metrics", 3),
    *(AtOperation("checkpoint", number) for number in (1, 9)),
    AtOperation("checkpoint: rename and evict", 1),
    AtOperation("commit: object", 2),
    *(AtOperation("table of a key", number) for number in (2, 5, 9, 14)),
]
SPEC = toy_spec(ToyConfig(seconds_a_step=0.05))


def wait(condition: Callable[[], object], *, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def stop_at(setup: Setup, when: AtOperation, *, elsewhere: bool) -> int:
    setup.home.mkdir()
    run = partial(run_toy, setup, SPEC, instant=when, act=instants.stand_still, elsewhere=elsewhere)
    child = processes.start(run, setup.home / LOG)
    assert processes.wait_until_stopped(child, stop_after_s=None), f"{when} was not reached"
    return child


def events_of(setup: Setup, pid: int, event: str) -> list[dict[str, object]]:
    return [one for one in read_events(setup.events) if one["pid"] == pid and one["event"] == event]


def is_at_work(setup: Setup, pid: int) -> bool:
    decided = [one for one in events_of(setup, pid, "started") if one["action"] in ("RUN", "RESUME")]
    return bool(decided) or processes.has_ended(pid)


@pytest.mark.parametrize("late", [False, True], ids=["while the other works", "when the other is done"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["on this machine", "on another machine"])
def test_a_run_that_wakes_after_it_was_taken_over_ends_with_one_sentence_and_disturbs_nobody(tmp_path, elsewhere, late):
    twin = Setup(tmp_path / "twin", mlflow=False)
    twin.home.mkdir()
    assert processes.run(partial(run_toy, twin, SPEC), twin.home / LOG).how == "completed"
    setups = [Setup(tmp_path / f"{index}", mlflow=False) for index in range(len(WHEN))]
    first = [stop_at(setup, when, elsewhere=elsewhere) for setup, when in zip(setups, WHEN, strict=True)]
    second = [processes.start(partial(run_toy, setup, SPEC), setup.home / LOG) for setup in setups]
    pairs = list(zip(setups, second, strict=True))
    # A run that is stopped while it holds the lock of the store is not taken over: the others wait until it is woken.
    wait(lambda: all(processes.has_ended(one) if late else is_at_work(setup, one) for setup, one in pairs), seconds=5.0)
    for one in first:
        os.killpg(one, signal.SIGCONT)
    ends = [[processes.finish(one, kill_after_s=None)[0] for one in pair] for pair in zip(first, second, strict=True)]
    for setup, when, end, a, b in zip(setups, WHEN, ends, first, second, strict=True):
        wrong = takeovers.wrong_ends(setup, end, a, b)
        wrong += [*checks.problems(setup.home, checks.results(twin.home)), *checks.leftovers(setup.home)]
        assert wrong == [], f"{when}: {'; '.join(wrong)}"
    sentences = [takeovers.SENTENCE in lives.last_words(setup, one) for setup, one in zip(setups, first, strict=True)]
    assert sum(sentences) >= len(WHEN) // 3, "hardly any was taken over"


def test_a_run_that_stops_where_it_takes_its_folder_does_not_take_its_successors(tmp_path):
    setup = Setup(tmp_path / "home", mlflow=False)
    first = stop_at(setup, AtOperation("work folder: taken over", 1), elsewhere=False)  # its attempt is noted
    run = partial(run_toy, setup, toy_spec(ToyConfig(seconds_a_step=0.3)))
    second = processes.start(run, setup.home / LOG)
    folder = ArtifactStore(setup.home / "store").layout.attempts
    assert wait(lambda: list(folder.glob("*/work-2/ckpt/step-*")))
    os.killpg(first, signal.SIGCONT)
    assert processes.finish(first, kill_after_s=None)[0] == "failed"
    assert takeovers.SENTENCE in lives.last_words(setup, first)
    assert processes.finish(second, kill_after_s=None)[0] == "completed"
    (key,) = folder.iterdir()
    past = attempts.history(ArtifactStore(setup.home / "store").attempts(key.name))
    assert [(item.number, item.pid) for item in past] == [(1, first), (2, second)]
