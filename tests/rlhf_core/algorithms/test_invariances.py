"""What every loss has in common: shares over global denominators add up, and what must not matter does not.

One table of losses, each on six rows of seeded numbers; the formulas themselves are in the modules' own tests.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.algorithms import policy as policy_losses
from rlhf_core.algorithms import preference
from rlhf_core.algorithms.distillation import distillation_loss, multi_teacher_loss, topk_distillation_loss, uld_loss
from rlhf_core.algorithms.token_math import LossOutput, bradley_terry_loss, clipped_value_loss, sft_loss, step_loss
from tests.support.losses import of_answers, of_pairs, of_tokens

METHODS: dict[str, Any] = {
    kind.model_fields["type"].default: kind for kind in (*policy_losses.METHODS, *preference.METHODS)
}
B, L, V, K = 6, 5, 7, 3
generator = torch.Generator().manual_seed(7)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A loss and its arguments: `rows` have B rows each, `counts` are of the whole step, `trained` have a gradient."""

    loss: Callable[..., LossOutput]
    rows: dict[str, Tensor]
    counts: dict[str, float]
    trained: tuple[str, ...]
    exact_gradient: bool = field(default=True)
    """False where the loss stops a gradient: a finite difference would see through it."""


MASK_BL = torch.rand(B, L, generator=generator) > 0.4
MASK_BL[3] = False  # a row without a trained token
TOKENS = {"num_tokens": float(MASK_BL.sum())}
POLICY_ROWS = {
    "logprobs": 0.3 * normal(B, L) - 1,
    "old_logprobs": 0.3 * normal(B, L) - 1,
    "advantages": normal(B, L),
    "loss_mask": MASK_BL,
    "weights": normal(B, L).abs(),
}
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
DUAL: dict[str, Any] = CLIPS | {"dual_clip": 1.4}
DROPS = {"threshold_low": 0.01, "threshold_high": 0.02, "ratio_cap": 1.5}
PAIR_ROWS = {
    name: 3 * normal(B) - 9
    for name in ("chosen_logprobs", "rejected_logprobs", "ref_chosen_logprobs", "ref_rejected_logprobs")
}
LENGTHS = {"chosen_lengths": torch.arange(3, B + 3), "rejected_lengths": torch.arange(B + 4, 4, -1)}
FREE_ROWS = {"chosen_logprobs": PAIR_ROWS["chosen_logprobs"], "rejected_logprobs": PAIR_ROWS["rejected_logprobs"]}
PAIRS = {"pairs": float(B)}
BOTH = ("chosen_logprobs", "rejected_logprobs")
DESIRABLE_B = torch.tensor([True, False, True, True, False, True])
TEACHER_IDS_TK = torch.stack([torch.randperm(V, generator=generator)[:K] for _ in range(B)])


def policy(kind: str, *, exact_gradient: bool = True, **scalars: Any) -> Case:
    loss = partial(of_tokens(METHODS[kind]), **scalars)
    return Case(loss, POLICY_ROWS, TOKENS | {"sequences": float(B)}, ("logprobs",), exact_gradient)


def pair(kind: str, rows: dict[str, Tensor] = PAIR_ROWS, **scalars: Any) -> Case:
    return Case(partial(of_pairs(METHODS[kind]), **scalars), rows, PAIRS, BOTH)


def distillation(loss: Callable[..., LossOutput], **scalars: Any) -> Case:
    rows = {"logits_TV": normal(B, V), "teacher_logits_TV": normal(B, V)}
    return Case(partial(loss, temperature=1.7, **scalars), rows, {"tokens": float(B)}, ("logits_TV",))


def topk(kind: str) -> Case:
    teacher_TK = normal(B, V).log_softmax(dim=1).gather(1, TEACHER_IDS_TK)
    rows = {"logits_TV": normal(B, V), "teacher_logprobs_TK": teacher_TK, "teacher_ids_TK": TEACHER_IDS_TK}
    return Case(partial(topk_distillation_loss, kind=kind), rows, {"tokens": float(B)}, ("logits_TV",))


