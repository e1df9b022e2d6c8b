"""Methods as functions on tensors: `of_pairs(DPOLoss)(chosen, rejected, ref_chosen, ref_rejected, beta=0.1)`.

Keywords are the options of the method, and the counts of the step; without counts the call is the whole step.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from rlhf_core.algorithms.advantage.base import GroupAdvantage, GroupRewards, TokenAdvantage, TokenRewards
from rlhf_core.algorithms.policy.clip import PolicyBatch, PolicyMethod
from rlhf_core.algorithms.preference.answers import BCOLoss, KTOLoss
from rlhf_core.algorithms.preference.base import PairBatch, PreferenceMethod
from rlhf_core.algorithms.token_math import LossOutput, masked_count


def of_pairs(kind: type[PreferenceMethod], user: Callable[..., Tensor] | None = None) -> Callable[..., LossOutput]:
    """Return the loss of a method on pairs; `user` is the function of the type `custom`."""

    def loss(*columns: Tensor, **keywords: Any) -> LossOutput:
        given = split(PairBatch, columns, keywords)
        zeros_B = torch.zeros_like(given["chosen_logprobs"])
        given = dict.fromkeys(("ref_chosen_logprobs", "ref_rejected_logprobs"), zeros_B) | given
        given = dict.fromkeys(("chosen_lengths", "rejected_lengths"), zeros_B + 1) | given
        given = {"pairs": float(len(zeros_B)), "tokens": float(given["chosen_lengths"].sum())} | given
        return kind(**keywords).loss(PairBatch(**given, function=user))

    return loss


def of_answers(kind: type[KTOLoss] | type[BCOLoss]) -> Callable[..., LossOutput]:
    """Return the loss of a method on single answers; `kl` or `shift` is the number of the step."""

    def loss(logprobs: Tensor, ref_logprobs: Tensor, desirable: Tensor, **keywords: Any) -> LossOutput:
        counts = {"rows": float(len(logprobs)), "desirable_rows": float((desirable != 0).sum())}
        counts |= {name: keywords.pop(name) for name in ("kl", "shift", "rows", "desirable_rows") if name in keywords}
        return kind(**keywords).answer_loss(logprobs, ref_logprobs, desirable, **counts)

    return loss


def of_tokens(kind: type[PolicyMethod], user: Callable[..., Tensor] | None = None) -> Callable[..., LossOutput]:
    """Return a policy loss; `user` is the function of the type `custom`."""

    def loss(*tensors: Tensor, **keywords: Any) -> LossOutput:
        given = split(PolicyBatch, tensors, keywords)
        counts = {"num_tokens": float(masked_count(given["loss_mask"])), "sequences": float(len(given["loss_mask"]))}
        given = {"weights": torch.ones_like(given["old_logprobs"]), "max_length": 1.0} | counts | given
        return kind(**keywords).loss(PolicyBatch(**given, function=user))

    return loss


def split(batch: type, tensors: tuple[Tensor, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a batch, the tensors under its first ones, and take theirs from the keywords."""
    names = [field.name for field in fields(batch) if field.name != "function"]
    return dict(zip(names, tensors, strict=False)) | {name: keywords.pop(name) for name in names if name in keywords}


def compared(method: GroupAdvantage, rewards_PG: Tensor, lengths_PG: Tensor | None = None) -> Tensor:
    """Return the advantages of the completions of each prompt; without lengths each has one token."""
    lengths_PG = torch.ones_like(rewards_PG) if lengths_PG is None else lengths_PG
    return method.compare(GroupRewards(rewards=rewards_PG, lengths=lengths_PG))


def estimated(
    method: TokenAdvantage, rewards_BL: Tensor, loss_mask_BL: Tensor, **given: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the advantages and returns of tokens, given `values` or `greedy` rewards where the method needs them."""
    return method.estimate(TokenRewards(rewards=rewards_BL, loss_mask=loss_mask_BL, **{"values": None} | given))
