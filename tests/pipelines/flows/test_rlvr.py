import pytest

from pipelines.execution.plan import plan_stages
from pipelines.flows.profile import load_profile
from pipelines.flows.rlvr import verifiable_rewards
from rlhf_core.errors import ConfigError
from rlhf_core.store.artifacts import ArtifactStore


def test_a_profile_with_a_learned_reward_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"reward_model = \{\.\.\.\}: the rlvr pipeline learns only from verifiable rewards"
    ):
        plan_stages(load_profile("tiny/full"), ArtifactStore(tmp_path), pipeline=verifiable_rewards)


def test_it_is_the_lifecycle_without_preferences(tmp_path):
    config, store = load_profile("tiny/rlvr"), ArtifactStore(tmp_path)
    ours = [(stage.label, stage.spec) for stage in plan_stages(config, store, pipeline=verifiable_rewards)]
    assert ours == [(stage.label, stage.spec) for stage in plan_stages(config, store)]
