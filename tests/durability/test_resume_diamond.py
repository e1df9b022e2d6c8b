"""n + m steps are n steps, a kill, and m steps of a new run: bitwise for every stage that trains.

With other micro-batches after the kill they agree to the rounding of float32 (`tests/support/tolerances.py`): the gradient is then
a sum of the same numbers in another order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
from rlhf_core.config.policy import LoopConfig
from rlhf_core.config.rewards import FunctionReward, RewardsConfig
from rlhf_core.runtime.local_runtime import LocalRuntime
from rlhf_core.schema.base import Config
from rlhf_core.types import ArtifactRef, PolicyRef
from stages.dpo import DPOConfig
from stages.ppo import PPOConfig
from stages.reward_model import RewardModelConfig
from stages.sft import SFTConfig
from tests.support.policies import RUNTIME, SHAPE
from tests.support.tolerances import assert_same_updates, near, of_training
from tests.support.training import demonstrations, killed_and_resumed, preferences, prompts, untimed
from tests.support.workshop import Workshop, workshop

RATE = OptimizerConfig(learning_rate=2e-4)
LOOP = LoopConfig(batch_size=6, epochs=1, eval_every=3, checkpoint_every=2)
"""Six rows a step: two micro-batches of 5 and 1 where the default of 8 makes one."""
KILLED_AT = 3
"""One step after a checkpoint."""
OTHER_RUNTIME = RUNTIME.model_copy(update={"trainer": RUNTIME.trainer.model_copy(update={"micro_batch": 5})})

CONFIGS: dict[str, Config] = {
    "sft": SFTConfig(max_length=48, loop=LOOP, optimizer=RATE),
    "reward_model": RewardModelConfig(max_length=48, loop=LOOP, optimizer=RATE),
    "dpo": DPOConfig(max_length=48, loop=LOOP, optimizer=RATE),
    "ppo": PPOConfig(
        steps=5,
        prompts_per_step=3,
        samples_per_prompt=2,
        sampling=SamplingConfig(max_tokens=6),
        rewards=RewardsConfig(terms={"short": FunctionReward(function="tests.support.token_rewards:small_is_good")}),
        optimizer=RATE,
        value={"optimizer": RATE},
        kl={"target": 0.5},
        checkpoint_every=2,
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What a stage made (`ref`, in `folder`), its final metrics, and all that it logged on the way."""

    ref: ArtifactRef
    folder: Path
    final: dict[str, float]
    points: list[tuple[int, dict[str, float]]]


@pytest.fixture(scope="module", params=CONFIGS)
def stage(request) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def straight(stage: str, policy: Path, tmp_path_factory) -> Outcome:
    shop, inputs = _shop(stage, policy, tmp_path_factory.mktemp("straight"))
    return _outcome(shop, shop.run(stage, CONFIGS[stage], inputs)[0])


@pytest.mark.full
def test_a_resumed_run_is_the_straight_one_to_the_bit(stage, straight, policy, tmp_path):
    shop, inputs = _shop(stage, policy, tmp_path)
    resumed = _outcome(shop, killed_and_resumed(shop, stage, CONFIGS[stage], inputs, at=KILLED_AT))
    assert _weights(resumed) == _weights(straight)
    assert resumed.final == straight.final
    assert resumed.points == straight.points
    assert resumed.ref.digest == straight.ref.digest


def test_a_run_resumed_with_other_micro_batches_is_the_straight_one_but_for_rounding(stage, straight, policy, tmp_path):
    shop, inputs = _shop(stage, policy, tmp_path)
    other = LocalRuntime(OTHER_RUNTIME)
    resumed = _outcome(shop, killed_and_resumed(shop, stage, CONFIGS[stage], inputs, at=KILLED_AT, resume_on=other))
    assert _weights(resumed) != _weights(straight), "the micro-batches were the same"
    expected = load_file(straight.folder / "model.safetensors")
    found = load_file(resumed.folder / "model.safetensors")
    assert found.keys() == expected.keys()
    one, other = (torch.cat([tensors[name].flatten() for name in expected]).tolist() for tensors in (found, expected))
    steps = len(straight.points)
    assert_same_updates(one, other, shape=SHAPE, rates=[RATE.learning_rate] * steps)
    same = of_training(SHAPE, steps=steps)
    assert [step for step, _ in resumed.points] == [step for step, _ in straight.points]
    for (step, values), (_, wanted) in zip(resumed.points, straight.points, strict=True):
        assert values == near(wanted, same), step
    assert resumed.final == near(straight.final, same)


def _shop(stage: str, policy: Path, root: Path) -> tuple[Workshop, dict[str, Any]]:
    shop = workshop(root)
    base = shop.store.external(PolicyRef, policy)
    inputs: dict[str, Callable[[], dict[str, Any]]] = {
        "sft": lambda: {"demonstrations": demonstrations(shop.store, root, count=30)},
        "reward_model": lambda: {"preferences": preferences(shop.store, root)},
        "dpo": lambda: {"reference": base, "preferences": preferences(shop.store, root)},
        "ppo": lambda: {"reference": base, "prompts": prompts(shop.store, root), "reward_models": {}},
    }
    return shop, {"policy": base} | inputs[stage]()


def _outcome(shop: Workshop, ref: ArtifactRef) -> Outcome:
    (record,) = [record for record in shop.store.records() if record.handle == ref]
    return Outcome(ref, shop.store.path(ref), dict(record.metrics), untimed(shop.tracker.points))


def _weights(outcome: Outcome) -> bytes:
    return (outcome.folder / "model.safetensors").read_bytes()
