"""Compute the load-balancing loss of a mixture of experts (arXiv 2101.03961).

The loss is computed per sequence (arXiv 2405.04434), as a product of two averages over one sample's tokens. Computed
over a micro-batch, as in transformers, it would depend on the micro-batches. Here it is a sum over samples, like any
other loss.

Legend: N samples, T positions of all rows, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.errors import ConfigError, explain
from rlhf_core.models.batches import TokenBatch


class Routing:
    """The routing balance of the samples that passed through a model inside `watching`."""

    def __init__(self) -> None:
        self._balance: list[Tensor] = []

    def add(self, router_logits: Sequence[Tensor], batch: TokenBatch, *, experts_per_token: int) -> None:
        """Add the samples of `batch`. `router_logits` are [T, E] per layer, with the rows concatenated."""
        layers = [_balance(logits, batch, experts_per_token) for logits in router_logits]
        self._balance.append(torch.stack(layers).mean())

    def total(self) -> Tensor:
        """Return the sum over samples of the layers' mean of E * sum_e (fraction sent to e) * (mean probability of e).

        A sample contributes K if its tokens are spread evenly over the experts, and more if not, but at most E.
        """
        return torch.stack(self._balance).sum()


_watched: ContextVar[Routing | None] = ContextVar("watched", default=None)


@contextmanager
def watching() -> Iterator[Routing]:
    """Collect the routing of every batch whose hidden states are computed inside this context."""
    routing = Routing()
    token = _watched.set(routing)
    try:
        yield routing
    finally:
        _watched.reset(token)


def routing_arguments() -> dict[str, bool]:
    """Return the arguments that a backbone needs while routing is watched."""
    return {} if _watched.get() is None else {"output_router_logits": True}


def note_routing(backbone: nn.Module, output: Any, batch: TokenBatch) -> None:
    """Add the router logits in a backbone's `output` for `batch` to the active `Routing`, if any."""
    routing = _watched.get()
    if routing is not None:
        any_backbone: Any = backbone
        config = any_backbone.config.get_text_config()
        routing.add(output.router_logits, batch, experts_per_token=config.num_experts_per_tok)


def check_routers(model: nn.Module) -> None:
    """Raise ConfigError unless `model` is a mixture of experts with a load-balancing loss in transformers."""
    any_model: Any = model
    config = any_model.config.get_text_config()
    if not hasattr(config, "router_aux_loss_coef") or not hasattr(config, "num_experts_per_tok"):
        rule = f"{type(model).__name__} has no experts with a load-balancing loss"
        remedy = "set it to 0, or train a mixture of experts"
        raise ConfigError(explain("runtime.trainer.router_aux_coef", "> 0", rule, remedy))


def _balance(logits: Tensor, batch: TokenBatch, experts_per_token: int) -> Tensor:
    """Return the sum of the balances of the samples of `batch` in one layer, in fp32."""
    experts = logits.shape[-1]
    probs_TE = torch.softmax(logits.reshape(-1, experts).float(), dim=-1)
    chosen_TK = probs_TE.detach().topk(experts_per_token, dim=-1).indices
    sent_TE = torch.zeros_like(probs_TE).scatter_(1, chosen_TK, 1.0)
    sample_T, length_N1 = _samples(batch)
    zeros_NE = probs_TE.new_zeros((len(batch.rows) + 1, experts))
    sent_NE = zeros_NE.index_add(0, sample_T, sent_TE)[:-1] / length_N1
    probs_NE = zeros_NE.index_add(0, sample_T, probs_TE)[:-1] / length_N1
    return experts * (sent_NE * probs_NE).sum()


def _samples(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return the sample of each position (N for padding), and the lengths of the samples as a column."""
    sample_BL = torch.full(batch.token_ids_BL.shape, len(batch.rows), dtype=torch.int64)
    for index, (row, start, length) in enumerate(batch.rows):
        sample_BL[row, start : start + length] = index
    device = batch.token_ids_BL.device
    lengths = torch.tensor([[float(length)] for _, _, length in batch.rows], device=device)
    return sample_BL.reshape(-1).to(device), lengths
