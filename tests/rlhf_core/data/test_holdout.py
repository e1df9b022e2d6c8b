from __future__ import annotations

import pytest

from rlhf_core.data.mixing import held_out

PROMPTS = [f"p{i}" for i in range(40)]


@pytest.mark.parametrize(("count", "fraction", "expected"), [(40, 0.05, 2), (40, 0.01, 1), (40, 0.0, 0), (1, 0.5, 0)])
def test_a_fraction_is_held_out_and_at_least_one(count: int, fraction: float, expected: int) -> None:
    assert len(held_out(PROMPTS[:count], fraction=fraction, seed=17)) == expected


def test_it_depends_on_the_seed_and_not_on_order_or_repetition() -> None:
    chosen = held_out(PROMPTS, fraction=0.25, seed=17)
    assert held_out(PROMPTS[::-1] * 2, fraction=0.25, seed=17) == chosen
    assert held_out(PROMPTS, fraction=0.25, seed=18) != chosen
