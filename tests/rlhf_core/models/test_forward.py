"""Log-probabilities, values and scores against slow float64 loops over one unpadded sample at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.config.engines import InitModel
from rlhf_core.errors import ConfigError
from rlhf_core.models import forward
from rlhf_core.models.batches import collate, unpack
from rlhf_core.models.forward import ValueModel, check_head, sequence_scores, token_logprobs, token_values
from rlhf_core.types import TokenSample
from tests.support.tolerances import of_model

SHAPE = InitModel(vocab_size=300, hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=96, max_positions=64)
"""No smaller than the models below."""


def sharpened(model: Any) -> Any:
    """Scale the weights so that the distributions are far from uniform and attention matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(6.0)
    return model.eval()


def llama(attention: str, *, heads: str = "lm", sharp: bool = True) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(3)
    shape = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        num_labels=1,
        attn_implementation=attention,
    )
    model = {"lm": LlamaForCausalLM, "score": LlamaForSequenceClassification}[heads](shape)
    return sharpened(model) if sharp else model.eval()


def samples(count: int = 6) -> list[TokenSample]:
    generator = torch.Generator().manual_seed(11)
    lengths = [9, 4, 7, 1, 12, 3, 8, 5][:count]
    drawn = []
    for length in lengths:
        ids = tuple(torch.randint(1, 97, (length,), generator=generator).tolist())
        mask = (0, *torch.randint(0, 2, (length - 1,), generator=generator).tolist())
        drawn.append(TokenSample(ids, mask))
    return drawn


@torch.no_grad()
def naive(model: Any, sample: TokenSample, temperature: float) -> tuple[Tensor, Tensor]:
    """The model's own logits, one sample, log-softmax and entropy in float64."""
    logits_LV = model(input_ids=torch.tensor([sample.token_ids])).logits[0].double() / temperature
    all_logprobs_LV = logits_LV.log_softmax(-1)
    logprobs, entropy = torch.zeros(len(sample.token_ids)), torch.zeros(len(sample.token_ids))
    for t in range(1, len(sample.token_ids)):
        if sample.loss_mask[t]:
            logprobs[t] = all_logprobs_LV[t - 1, sample.token_ids[t]]
            entropy[t] = -(all_logprobs_LV[t - 1].exp() * all_logprobs_LV[t - 1]).sum()
    return logprobs, entropy