def several_teachers(logits_TV: Tensor, one_teacher_TV: Tensor, two_teacher_TV: Tensor, **counts: float) -> LossOutput:
    ids = torch.empty(len(logits_TV), 0, dtype=torch.long)
    given, weights = [(one_teacher_TV, ids), (two_teacher_TV, ids)], (("one", 0.75), ("two", 0.25))
    return multi_teacher_loss(logits_TV, given, weights, kind="reverse", jsd_beta=0.5, temperature=1.7, **counts)


def outcomes() -> tuple[Tensor, Tensor]:
    """Return the log-prob of a text, and the probabilities of the other outcomes, decreasing; some are left out."""
    logprobs = normal(B, V + 3).log_softmax(dim=1)
    return logprobs[:, 0], logprobs[:, 3:].exp().sort(dim=1, descending=True).values


SEVERAL_ROWS = {"logits_TV": normal(B, V)} | {
    f"{name}_teacher_TV": (normal(B, V) / 1.7).log_softmax(dim=1) for name in ("one", "two")
}
ULD_ROWS = dict(
    zip(("text_G", "others_GN", "teacher_text_G", "teacher_others_GN"), outcomes() + outcomes(), strict=True)
)
SFT_ROWS = {"logprobs_BL": normal(B, L) - 2, "loss_mask_BL": MASK_BL}
SFT_TOKENS = {"tokens": TOKENS["num_tokens"]}
VALUE_ROWS = {name: normal(B, L) for name in ("values", "old_values", "returns")} | {"loss_mask": MASK_BL}
KTO_ROWS = {"logprobs": 3 * normal(B) - 9, "ref_logprobs": 3 * normal(B) - 9, "desirable": DESIRABLE_B}
KTO: dict[str, Any] = {"kl": 0.4, "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.3}
SCORE_ROWS = {"chosen_scores": normal(B), "rejected_scores": normal(B), "margin": normal(B).abs()}
STEP_ROWS = {"logits_S": normal(B), "labels_S": torch.tensor([0.0, 1.0, 0.25, 1.0, 0.75, 0.0])}

CASES: dict[str, Case] = {
    "sft": Case(sft_loss, SFT_ROWS, SFT_TOKENS, ("logprobs_BL",)),
    "dft": Case(partial(sft_loss, dft=True), SFT_ROWS, SFT_TOKENS, ("logprobs_BL",), exact_gradient=False),
    "value": Case(partial(clipped_value_loss, clip=0.2), VALUE_ROWS, TOKENS, ("values",)),
    "value without a clip": Case(partial(clipped_value_loss, clip=None), VALUE_ROWS, TOKENS, ("values",)),
    "ppo, token_mean": policy("clip", **DUAL),
    "ppo, seq_mean_token_mean": policy("clip", aggregation="seq_mean_token_mean", **DUAL),
    "ppo, constant": policy("clip", aggregation="constant", max_length=9.0, **DUAL),
    "gspo": policy("gspo", clip_low=0.03, clip_high=0.04),
    "cispo": policy("cispo", exact_gradient=False, clip_high=0.2),
    "cispo, seq_mean_token_mean": policy(
        "cispo", exact_gradient=False, aggregation="seq_mean_token_mean", clip_high=0.28
    ),
    "sapo": policy("sapo", tau_positive=1.0, tau_negative=1.05),
    "sapo, token_mean": policy("sapo", tau_positive=3.0, tau_negative=1.5, aggregation="token_mean"),
    "gmpo": policy("gmpo", clip_low=0.1, clip_high=0.15),
    "dppo, tv": policy("dppo", exact_gradient=False, divergence="tv", **DROPS),
    "dppo, kl": policy("dppo", exact_gradient=False, divergence="kl", aggregation="seq_mean_token_mean", **DROPS),
    "bradley_terry": Case(
        partial(bradley_terry_loss, center_coef=0.01), SCORE_ROWS, PAIRS, ("chosen_scores", "rejected_scores")
    ),
    "step": Case(step_loss, STEP_ROWS, {"steps": float(B)}, ("logits_S",)),
    "dpo": pair("dpo", beta=0.1),
    "cdpo": pair("cdpo", beta=0.1, label_smoothing=0.1),
    "robust_dpo": pair("robust", beta=0.1, label_smoothing=0.1),
    "ipo of sums": pair("ipo", beta=0.1, length_average=False),
    "ipo": pair("ipo", PAIR_ROWS | LENGTHS, beta=0.1),
    "hinge": pair("hinge", beta=0.3),
    "apo_zero": pair("apo_zero", beta=0.1),
    "apo_down": pair("apo_down", beta=0.1),
    "sppo": pair("sppo", beta=0.1),
    "nca": pair("nca", beta=0.1),
    "exo": pair("exo", beta=0.1, label_smoothing=1e-3),
    "discopop": pair("discopop", beta=0.1),
    "aot": pair("aot", beta=0.1, label_smoothing=0.1),
    "f_dpo, forward_kl": pair("f_dpo", beta=0.01, divergence="forward_kl"),
    "f_dpo, js": pair("f_dpo", beta=0.1, divergence="js"),
    "f_dpo, alpha": pair("f_dpo", beta=0.1, divergence="alpha", alpha=0.3),
    "dpo_norm": pair("dpo_norm", PAIR_ROWS | LENGTHS),
    "bco": Case(
        partial(of_answers(METHODS["bco"]), shift=0.2, beta=0.1),
        KTO_ROWS,
        {"rows": float(B), "desirable_rows": 4.0},
        ("logprobs",),
    ),
    "simpo": pair("simpo", FREE_ROWS | LENGTHS, gamma=0.5),
    "orpo": Case(
        partial(of_pairs(METHODS["orpo"]), odds_weight=0.7),
        FREE_ROWS | LENGTHS,
        PAIRS | {"tokens": float(LENGTHS["chosen_lengths"].sum())},
        BOTH,
    ),
    "kto": Case(
        partial(of_answers(METHODS["kto"]), **KTO), KTO_ROWS, {"rows": float(B), "desirable_rows": 4.0}, ("logprobs",)
    ),
    "forward": distillation(distillation_loss, kind="forward"),
    "reverse": distillation(distillation_loss, kind="reverse"),
    "jsd": distillation(distillation_loss, kind="jsd", jsd_beta=0.3),
    "top-k forward": topk("forward"),
    "top-k reverse": topk("reverse"),
    "top-k jsd": topk("jsd"),
    "several teachers": Case(several_teachers, SEVERAL_ROWS, {"tokens": float(B)}, ("logits_TV",)),
    "uld": Case(partial(uld_loss, kind="uld", k=3), ULD_ROWS, {"groups": float(B)}, ("text_G", "others_GN")),
    "uld_text": Case(partial(uld_loss, kind="uld_text", k=0), ULD_ROWS, {"groups": float(B)}, ("text_G", "others_GN")),
}

MASKED = [name for name, case in CASES.items() if any("mask" in key for key in case.rows)]


def fp32(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.float() if x.is_floating_point() else x for name, x in rows.items()}


def step(
    case: Case, rows: dict[str, Tensor], parts: list[Tensor], counts: dict[str, float]
) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """Loss, metrics and gradients of one optimizer step cut into those rows."""
    rows = {name: x.clone().requires_grad_(name in case.trained) for name, x in rows.items()}
    total, metrics = 0.0, dict[str, float]()
    for part in parts:
        output = case.loss(**{name: x[part] for name, x in rows.items()}, **counts)
        output.loss.backward()
        total += output.loss.item()
        for name, value in output.metrics.items():
            assert not value.requires_grad and value.dim() == 0
            combine = max if name.endswith("_max") else lambda a, b: a + b
            metrics[name] = combine(metrics[name], value.item()) if name in metrics else value.item()
    gradients = {}
    for name in case.trained:
        gradient = rows[name].grad
        assert gradient is not None
        gradients[name] = gradient
    return total, metrics, gradients


def assert_close(
    one: tuple[float, dict[str, float], dict[str, Tensor]], other: tuple[float, dict[str, float], dict[str, Tensor]]
) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-6, abs=1e-7)
    assert one[1] == pytest.approx(other[1], rel=1e-6, abs=1e-6)
    for name, gradient in other[2].items():
        assert gradient.norm() > 0
        assert (one[2][name] - gradient).norm() <= 1e-6 * gradient.norm()


