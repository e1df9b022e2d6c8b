"""The balance of a mixture of experts: a sum over samples like every other loss, and one that reaches the routers."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.training import distillation_trainer
from rlhf_core.training.batching import step_counts
from rlhf_core.training.distillation_trainer import DistillationTrainer
from rlhf_core.training.engines.base import open_engine
from rlhf_core.training.objectives.base import BradleyTerryObjective, SftObjective
from rlhf_core.training.objectives.distillation import DistillationObjective, SameVocabulary
from rlhf_core.training.trainer import LocalTrainer
from rlhf_core.types import TokenSample
from tests.rlhf_core.training.conftest import TINY
from tests.support.tolerances import near, of_model

CONFIG = TrainerConfig(engine="torch", micro_batch=4, router_aux_coef=0.5)
SFT = SftObjective(pack_to=None)


@pytest.fixture(scope="module")
def mixture(policy_folder: Path, tmp_path_factory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("mixture")
    shutil.copytree(policy_folder, folder, dirs_exist_ok=True)
    shape = MixtralConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        sliding_window=None,
    )
    torch.manual_seed(3)
    model = MixtralForCausalLM(shape)
    for name, weight in model.named_parameters():
        if name.endswith("gate.weight"):
            weight.data *= 20  # else the router hardly prefers any expert
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    return ModelSpec(str(folder), "lm", None, 3)


def trained(
    spec: ModelSpec, samples: list[Any], objective: Any = SFT, **changes: Any
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    config, optimizer = CONFIG.model_copy(update=changes), OptimizerConfig()
    engine = open_engine(spec, optimizer, config)
    metrics = LocalTrainer(spec, optimizer, config, engine=engine).forward_backward(samples, objective)
    return metrics, {name: p.grad for name, p in engine.module.named_parameters() if p.grad is not None}


def assert_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    assert one[0] == near(other[0], of_model(TINY))
    for name, grad in one[1].items():
        assert torch.linalg.norm(grad - other[1][name]) <= of_model(TINY) * torch.linalg.norm(grad) + 1e-9, name


def test_loss_and_gradient_are_those_of_transformers_sequence_by_sequence_and_layer_by_layer(mixture, token_samples):
    model = AutoModelForCausalLM.from_pretrained(mixture.path)
    expected = torch.zeros(())
    for sample in token_samples:
        logits = model(input_ids=torch.tensor([sample.token_ids]), output_router_logits=True).router_logits
        layers = [load_balancing_loss_func((layer,), 4, 2) for layer in logits]
        expected = expected + sum(layers) / len(layers) / len(token_samples)
    gate = "model.layers.1.mlp.gate.weight"
    (grad,) = torch.autograd.grad(0.5 * expected, model.get_parameter(gate))
    metrics, grads = trained(mixture, token_samples)
    _, without = trained(mixture, token_samples, router_aux_coef=0.0)
    assert metrics["router_aux"] == near(float(expected.detach()), of_model(TINY))
    assert float(expected.detach()) > 2.05  # 2 is perfect balance
    torch.testing.assert_close(grads[gate] - without[gate], grad, rtol=1e-4, atol=1e-6)


def test_it_is_added_to_the_loss_and_reaches_the_routers(mixture, token_samples):
    plain, without = trained(mixture, token_samples, router_aux_coef=0.0)
    metrics, grads = trained(mixture, token_samples)
    assert "router_aux" not in plain
    assert metrics["loss"] == near(plain["loss"] + 0.5 * metrics["router_aux"], of_model(TINY))
    routers = [name for name in grads if name.endswith("gate.weight")]
    assert len(routers) == 2
    assert all(torch.linalg.norm(grads[name] - without[name]) > 1e-3 for name in routers)
    assert torch.equal(grads["lm_head.weight"], without["lm_head.weight"])


def test_neither_micro_batches_nor_padding_packing_and_checkpointing_change_it(mixture, token_samples):
    whole = trained(mixture, token_samples, micro_batch=10)
    assert_same(whole, trained(mixture, token_samples, micro_batch=1))
    assert_same(whole, trained(mixture, token_samples, objective=SftObjective(pack_to=32), micro_batch=2))
    assert_same(whole, trained(mixture, token_samples, micro_batch=3, gradient_checkpointing=True))


def test_the_shards_of_two_ranks_are_the_whole(mixture, token_samples):
    engine = open_engine(mixture, OptimizerConfig(), CONFIG)
    trainer = LocalTrainer(mixture, OptimizerConfig(), CONFIG, engine=engine)
    counts = step_counts(SFT, token_samples)
    parts = [trainer.forward_backward(token_samples[rank::2], SFT, counts) for rank in range(2)]
    whole, _ = trained(mixture, token_samples)
    assert sum(part["router_aux"] for part in parts) == near(whole["router_aux"], of_model(TINY))


def test_both_rows_of_a_pair_count(mixture, reward_pairs, preference_samples):
    assert step_counts(BradleyTerryObjective(0.0), reward_pairs) == {"pairs": 10.0, "router/rows": 20.0}
    spec = ModelSpec(mixture.path, "score", None, 3)
    metrics, _ = trained(spec, reward_pairs, BradleyTerryObjective(0.0))
    # The chosen and the rejected rows are the same ten sequences.
    rows = [TokenSample(pair.chosen_ids, (0, *(1,) * (len(pair.chosen_ids) - 1))) for pair in reward_pairs]
    assert metrics["router_aux"] == near(trained(mixture, rows)[0]["router_aux"], of_model(TINY))


def test_a_distilled_step_in_pieces_has_the_balance_of_the_step_in_one(
    mixture, policy_spec, token_samples, monkeypatch
):
    objective = DistillationObjective(kind="forward", jsd_beta=0.5, temperature=1.0, kl_weight=0.5)
    teacher = LocalTrainer(policy_spec, None, CONFIG)
    made = []
    for elements in (2**25, 20 * 8):  # all at once, or 20 tokens: seven pieces
        monkeypatch.setattr(distillation_trainer, "PIECE_ELEMENTS", elements)
        engine = open_engine(mixture, OptimizerConfig(), CONFIG)
        student = LocalTrainer(mixture, OptimizerConfig(), CONFIG, engine=engine)
        taught = DistillationTrainer(student, SameVocabulary((teacher,), 8, 1.0, 320))
        metrics = taught.forward_backward(token_samples, objective)
        grads = {name: p.grad for name, p in engine.module.named_parameters() if p.grad is not None}
        metrics["router_aux/eval"] = taught.loss(token_samples, objective)["router_aux"]
        made.append((metrics, grads))
    sft = trained(mixture, token_samples)[0]["router_aux"]
    assert made[0][0]["router_aux"] == pytest.approx(sft, rel=1e-6)  # the same rows, whatever is learnt on them
    assert_same(*made)


def test_a_dense_model_is_refused_and_a_frozen_one_is_not_asked(policy_spec):
    with pytest.raises(
        ConfigError, match=r"router_aux_coef .* LlamaForCausalLM has no experts with a load-balancing loss"
    ):
        open_engine(policy_spec, OptimizerConfig(), CONFIG)
    open_engine(policy_spec, None, CONFIG)
