"""Rows of training batches, written by hand: `Sequences.of` joins them."""

from dataclasses import dataclass

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class PolicySample:
    """A rollout for the policy loss."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    rollout_logprobs: Numbers
    old_logprobs: Numbers
    ref_logprobs: Numbers
    advantages: Numbers


@dataclass(frozen=True)
class ValueSample:
    """A rollout for the value loss."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    old_values: Numbers
    returns: Numbers
