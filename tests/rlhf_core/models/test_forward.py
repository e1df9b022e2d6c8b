"""Log-probabilities, values, scores and the balance of experts against slow float64 loops over one unpadded sample at a time."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.config.models import InitModel
from rlhf_core.errors import ConfigError
from rlhf_core.models import forward
from rlhf_core.models.batches import TokenBatch, collate, unpack_rows
from rlhf_core.models.forward import (
    Routing,
    ValueModel,
    check_head,
    check_routers,
    logprobs_and_entropy,
    sequence_scores,
    token_logprobs,
    token_values,
    warn_of_positions,
)
from rlhf_core.types import TokenSample
from tests.rlhf_core.models.conftest import assert_near, sharpened
from tests.support.tolerances import of_model

SHAPE = InitModel(vocab_size=300, hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=96, max_positions=64)
"""No smaller than the models below."""


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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("pack_to", [None, 16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_equal_a_float64_log_softmax(attention, pack_to, temperature):
    model = llama(attention)
    batch = collate(samples(), pad_id=0, pack_to=pack_to)
    logprobs_BL, entropy_BL = token_logprobs(model, batch, temperature=temperature, with_entropy=True)
    assert entropy_BL is not None and logprobs_BL.dtype == entropy_BL.dtype == torch.float32
    wanted = [naive(model, sample, temperature) for sample in samples()]
    assert_near(unpack_rows(logprobs_BL, batch), [logprobs for logprobs, _ in wanted], SHAPE)
    assert_near(unpack_rows(entropy_BL, batch), [entropy for _, entropy in wanted], SHAPE)


def test_packed_rows_can_be_laid_end_to_end_as_flash_attention_needs(monkeypatch):
    model = llama("sdpa")
    packed = collate(samples(), pad_id=0, pack_to=16)
    rows_BL, _ = token_logprobs(model, packed, temperature=1.0, with_entropy=False)
    flat = replace(forward.model_rules(model), is_flash=True)
    monkeypatch.setattr(forward, "model_rules", lambda model: flat)
    flat_BL, _ = token_logprobs(model, packed, temperature=1.0, with_entropy=False)
    assert_near([flat_BL], [rows_BL.detach()], SHAPE)


def gradients(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    model.zero_grad()
    logprobs_BL, entropy_BL = token_logprobs(model, batch, temperature=0.9, with_entropy=True, entropy_gradient=True)
    (logprobs_BL.sum() + 0.1 * entropy_BL.sum()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_do_not_depend_on_chunks_or_packing(monkeypatch):
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


def test_the_head_never_sees_more_positions_than_a_chunk(monkeypatch):
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
def test_the_head_is_called_once_and_gives_one_tensor_whatever_its_share(tokens, monkeypatch):
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


def test_entropy_is_a_measurement_unless_it_is_asked_for_its_gradient():
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


def test_a_batch_without_trained_tokens_gives_zeros_that_can_be_differentiated():
    model = llama("sdpa")
    logprobs_BL, _ = token_logprobs(
        model, collate([TokenSample((3, 4), (0, 0))], pad_id=0), temperature=1.0, with_entropy=False
    )
    logprobs_BL.sum().backward()
    assert logprobs_BL.tolist() == [[0.0, 0.0]]


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(ConfigError, match="temperature = 0"):
        token_logprobs(llama("sdpa"), collate(samples(), pad_id=0), temperature=0.0, with_entropy=False)


@pytest.mark.parametrize("pack_to", [None, 16])
def test_the_value_of_a_token_is_read_before_it(pack_to):
    backbone = llama("sdpa").model
    model = ValueModel(backbone, torch.linspace(-1, 1, 64).unsqueeze(0))
    batch = collate(samples(), pad_id=0, pack_to=pack_to)
    got = unpack_rows(token_values(model, batch), batch)
    for sample, got_L in zip(samples(), got, strict=True):
        with torch.no_grad():
            after_L = model(torch.tensor([sample.token_ids]))[0]
        # values[t] = V after token t - 1; nothing before the first token.
        before_L = torch.cat([torch.zeros(1), after_L[:-1]]) * torch.tensor(sample.loss_mask)
        assert_near([got_L], [before_L], SHAPE)


@pytest.mark.parametrize("pack_to", [None, 16])
def test_a_sequence_is_scored_at_its_last_token(pack_to):
    model = llama("sdpa", heads="score")
    batch = collate(samples(), pad_id=0, pack_to=pack_to)
    scores_N = sequence_scores(model, batch)
    with torch.no_grad():
        wanted = torch.cat([model(input_ids=torch.tensor([s.token_ids])).logits[0] for s in samples()])
    assert_near([scores_N], [wanted], SHAPE)
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
def test_families_that_number_or_scale_differently_agree_with_their_own_forward_pass(family, options):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    model = sharpened(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options)))
    check_head(model)
    batch = collate(samples(), pad_id=0, pack_to=16)
    logprobs_BL, _ = token_logprobs(model, batch, temperature=1.0, with_entropy=False)
    assert_near(unpack_rows(logprobs_BL, batch), [naive(model, s, 1.0)[0] for s in samples()], SHAPE)


def test_a_family_with_an_unknown_rule_after_its_head_is_refused():
    model = llama("sdpa")
    model.config.logit_scale = 0.5  # Llama's own forward pass does not scale
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        check_head(model)


def test_rotary_positions_beyond_those_of_the_model_are_computed_with_one_warning(caplog):
    warn_of_positions.cache_clear()
    model = llama("sdpa")  # of 64 positions
    for length, warnings in ((64, 0), (65, 1), (66, 1)):
        row = TokenSample(tuple(range(5, 5 + length)), (0,) + (1,) * (length - 1))
        token_logprobs(model, collate([row], pad_id=0), temperature=1.0, with_entropy=False)
        assert len([one for one in caplog.records if "than the 64 positions" in one.getMessage()]) == warnings


def test_a_scaling_that_the_configuration_alone_has_gives_no_warning(caplog):
    warn_of_positions.cache_clear()
    model = llama("sdpa")
    model.config.rope_parameters |= {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    for length, warnings in ((65, 0), (128, 0), (129, 1)):
        row = TokenSample(tuple(5 + at % 90 for at in range(length)), (0,) + (1,) * (length - 1))
        token_logprobs(model, collate([row], pad_id=0), temperature=1.0, with_entropy=False)
        assert len([one for one in caplog.records if "than the 128 positions" in one.getMessage()]) == warnings


def test_a_family_without_position_ids_cannot_be_packed():
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=64, n_layer=1, n_head=4)).eval()
    batch = collate(samples(), pad_id=0)
    logprobs_BL, _ = token_logprobs(model, batch, temperature=1.0, with_entropy=False)
    assert_near(unpack_rows(logprobs_BL, batch), [naive(model, s, 1.0)[0] for s in samples()], SHAPE)
    with pytest.raises(ConfigError, match="without packing"):
        token_logprobs(model, collate(samples(), pad_id=0, pack_to=16), temperature=1.0, with_entropy=False)


def test_the_first_call_with_and_without_gradient_gives_the_same_bits():
    model = llama("sdpa")
    batch = collate(samples(), pad_id=0)
    with torch.no_grad():
        frozen_BL, _ = token_logprobs(model, batch, temperature=1.0, with_entropy=False)
    live_BL, _ = token_logprobs(model, batch, temperature=1.0, with_entropy=True)
    assert torch.equal(frozen_BL, live_BL.detach())


# ---------------------------------------------------------------- drawn tokens


EPSILON = torch.finfo(torch.float32).eps


def logits_and_targets(tokens: int, vocabulary: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    logits_CV = 3 * torch.randn(tokens, vocabulary, generator=draw, dtype=dtype)
    return logits_CV.requires_grad_(), torch.randint(vocabulary, (tokens,), generator=draw)


def plain(logits_CV: Tensor, targets_C: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    every_CV = torch.log_softmax(logits_CV / temperature, dim=-1)
    return every_CV.gather(1, targets_C[:, None])[:, 0], -(every_CV.exp() * every_CV).sum(-1)


def assert_rounded(made: Tensor, exact: Tensor, logits_CV: Tensor) -> None:
    """Values and gradients are the exact ones up to the rounding of float32.

    The normalizer is at most about log 152,000 + 9 / 2 = 16: a sum of positive terms, in blocks, within some units of
    16 eps.
    """
    torch.testing.assert_close(made.double(), exact, rtol=0, atol=64 * 16 * EPSILON)
    (gradient,) = torch.autograd.grad(made.sum(), logits_CV)
    (expected,) = torch.autograd.grad(exact.sum(), logits_CV)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=64 * 16 * EPSILON)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_gradients_are_those_of_finite_differences_and_of_the_plain_formulas(temperature, entropy_gradient):
    logits_CV, targets_C = logits_and_targets(5, 11, dtype=torch.float64)
    both = partial(
        logprobs_and_entropy,
        targets_C=targets_C,
        temperature=temperature,
        with_entropy=True,
        entropy_gradient=entropy_gradient,
    )
    taken = 2 if entropy_gradient else 1
    torch.autograd.gradcheck(lambda x: both(x)[:, :taken], logits_CV)

    weights_C2 = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logprobs_C, entropy_C = plain(logits_CV, targets_C, temperature=temperature)
    wanted = torch.stack([logprobs_C, entropy_C if entropy_gradient else entropy_C.detach()], dim=1)
    torch.testing.assert_close(both(logits_CV), wanted, rtol=1e-13, atol=1e-13)
    (expected,) = torch.autograd.grad((wanted * weights_C2).sum(), logits_CV)
    (gradient,) = torch.autograd.grad((both(logits_CV) * weights_C2).sum(), logits_CV)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def test_autocast_rounds_neither_entropies_nor_gradients():
    logits_CV, targets_C = logits_and_targets(6, 2000, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = logprobs_and_entropy(logits_CV, targets_C, temperature=0.9, with_entropy=True, entropy_gradient=True)
    exact = torch.stack(plain(logits_CV.double(), targets_C, temperature=0.9), dim=1)
    assert_rounded(made, exact, logits_CV)


@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_tokens_that_cannot_be_drawn_leave_gradients_finite(entropy_gradient):
    logits_CV, targets_C = logits_and_targets(4, 9, dtype=torch.float32)
    banned_V = torch.zeros(9).index_fill(0, torch.tensor([0]), -torch.inf)
    made = logprobs_and_entropy(
        logits_CV + banned_V,
        targets_C.clamp(min=1),
        temperature=1.0,
        with_entropy=False,
        entropy_gradient=entropy_gradient,
    )
    (gradient,) = torch.autograd.grad(made.sum(), logits_CV)
    assert gradient.isfinite().all() and gradient[:, 0].eq(0).all()


def test_no_token_is_no_result():
    logits_CV = torch.zeros(0, 7, requires_grad=True)
    made = logprobs_and_entropy(
        logits_CV, torch.zeros(0, dtype=torch.long), temperature=1.0, with_entropy=True, entropy_gradient=True
    )
    made.sum().backward()
    assert made.shape == (0, 2) and logits_CV.grad is not None


def test_a_large_vocabulary_in_float32_loses_no_more_than_its_rounding():
    logits_CV, targets_C = logits_and_targets(6, 152_000, dtype=torch.float32)
    made = logprobs_and_entropy(logits_CV, targets_C, temperature=1.0, with_entropy=True, entropy_gradient=True)
    exact = torch.stack(plain(logits_CV.double(), targets_C, temperature=1.0), dim=1)
    assert_rounded(made, exact, logits_CV)


def test_one_matrix_of_the_vocabulary_is_kept_for_the_backward_pass():
    logits_CV, targets_C = logits_and_targets(4, 100, dtype=torch.float32)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs_and_entropy(logits_CV * 1.0, targets_C, temperature=1.0, with_entropy=True, entropy_gradient=True)
    assert sorted(kept.values())[-2:] == [4, 400]


def test_a_second_backward_pass_has_the_same_gradient():
    logits_CV, targets_C = logits_and_targets(4, 9, dtype=torch.float32)
    loss = logprobs_and_entropy(logits_CV, targets_C, temperature=2.0, with_entropy=True, entropy_gradient=True).sum()
    first, second = (torch.autograd.grad(loss, logits_CV, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


# ---------------------------------------------------------------- balance of experts, for whole models in tests/rlhf_core/training/objectives/test_router.py


EXPERTS, CHOSEN = 4, 2


def rows_of(*lengths: int, pack_to: int | None = None) -> TokenBatch:
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


def naive_balance(logits_SE: Tensor) -> float:
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
def test_it_is_the_sum_over_samples_of_the_mean_over_layers_without_padding(pack_to):
    of = rows_of(5, 2, 1, 7, pack_to=pack_to)
    layers = [drawn(5, 2, 1, 7, seed=seed) for seed in (1, 2)]
    expected = sum(naive_balance(sample) for layer in layers for sample in layer) / 2
    found = total([laid_out(layer, of) for layer in layers], of)
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_perfect_balance_counts_the_experts_of_a_token_and_none_at_all_counts_the_experts():
    turns = torch.tensor([[9.0, 9, 0, 0], [0, 0, 9, 9]]).repeat(3, 1)
    assert float(total([turns], rows_of(6))) == pytest.approx(CHOSEN)
    always = torch.tensor([[50.0, 50, 0, 0]]).repeat(6, 1)
    assert float(total([always], rows_of(6))) == pytest.approx(EXPERTS)


def test_it_pushes_a_token_away_from_the_experts_that_have_too_many():
    logits = torch.tensor([[2.0, 1.0, 0.0, 0.0]]).repeat(4, 1).requires_grad_()
    (grad_TE,) = torch.autograd.grad(total([logits], rows_of(4)), logits)
    assert bool((grad_TE[:, :CHOSEN] > 0).all()) and bool((grad_TE[:, CHOSEN:] < 0).all())


def backbone(**config: Any) -> nn.Module:
    module = nn.Module()
    settings = SimpleNamespace(**config)
    module.config = cast(Any, SimpleNamespace(get_text_config=lambda: settings))
    return module


def test_a_model_without_routers_is_refused():
    check_routers(backbone(router_aux_loss_coef=0.01, num_experts_per_tok=CHOSEN))
    with pytest.raises(ConfigError, match=r"router_aux_coef .* Module has no experts with a load-balancing loss"):
        check_routers(backbone())
