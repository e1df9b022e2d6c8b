"""Fewer rows, the same values. Which architectures may share rows is proven in `tests/benchmarks/test_separable.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.config.engines import InitModel
from rlhf_core.models import forward, shared_rows
from rlhf_core.models.batches import TokenBatch, collate
from rlhf_core.models.forward import hidden_states, token_logprobs
from rlhf_core.types import TokenSample
from tests.support.tolerances import of_model

SHAPE = InitModel(vocab_size=300, hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=48, max_positions=64)
"""No smaller than the models below."""

LENGTHS = (3, 9, 2, 4, 1, 5)


def batch_of(*lengths: int) -> TokenBatch:
    draw = torch.Generator().manual_seed(11)
    ids = [tuple(torch.randint(1, 97, (length,), generator=draw).tolist()) for length in lengths]
    return collate([TokenSample(one, (0,) + (1,) * (len(one) - 1)) for one in ids], pad_id=0)


def small(model_type: str, attention: str = "sdpa") -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type,
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(4.0)
    return model


def own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "shared_rows", lambda batch: None)


def real(hidden_BLH: Tensor, batch: TokenBatch) -> Tensor:
    return torch.cat([hidden_BLH[row, :length] for row, _, length in batch.rows])


def test_samples_are_laid_first_fit_from_the_longest_down() -> None:
    batch = batch_of(*LENGTHS)
    layout = shared_rows.shared_rows(batch)
    assert layout is not None
    # 9 | 5 + 4 | 3 + 2 + 1: three rows of 9; the last sample of a row counts on through the padding
    assert layout.position_ids_RL.tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 0, 1, 2, 3],
        [0, 1, 2, 0, 1, 0, 1, 2, 3],
    ]
    assert layout.token_ids_RL[1].tolist() == [*batch.token_ids_BL[5, :5].tolist(), *batch.token_ids_BL[3, :4].tolist()]
    restored = layout.restore(layout.token_ids_RL.unsqueeze(-1), batch)
    assert torch.equal(real(restored, batch), real(batch.token_ids_BL.unsqueeze(-1), batch))


@pytest.mark.parametrize(
    "batch",
    [
        batch_of(9, 8, 9, 8),  # nothing fits beside another
        batch_of(9),
        collate([TokenSample((1, 2), (0, 1))] * 3, pad_id=0, pack_to=4),
    ],
)
def test_rows_stay_where_sharing_them_is_useless(batch: TokenBatch) -> None:
    assert shared_rows.shared_rows(batch) is None


def test_long_rows_are_left_alone_for_the_mask_they_would_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_rows, "LONGEST", 8)
    assert shared_rows.shared_rows(batch_of(*LENGTHS)) is None


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["gemma2", "llama", "qwen3"])
def test_hidden_states_are_those_of_a_row_each(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = small(model_type), batch_of(*LENGTHS)
    rows_seen: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: rows_seen.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    shared = real(hidden_states(model, batch), batch)
    own_rows(monkeypatch)
    alone = real(hidden_states(model, batch), batch)
    assert rows_seen == [3, 6]
    torch.testing.assert_close(shared, alone, rtol=0, atol=of_model(SHAPE) * float(alone.abs().max()))


def test_gradients_are_those_of_a_row_each(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(*LENGTHS)

    def gradients() -> list[Tensor]:
        model = small("llama")
        token_logprobs(model, batch, temperature=1.0, with_entropy=False)[0].sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    shared = gradients()
    own_rows(monkeypatch)
    for one, other in zip(shared, gradients(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=of_model(SHAPE) * max(1.0, float(other.abs().max())))
