"""Convert sampled answers to the messages that supervised stages imitate or compare."""

from __future__ import annotations

from rlhf_core.errors import DataError, explain
from rlhf_core.types import Message, Rollout


def answer_message(rollout: Rollout) -> Message:
    """Return the answer as one assistant message. Raises DataError for an episode in which an environment wrote tokens.

    In one message, the environment's text would be trained on as if it were the policy's, and the turns would be lost.
    """
    completion = rollout.completion
    if not all(completion.action_mask):
        raise DataError(
            explain(
                "rollouts",
                rollout.prompt.id,
                f"{completion.action_mask.count(0)} of its {len(completion.token_ids)} tokens come from an environment, and "
                "one message of the assistant cannot contain an episode",
                "train on episodes with ppo, or generate without an agent",
            )
        )
    return Message("assistant", completion.text)
