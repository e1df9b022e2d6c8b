"""Run reinforcement learning from verifiable rewards: prepare_data -> sft -> policy optimization -> evaluate.

This is the lifecycle without preferences: the reward checks the answer against the prompt's label (arXiv 2411.15124),
so no reward model is trained. The profile selects the estimator, usually `grpo`.
"""

from pipelines.flows.full import lifecycle
from pipelines.flows.graph import Stages
from pipelines.flows.profile import PipelineConfig
from rlhf_core.errors import ConfigError
from rlhf_core.types import PolicyRef


def verifiable_rewards(config: PipelineConfig, stages: Stages) -> dict[str, PolicyRef]:
    """Run the lifecycle of a profile that has no learned reward; raise ConfigError if it has one."""
    for section in (
        "import_reward_model",
        "reward_model",
        "process_reward_model",
        "rejection_sampling",
        "conditional_sft",
        "dpo",
        "iterative_dpo",
    ):
        if getattr(config, section) is not None:
            raise ConfigError(
                f"{section} = {{...}}: the rlvr pipeline learns only from verifiable rewards; "
                f"remove [{section}] from the profile, or run the full pipeline"
            )
    return lifecycle(config, stages)
