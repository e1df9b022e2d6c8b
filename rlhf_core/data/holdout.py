"""Choose the prompts that are held out for evaluation, from the seed and the prompts alone."""

from __future__ import annotations

from collections.abc import Iterable

from rlhf_core.types import derive_seed


def held_out(prompt_ids: Iterable[str], *, fraction: float, seed: int) -> set[str]:
    """Return the prompts to hold out: `fraction` of them and at least one, or none for one prompt or a fraction of 0.

    >>> len(held_out(["a", "b", "c"], fraction=0.05, seed=17))
    1
    """
    prompts = sorted(set(prompt_ids), key=lambda prompt: (derive_seed(seed, "eval", prompt), prompt))
    count = max(1, round(fraction * len(prompts))) if fraction and len(prompts) > 1 else 0
    return set(prompts[:count])
