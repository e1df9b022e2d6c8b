"""DPO raises what is chosen over what is rejected, keeps the reference's log-probs, and resumes bitwise."""

from typing import get_args

import pytest
from pydantic import ValidationError

from rlhf_core.algorithms.preference.answers import BCOLoss, KTOLoss
from rlhf_core.algorithms.preference.dpo import AOTLoss, DiscoPOPLoss, DPOLoss, IPOLoss, ORPOLoss
from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.config.policy import LoopConfig, PreferenceLoss
from rlhf_core.errors import DataError
from rlhf_core.schema.base import CustomFunction
from rlhf_core.types import PolicyRef, TokenSample
from stages.dpo import DPOConfig
from stages.dpo.run import answer_to_another_prompt, mismatched
from tests.support.training import preferences, thumbs
from tests.support.workshop import workshop

CONFIG = DPOConfig(
    max_length=48,
    loss=DPOLoss(beta=0.5),
    loop=LoopConfig(batch_size=4, epochs=1, eval_every=8, checkpoint_every=3),
    optimizer=OptimizerConfig(learning_rate=2e-3),
)

GROWTH = 0.02
"""What the margin of the rewards must grow by in eight small steps, whatever the loss's scale."""


KINDS = [kind for kind in get_args(get_args(PreferenceLoss)[0]) if not issubclass(kind, CustomFunction)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind().type)
def test_every_loss_of_the_family_raises_the_chosen_above_the_rejected(tmp_path, policy, kind):
    shop = workshop(tmp_path)
    base = shop.store.external(PolicyRef, policy)
    inputs = {"policy": base, "reference": base, "preferences": preferences(shop.store, tmp_path)}
    ref, _ = shop.run("dpo", CONFIG.model_copy(update={"loss": kind()}), inputs)
    evaluated = [values for _, values in shop.tracker.points if "dpo/eval/loss" in values]
    margins = [margin({name.removeprefix("dpo/"): value for name, value in row.items()}) for row in evaluated]
    if kind().uses_reference:
        assert margins[0] == pytest.approx(0.0, abs=1e-4)  # policy == reference; sums of fp32 log-probs of ~ -80
    if kind is DiscoPOPLoss:  # from h = 0 its gradient points the wrong way: 5 (1 - log 2) - 0.75 = 0.78 > 0
        assert evaluated[-1]["dpo/eval/loss"] < evaluated[0]["dpo/eval/loss"]
    else:
        assert margins[-1] > margins[0] + GROWTH * (0.1 if kind is ORPOLoss else 1.0)
    assert ref.digest != base.digest


def margin(metrics: dict[str, float]) -> float:
    if "eval/rewards/margin" in metrics:
        return metrics["eval/rewards/margin"]
    return metrics["eval/rewards/desirable"] - metrics["eval/rewards/undesirable"]


def test_kto_measures_its_kl_on_answers_to_other_prompts():
    sample, other = TokenSample((1, 2, 3, 4), (0, 0, 1, 1)), TokenSample((7, 8, 9, 5, 6), (0, 1, 1, 1, 0))
    assert mismatched(sample, other) == TokenSample((1, 2, 8, 9, 5), (0, 0, 1, 1, 1))


def test_the_stranger_is_the_next_answer_to_another_prompt():
    one, same, other = (TokenSample(ids, (0, 1, 1)) for ids in ((1, 5, 6), (1, 7, 8), (2, 5, 6)))
    assert answer_to_another_prompt(0, [one, same, other], []) is other
    assert answer_to_another_prompt(2, [one, same, other], []) is one
    assert answer_to_another_prompt(1, [one, same], [one, other]) is other
    with pytest.raises(DataError, match="preferences = 2: all answers belong to the same prompt"):
        answer_to_another_prompt(0, [one, same], [one])


