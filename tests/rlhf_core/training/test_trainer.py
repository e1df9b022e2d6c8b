"""A trainer on one rank: gradients, measurements, checkpoints, exports, averages of weights and skipped updates."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_core.algorithms.policy.clip import ClipLoss
from rlhf_core.algorithms.preference.dpo import HingeLoss
from rlhf_core.algorithms.token_math import CorrectionConfig
from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.config.models import LoraConfig
from rlhf_core.errors import ArtifactError, ConfigError, TrainingError
from rlhf_core.interfaces import ModelSpec, logprob_rows
from rlhf_core.models.loading import load_model
from rlhf_core.models.lora import weights_digest
from rlhf_core.sequences import Sequences, Subset
from rlhf_core.stage import checkpoints
from rlhf_core.stage.checkpoints import wait_for_parts
from rlhf_core.training.batching import reduce
from rlhf_core.training.engines.base import TorchEngine, open_engine
from rlhf_core.training.moving_reference import AdaptersOff
from rlhf_core.training.objectives.base import BradleyTerryObjective, PolicyObjective, SftObjective, ValueObjective
from rlhf_core.training.objectives.preference import PairObjective
from rlhf_core.training.skipped import check_updated, count_skipped
from rlhf_core.training.trainer import LocalTrainer, WeightAverage, average_of
from rlhf_core.types import RewardPair, TokenSample
from tests.rlhf_core.training.conftest import TINY
from tests.support.samples import PolicySample
from tests.support.tolerances import near, of_model

TORCH = TrainerConfig(engine="torch", micro_batch=4)
SFT = SftObjective(pack_to=None)
POLICY = PolicyObjective(
    loss=ClipLoss(), max_length=24, temperature=0.7, kl_coef=0.1, entropy_coef=0.0, correction=CorrectionConfig()
)


def steps(trainer: LocalTrainer, samples: list[Any], objective: Any, first: int, last: int) -> list[dict[str, float]]:
    """Optimizer steps `first`.. `last` - 1, each on six of the ten samples."""
    history = []
    for step in range(first, last):
        batch = [samples[(step + i) % 10] for i in range(6)]
        history.append(trainer.forward_backward(batch, objective) | trainer.optim_step(learning_rate=1e-3))
    return history


def on_policy(trainer: LocalTrainer, samples: list[PolicySample]) -> list[PolicySample]:
    rows = logprob_rows(trainer, [TokenSample(s.token_ids, s.loss_mask) for s in samples], temperature=0.7)
    return [
        replace(sample, old_logprobs=row, rollout_logprobs=row, ref_logprobs=row)
        for sample, row in zip(samples, rows, strict=True)
    ]


def test_metrics_of_shards_add_up_to_those_of_the_whole_batch(policy_spec, policy_samples):
    trainer = LocalTrainer(policy_spec, None, TORCH)
    whole = trainer.loss(policy_samples, POLICY)
    counts = POLICY.denominators(policy_samples)
    parts = reduce([trainer.loss(policy_samples[rank::3], POLICY, counts) for rank in range(3)])
    assert parts == near(whole, of_model(TINY))
    assert whole["ratio_max"] > 1.0


def test_the_first_ratio_is_exactly_one_and_the_kl_to_itself_exactly_zero_in_any_order(
    policy_spec, optimizer, policy_samples
):
    trainer = LocalTrainer(policy_spec, optimizer, TORCH)
    samples = on_policy(trainer, policy_samples)
    metrics = trainer.forward_backward([samples[i] for i in (3, 9, 0, 5, 1, 8, 2, 7, 4, 6)], POLICY)
    assert metrics["ratio_max"] == 1.0
    assert metrics["approx_kl"] == metrics["ref_kl"] == metrics["kl_loss"] == metrics["clip_fraction"] == 0.0
    # rho = w = 1 everywhere: the loss is minus the mean advantage
    advantages = [a for s in samples for a, masked in zip(s.advantages, s.loss_mask, strict=True) if masked]
    assert metrics["loss"] == pytest.approx(-sum(advantages) / 100, abs=1e-6)


def test_measurements_come_back_in_order_and_are_those_of_each_sample_alone(
    policy_spec, score_spec, value_spec, token_samples
):
    policy, scorer, critic = (LocalTrainer(spec, None, TORCH) for spec in (policy_spec, score_spec, value_spec))
    tokens = Sequences.of(token_samples)
    logprobs = logprob_rows(policy, token_samples, temperature=0.7)
    values = [row.tolist() for row in tokens.split(critic.values(tokens))]
    scores = scorer.scores([sample.token_ids for sample in token_samples])
    assert [len(row) for row in logprobs] == [len(sample.token_ids) for sample in token_samples]
    for index, sample in enumerate(token_samples):
        assert logprobs[index] == near(logprob_rows(policy, [sample], temperature=0.7)[0], of_model(TINY))
        assert values[index] == near(critic.values(Sequences.of([sample])).tolist(), of_model(TINY))
        assert scores[index] == near(scorer.scores([sample.token_ids])[0], of_model(TINY))
        assert logprobs[index][:2] == values[index][:2] == [0.0, 0.0]
    assert logprob_rows(policy, token_samples, temperature=0.7) == logprobs
    some = policy.logprobs(Subset(tokens, np.array([4, 1])), temperature=0.7)
    assert some.tolist() == near(logprobs[4] + logprobs[1], of_model(TINY))


def test_no_samples_give_no_answers(policy_spec):
    assert logprob_rows(LocalTrainer(policy_spec, None, TORCH), []) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_skipped_and_training_goes_on_as_if_it_had_not_been(
    bad, value_spec, optimizer, value_samples
):
    objective = ValueObjective(clip=None)
    poison = replace(value_samples[0], returns=(bad,) * len(value_samples[0].returns))
    trainer, clean = (LocalTrainer(value_spec, optimizer, TORCH) for _ in range(2))
    steps(trainer, value_samples, objective, 0, 1)
    steps(clean, value_samples, objective, 0, 1)
    metrics = trainer.forward_backward([*value_samples[1:], poison], objective)
    assert not math.isfinite(metrics["loss"])
    assert trainer.optim_step(learning_rate=1e-3) == {"grad_norm": math.inf, "learning_rate": 1e-3, "skipped": 1.0}
    assert steps(trainer, value_samples, objective, 1, 2) == steps(clean, value_samples, objective, 1, 2)
    assert trainer.weights().digest == clean.weights().digest


def test_an_infinite_loss_with_a_finite_gradient_is_skipped_too(policy_spec, optimizer, preference_samples):
    # max(0, 1 - beta h) with h = -infinity: the loss is infinite, its gradient is beta times that of the log-probs
    hinge = PairObjective(loss=HingeLoss(beta=0.1), nll_coef=0.0, length_alpha=1.0)
    trainer = LocalTrainer(policy_spec, optimizer, TORCH)
    before = trainer.weights().digest
    metrics = trainer.forward_backward([replace(preference_samples[0], ref_chosen_logprob=math.inf)], hinge)
    assert metrics["loss"] == math.inf
    assert trainer.optim_step(learning_rate=1e-3)["skipped"] == 1.0
    assert trainer.weights().digest == before


def assert_resumes_bitwise(
    make: Callable[[], LocalTrainer], run: Callable[[LocalTrainer, int, int], Any], folder: Path
) -> None:
    """5 steps must be, bit for bit, 2 steps, a save, and 3 steps of a new trainer."""
    straight = make()
    history = run(straight, 0, 5)
    first = make()
    run(first, 0, 2)
    first.save(folder)
    torch.manual_seed(99)
    second = make()
    second.load(folder)
    assert run(second, 2, 5) == history[2:]
    assert_same_weights(second, straight)


def assert_same_weights(one: LocalTrainer, other: LocalTrainer) -> None:
    left, right = one.weights().payload, other.weights().payload
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("spec", "samples", "objective"),
    [
        ("policy_spec", "token_samples", SftObjective(pack_to=48)),
        ("score_spec", "reward_pairs", BradleyTerryObjective(0.01)),
    ],
)
def test_training_resumes_bitwise(spec, samples, objective, optimizer, request, tmp_path):
    model, rows = request.getfixturevalue(spec), request.getfixturevalue(samples)
    assert_resumes_bitwise(
        lambda: LocalTrainer(model, optimizer, TORCH),
        lambda trainer, first, last: steps(trainer, rows, objective, first, last),
        tmp_path,
    )


def test_a_checkpoint_is_the_state_at_the_call_though_training_goes_on_before_it_is_written(
    policy_spec, optimizer, token_samples, tmp_path
):
    def run(trainer: LocalTrainer, first: int, last: int) -> Any:
        return steps(trainer, token_samples, SftObjective(pack_to=None), first, last)

    trainer = LocalTrainer(policy_spec, optimizer, TORCH)
    run(trainer, 0, 2)
    file = tmp_path / "training_state.pt"
    os.mkfifo(file)  # nothing can be written before somebody reads
    trainer.save(tmp_path)
    history = run(trainer, 2, 4)
    written = file.read_bytes()
    file.unlink()
    file.write_bytes(written)
    wait_for_parts(tmp_path)
    again = LocalTrainer(policy_spec, optimizer, TORCH)
    again.load(tmp_path)
    assert run(again, 2, 4) == history
    assert_same_weights(again, trainer)


def test_a_full_disk_is_told_to_who_waits_for_the_checkpoint(policy_spec, optimizer, tmp_path):
    (tmp_path / "training_state.pt").symlink_to("/dev/full")
    LocalTrainer(policy_spec, optimizer, TORCH).save(tmp_path)
    with pytest.raises(ArtifactError, match="the disk is full; free space"):
        wait_for_parts(tmp_path)


def test_a_flipped_byte_is_found_by_the_rank_that_loads_the_file(policy_spec, optimizer, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_SMALL_BYTES", 0)  # of smaller files the marker has digests
    trainer = LocalTrainer(policy_spec, optimizer, TORCH)
    trainer.save(tmp_path)
    wait_for_parts(tmp_path)
    assert trainer.damage(tmp_path) == ""
    for name, rank in (("training_state.pt", 0), ("random_state_00000.pt", 0)):
        content = bytearray((tmp_path / name).read_bytes())
        content[len(content) // 2] ^= 1
        (tmp_path / name).write_bytes(content)
        assert trainer.damage(tmp_path).startswith("random_state" if "random" in name else name)
        for number in (0, 1):
            group = {"RANK": number, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
            with monkeypatch.context() as patch:
                for variable, value in group.items():
                    patch.setenv(variable, str(value))
                assert bool(trainer.damage(tmp_path)) == (number == rank)


def test_lora_saves_the_adapters_alone_resumes_bitwise_and_exports_merged(
    policy_spec, optimizer, token_samples, tmp_path
):
    spec = replace(policy_spec, lora=LoraConfig(rank=2, alpha=4.0))
    trainer = LocalTrainer(spec, optimizer, TORCH)
    assert_resumes_bitwise(
        lambda: LocalTrainer(spec, optimizer, TORCH),
        lambda trainer, first, last: steps(trainer, token_samples, SFT, first, last),
        tmp_path / "checkpoint",
    )
    saved = torch.load(tmp_path / "checkpoint" / "training_state.pt", weights_only=True)
    assert all(".lora_" in name for name in saved["parameters"])

    steps(trainer, token_samples, SFT, 0, 2)
    start = logprob_rows(LocalTrainer(policy_spec, None, TORCH), token_samples)
    assert logprob_rows(AdaptersOff(trainer), token_samples) == start
    assert logprob_rows(trainer, token_samples) != start
    trainer.export(tmp_path / "exported")
    exported = LocalTrainer(replace(policy_spec, path=str(tmp_path / "exported")), None, TORCH)
    own = logprob_rows(trainer, token_samples)
    for row, other in zip(own, logprob_rows(exported, token_samples), strict=True):
        assert row == near(other, of_model(TINY))


def test_an_export_is_what_transformers_loads(policy_spec, score_spec, token_samples, tmp_path):
    policy, scorer = LocalTrainer(policy_spec, None, TORCH), LocalTrainer(score_spec, None, TORCH)
    policy.export(tmp_path / "policy")
    scorer.export(tmp_path / "scorer")
    sample = token_samples[0]
    ids = torch.tensor([sample.token_ids])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    own = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[:, 0].tolist()
    assert logprob_rows(policy, [sample])[0][2:] == near(list(own[1:]), of_model(TINY))
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "scorer")
    assert scorer.scores([sample.token_ids])[0] == near(classifier(input_ids=ids).logits.item(), of_model(TINY))


def test_weights_are_a_copy_with_the_digest_of_their_probes(policy_spec, optimizer, token_samples):
    trainer = LocalTrainer(policy_spec, optimizer, TORCH)
    before = trainer.weights()
    steps(trainer, token_samples, SFT, 0, 1)
    assert weights_digest(before.payload) == before.digest
    assert trainer.weights().digest != before.digest


def test_only_rank_0_holds_a_copy_of_the_weights(policy_spec):
    module = open_engine(policy_spec, None, TORCH).module
    counts = []
    for rank in range(2):
        engine = TorchEngine(module, None, device=torch.device("cpu"), rank=rank, compute_dtype=torch.float32)
        counts.append(len(LocalTrainer(policy_spec, None, TORCH, engine=engine).weights().payload))
    assert counts[0] > 0
    assert counts[1] == 0


def test_a_frozen_model_measures_and_refuses_to_train(policy_spec, token_samples):
    trainer = LocalTrainer(policy_spec, None, TORCH)
    with pytest.raises(TrainingError, match="the model is frozen: it has no optimizer"):
        trainer.forward_backward(token_samples, SFT)
    with pytest.raises(TrainingError, match=r"trainer\.optim_step"):
        trainer.optim_step(learning_rate=1e-3)


BFLOAT16 = {
    "bfloat16 weights": (TrainerConfig(engine="deepspeed", dtype="bfloat16"), False),
    "autocast": (TORCH.model_copy(update={"dtype": "bfloat16"}), True),
}


@pytest.mark.parametrize("name", sorted(BFLOAT16))
def test_scores_and_values_of_a_bfloat16_trainer_are_float32_numbers(
    name, score_spec, value_spec, optimizer, token_samples
):
    config, trained = BFLOAT16[name]
    reward, critic = (LocalTrainer(s, optimizer if trained else None, config) for s in (score_spec, value_spec))
    last = [TokenSample(s.token_ids, (0,) * (len(s.token_ids) - 1) + (1,)) for s in token_samples]
    scores, tokens = reward.scores([s.token_ids for s in token_samples]), Sequences.of(last)
    for measured in (scores, critic.values(tokens)[tokens.offsets[1:] - 1], [v[0] for v in reward.step_scores(last)]):
        exact = torch.tensor(measured)
        # The chance that a float32 is a bfloat16 is 2^-16.
        assert not (exact == exact.bfloat16().float()).any()
    if trained:
        reward.forward_backward([RewardPair((1, 20, 30), (1, 20, 40), 0.0)], BradleyTerryObjective(centering_coef=0.0))
        assert reward.optim_step(learning_rate=1e-3)["grad_norm"] > 0


@pytest.mark.parametrize("name", sorted(BFLOAT16))
def test_a_float32_lm_head_multiplies_what_the_layers_give_it_without_rounding(
    name, policy_spec, optimizer, token_samples
):
    config, trained = BFLOAT16[name]
    one = token_samples[0]
    found = {}
    for fp32 in (False, True):
        chosen = config.model_copy(update={"fp32_lm_head": fp32})
        trainer = LocalTrainer(policy_spec, optimizer if trained else None, chosen)
        found[fp32] = torch.tensor(logprob_rows(trainer, [one])[0][2:])
    module: Any = trainer._engine.module
    ids_1L = torch.tensor([one.token_ids])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=trained):
        hidden_LH = module.model(input_ids=ids_1L, use_cache=False).last_hidden_state[0]
    logits_LV = hidden_LH.float() @ module.lm_head.weight.float().T
    wanted = logits_LV[1:-1].log_softmax(-1).gather(-1, ids_1L[0, 2:, None]).squeeze(-1)
    torch.testing.assert_close(found[True], wanted.detach(), rtol=0, atol=1e-6)
    assert not torch.allclose(found[False], wanted, rtol=0, atol=1e-5)


def test_bfloat16_trains_float32_weights(policy_spec, optimizer, token_samples):
    config = TORCH.model_copy(update={"dtype": "bfloat16"})
    trainer = LocalTrainer(policy_spec, optimizer, config)
    exact = LocalTrainer(policy_spec, optimizer, TORCH)
    loss, reference = (steps(t, token_samples, SFT, 0, 1)[0]["loss"] for t in (trainer, exact))
    assert loss != reference
    assert loss == pytest.approx(reference, rel=1e-2)  # bfloat16 has 8 bits
    assert {tensor.dtype for tensor in trainer.weights().payload.values()} == {torch.float32}
    # A frozen one too: it must say what the same model says while it trains.
    frozen = LocalTrainer(policy_spec, None, config)
    assert {tensor.dtype for tensor in frozen.weights().payload.values()} == {torch.float32}


AVERAGED = OptimizerConfig(learning_rate=1e-2, schedule="constant", ema_decay=0.5)


def linear(value: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(value)
    return model


def test_the_average_is_a_geometric_sum_of_the_weights():
    model = linear(0.0)
    average = WeightAverage(model, decay=0.9)
    for value in (1.0, 2.0):
        model.weight.data.fill_(value)
        average.update(model)
    # 0.9 * (0.9 * 0 + 0.1 * 1) + 0.1 * 2
    assert average.state()["weight"].item() == pytest.approx(0.29)
    with average.in_place(model):
        assert model.weight.item() == pytest.approx(0.29)
    assert model.weight.item() == 2.0


def test_only_rank_0_keeps_one_and_only_if_asked_to():
    assert average_of(linear(1.0), decay=0.0, rank=0) is None
    assert average_of(linear(1.0), decay=0.9, rank=1) is None
    assert average_of(linear(1.0), decay=0.9, rank=0) is not None


def exported(trainer: LocalTrainer, folder: Path) -> dict[str, torch.Tensor]:
    trainer.export(folder)
    spec = ModelSpec(path=str(folder), head="lm", lora=None, seed=0)
    return load_model(spec, dtype="float32", attention="sdpa", gradient_checkpointing=False, device="cpu").state_dict()


def train(trainer: LocalTrainer, samples: list[TokenSample], steps: int) -> None:
    for _ in range(steps):
        trainer.forward_backward(samples, SftObjective(pack_to=None))
        trainer.optim_step(learning_rate=1e-2)


def test_the_export_is_the_average_and_the_sampler_gets_the_weights(policy_spec, token_samples, tmp_path):
    trainer = LocalTrainer(policy_spec, AVERAGED, TORCH)
    before = {name: weight.clone() for name, weight in trainer.weights().payload.items()}
    train(trainer, token_samples, 1)
    after = trainer.weights().payload
    made = exported(trainer, tmp_path / "made")
    name = next(name for name, weight in after.items() if weight.dim() == 2 and not torch.equal(weight, before[name]))
    torch.testing.assert_close(made[name], (before[name] + after[name]) / 2)
    assert trainer.weights().payload[name].equal(after[name])


def test_the_average_goes_on_from_a_checkpoint(policy_spec, token_samples, tmp_path):
    whole = LocalTrainer(policy_spec, AVERAGED, TORCH)
    train(whole, token_samples, 4)
    first = LocalTrainer(policy_spec, AVERAGED, TORCH)
    train(first, token_samples, 2)
    first.save(tmp_path / "saved")
    second = LocalTrainer(policy_spec, AVERAGED, TORCH)
    second.load(tmp_path / "saved")
    train(second, token_samples, 2)
    expected, resumed = exported(whole, tmp_path / "whole"), exported(second, tmp_path / "resumed")
    assert all(weight.equal(resumed[name]) for name, weight in expected.items())


def test_zero_3_has_no_whole_weights_to_average(policy_spec):
    with pytest.raises(ConfigError, match=r"optimizer\.ema_decay = 0\.5: under ZeRO 3"):
        open_engine(policy_spec, AVERAGED, TrainerConfig(engine="deepspeed", zero_stage=3))


def test_updates_that_are_skipped_in_a_row_end_the_stage_and_a_good_one_forgives():
    count = 0
    for step in range(4):
        count = count_skipped(count, {"skipped": 1.0}, label="sft", step=step)
    assert count == 4
    assert count_skipped(count, {"skipped": 0.0}, label="sft", step=4) == 0
    with pytest.raises(TrainingError, match=r"sft\.step = 4: 5 updates in a row"):
        count_skipped(count, {"skipped": 1.0}, label="sft", step=4)


def test_a_step_that_updated_neither_or_only_one_of_its_models_ends_the_stage():
    good, bad = {"policy/skipped": 0.0, "value/skipped": 0.0}, {"policy/skipped": 1.0, "value/skipped": 0.0}
    check_updated([good, bad], label="ppo", step=3)
    check_updated([{"value/skipped": 0.0}], label="ppo", step=3)  # the policy waits for the warm-up
    with pytest.raises(TrainingError, match=r"ppo\.step = 3: every update of the policy had a non-finite"):
        check_updated([bad, bad], label="ppo", step=3)
