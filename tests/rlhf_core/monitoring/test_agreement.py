"""Two computations of one number: what counts as disagreement, and what as chance."""

import math
import random

import pytest

from rlhf_core.monitoring.agreement import KLEstimate, LogprobMismatch
from tests.support.monitoring import found


def test_a_mismatch_names_the_figure_that_left_its_bound():
    assert found(LogprobMismatch(), mismatch__exp_abs_log_q=[1.02], mismatch__ess=[0.99]) == ""
    figures = {"mismatch__exp_abs_log_q": [1.3], "mismatch__ess": [0.5]}
    assert found(LogprobMismatch(), **figures) == "mismatch/exp_abs_log_q 1.3 > 1.1"
    assert found(LogprobMismatch(exp_abs_log_q=None), **figures) == "mismatch/ess 0.5 < 0.9"
    only = LogprobMismatch(exp_abs_log_q=None, ess=None, log_q_max=1.0, growth=None)
    assert only.reads() == ("mismatch/log_q_max",)
    assert found(only, mismatch__log_q_max=[1.5]) == "mismatch/log_q_max 1.5 > 1"


@pytest.mark.parametrize(
    ("first", "now", "fires"),
    [
        (1.0, 1.003, False),  # below the floor
        (1.0, 1.012, True),
        (1.01, 1.035, False),  # 3.5 times what these engines differ by anyway
        (1.01, 1.045, True),
        (1.01, math.nan, True),
    ],
)
def test_a_mismatch_that_grows_is_found_long_before_its_bound(first, now, fires):
    monitor = LogprobMismatch(reference_steps=2)
    assert found(monitor, mismatch__exp_abs_log_q=[first, now]) == (
        "" if now == now else found(monitor, mismatch__exp_abs_log_q=[now])
    )
    assert bool(found(monitor, mismatch__exp_abs_log_q=[first, first, now])) == fires
    if fires and now == now:
        assert found(LogprobMismatch(reference_steps=2, growth=None), mismatch__exp_abs_log_q=[first, first, now]) == ""


def estimates(steps: int, *, seed: int, sign: float = 1.0) -> dict[str, list[float]]:
    """Return k1 and k3 per token of steps of 700 tokens whose log-ratios are normal, with the KL rising to 0.02 nats.

    With log ratio d = log pi - log ref ~ N(s^2 / 2, s^2) under pi, the KL is s^2 / 2; k1 = d, k3 = exp(-d) - 1 + d.
    """
    rng = random.Random(seed)
    made: dict[str, list[float]] = {"kl__per_token": [], "kl__k3": []}
    for step in range(1, steps + 1):
        spread = math.sqrt(2 * 0.02 * step / steps)
        ratios = [rng.gauss(spread**2 / 2, spread) for _ in range(700)]
        made["kl__per_token"].append(sign * sum(ratios) / len(ratios))
        made["kl__k3"].append(sum(math.exp(-one) - 1 + one for one in ratios) / len(ratios))
    return made


def test_a_swapped_direction_is_found_while_the_divergence_is_small():
    swapped = [found(KLEstimate(), **estimates(12, seed=seed, sign=-1.0)) for seed in range(50)]
    assert sum("p = " in one for one in swapped) >= 45
    untested = [found(KLEstimate(level=0.0), **estimates(12, seed=seed, sign=-1.0)) for seed in range(50)]
    assert not any("p = " in one for one in untested)


def test_a_right_pair_of_estimates_has_an_alarm_as_seldom_as_its_level_says():
    alarms = sum(bool(found(KLEstimate(), **estimates(12, seed=seed))) for seed in range(300))
    assert alarms <= 3  # 0.3 are expected, and more than 3 have a probability below 1e-3


def test_a_copy_is_not_an_estimate_of_its_own():
    right = estimates(12, seed=1)
    copied = {"kl__per_token": right["kl__k3"], "kl__k3": right["kl__k3"]}
    assert found(KLEstimate(), **copied) == "k1 and k3 are the same number at 10 steps in a row"
    at_the_reference = {"kl__per_token": [0.0] * 12, "kl__k3": [0.0] * 12}
    assert found(KLEstimate(), **at_the_reference) == ""


def test_estimates_of_a_large_divergence_may_differ_by_a_share_of_it():
    assert found(KLEstimate(), kl__per_token=[-0.08], kl__k3=[0.08]) != ""
    assert found(KLEstimate(), kl__per_token=[1.4], kl__k3=[1.0]) == ""  # allowed: 0.05 + 0.5 * 1.0
    assert found(KLEstimate(), kl__per_token=[1.6], kl__k3=[1.0]).endswith("difference 0.6 > 0.55")
