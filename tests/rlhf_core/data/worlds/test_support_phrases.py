"""The gold reward tells sentences apart by their text, so no two lists may share one."""

from __future__ import annotations

import re

from rlhf_core.data.worlds import support_phrases as phrases


def test_no_sentence_has_two_meanings() -> None:
    remedies = [sentence for wordings in phrases.REMEDIES.values() for sentence in wordings]
    lists = (phrases.GREETINGS, phrases.BLANK_GREETINGS, phrases.APOLOGIES, phrases.ITEMS, phrases.THANKS)
    sentences = [*remedies, *(sentence for one in (*lists, phrases.BLAMES, phrases.FILLERS) for sentence in one)]
    assert len(sentences) == len(set(sentences)) == 10 + 2 + 1 + 2 + 2 + 2 + 2 + 2


def test_every_sentence_is_one_sentence() -> None:
    every = [*phrases.APOLOGIES, *phrases.ITEMS, *phrases.THANKS, *phrases.BLAMES, *phrases.FILLERS]
    every += [sentence for wordings in phrases.REMEDIES.values() for sentence in wordings]
    assert all(re.fullmatch(r"[^.,!?]+\.", sentence) for sentence in every)


def test_every_problem_has_a_remedy_and_names_and_things_do_not_repeat() -> None:
    assert list(phrases.PROBLEMS) == list(phrases.REMEDIES)
    assert len({*phrases.WOMEN, *phrases.MEN}) == 30
    assert len(set(phrases.THINGS)) == 20
    assert len(set(phrases.COLOURS)) == 8
