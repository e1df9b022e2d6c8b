"""The contract of every loss: partial sums over global denominators add up to the step's value and gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlhf_core.losses.output import LossOutput
from rlhf_core.losses.policy import ppo_clip_loss
from rlhf_core.losses.preference import dpo_loss, hinge_loss, ipo_loss, robust_dpo_loss, simpo_loss
from rlhf_core.losses.reward import bradley_terry_loss
from rlhf_core.losses.supervised import sft_loss
from rlhf_core.losses.value import value_loss

B, L = 6, 5
generator = torch.Generator().manual_seed(7)
MASK_BL = (torch.rand(B, L, generator=generator) > 0.4).int()
TOKENS = float(MASK_BL.sum())
A, C, D, E, F = (torch.randn(B, L, generator=generator) for _ in range(5))
LENGTH_B, OTHER_LENGTH_B = torch.arange(1.0, B + 1), torch.arange(B, 0.0, -1)


def policy(aggregation: str) -> Callable[[Tensor, slice], LossOutput]:
    return lambda x, rows: ppo_clip_loss(
        x,
        A[rows],
        C[rows],
        MASK_BL[rows],
        D[rows].abs(),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
        aggregation=aggregation,  # type: ignore[arg-type]
        tokens=TOKENS,
        sequences=float(B),
        max_length=float(L),
    )


def pairwise(
    loss: Callable[..., LossOutput], *columns: Tensor, **scalars: float
) -> Callable[[Tensor, slice], LossOutput]:
    return lambda x, rows: loss(x[:, 0], *(column[rows] for column in columns), pairs=float(B), **scalars)


REFERENCES = (C[:, 0], D[:, 0], E[:, 0])
LOSSES: dict[str, Callable[[Tensor, slice], LossOutput]] = {
    "sft": lambda x, rows: sft_loss(x, MASK_BL[rows], tokens=TOKENS),
    "value": lambda x, rows: value_loss(x, A[rows], C[rows], MASK_BL[rows], clip=0.2, tokens=TOKENS),
    "token_mean": policy("token_mean"),
    "seq_mean_token_mean": policy("seq_mean_token_mean"),
    "seq_mean_token_sum_norm": policy("seq_mean_token_sum_norm"),
    "bradley_terry": pairwise(bradley_terry_loss, C[:, 0], D[:, 0].abs(), centering_coef=0.01),
    "dpo": pairwise(dpo_loss, *REFERENCES, beta=0.1, label_smoothing=0.1),
    "robust_dpo": pairwise(robust_dpo_loss, *REFERENCES, beta=0.1, label_smoothing=0.1),
    "ipo": pairwise(ipo_loss, *REFERENCES, LENGTH_B, OTHER_LENGTH_B, beta=0.1, length_average=True),
    "hinge": pairwise(hinge_loss, *REFERENCES, beta=0.5),
    "simpo": pairwise(simpo_loss, C[:, 0], LENGTH_B, OTHER_LENGTH_B, beta=2.0, gamma=0.5),
}


def step(loss: Callable[[Tensor, slice], LossOutput], micro_batch: int) -> tuple[float, dict[str, float], Tensor]:
    """Loss, metrics and gradient of one optimizer step cut into micro-batches of that many rows."""
    x = (F * 0.3 + A).requires_grad_(True)
    total, metrics = 0.0, dict[str, float]()
    for start in range(0, B, micro_batch):
        rows = slice(start, min(start + micro_batch, B))
        output = loss(x[rows], rows)
        output.loss.backward()
        total += output.loss.item()
        for name, value in output.metrics.items():
            assert not value.requires_grad and value.dim() == 0
            combine = max if name.endswith("_max") else lambda a, b: a + b
            metrics[name] = combine(metrics[name], value.item()) if name in metrics else value.item()
    assert x.grad is not None
    return total, metrics, x.grad


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_metrics_and_gradient_do_not_depend_on_the_micro_batch(name: str, micro_batch: int) -> None:
    whole_loss, whole_metrics, whole_grad = step(LOSSES[name], B)
    loss, metrics, grad = step(LOSSES[name], micro_batch)
    assert loss == pytest.approx(whole_loss, rel=1e-6, abs=1e-7)
    assert metrics == pytest.approx(whole_metrics, rel=1e-6, abs=1e-7)
    assert whole_grad.norm() > 0
    assert (grad - whole_grad).norm() <= 1e-6 * whole_grad.norm()
