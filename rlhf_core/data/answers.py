"""Sampled answers as the messages that supervised stages imitate or compare."""

from __future__ import annotations

from rlhf_core.errors import DataError, explain
from rlhf_core.types import Message, Rollout


def answer_message(rollout: Rollout) -> Message:
    """Return the answer as the assistant's one message; DataError for an episode that an environment wrote a part of.

    As one message the environment's words would be trained on as the policy's own, and the turns would be lost.
    """
    completion = rollout.completion
    if not all(completion.action_mask):
        raise DataError(
            explain(
                "rollouts",
                rollout.prompt.id,
                f"{completion.action_mask.count(0)} of its {len(completion.token_ids)} tokens are an environment's, and "
                "one message of the assistant cannot hold an episode",
                "train on episodes with ppo, or generate without an agent",
            )
        )
    return Message("assistant", completion.text)
