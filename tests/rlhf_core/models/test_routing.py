"""The load-balancing loss against slow loops; whole models are in tests/rlhf_core/training/objectives/test_router.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.errors import ConfigError
from rlhf_core.models.batches import TokenBatch, collate
from rlhf_core.models.forward import Routing, check_routers, note_routing, routing_arguments, watching
from rlhf_core.types import TokenSample

EXPERTS, CHOSEN = 4, 2


def batch(*lengths: int, pack_to: int | None = None) -> TokenBatch:
    samples = [TokenSample((5,) * length, (0,) * length) for length in lengths]
    return collate(samples, pad_id=0, pack_to=pack_to)


def total(layers: list[Tensor], of: TokenBatch) -> Tensor:
    routing = Routing()
    routing.add(layers, of, experts_per_token=CHOSEN)
    return routing.total()


def laid_out(samples: list[Tensor], of: TokenBatch) -> Tensor:
    """Return the logits [T, E] of `samples` where the batch has them; padding would go to the last expert alone."""
    logits_BLE = torch.zeros(*of.token_ids_BL.shape, EXPERTS)
    logits_BLE[..., -1] = 50.0
    for logits_SE, (row, start, length) in zip(samples, of.rows, strict=True):
        logits_BLE[row, start : start + length] = logits_SE
    return logits_BLE.reshape(-1, EXPERTS)


def naive(logits_SE: Tensor) -> float:
    """Return E * sum_e (fraction sent to e) * (mean probability of e) of one sample."""
    value = 0.0
    for expert in range(EXPERTS):
        sent = sum(expert in row.argsort(descending=True)[:CHOSEN] for row in logits_SE)
        mean = sum(float(row.double().softmax(-1)[expert]) for row in logits_SE) / len(logits_SE)
        value += EXPERTS * int(sent) / len(logits_SE) * mean
    return value


def drawn(*lengths: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [2 * torch.randn(length, EXPERTS, generator=generator) for length in lengths]


@pytest.mark.parametrize("pack_to", [None, 9])
def test_it_is_the_sum_over_samples_of_the_mean_over_layers_without_padding(pack_to: int | None) -> None:
    of = batch(5, 2, 1, 7, pack_to=pack_to)
    layers = [drawn(5, 2, 1, 7, seed=seed) for seed in (1, 2)]
    expected = sum(naive(sample) for layer in layers for sample in layer) / 2
    found = total([laid_out(layer, of) for layer in layers], of)
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_perfect_balance_counts_the_experts_of_a_token_and_none_at_all_counts_the_experts() -> None:
    turns = torch.tensor([[9.0, 9, 0, 0], [0, 0, 9, 9]]).repeat(3, 1)
    assert float(total([turns], batch(6))) == pytest.approx(CHOSEN)
    always = torch.tensor([[50.0, 50, 0, 0]]).repeat(6, 1)
    assert float(total([always], batch(6))) == pytest.approx(EXPERTS)


def test_it_pushes_a_token_away_from_the_experts_that_have_too_many() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, 0.0]]).repeat(4, 1).requires_grad_()
    (grad_TE,) = torch.autograd.grad(total([logits], batch(4)), logits)
    assert bool((grad_TE[:, :CHOSEN] > 0).all()) and bool((grad_TE[:, CHOSEN:] < 0).all())


def backbone(**config: Any) -> nn.Module:
    module = nn.Module()
    settings = SimpleNamespace(**config)
    module.config = cast(Any, SimpleNamespace(get_text_config=lambda: settings))
    return module


def test_only_what_is_computed_while_somebody_watches_is_noted() -> None:
    of, (logits,) = batch(3), drawn(3, seed=4)
    model, output = backbone(num_experts_per_tok=CHOSEN), SimpleNamespace(router_logits=[logits])
    note_routing(model, SimpleNamespace(), of)  # nobody asked the backbone for its logits
    assert routing_arguments() == {}
    with watching() as routing:
        assert routing_arguments() == {"output_router_logits": True}
        note_routing(model, output, of)
        note_routing(model, output, of)
    assert routing_arguments() == {}
    assert float(routing.total()) == pytest.approx(2 * naive(logits), rel=1e-6)


def test_a_model_without_routers_is_refused() -> None:
    check_routers(backbone(router_aux_loss_coef=0.01, num_experts_per_tok=CHOSEN))
    with pytest.raises(ConfigError, match=r"router_aux_coef .* Module has no experts with a load-balancing loss"):
        check_routers(backbone())
