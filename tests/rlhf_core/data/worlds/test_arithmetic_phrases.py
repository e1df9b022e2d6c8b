"""Wordings that a problem fits into."""

from __future__ import annotations

from rlhf_core.data.worlds.arithmetic_phrases import HELD_OUT, WORDINGS


def test_every_wording_has_one_place_for_the_problem_and_they_differ() -> None:
    asked = [wording.format("1 + 2") for wording in WORDINGS]
    assert all(text.count("1 + 2") == 1 for text in asked)
    assert len(set(asked)) == len(WORDINGS)


def test_some_questions_are_held_out_and_most_are_not() -> None:
    assert HELD_OUT >= 2
