import time
from functools import partial
from pathlib import Path

import pytest

from campaigns.durability import checks, clocks, processes, takeovers
from campaigns.durability.clocks import Skew
from campaigns.durability.pipeline import LOG, Setup
from rlhf_core.store import disk
from rlhf_core.store.artifacts import ArtifactStore
from tests.support.toy_runs import run_toy
from tests.support.toy_stage import ToyConfig, toy_spec

TTL_S = 2.0
SPEC = toy_spec(ToyConfig(seconds_a_step=TTL_S / 2))
"""It takes longer than a lease lasts, so a waiting run that did not see the heartbeats would take it."""
AHEAD, BEHIND = Skew(4000.0, 1000.0, elsewhere=True), Skew(-130.0, -1000.0, elsewhere=False)


def start(setup: Setup, skew: Skew, *, ttl_s: float = TTL_S) -> int:
    run = partial(run_toy, setup, SPEC, prepare=partial(clocks.apply, skew), ttl_s=ttl_s)
    return processes.start(run, setup.home / LOG)


def begin(tmp_path: Path, first: Skew) -> tuple[Setup, int]:
    """Start a run, and wait until its attempt has begun, which is after its decision."""
    setup = Setup(tmp_path / "home", mlflow=False)
    setup.home.mkdir()
    child = start(setup, first)
    deadline = time.monotonic() + 30.0
    store = ArtifactStore(setup.home / "store")
    while not any(table.value.get("attempts") for table in store.shared.tables("keys/")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return setup, child


@pytest.mark.parametrize("skews", [(AHEAD, BEHIND), (BEHIND, AHEAD)], ids=["first ahead", "first behind"])
def test_with_wrong_clocks_a_living_owner_is_waited_for(tmp_path, skews):
    setup, first = begin(tmp_path, skews[0])
    second = start(setup, skews[1])
    assert [processes.finish(one, kill_after_s=None)[0] for one in (first, second)] == ["completed", "completed"]
    (made,) = checks.results(setup.home).values()
    assert made.attempts == 1
    assert checks.problems(setup.home, {"toy": made}) == [] and checks.leftovers(setup.home) == []


def test_with_wrong_clocks_a_killed_owner_on_another_machine_is_taken_over(tmp_path):
    setup, first = begin(tmp_path, AHEAD)
    second = start(setup, BEHIND)
    assert processes.finish(first, kill_after_s=0.0)[0] == "killed"
    assert processes.finish(second, kill_after_s=None)[0] == "completed"
    assert [one.attempts for one in checks.results(setup.home).values()] == [2]
    takeovers.reconcile_elsewhere(setup.home / "store", setup.home / LOG)
    assert checks.leftovers(setup.home) == []


def test_the_clocks_of_a_run_are_wrong(tmp_path):
    wall, file = time.time(), tmp_path / "said"

    def say() -> None:
        clocks.apply(AHEAD)
        disk._replace(tmp_path / "lease.json", b"", is_new=True)
        said = f"{time.time() - wall} {time.time_ns() / 1e9 - wall} {wall - (tmp_path / 'lease.json').stat().st_mtime}"
        file.write_text(said)

    assert processes.run(say, tmp_path / LOG).how == "completed"
    now, now_ns, age = map(float, file.read_text().split())
    assert 4000.0 <= now < 4060.0 and 4000.0 <= now_ns < 4060.0 and 940.0 < age <= 1001.0
