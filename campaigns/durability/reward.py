"""Reward function for the kill campaign, which copies this file to the folder of a run and edits it."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.types import Generation

LENGTH = 20.0


def brief(generations: Sequence[Generation]) -> list[float]:
    """Score short answers highest: 0 for an empty answer, -1 for one of `LENGTH` characters."""
    return [-len(generation.completion.text) / LENGTH for generation in generations]
