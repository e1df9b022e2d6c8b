from pathlib import Path

import pytest

from pipelines.execution.plan import PlannedStage, plan_stages
from pipelines.flows.full import part
from pipelines.flows.profile import load_profile
from rlhf_core.errors import ConfigError
from rlhf_core.schema.base import keyed
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import PreferencesRef, PreparedDataRef, ProcessRewardModelRef, PromptsRef


def planned(tmp_path: Path, *overrides: str) -> dict[str, PlannedStage]:
    return {stage.label: stage for stage in plan_stages(load_profile("tiny/full", overrides), ArtifactStore(tmp_path))}


def made_by(stage: PlannedStage, name: str) -> str:
    value = stage.spec.inputs[name]
    assert not isinstance(value, (dict, tuple))
    return value.uri.removeprefix("pending://")


def test_policies_start_from_what_the_profile_says(tmp_path):
    stages = planned(tmp_path, "ppo.start_from=iterative_dpo", "iterative_dpo.start_from=rejection_sampling")
    assert made_by(stages["iterative_dpo/round_1/dpo"], "policy") == "rejection_sampling/sft"
    assert made_by(stages["ppo"], "policy") == "iterative_dpo/round_2/dpo"
    assert made_by(stages["ppo"], "reference") == "iterative_dpo/round_2/dpo"


def test_every_policy_answers_the_held_out_prompts_and_the_best_of_n_policy_n_times(tmp_path):
    stages = planned(tmp_path)
    counts = {
        label.split("/")[1]: stage.spec.config.model_dump()["samples_per_prompt"]
        for label, stage in stages.items()
        if label.startswith("evaluate/")
    }
    assert list(counts) == ["base", "sft", "rejection_sampling", "iterative_dpo", "ppo"]
    assert counts["sft"] == 8


def test_a_section_that_is_missing_is_skipped(tmp_path):
    changes = ("rejection_sampling=none", "iterative_dpo=none", "ppo.start_from=sft", "evaluate.evaluate.parents=none")
    labels = planned(tmp_path, *changes)
    assert not any(label.startswith(("rejection_sampling", "iterative_dpo")) for label in labels)
    assert set(labels["evaluate"].spec.inputs["generations"]) == {"base", "sft", "ppo"}


def test_a_policy_that_is_taken_away_is_not_compared(tmp_path):
    compared = planned(tmp_path, "ppo=none", "publish=none")["evaluate"].spec.config.model_dump()
    assert compared["parents"] == {"sft": "base", "rejection_sampling": "sft", "iterative_dpo": "sft"}
    assert compared["best_of"] == {"sft": 8}


def test_the_policy_that_the_profile_names_is_published(tmp_path):
    assert made_by(planned(tmp_path, "publish.policy=sft")["publish"], "policy") == "sft"


def test_prepared_data_without_the_part_that_a_stage_needs_is_refused():
    data = PreparedDataRef(uri="store://x", digest="x", prompts=PromptsRef(uri="store://x/prompts", digest="y"))
    assert part(data, "prompts", PromptsRef).digest == "y"
    with pytest.raises(ConfigError, match=r"prepare_data\.preferences: has no rows, and a later stage reads them"):
        part(data, "preferences", PreferencesRef)


def test_conditional_sft_imitates_all_answers_and_is_evaluated_on_what_it_was_taught_to_hear(tmp_path):
    config = load_profile("tiny/conditional")
    stages = {stage.label: stage for stage in plan_stages(config, ArtifactStore(tmp_path))}
    assert made_by(stages["conditional_sft/sft"], "policy") == "sft"
    assert made_by(stages["conditional_sft/sft"], "demonstrations") == "conditional_sft/condition"
    assert made_by(stages["conditional_sft/ask"], "rollouts") == "conditional_sft/score"
    ours, theirs = (stages[f"evaluate/{name}/generate"] for name in ("conditional_sft", "sft"))
    assert made_by(ours, "asked") == "conditional_sft/ask"
    assert "asked" not in theirs.spec.inputs
    assert made_by(ours, "prompts") == made_by(theirs, "prompts") == "prepare_data"


