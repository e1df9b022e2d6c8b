"""Padding, packing and the way back; fewer rows with the same values. `tests/benchmarks/test_separable.py` proves which architectures may share rows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.config.models import InitModel
from rlhf_core.errors import DataError
from rlhf_core.models import batches, forward
from rlhf_core.models.batches import TokenBatch, collate, unpack_rows
from rlhf_core.models.forward import hidden_states, token_logprobs
from rlhf_core.types import TokenSample
from tests.rlhf_core.models.conftest import assert_near, sharpened
from tests.support.samples import PolicySample, ValueSample

A = TokenSample((5, 7, 2), (0, 1, 1))
B = TokenSample((4,), (0,))
C = TokenSample((8, 9), (0, 1))


def test_samples_get_one_row_each_padded_on_the_right():
    batch = collate([A, B], pad_id=99)
    assert batch.token_ids_BL.tolist() == [[5, 7, 2], [4, 99, 99]]
    assert batch.segment_ids_BL.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.loss_mask_BL.tolist() == [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    assert batch.rows == ((0, 0, 3), (1, 0, 1))
    assert not batch.packed


def test_positions_count_through_the_padding_so_that_a_row_is_plain_causal():
    assert collate([A, B], pad_id=0).position_ids_BL.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_packing_puts_each_sample_into_the_first_row_with_room():
    # A (3) opens row 0 of 4; C (2) does not fit, opens row 1; B (1) goes back to row 0; C again fits row 1.
    batch = collate([A, C, B, C], pad_id=0, pack_to=4)
    assert batch.rows == ((0, 0, 3), (1, 0, 2), (0, 3, 1), (1, 2, 2))
    assert batch.token_ids_BL.tolist() == [[5, 7, 2, 4], [8, 9, 8, 9]]
    assert batch.position_ids_BL.tolist() == [[0, 1, 2, 0], [0, 1, 0, 1]]
    assert batch.segment_ids_BL.tolist() == [[1, 1, 1, 2], [1, 1, 2, 2]]
    assert batch.packed


def test_unpack_returns_the_samples_in_their_order():
    batch = collate([A, C, B, C], pad_id=0, pack_to=4)
    assert [ids.tolist() for ids in unpack_rows(batch.token_ids_BL, batch)] == [[5, 7, 2], [8, 9], [4], [8, 9]]


def test_policy_fields_are_laid_out_like_the_tokens():
    sample = PolicySample((5, 7), (0, 1), (0.0, -1.5), (0.0, -1.25), (0.0, -2.0), (0.0, 3.0))
    longer = PolicySample((1, 2, 3), (0, 0, 1), (0.0, 0.0, -1.0), (0.0, 0.0, -1.0), (0.0, 0.0, -1.0), (0.0, 0.0, 0.5))
    batch = collate([sample, longer], pad_id=0)
    assert set(batch.fields) == {"rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages"}
    assert batch.fields["old_logprobs"].tolist() == [[0.0, -1.25, 0.0], [0.0, 0.0, -1.0]]
    assert batch.fields["advantages"].tolist() == [[0.0, 3.0, 0.0], [0.0, 0.0, 0.5]]
    assert all(value_BL.dtype == torch.float32 for value_BL in batch.fields.values())


def test_moving_a_batch_keeps_every_field():
    batch = collate([ValueSample((5, 7), (0, 1), (0.0, 0.5), (0.0, 1.0))], pad_id=0)
    assert {name: value.tolist() for name, value in batch.fields.items()} == {
        "old_values": [[0.0, 0.5]],
        "returns": [[0.0, 1.0]],
    }
    moved = batch.to("meta")
    assert moved.token_ids_BL.device.type == moved.fields["returns"].device.type == "meta"
    assert moved.rows == ((0, 0, 2),)


@pytest.mark.parametrize(
    ("samples", "pack_to", "message"),
    [
        ([], None, "at least one sample"),
        ([TokenSample((), ())], None, r"samples\[0\].token_ids = \(\): must not be empty"),
        ([B, TokenSample((1, 2), (1, 1))], None, r"samples\[1\].loss_mask\[0\] = 1"),
        ([A], 2, r"samples\[0\] length = 3: must be <= pack_to = 2"),
    ],
)
def test_what_cannot_be_collated_is_named(samples, pack_to, message):
    with pytest.raises(DataError, match=message):
        collate(samples, pad_id=0, pack_to=pack_to)


# ---------------------------------------------------------------- shared rows


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
    return sharpened(AutoModelForCausalLM.from_config(config, attn_implementation=attention), by=4.0)


def own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "shared_rows", lambda batch, prefixes_of: None)


def real(hidden_BLH: Tensor, batch: TokenBatch) -> Tensor:
    return torch.cat([hidden_BLH[row, :length] for row, _, length in batch.rows])


def test_samples_are_laid_first_fit_from_the_longest_down():
    batch = batch_of(*LENGTHS)
    layout = batches.shared_rows(batch)
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
def test_rows_stay_where_sharing_them_is_useless(batch):
    assert batches.shared_rows(batch) is None


def test_long_rows_are_left_alone_for_the_mask_they_would_need(monkeypatch):
    monkeypatch.setattr(batches, "LONGEST", 8)
    assert batches.shared_rows(batch_of(*LENGTHS)) is None


def test_gradients_are_those_of_a_row_each(monkeypatch):
    batch = batch_of(*LENGTHS)

    def gradients() -> list[Tensor]:
        model = small("llama")
        token_logprobs(model, batch, temperature=1.0, with_entropy=False)[0].sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    shared = gradients()
    own_rows(monkeypatch)
    for one, other in zip(shared, gradients(), strict=True):
        assert_near([one], [other], SHAPE)


# ---------------------------------------------------------------- samples that begin alike


def answers(*groups: tuple[int, tuple[int, ...]], most: int = 97) -> TokenBatch:
    """Return the answers of these lengths to prompts of those, in an order that keeps none together."""
    draw = torch.Generator().manual_seed(12)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, most, (length,), generator=draw).tolist())

    made = []
    for prompt, lengths in groups:
        begins = ids(prompt)
        made += [TokenSample(begins + ids(length), (0,) * prompt + (1,) * length) for length in lengths]
    return collate(made[::2] + made[1::2], pad_id=0)


GROUPS = answers((20, (3, 9, 1, 14)), (11, (5, 2, 8)), (6, (30,)))


def seen_masks(model: Any) -> list[Tensor | None]:
    """Return the list that the masks of the following passes are put into."""
    masks: list[Tensor | None] = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    return masks


def test_the_answers_to_a_prompt_follow_it_in_one_row():
    one, other, third = (5, 6, 7, 8, 1, 2), (5, 6, 7, 8, 3), (9, 9)
    batch = collate([TokenSample(ids, (0,) + (1,) * (len(ids) - 1)) for ids in (one, third, other)], pad_id=0)
    layout = batches.shared_rows(batch, prefixes_of=32)
    assert layout.mask_R1LL is not None
    # Two rows of 7, the longest block: 9 9 would not fit after it. Padding reads the first token.
    assert layout.token_ids_RL.tolist() == [[5, 6, 7, 8, 1, 2, 3], [9, 9, 5, 5, 5, 5, 5]]
    assert layout.position_ids_RL.tolist() == [[0, 1, 2, 3, 4, 5, 4], [0, 1, 0, 0, 0, 0, 0]]
    attended = layout.mask_R1LL[0, 0].int().tolist()
    assert attended[3:] == [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 1]]
    assert layout.mask_R1LL[1, 0, 2].int().tolist() == [0, 0, 1, 0, 0, 0, 0]
    restored = layout.restore(layout.token_ids_RL.unsqueeze(-1), batch)
    assert torch.equal(real(restored, batch), real(batch.token_ids_BL.unsqueeze(-1), batch))


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["llama", "olmo2", "qwen3"])
@pytest.mark.parametrize("batch", [GROUPS, answers((40, (1, 1))), answers((30, (4,) * 8), (30, (5,) * 8))])
def test_hidden_states_of_shared_beginnings_are_those_of_a_row_each(model_type, batch, monkeypatch):
    model = small(model_type)
    masks = seen_masks(model)
    shared = real(hidden_states(model, batch), batch)
    own_rows(monkeypatch)
    alone = real(hidden_states(model, batch), batch)
    assert [mask is not None for mask in masks] == [True, False]
    assert_near([shared], [alone], SHAPE)


def test_gradients_of_shared_beginnings_are_those_of_a_row_each(monkeypatch):
    def gradients() -> list[Tensor]:
        model = small("llama")
        masks = seen_masks(model)
        logprobs_BL, _ = token_logprobs(model, GROUPS, temperature=1.0, with_entropy=False)
        weights_BL = torch.linspace(-1, 2, logprobs_BL.numel()).reshape_as(logprobs_BL)
        (logprobs_BL * weights_BL).sum().backward()
        used.append(masks[0] is not None)
        return [parameter.grad for parameter in model.parameters()]

    used: list[bool] = []
    shared = gradients()
    own_rows(monkeypatch)
    for one, other in zip(shared, gradients(), strict=True):
        assert_near([one], [other], SHAPE)
    assert used == [True, False]


@torch.no_grad()
def test_beginnings_are_not_shared_where_a_mask_would_replace_windows_or_another_kernel_runs():
    for model in (small("gemma2"), small("llama", attention="eager")):
        masks = seen_masks(model)
        hidden_states(model, GROUPS)
        assert masks == [None]


@pytest.mark.parametrize(
    ("model_type", "further", "width"),
    [
        ("mistral", {"sliding_window": None}, 32),
        ("mistral", {"sliding_window": 8}, 0),
        # These architectures use the window whatever else their configuration says.
        ("mistral", {"sliding_window": 8, "use_sliding_window": False}, 0),
        ("phi3", {"sliding_window": 8, "layer_types": ["full_attention"] * 2}, 0),
        ("mixtral", {"sliding_window": 8, "layer_types": ["full_attention"] * 2}, 0),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8}, 32),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, 0),
        ("gemma2", {}, 0),
    ],
)
def test_beginnings_are_shared_only_where_surely_no_layer_has_a_window(model_type, further, width):
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, hidden_size=32, num_hidden_layers=2, **further)
    config._attn_implementation = "sdpa"
    assert batches.prefix_width(config) == width


def test_equal_answers_are_computed_once():
    one, other = (5, 6, 7, 8, 1, 2), (5, 6, 7, 8, 3)
    batch = collate([TokenSample(ids, (0,) + (1,) * (len(ids) - 1)) for ids in (one, other, one, one)], pad_id=0)
    layout = batches.shared_rows(batch, prefixes_of=32)
    assert sorted(layout.token_ids_RL.flatten().tolist()) == sorted([5, 6, 7, 8, 1, 2, 3])
    restored = layout.restore(layout.token_ids_RL.unsqueeze(-1), batch)
    assert torch.equal(real(restored, batch), real(batch.token_ids_BL.unsqueeze(-1), batch))


@torch.no_grad()
def test_the_order_of_samples_does_not_change_a_bit_even_with_equal_ones():
    model = small("llama")
    draw = torch.Generator().manual_seed(7)
    texts = [tuple(torch.randint(1, 97, (length,), generator=draw).tolist()) for length in (3, 9, 5)]
    prompt = tuple(range(1, 16))
    sequences = [prompt + texts[int(torch.randint(3, (1,), generator=draw))] for _ in range(8)]

    def hidden(order: list[int]) -> list[Tensor]:
        samples = [TokenSample(sequences[i], (0,) + (1,) * (len(sequences[i]) - 1)) for i in order]
        # As the trainer does: micro-batches are sorted by content.
        sorted_ = sorted(range(len(samples)), key=lambda k: (-len(samples[k].token_ids), samples[k].token_ids))
        batch = collate([samples[k] for k in sorted_], pad_id=0)
        states = hidden_states(model, batch)
        found = {order[k]: states[row, : len(samples[k].token_ids)] for row, k in enumerate(sorted_)}
        return [found[i] for i in range(8)]

    for one, other in zip(hidden(list(range(8))), hidden([5, 2, 7, 0, 3, 6, 1, 4]), strict=True):
        assert torch.equal(one, other)


def test_a_long_prompt_is_computed_once_where_that_is_cheaper():
    """Blocks have no limit of their own: it is the cost of attention that decides."""
    answers_of = answers((1000, (20,) * 8), most=50_000)
    layout = batches.shared_rows(answers_of, prefixes_of=576)
    assert layout.token_ids_RL.numel() == 1000 + 8 * 20
    narrow = batches.shared_rows(answers((60, (400,) * 8), most=50_000), prefixes_of=32)
    assert narrow is None  # attention to 3260 positions would cost more than the prompt


def test_a_mask_that_would_be_too_large_is_not_made(monkeypatch):
    monkeypatch.setattr(batches, "LARGEST_MASK", 100)
    assert batches.shared_rows(answers((20, (3, 4, 5))), prefixes_of=32) is None


def test_a_beginning_that_saves_little_is_not_worth_a_mask():
    alike = answers((3, (30, 30, 30, 30)))
    assert batches.shared_rows(alike, prefixes_of=32) is None