def assert_close(got: list[Tensor], want: list[Tensor]) -> None:
    """Compare to the rounding of float32; a neighbour that is seen, or one position off, changes these by 0.1 and more."""
    atol = of_model(SHAPE) * max(1.0, *(float(want_L.detach().abs().max()) for want_L in want))
    for got_L, want_L in zip(got, want, strict=True):
        torch.testing.assert_close(got_L.detach(), want_L.detach(), rtol=0, atol=atol)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("pack_to", [None, 16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_equal_a_float64_log_softmax(
    attention: str, pack_to: int | None, temperature: float
) -> None:
    model = llama(attention)
    batch = collate(samples(), pad_id=0, pack_to=pack_to)
    logprobs_BL, entropy_BL = token_logprobs(model, batch, temperature=temperature, with_entropy=True)
    assert entropy_BL is not None and logprobs_BL.dtype == entropy_BL.dtype == torch.float32
    wanted = [naive(model, sample, temperature) for sample in samples()]
    assert_close(unpack(logprobs_BL, batch), [logprobs for logprobs, _ in wanted])
    assert_close(unpack(entropy_BL, batch), [entropy for _, entropy in wanted])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("sharp", [False, True])
def test_packed_logprobs_equal_unpacked_ones(attention: str, sharp: bool) -> None:
    model = llama(attention, sharp=sharp)
    unpacked, packed = collate(samples(), pad_id=0), collate(samples(), pad_id=0, pack_to=16)
    assert packed.packed and packed.token_ids_BL.shape[0] == 3
    one_BL, _ = token_logprobs(model, unpacked, temperature=1.0, with_entropy=False)
    two_BL, _ = token_logprobs(model, packed, temperature=1.0, with_entropy=False)
    assert_close(unpack(two_BL, packed), [x.detach() for x in unpack(one_BL, unpacked)])


def test_packed_rows_can_be_laid_end_to_end_as_flash_attention_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama("sdpa")
    packed = collate(samples(), pad_id=0, pack_to=16)
    rows_BL, _ = token_logprobs(model, packed, temperature=1.0, with_entropy=False)
    monkeypatch.setattr(forward, "_is_flash", lambda backbone: True)
    flat_BL, _ = token_logprobs(model, packed, temperature=1.0, with_entropy=False)
    assert_close([flat_BL], [rows_BL.detach()])


def test_other_samples_in_the_row_do_not_change_a_sample() -> None:
    model = llama("sdpa")
    first, *rest = samples()
    other = [TokenSample(tuple(96 - i for i in s.token_ids), s.loss_mask) for s in rest]
    one, two = (collate([*neighbours, first], pad_id=0, pack_to=64) for neighbours in (rest, other))
    one_BL, _ = token_logprobs(model, one, temperature=1.0, with_entropy=False)
    two_BL, _ = token_logprobs(model, two, temperature=1.0, with_entropy=False)
    assert torch.equal(unpack(one_BL, one)[-1], unpack(two_BL, two)[-1])
    assert unpack(one_BL, one)[-1].abs().sum() > 1.0


def test_padding_does_not_change_logprobs() -> None:
    model = llama("sdpa")
    short = samples()[2]
    alone = collate([short], pad_id=0)
    padded = collate([short, TokenSample(tuple(range(1, 41)), (0,) * 40)], pad_id=5)
    alone_BL, _ = token_logprobs(model, alone, temperature=1.0, with_entropy=False)
    padded_BL, _ = token_logprobs(model, padded, temperature=1.0, with_entropy=False)
    assert_close(unpack(padded_BL, padded)[:1], [x.detach() for x in unpack(alone_BL, alone)])


def gradients(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    model.zero_grad()
    logprobs_BL, entropy_BL = token_logprobs(model, batch, temperature=0.9, with_entropy=True, entropy_gradient=True)
    assert entropy_BL is not None
    (logprobs_BL.sum() + 0.1 * entropy_BL.sum()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_do_not_depend_on_chunks_or_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama("sdpa")
    whole = gradients(model, collate(samples(), pad_id=0))
    packed = gradients(model, collate(samples(), pad_id=0, pack_to=16))
    monkeypatch.setattr(forward, "LOGPROB_ELEMENTS", 97 * 4)
    chunked = gradients(model, collate(samples(), pad_id=0))
    assert len(whole) == sum(1 for _ in model.named_parameters())
    for name, gradient in whole.items():
        scale = gradient.abs().max()
        assert (packed[name] - gradient).abs().max() <= of_model(SHAPE) * scale, name
        assert (chunked[name] - gradient).abs().max() <= of_model(SHAPE) * scale, name


def test_the_head_never_sees_more_positions_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama("sdpa")
    seen: list[int] = []
    plain = model.lm_head.forward

    def watched(hidden_CH: Tensor) -> Tensor:
        logits_CV: Tensor = plain(hidden_CH)
        seen.append(logits_CV.numel())
        return logits_CV

    monkeypatch.setattr(model.lm_head, "forward", watched)
    monkeypatch.setattr(forward, "LOGPROB_ELEMENTS", 97 * 4)
    batch = collate(samples(), pad_id=0)
    masked = int(batch.loss_mask_BL.sum())
    with torch.no_grad():
        token_logprobs(model, batch, temperature=1.0, with_entropy=False)
    assert max(seen) == 97 * 4
    assert sum(seen) == 97 * masked


@pytest.mark.parametrize("tokens", [2, 5, 30])
def test_the_head_is_called_once_and_gives_one_tensor_whatever_its_share(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ZeRO 3 hooks its collective calls to: the calls of a module, and the tensors that gradients come in by."""
    model = llama("sdpa")
    calls: list[Any] = []
    model.lm_head.register_forward_hook(lambda module, args, output: calls.append(output))
    model.lm_head.register_full_backward_hook(lambda module, inward, outward: calls.append("backward"))
    monkeypatch.setattr(forward, "LOGPROB_ELEMENTS", 97 * 4)
    batch = collate([TokenSample(tuple(range(1, tokens + 1)), (0, *(1,) * (tokens - 1)))], pad_id=0)
    logprobs_BL, _ = token_logprobs(model, batch, temperature=1.0, with_entropy=tokens > 4)
    logprobs_BL.sum().backward()
    assert [type(call) for call in calls] == [Tensor, str]
    assert "forward" not in vars(model.lm_head)


def test_entropy_is_a_measurement_unless_it_is_asked_for_its_gradient() -> None:
    model = llama("sdpa")
    batch = collate(samples(), pad_id=0)
    (_, measured_BL), (_, live_BL) = (
        token_logprobs(model, batch, temperature=1.0, with_entropy=True, entropy_gradient=asked)
        for asked in (False, True)
    )
    assert measured_BL is not None and live_BL is not None
    assert torch.equal(measured_BL, live_BL)
    measured, live = (
        torch.autograd.grad(entropy_BL.sum(), model.lm_head.weight)[0] for entropy_BL in (measured_BL, live_BL)
    )
    assert (float(measured.abs().max()), bool(live.abs().max() > 0.1)) == (0.0, True)


def test_a_batch_without_trained_tokens_gives_zeros_that_can_be_differentiated() -> None:
    model = llama("sdpa")
    logprobs_BL, _ = token_logprobs(
        model, collate([TokenSample((3, 4), (0, 0))], pad_id=0), temperature=1.0, with_entropy=False
    )
    logprobs_BL.sum().backward()
    assert logprobs_BL.tolist() == [[0.0, 0.0]]


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="temperature = 0"):
        token_logprobs(llama("sdpa"), collate(samples(), pad_id=0), temperature=0.0, with_entropy=False)


@pytest.mark.parametrize("pack_to", [None, 16])
def test_the_value_of_a_token_is_read_before_it(pack_to: int | None) -> None:
    backbone = llama("sdpa").model
    model = ValueModel(backbone, torch.linspace(-1, 1, 64).unsqueeze(0))
    batch = collate(samples(), pad_id=0, pack_to=pack_to)
    got = unpack(token_values(model, batch), batch)
    for sample, got_L in zip(samples(), got, strict=True):
        with torch.no_grad():
            after_L = model(torch.tensor([sample.token_ids]))[0]
        # values[t] = V after token t - 1; nothing before the first token.
        before_L = torch.cat([torch.zeros(1), after_L[:-1]]) * torch.tensor(sample.loss_mask)
        assert_close([got_L], [before_L])


@pytest.mark.parametrize("pack_to", [None, 16])
def test_a_sequence_is_scored_at_its_last_token(pack_to: int | None) -> None:
    model = llama("sdpa", heads="score")
    batch = collate(samples(), pad_id=0, pack_to=pack_to)
    scores_N = sequence_scores(model, batch)
    with torch.no_grad():
        wanted = torch.cat([model(input_ids=torch.tensor([s.token_ids])).logits[0] for s in samples()])
    assert_close([scores_N], [wanted])
    assert scores_N.std() > 0.1


SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "attn_implementation": "sdpa",
}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", SMALL),
        ("qwen3", SMALL),
        ("mistral", SMALL | {"sliding_window": None}),
        ("gemma2", SMALL | {"final_logit_softcapping": 3.0, "attn_implementation": "eager"}),
        ("cohere", SMALL | {"logit_scale": 0.25}),
        ("granite", SMALL | {"logits_scaling": 3.0}),
        ("gpt2", {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0}),
        ("gpt_neox", SMALL),
    ],
)
def test_families_that_number_or_scale_differently_agree_with_their_own_forward_pass(
    family: str, options: dict[str, Any]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    model = sharpened(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options)))
    check_head(model)
    batch = collate(samples(), pad_id=0, pack_to=16)
    logprobs_BL, _ = token_logprobs(model, batch, temperature=1.0, with_entropy=False)
    assert_close(unpack(logprobs_BL, batch), [naive(model, s, 1.0)[0] for s in samples()])


def test_a_family_with_an_unknown_rule_after_its_head_is_refused() -> None:
    model = llama("sdpa")
    model.config.logit_scale = 0.5  # Llama's own forward pass does not scale
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        check_head(model)


def test_a_family_without_position_ids_cannot_be_packed() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=64, n_layer=1, n_head=4)).eval()
    batch = collate(samples(), pad_id=0)
    logprobs_BL, _ = token_logprobs(model, batch, temperature=1.0, with_entropy=False)
    assert_close(unpack(logprobs_BL, batch), [naive(model, s, 1.0)[0] for s in samples()])
    with pytest.raises(ConfigError, match="without packing"):
        token_logprobs(model, collate(samples(), pad_id=0, pack_to=16), temperature=1.0, with_entropy=False)


def test_the_first_call_with_and_without_gradient_gives_the_same_bits() -> None:
    model = llama("sdpa")
    batch = collate(samples(), pad_id=0)
    with torch.no_grad():
        frozen_BL, _ = token_logprobs(model, batch, temperature=1.0, with_entropy=False)
    live_BL, _ = token_logprobs(model, batch, temperature=1.0, with_entropy=True)
    assert torch.equal(frozen_BL, live_BL.detach())
