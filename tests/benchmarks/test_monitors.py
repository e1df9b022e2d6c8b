"""The table of planted faults: what a quick run finds, and how the table is made."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import small_world
from benchmarks.monitor_faults import FAULTS
from benchmarks.monitors import MONITORS, run
from benchmarks.small_world import SmallWorld
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.monitors import HeldOutConfig
from rlhf_core.config.rewards import FunctionReward, RewardsConfig
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import PolicyRef
from tests.support.training import prompts

FOUND_AT_ONCE = {
    "stale weights": "mismatch",
    "wrong chat template at sampling": "mismatch",
    "temperature mismatch": "mismatch",
    "one bad rank": "mismatch",
    "truncated tails": "end_token",
    "dropped end token": "end_token",
    "KL estimator: the other direction": "kl_estimate",
}
"""Faults that do not depend on what the policy learns -> the monitor that finds them."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, policy: Path) -> SmallWorld:
    """Return a world whose policy is not trained, so that it is there in a second."""
    root = tmp_path_factory.mktemp("world")
    store = ArtifactStore(root / "store")
    store.create()
    made = SmallWorld(store)
    base = store.external(PolicyRef, policy)
    made.inputs = {"policy": base, "reference": base, "prompts": prompts(store, root, 12), "reward_models": {}}
    return made


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs of `ppo` have few short answers, a reward of tokens, and updates that are large enough to be seen."""
    original = small_world.ppo

    def changed(*, steps: int, **changes: Any) -> Any:
        rewards = RewardsConfig(terms={"own": FunctionReward(function="tests.support.token_rewards:small_is_good")})
        short = {
            "prompts_per_step": 4,
            "sampling": SamplingConfig(max_tokens=12),
            "evaluate": HeldOutConfig(every=4, prompts=3, export="last"),
            "rewards": rewards,
            "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
        }
        monitors = [one for one in MONITORS if one["type"] in ("mismatch", "end_token", "kl_estimate")]
        return original(steps=steps, **(short | changes | {"monitors": monitors}))

    monkeypatch.setattr("benchmarks.monitors.ppo", changed)
    monkeypatch.setattr("benchmarks.monitors.SETTINGS", {})


@pytest.mark.parametrize("fault", ["stale weights", "temperature mismatch", "one bad rank"])
def test_a_planted_fault_is_found_soon_by_the_monitor_that_is_for_it(
    world: SmallWorld, quick: None, fault: str
) -> None:
    found = run(world, None, 17, FAULTS[fault], steps=6, begins=2)
    assert not found.error
    assert 2 < found.alarms[FOUND_AT_ONCE[fault]] <= 6


def test_a_run_without_a_fault_has_no_alarm_of_these(world: SmallWorld, quick: None) -> None:
    assert run(world, None, 17, None, steps=6, begins=0).alarms == {}
