from __future__ import annotations

from pathlib import Path

from pipelines.graph import ENGINES, reward_functions
from pipelines.plan import plan
from pipelines.profile import load_profile
from rlhf_core.artifacts import ArtifactStore
from stages.ppo import PPOConfig
from tests.pipelines.mini import write_mini


def test_every_stage_module_is_in_the_table_of_engines() -> None:
    root = Path(__file__).parents[2] / "stages"
    assert {path.stem for path in root.glob("[a-z]*.py")} == set(ENGINES)


def test_engines_enter_the_spec_of_the_stages_that_lease_them(tmp_path: Path) -> None:
    stages = {stage.label: stage.spec for stage in plan(load_profile("tiny/full"), ArtifactStore(tmp_path))}
    assert set(stages["ppo"].engines) == {"trainer", "sampler"}
    assert set(stages["evaluate/sft/generate"].engines) == {"sampler"}
    assert stages["prepare_data"].engines == {}


def test_the_number_of_workers_is_no_part_of_a_spec_and_the_precision_is(tmp_path: Path) -> None:
    def trainer(*overrides: str) -> object:
        stages = plan(load_profile("tiny/full", overrides), ArtifactStore(tmp_path), until="sft")
        return stages[-1].spec.engines["trainer"]

    assert trainer() == trainer("runtime.train_workers=2", "runtime.trainer.micro_batch=3")
    assert trainer() != trainer("runtime.trainer.dtype=bfloat16")


def test_the_functions_of_users_are_found_wherever_they_stand() -> None:
    config = PPOConfig.model_validate(
        {
            "rewards": {
                "terms": {"a": {"type": "function", "function": "m:f"}, "b": {"type": "function", "function": "n.py:g"}}
            }
        }
    )
    assert reward_functions(config) == ("m:f", "n.py:g")


def test_the_gold_reward_of_an_evaluation_is_one_of_them(tmp_path: Path) -> None:
    config = load_profile(write_mini(tmp_path))
    assert config.evaluate is not None
    assert reward_functions(config.evaluate.evaluate) == ("rlhf_core.data.worlds.support:gold_reward",)