WHOLE = [torch.arange(B)]


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_loss_metrics_and_gradient_do_not_depend_on_the_micro_batch(name, micro_batch):
    case = CASES[name]
    rows = fp32(case.rows)
    parts = list(torch.arange(B).split(micro_batch))
    assert_close(step(case, rows, parts, case.counts), step(case, rows, WHOLE, case.counts))


@pytest.mark.parametrize("name", CASES)
def test_without_counts_the_call_is_the_whole_step(name):
    case = CASES[name]
    rows = fp32(case.rows)
    assert_close(step(case, rows, WHOLE, {}), step(case, rows, WHOLE, case.counts))


@pytest.mark.parametrize("name", CASES)
def test_the_order_of_the_rows_does_not_matter(name):
    case = CASES[name]
    rows = fp32(case.rows)
    order = torch.tensor([4, 2, 0, 5, 3, 1])
    assert_close(step(case, rows, [order], case.counts), step(case, rows, WHOLE, case.counts))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("name", MASKED)
def test_what_stands_outside_the_mask_reaches_neither_loss_nor_metrics_nor_gradient(name, garbage):
    case = CASES[name]
    clean = fp32(case.rows)
    dirty = {key: x if "mask" in key else torch.where(MASK_BL, x, garbage) for key, x in clean.items()}
    loss, metrics, gradients = step(case, dirty, WHOLE, case.counts)
    expected_loss, expected_metrics, expected_gradients = step(case, clean, WHOLE, case.counts)
    assert (loss, metrics) == (expected_loss, expected_metrics)
    for key, gradient in gradients.items():
        assert torch.equal(gradient, expected_gradients[key])
        assert bool((gradient[~MASK_BL] == 0).all())


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_may_be_of_any_type(name):
    case = CASES[name]
    losses = set()
    for dtype in (torch.bool, torch.int64, torch.float32):
        rows = {key: x.to(dtype) if "mask" in key else x for key, x in case.rows.items()}
        losses.add(step(case, rows, WHOLE, {})[0])
    assert len(losses) == 1


