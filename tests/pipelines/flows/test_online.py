"""The online loop as a plan: what each round makes of what, and what a profile must have."""

from pathlib import Path

import pytest

from pipelines.execution.plan import PENDING, PlannedStage, plan_stages
from pipelines.flows.profile import load_profile
from rlhf_core.errors import ConfigError
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef


def planned(tmp_path: Path, *overrides: str) -> dict[str, PlannedStage]:
    config = load_profile("tiny/online", overrides)
    return {stage.label: stage for stage in plan_stages(config, ArtifactStore(tmp_path / "store"))}


def made_from(stage: PlannedStage, name: str) -> object:
    value = stage.spec.inputs[name]
    if isinstance(value, ArtifactRef):
        return value.uri.removeprefix(PENDING)
    return {key: ref.uri.removeprefix(PENDING) for key, ref in value.items()}


def test_every_round_starts_from_the_policy_and_the_reward_model_of_the_round_before(tmp_path):
    stages = planned(tmp_path)
    second = {
        name: stages[f"online/round_2/{name}"] for name in ("generate", "score", "collect", "pairs", "compare", "ppo")
    }
    assert made_from(second["generate"], "policy") == "online/round_1/ppo"
    assert made_from(second["score"], "reward_models") == {"reward_model": "online/round_1/reward_model"}
    assert made_from(second["collect"], "comparisons") == "online/round_2/propose"
    assert made_from(second["pairs"], "preferences") == {
        "prepared": "prepare_data",
        "round_1": "online/round_1/collect",
        "round_2": "online/round_2/collect",
    }
    assert made_from(second["compare"], "reward_models") == {
        "before": "online/round_1/reward_model",
        "after": "online/round_2/reward_model",
    }
    assert made_from(second["compare"], "preferences") == "online/round_2/collect"
    assert made_from(second["ppo"], "reward_models") == {"reward_model": "online/round_2/reward_model"}
    assert made_from(second["ppo"], "reference") == "sft"


def test_rounds_draw_other_samples_and_one_more_leaves_the_earlier_ones_as_they_are(tmp_path):
    stages = planned(tmp_path)
    seeds = [stages[f"online/round_{number}/ppo"].spec.seed for number in (1, 2, 3)]
    assert len(set(seeds)) == 3
    rounds = [stages[f"online/round_{number}/generate"].spec.config.round for number in (1, 2, 3)]
    assert len(set(rounds)) == 3
    fewer = planned(tmp_path, "online.rounds=2", "evaluate.evaluate.parents.online_3=none")
    for label, stage in fewer.items():
        if label.startswith("online/"):
            assert (stage.spec.config, stage.spec.seed) == (stages[label].spec.config, stages[label].spec.seed)


def test_without_refresh_the_first_reward_model_serves_in_all_rounds(tmp_path):
    stages = planned(tmp_path, "online.refresh=false")
    assert not [label for label in stages if label.endswith(("/reward_model", "/compare", "/pairs"))]
    assert made_from(stages["online/round_3/ppo"], "reward_models") == {"reward_model": "reward_model"}


def test_the_rubric_of_a_judge_and_a_known_reward_are_in_the_key_by_their_content(tmp_path):
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("Be kind.")
    judge = (
        f'online.collect.annotator={{type = "judge", url = "http://host/v1", model = "m", rubric_file = "{rubric}"}}'
    )
    gold = "online.collect.gold=rlhf_contrib.worlds.support_readers:reader_reward"
    without = planned(tmp_path)["online/round_1/collect"].spec
    spec = planned(tmp_path, judge, gold)["online/round_1/collect"].spec
    assert spec.callables == ("rlhf_contrib.worlds.support_readers:reader_reward",) and "files" not in without.engines
    before = spec.engines["files"]
    rubric.write_text("Be brief.")
    assert planned(tmp_path, judge, gold)["online/round_1/collect"].spec.engines["files"] != before
    rubric.unlink()
    with pytest.raises(ConfigError, match=r"rubric_file = .*there is no such file"):
        planned(tmp_path, judge)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("online.ppo=none", r"neither of \[online.dpo\] and \[online.ppo\]; give one of them"),
        ("online.collect.eval_fraction=0.0", "compared with the one before on held-out pairs; raise it"),
        ("reward_model=none", r"its first round scores answers with a reward model; add \[reward_model\]"),
    ],
)
def test_a_profile_that_cannot_be_run_says_what_to_change(tmp_path, override, said):
    with pytest.raises(ConfigError, match=said):
        planned(tmp_path, override)