@pytest.mark.parametrize("loss", [KTOLoss(), BCOLoss()], ids=lambda loss: loss.type)
def test_six_thumbs_on_six_prompts_with_one_held_out_are_learned_from(tmp_path, policy, loss):
    shop = workshop(tmp_path)
    base = shop.store.external(PolicyRef, policy)
    inputs = {"policy": base, "reference": base, "preferences": thumbs(shop.store, tmp_path, up=4, down=2)}
    loop = CONFIG.loop.model_copy(update={"batch_size": 6, "epochs": 8})
    _, decision = shop.run("dpo", CONFIG.model_copy(update={"loss": loss, "loop": loop}), inputs)
    metrics = shop.metrics(decision)
    assert (metrics["train_pairs"], metrics["train_answers"], metrics["dropped_answers"]) == (0, 6, 0)
    trained = [values for _, values in shop.tracker.points if "dpo/train/rewards/desirable" in values]
    first, last = (margin({"eval/rewards/" + k: v["dpo/train/rewards/" + k] for k in ("desirable", "undesirable")})
                   for v in (trained[0], trained[-1]))  # fmt: skip
    assert first == pytest.approx(0.0, abs=1e-4)
    assert last > GROWTH
    # The one held-out answer is a good one, and its stranger is of the training rows.
    assert metrics["eval/rewards/desirable"] > 0.0 == metrics["eval/rewards/undesirable"]


def test_the_two_answers_of_a_pair_and_single_ones_are_trained_on_together(tmp_path, policy):
    shop = workshop(tmp_path)
    base = shop.store.external(PolicyRef, policy)
    inputs = {"policy": base, "reference": base, "preferences": thumbs(shop.store, tmp_path, pairs=4, held_out=0)}
    _, decision = shop.run("dpo", CONFIG.model_copy(update={"loss": KTOLoss()}), inputs)
    metrics = shop.metrics(decision)
    assert (metrics["train_pairs"], metrics["train_answers"], metrics["steps"]) == (4, 14, 4)  # 2 * 4 + 6, in fours
    _, decision = shop.run("dpo", CONFIG, inputs)  # a loss on pairs leaves them out, and says so
    metrics = shop.metrics(decision)
    assert (metrics["train_answers"], metrics["dropped_answers"], metrics["steps"]) == (0, 6, 1)


@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_a_loss_on_pairs_refuses_single_answers_before_any_model_is_loaded(tmp_path, policy, loss):
    shop = workshop(tmp_path, runtime=None)
    base = shop.store.external(PolicyRef, policy)
    inputs = {"policy": base, "reference": base, "preferences": thumbs(shop.store, tmp_path)}
    rule = rf"dpo\.loss\.type = '{loss}'.* compares two answers, but the data has 6 single labeled answers.*'kto'"
    with pytest.raises(DataError, match=rule):
        shop.run("dpo", DPOConfig.model_validate({"loss": loss, "max_length": 48}), inputs)


@pytest.mark.parametrize("held_out", [0, 1])
def test_few_held_out_pairs_do_not_end_the_stage(tmp_path, policy, held_out):
    shop = workshop(tmp_path)
    base = shop.store.external(PolicyRef, policy)
    rows = preferences(shop.store, tmp_path, 4, held_out=held_out)
    inputs = {"policy": base, "reference": base, "preferences": rows}
    for loss in (DPOLoss(), KTOLoss(), AOTLoss()):
        _, decision = shop.run("dpo", CONFIG.model_copy(update={"loss": loss}), inputs)
        assert ("eval/loss" in shop.metrics(decision)) == (held_out > 0), loss.type


def test_options_that_a_loss_cannot_use_are_refused():
    with pytest.raises(ValidationError, match=r"nll_coef = 0\.1: kto trains on single answers, not on pairs"):
        DPOConfig(loss=KTOLoss(), nll_coef=0.1)
    with pytest.raises(ValidationError, match=r"nll_coef = 0\.1: orpo already includes the loss of the chosen answer"):
        DPOConfig(loss=ORPOLoss(), nll_coef=0.1)
    for loss in ("kto", "aot", "orpo", "simpo", "ipo"):
        with pytest.raises(
            ValidationError, match=r"length_alpha = 0\.5: applies only to losses on the summed log-probs"
        ):
            DPOConfig.model_validate({"loss": loss, "length_alpha": 0.5})
    assert DPOConfig(loss=IPOLoss(length_average=False), length_alpha=0.5).length_alpha == 0.5
    with pytest.raises(ValidationError, match="label_smoothing"):
        DPOConfig(loss={"type": "dpo", "label_smoothing": 0.1})


def test_exports_need_a_number_of_steps():
    with pytest.raises(ValidationError, match=r"export_every = 2: the policies are named by their steps"):
        DPOConfig(export_every=2)
