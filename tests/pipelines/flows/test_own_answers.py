from pathlib import Path

import pytest

from pipelines.execution.plan import plan_stages
from pipelines.flows.profile import load_profile
from rlhf_core.stage.key import StageSpec
from rlhf_core.store.artifacts import ArtifactStore


def rounds(tmp_path: Path, *overrides: str) -> dict[str, StageSpec]:
    stages = plan_stages(load_profile("tiny/full", ["iterative_dpo.rounds=3", *overrides]), ArtifactStore(tmp_path))
    return {stage.label: stage.spec for stage in stages}


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("initial", ["sft", "sft", "sft"]),
        ("previous", ["sft", "iterative_dpo/round_1/dpo", "iterative_dpo/round_2/dpo"]),
    ],
)
def test_the_reference_stays_or_follows(tmp_path, reference, expected):
    specs = rounds(tmp_path, f"iterative_dpo.reference={reference}")
    inputs = [specs[f"iterative_dpo/round_{number}/dpo"].inputs["reference"] for number in (1, 2, 3)]
    assert [ref.uri.removeprefix("pending://") for ref in inputs] == expected


def test_each_round_answers_with_the_policy_of_the_round_before_and_draws_anew(tmp_path):
    specs = rounds(tmp_path)
    answers = [specs[f"iterative_dpo/round_{number}/generate"] for number in (1, 2, 3)]
    assert [spec.inputs["policy"].uri.removeprefix("pending://") for spec in answers] == [
        "sft",
        "iterative_dpo/round_1/dpo",
        "iterative_dpo/round_2/dpo",
    ]
    assert [spec.config.model_dump()["round"] for spec in answers] == [0, 1, 2]


def test_the_first_round_can_share_the_answers_of_rejection_sampling(tmp_path):
    specs = rounds(tmp_path)
    ours, theirs = specs["iterative_dpo/round_1/generate"], specs["rejection_sampling/generate"]
    assert (ours.config, ours.inputs, ours.engines) == (theirs.config, theirs.inputs, theirs.engines)
