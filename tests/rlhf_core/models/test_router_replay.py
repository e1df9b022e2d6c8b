"""Experts that are recorded and replayed: nothing changes by a router's own choice, and all follows another one, gradients too."""

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.runtime import HFSamplerConfig
from rlhf_core.errors import ConfigError
from rlhf_core.models.batches import TokenBatch, collate
from rlhf_core.models.forward import token_logprobs
from rlhf_core.models.router_replay import WEIGHTS, ExpertRecorder, check_router_replay, replay_experts
from rlhf_core.sampling.hf_sampler import HFSampler
from rlhf_core.sequences import ROUTED_EXPERTS
from rlhf_core.types import SamplingRequest, TokenSample
from tests.rlhf_core.models.conftest import loaded

EXPERTS = 5
OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "layer_types": ["full_attention"] * 2,
    "num_key_value_heads": 4,
}
"""Of all families; each reads some of them."""
# Of unequal first tokens, so that no rows are shared.
BATCH = collate(
    [TokenSample((9, 5, 7, 31, 8, 40), (0, 0, 1, 1, 1, 1)), TokenSample((6, 50, 3, 2, 9), (0, 1, 1, 1, 1))], pad_id=0
)


def opened(folder: Any, family: str, **options: Any) -> Any:
    return loaded(folder, attention="eager" if family == "gpt_oss" else "sdpa", **options)


def logprobs(model: Any, batch: TokenBatch = BATCH, experts: Tensor | None = None) -> Tensor:
    routed = batch if experts is None else replace(batch, fields={ROUTED_EXPERTS: experts})
    return token_logprobs(model, routed, temperature=1.0, with_entropy=False)[0]


def recorded(model: Any) -> Tensor:
    with closing(ExpertRecorder(model.model)) as recorder, torch.no_grad():
        logprobs(model)
        return torch.stack(recorder.take(2))


def others(experts: Tensor) -> Tensor:
    """The next expert in place of each, where there are experts."""
    return torch.where(experts < 0, experts, (experts + 1) % EXPERTS)


@torch.no_grad()
@pytest.mark.parametrize("family", sorted(WEIGHTS))
def test_the_own_choice_changes_nothing_and_another_one_does(family, made):
    model = opened(made(family, **OPTIONS), family)
    experts, plain = recorded(model), logprobs(model)
    assert experts.dtype == torch.int16 and experts.shape == (2, 6, 2 * 2)  # two layers, two experts in each
    dense = family in ("deepseek_v3", "glm4_moe")
    assert (experts[..., :2] == -1).all() == dense and (experts[..., 2:] >= 0).all()
    assert torch.equal(logprobs(model, experts=experts), plain)
    assert torch.equal(logprobs(model, experts=torch.full_like(experts, -1)), plain)
    moved = logprobs(model, experts=others(experts))
    assert (moved - plain).abs().max() > 1e-2
    assert torch.equal(logprobs(model), plain)  # and the next pass is the routers' own again


def test_weights_of_chosen_experts_are_those_of_the_formulas():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()  # softmax: the numbers themselves; sigmoid(log p) = p / (1 + p)
    chosen = torch.tensor([[1, 3]])
    plain, normed = SimpleNamespace(norm_topk_prob=False), SimpleNamespace(norm_topk_prob=True)
    for router in (plain, normed):
        router.routed_scaling_factor = 2.5
    third, tenth = 0.3 / 1.3, 0.1 / 1.1
    for family, router, expected in (
        ("qwen3_moe", plain, [0.3, 0.1]),
        ("qwen3_moe", normed, [0.75, 0.25]),
        ("mixtral", SimpleNamespace(), [0.75, 0.25]),
        ("gpt_oss", SimpleNamespace(), [0.75, 0.25]),
        ("deepseek_v3", plain, [2.5 * third, 2.5 * tenth]),
        ("deepseek_v3", normed, [2.5 * third / (third + tenth), 2.5 * tenth / (third + tenth)]),
    ):
        assert WEIGHTS[family](router, logits, chosen)[0].tolist() == pytest.approx(expected, abs=1e-6)


def gradients(model: Any, experts: Tensor | None) -> dict[str, Tensor]:
    model.zero_grad()
    logprobs(model, experts=experts).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_layers_that_are_computed_again_get_the_same_experts_and_routers_learn(made):
    folder = made("qwen3_moe", **OPTIONS)
    model = opened(folder, "qwen3_moe")
    experts = others(recorded(model))
    whole, own = gradients(model, experts), gradients(model, None)
    again = gradients(opened(folder, "qwen3_moe", checkpointing=True), experts)
    gate = "model.layers.0.mlp.gate.weight"
    assert whole[gate].abs().max() > 0
    assert (whole[gate] - own[gate]).norm() > 0.1 * own[gate].norm()
    assert all(torch.equal(again[name], gradient) for name, gradient in whole.items())


def test_models_that_cannot_replay_are_refused(made, tiny_llama):
    rule = r"ppo\.router_replay = True: a model of type llama has no experts.*; set it to false, or train one of deepseek_v3"
    with pytest.raises(ConfigError, match=rule):
        check_router_replay(tiny_llama, key="ppo.router_replay")
    check_router_replay(made("mixtral", **OPTIONS), key="ppo.router_replay")
    dense = loaded(made("qwen3_moe", **OPTIONS, mlp_only_layers=[0, 1])).model
    with pytest.raises(ConfigError, match="Qwen3MoeModel: none of its layers has experts"):
        replay_experts(dense, torch.zeros(1, 2, 4))
    with pytest.raises(ConfigError, match="the sampler recorded 6 experts of each token, and the model has 4"):
        replay_experts(loaded(made("olmoe", **OPTIONS)).model, torch.zeros(1, 2, 6))


def test_the_transformers_sampler_records_every_token_that_it_computes_where_it_is_asked_to(made):
    folder = made("qwen3_moe", **OPTIONS)
    requests = [SamplingRequest(tuple(range(10, 13 + at)), seed=at, routed_experts=at != 2) for at in range(4)]
    completions = HFSampler(folder, HFSamplerConfig()).generate(requests, SamplingConfig(max_tokens=5))
    model = loaded(folder)
    for request, one in zip(requests, completions, strict=True):
        tokens = request.prompt_ids + one.token_ids
        if not request.routed_experts:
            assert not one.routed_experts
            continue
        with closing(ExpertRecorder(model.model)) as recorder, torch.no_grad():
            model(torch.tensor([list(tokens)]))
            (own,) = recorder.take(1)
        found = np.asarray(one.routed_experts.data).reshape(len(tokens), 4)
        assert found[:-1].tolist() == own[:-1].tolist()
        assert found[-1].tolist() == [-1] * 4  # it was drawn and not read
