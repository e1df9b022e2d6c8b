"""Which pairs are asked about, on which side, and which comparisons check the annotators."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from rlhf_core.annotation.proposing import Candidate, Comparison, candidates, chosen, comparisons, require_components
from rlhf_core.errors import DataError
from rlhf_core.types import Rollout
from tests.support.workshop import rollout


def scored(prompt: str, text: str, **components: float) -> Rollout:
    return replace(rollout(prompt, text, sum(components.values())), reward_components=components)


def pairs_of(count: int) -> list[Candidate]:
    rows = [rollout(f"p{n}", text, value) for n in range(count) for text, value in ((f"a{n}", 0.0), (f"b{n}", 1.0))]
    return [pair for found in candidates({"sft": rows}).values() for pair in found]


def texts(pairs: list[Candidate]) -> list[tuple[str, str]]:
    return [(pair.first.completion.text, pair.second.completion.text) for pair in pairs]


def test_every_pair_of_different_valid_answers_to_a_prompt_is_a_candidate():
    broken = replace(rollout("p", "d", 0.0), invalid="timed out")
    rows = [rollout("p", "a", 1.0), rollout("p", "a", 1.0), rollout("p", "b", 2.0), broken, rollout("q", "alone", 1.0)]
    found = candidates({"sft": rows, "ppo": [rollout("p", "c", 3.0)]})
    assert texts(found["p"]) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert found["p"][1].policies == ("sft", "ppo")
    assert found["q"] == []


def test_margin_takes_the_closest_rewards_first():
    rows = [rollout("p", "a", 0.0), rollout("p", "b", 1.0), rollout("p", "c", 1.1)]
    found = chosen(candidates({"sft": rows}), strategy="margin", budget=2, per_prompt=2, seed=1)
    assert texts(found) == [("b", "c"), ("a", "b")]


def test_disagreement_takes_the_pair_whose_components_disagree():
    rows = [scored("p", "a", x=0.0, y=0.0), scored("p", "b", x=1.0, y=1.0), scored("p", "c", x=2.0, y=0.5)]
    found = chosen(candidates({"sft": rows}), strategy="disagreement", budget=1, per_prompt=1, seed=1)
    assert texts(found) == [("b", "c")]
    assert found[0].disagreement == 1.0


def test_disagreement_needs_two_components():
    with pytest.raises(DataError, match="the rollouts have 1; score with two terms or more"):
        require_components({"sft": [rollout("p", "a", 1.0)]})
    require_components({"sft": [scored("p", "a", x=1.0, y=1.0)]})


@pytest.mark.parametrize("strategy", ["random", "margin", "disagreement"])
def test_the_budget_covers_the_prompts_before_it_asks_twice_about_one(strategy):
    rows = [rollout(f"p{n}", f"{text}{n}", float(value * n)) for n in range(5) for value, text in enumerate("abc")]
    found = chosen(candidates({"sft": rows}), strategy=strategy, budget=7, per_prompt=3, seed=1)
    assert sorted(Counter(pair.prompt.id for pair in found[:5]).values()) == [1] * 5
    assert len(found) == 7 and len(set(texts(found))) == 7


def test_the_draw_depends_on_the_seed_and_not_on_the_order_of_the_prompts():
    rows = [rollout(f"p{n}", f"{text}{n}", 0.0) for n in range(20) for text in "abcd"]
    options: dict[str, Any] = {"strategy": "random", "budget": 20, "per_prompt": 1}
    ours = chosen(candidates({"sft": rows}), seed=1, **options)
    backwards = chosen(candidates({"sft": sorted(rows, key=lambda row: -int(row.prompt.id[1:]))}), seed=1, **options)
    assert texts(ours) == texts(backwards)
    assert texts(ours) != texts(chosen(candidates({"sft": rows}), seed=2, **options))


def asked(count: int = 200, *, repeat: float = 0.0, attention: float = 0.0) -> list[Comparison]:
    return comparisons(pairs_of(count), repeat_fraction=repeat, attention_fraction=attention, seed=3)


def test_sides_are_random_and_recorded():
    rows = asked()
    first = sum(row.first.startswith("a") for row in rows)
    assert 70 < first < 130  # binomial, n = 200, p = 1/2: 4 standard deviations are 28
    assert len({row.id for row in rows}) == 200
    assert all({row.first[0], row.second[0]} == {"a", "b"} for row in rows)


def test_a_repeated_comparison_has_its_sides_swapped_and_trains_nothing():
    rows = {row.id: row for row in asked(repeat=0.25)}
    again = [row for row in rows.values() if row.repeats]
    assert len(again) == 50
    for row in again:
        before = rows[row.repeats]
        assert (row.first, row.second) == (before.second, before.first) and row.prompt == before.prompt
        assert not row.trains and before.trains


def test_an_attention_check_shows_the_answer_to_another_prompt():
    checks = [row for row in asked(attention=0.1) if row.expected]
    assert len(checks) == 20 and {row.expected for row in checks} == {"first", "second"}
    for row in checks:
        number = row.prompt[0].content.removeprefix("question p")
        own, strange = (row.first, row.second) if row.expected == "first" else (row.second, row.first)
        assert own[1:] == number and strange[1:] != number
        assert not row.trains


def test_a_reply_that_fits_every_prompt_is_no_attention_check():
    rows = [rollout(f"p{n}", text, 0.0) for n in range(20) for text in ("Yes.", "No.")]
    pairs = [pair for found in candidates({"sft": rows}).values() for pair in found]
    assert not any(row.expected for row in comparisons(pairs, repeat_fraction=0.0, attention_fraction=0.5, seed=3))


def test_two_prompts_with_the_same_text_and_answers_are_asked_about_once():
    [pair] = pairs_of(1)
    twin = Candidate(
        *(replace(row, prompt=replace(row.prompt, id="twin")) for row in (pair.first, pair.second)), ("sft",) * 2
    )
    rows = comparisons([pair, pair, twin], repeat_fraction=0.0, attention_fraction=0.0, seed=3)
    assert len({row.id for row in rows}) == len(rows) <= 2  # one for each order of the sides