def test_nothing_is_asked_where_nothing_is_evaluated(tmp_path):
    config = load_profile("tiny/conditional", ["evaluate=none"])
    labels = [stage.label for stage in plan_stages(config, ArtifactStore(tmp_path))]
    assert labels[-2:] == ["conditional_sft/condition", "conditional_sft/sft"]


@pytest.mark.parametrize("on_policy", [False, True])
def test_the_student_reads_prompts_on_policy_and_demonstrations_off_it(tmp_path, on_policy):
    changes = ["distill.on_policy=true", "distill.kl_weight=1"] if on_policy else []
    stages = {
        stage.label: stage for stage in plan_stages(load_profile("tiny/distill", changes), ArtifactStore(tmp_path))
    }
    inputs = stages["distill"].spec.inputs
    assert set(inputs) == {"policy", "teacher", "prompts" if on_policy else "demonstrations"}
    assert (made_by(stages["distill"], "policy"), made_by(stages["distill"], "teacher")) == ("prepare_data", "sft")
    assert set(stages["evaluate"].spec.inputs["generations"]) == {"base", "sft", "distill"}


def test_several_teachers_come_from_sections_and_from_outside(tmp_path, policy):
    changes = ["distill.teacher=none", "distill.teachers={big = 1.0, sft = 3.0}", f"distill.external.big.path={policy}"]
    stages = {
        stage.label: stage for stage in plan_stages(load_profile("tiny/distill", changes), ArtifactStore(tmp_path))
    }
    inputs = stages["distill"].spec.inputs
    assert set(inputs) == {"policy", "teachers", "demonstrations"}
    assert isinstance(inputs["teachers"], dict)
    assert list(inputs["teachers"]) == ["big", "sft"]
    assert inputs["teachers"]["big"].parents == () and "distill/big/import" in stages
    assert stages["distill/big/import"].spec.config.model.path == str(policy)


def test_a_process_reward_model_is_offered_to_later_stages_and_not_to_the_report(tmp_path):
    stages = {stage.label: stage for stage in plan_stages(load_profile("tiny/prm"), ArtifactStore(tmp_path))}
    assert made_by(stages["process_reward_model"], "policy") == "sft"
    assert made_by(stages["process_reward_model"], "steps") == "prepare_data"
    offered = stages["rejection_sampling/score"].spec.inputs["reward_models"]
    assert isinstance(offered, dict)
    assert {name: type(ref) for name, ref in offered.items()} == {"process_reward_model": ProcessRewardModelRef}
    assert "reward_model" not in stages["evaluate"].spec.inputs


def test_a_judge_that_no_section_trains_is_missed_before_anything_is_computed(tmp_path):
    with pytest.raises(ConfigError, match=r"^ppo\.rewards\.terms\.judge\.model = 'other'"):
        planned(tmp_path, 'ppo.rewards.terms={judge={type="reward_model", model="other"}}')


def test_an_ensemble_is_a_stage_per_member_and_serves_as_one_reward(tmp_path):
    plain = planned(tmp_path)
    term = 'ppo.rewards.terms={careful={type="ensemble", models=["reward_model/1", "reward_model/2"], reduce="mean_minus_std"}}'
    stages = planned(tmp_path, 'reward_model.ensemble={members=2, by="folds"}', term)
    assert "reward_model" not in stages
    members = [stages[f"reward_model/{number}"] for number in (1, 2)]
    assert [one.spec.config.model_dump()["member"] for one in members] == [
        {"number": 1, "of": 2, "by": "folds"},
        {"number": 2, "of": 2, "by": "folds"},
    ]
    offered = stages["ppo"].spec.inputs["reward_models"]
    assert isinstance(offered, dict) and set(offered) == {"reward_model", "reward_model/1", "reward_model/2"}
    assert made_by(stages["evaluate"], "reward_model") == "reward_model/1"
    one = load_profile("tiny/full").reward_model
    (alone,) = one.stage_configs().values()
    assert keyed(alone) == keyed(one) == keyed(plain["reward_model"].spec.config)
    assert "member" not in keyed(alone) and "suites" not in keyed(alone)
