"""What a benchmark starts from, as handles of artifacts that do not exist."""

from typing import TypeVar

from benchmarks.method_rows import Start
from rlhf_core.types import ArtifactRef, DemonstrationsRef, PolicyRef, PreferencesRef, PromptsRef, RewardModelRef

R = TypeVar("R", bound=ArtifactRef)


def made(kind: type[R], label: str) -> R:
    """Return a handle that is told by its label."""
    return kind(uri=label, digest=label)


def imagined_start() -> Start:
    """Return a start of which nothing is in any store."""
    return Start(
        base=made(PolicyRef, "base"),
        policy=made(PolicyRef, "sft"),
        prompts=made(PromptsRef, "prompts"),
        eval_prompts=made(PromptsRef, "eval_prompts"),
        demonstrations=made(DemonstrationsRef, "demonstrations"),
        preferences=made(PreferencesRef, "preferences"),
        reward_models={"reward_model": made(RewardModelRef, "reward_model")},
    )
