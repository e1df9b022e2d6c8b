"""The shared loop: the true number of steps, the order of samples, and when it gives up."""

import subprocess
import sys

import pytest

from rlhf_core.config.policy import LoopConfig
from rlhf_core.data.tables import write_demonstrations
from rlhf_core.errors import ConfigError
from rlhf_core.training.fit import batch_at, total_steps
from rlhf_core.types import DemonstrationsRef, PolicyRef
from stages.sft import SFTConfig
from tests.support.training import demonstrations
from tests.support.workshop import workshop


def test_steps_are_counted_with_the_short_batch_and_the_limit():
    assert total_steps(10, LoopConfig(batch_size=4, epochs=2)) == 6  # 4 + 4 + 2, twice
    assert total_steps(10, LoopConfig(batch_size=4, epochs=2, max_steps=5)) == 5


def test_an_epoch_sees_every_sample_once_in_an_order_of_its_own():
    first, second = (
        [row for step in steps for row in batch_at(step, range(10), batch_size=4, seed=1)]
        for steps in ((0, 1, 2), (3, 4, 5))
    )
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert batch_at(1, range(10), batch_size=4, seed=1) == first[4:8]


def test_the_best_of_no_evaluations_is_refused_before_a_step(tmp_path, policy_folder):
    shop = workshop(tmp_path)
    demonstrations(shop.store, tmp_path / "made")
    write_demonstrations(tmp_path / "made" / "demonstrations" / "eval.parquet", [])
    inputs = {
        "policy": shop.store.external(PolicyRef, policy_folder),
        "demonstrations": shop.store.external(DemonstrationsRef, tmp_path / "made" / "demonstrations"),
    }
    config = SFTConfig(max_length=48, loop=LoopConfig(batch_size=8, epochs=1, keep_best=1))
    with pytest.raises(ConfigError, match=r"sft\.loop\.keep_best = 1: no held-out rows are left"):
        shop.run("sft", config, inputs)
    assert not shop.tracker.points


def test_stages_that_train_leave_the_models_and_engines_to_the_workers():
    """Nothing that a stage imports may share a module with a function that needs transformers, peft or DeepSpeed."""
    code = (
        "import sys, stages.sft.run, stages.ppo.run, stages.dpo.run, stages.reward_model.run; import stages.process_reward_model.run; "
        "print(sorted({'transformers', 'peft', 'deepspeed', 'ray', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
