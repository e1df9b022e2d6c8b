"""The table of planted faults: what a quick run finds, and how the table is made."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import monitor_faults, small_world
from benchmarks.monitor_faults import FAULTS, Clock, CutSampler, Fault
from benchmarks.monitors import MONITORS, Found, false_alarms, run, table
from benchmarks.over_optimization import expected_best
from benchmarks.small_world import SmallWorld
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.monitors import HeldOutConfig
from rlhf_core.config.rewards import FunctionReward, RewardsConfig
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import Completion, PolicyRef
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


def test_every_fault_of_the_design_is_planted() -> None:
    expected = {*FOUND_AT_ONCE, "learning rate x10", "reward sign flip", "reward hack in the reward model"}
    assert expected <= set(FAULTS)
    assert all(isinstance(one, Fault) for one in FAULTS.values())


class OneAnswer:
    """A sampler that always says the same five tokens."""

    class _tokenizer:
        @staticmethod
        def decode(token_ids: tuple[int, ...], *, skip_special_tokens: bool) -> str:
            return " ".join(map(str, token_ids))

    def generate(self, requests: Any, sampling: Any) -> list[Completion]:
        return [Completion((5, 6, 7, 8, 2), (-0.5,) * 5, "5 6 7 8", "stop", 0, 1)]


def test_a_cut_answer_says_that_it_ended_by_itself() -> None:
    clock = Clock(begins=1)
    sampler = CutSampler(OneAnswer(), clock, keep=lambda size: size // 2)
    assert sampler.generate([], SamplingConfig())[0].token_ids == (5, 6, 7, 8, 2)
    clock.step = 1
    (cut,) = sampler.generate([], SamplingConfig())
    assert (cut.token_ids, cut.text, cut.finish_reason) == ((5, 6), "5 6", "stop")


def test_the_planted_hack_prefers_repetition() -> None:
    completions = [Completion((5,), (-0.5,), text, "stop", 0, 1) for text in ("a b c d e", "a b a b a", "")]
    rows: Any = [type("Row", (), {"completion": one}) for one in completions]
    assert monitor_faults.repeats(rows) == [0.0, 3.0, 0.0]


def test_alarms_before_the_fault_are_not_counted_as_finding_it() -> None:
    text = table(
        {"stale weights": Found({"length": 2, "mismatch": 5}, 1.0), "other": Found({}, 1.0)},
        {"stale weights": 4, "other": 4},
    )
    assert text.splitlines()[2:] == ["| stale weights | mismatch 1 |", "| other | not found |"]


def test_clean_runs_are_counted_once_however_many_monitors_fired() -> None:
    clean = [Found({}, 10.0), Found({"kl": 3, "length": 5}, 12.0), Found({"kl": 1}, 14.0)]
    assert false_alarms(clean).strip() == "3 clean runs: 2 with a false alarm (kl 2, length 1); median 12 s a run"


def test_the_expected_best_of_one_and_of_all() -> None:
    proxy, gold = [3.0, 1.0, 2.0], [-1.0, 0.0, 4.0]
    assert expected_best(proxy, gold, 1) == pytest.approx((2.0, 1.0))
    assert expected_best(proxy, gold, 3) == (3.0, -1.0)