@pytest.mark.parametrize("name", MASKED)
def test_an_empty_mask_gives_zero_and_not_nan(name):
    case = CASES[name]
    rows = {key: torch.zeros_like(x) if "mask" in key else x for key, x in case.rows.items()}
    loss, metrics, gradients = step(case, rows, WHOLE, {})
    assert loss == 0.0 and set(metrics.values()) == {0.0}
    assert all(bool((gradient == 0).all()) for gradient in gradients.values())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.exact_gradient])
def test_the_gradient_is_that_of_finite_differences(name):
    case = CASES[name]
    fixed = {key: x for key, x in case.rows.items() if key not in case.trained}

    def loss(*trained: Tensor) -> Tensor:
        return case.loss(**dict(zip(case.trained, trained, strict=True)), **fixed, **case.counts).loss

    inputs = tuple(case.rows[key].clone().requires_grad_(True) for key in case.trained)
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-6, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_single_precision_agrees_with_double(name):
    case = CASES[name]
    double = step(case, case.rows, WHOLE, case.counts)
    single = step(case, fp32(case.rows), WHOLE, case.counts)
    assert single[0] == pytest.approx(double[0], rel=1e-6, abs=1e-7)
    assert single[1] == pytest.approx(double[1], rel=1e-6, abs=1e-6)
    for key, gradient in double[2].items():
        assert (single[2][key] - gradient).norm() <= 2e-6 * gradient.norm()


@pytest.mark.parametrize("name", CASES)
def test_references_teachers_and_labels_are_not_trained(name):
    case = CASES[name]
    fixed = [key for key, x in case.rows.items() if key not in case.trained and x.is_floating_point()]
    fixed = [key for key in fixed if key == "weights" or "teacher" in key]
    rows = {key: x.clone().requires_grad_(key in (*fixed, *case.trained)) for key, x in case.rows.items()}
    case.loss(**rows, **case.counts).loss.backward()
    assert all(rows[key].grad is None for key in fixed)
