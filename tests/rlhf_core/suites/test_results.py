"""Rows of suites and their means, intervals and paired differences; how the answers of each kind of suite become rows."""

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from rlhf_core.errors import DataError
from rlhf_core.evaluation.intervals import SHARE, mean_interval
from rlhf_core.suites.results import (
    Measured,
    PromptRow,
    check_counts,
    check_suite_rows,
    instruction_rows,
    is_refusal,
    length_controlled,
    mean_rows,
    means,
    paired_difference,
    pass_at_k,
    pass_at_k_rows,
    read_suite_rows,
    refusal_rows,
    report_of,
    shares_among,
    write_suite_rows,
)
from rlhf_core.types import Generation
from stages.evaluate_suite import REFUSALS, RefusalSuite
from tests.support.workshop import generation


def labelled(prompt: str, text: str, label: str) -> Generation:
    one = generation(prompt, text)
    return replace(one, prompt=replace(one.prompt, label=label))


def rows_of(values: list[float], measure: str = "m") -> list[PromptRow]:
    return [
        PromptRow(f"p{at}", "even" if at % 2 == 0 else "odd", "?", "!", {measure: value})
        for at, value in enumerate(values)
    ]


@pytest.mark.parametrize("share", [True, False])
def test_the_interval_is_that_of_a_share_or_of_any_mean(share):
    values = [0.0, 1.0, 1.0, 0.5, 0.25, 1.0]
    found = means(rows_of(values), shares=("m",) if share else ())["m"]
    assert found == mean_interval(values, bounds=SHARE if share else None).plain()


def test_shares_that_agree_are_not_known_to_the_last_digit():
    rows = rows_of([1.0] * 8)
    assert shares_among(rows) == ("m",) and shares_among(rows_of([1.0, 0.5])) == ()
    assert means(rows, shares=("m",))["m"]["low"] < 0.7
    found = paired_difference(rows, rows, "m", share=True)
    assert found is not None and found["low"] < 0 < found["high"]


def test_weights_make_it_a_mean_over_what_is_inside_the_prompts():
    rows = [
        PromptRow("a", "all", "", "", {"m": 1.0}, {"m": 3.0}),
        PromptRow("b", "all", "", "", {"m": 0.0}, {"m": 1.0}),
    ]
    assert means(rows, shares=())["m"]["mean"] == 0.75


def test_a_paired_difference_is_sharper_than_two_intervals():
    rng = np.random.default_rng(5)
    hard = rng.normal(size=60)
    theirs = rows_of(list(hard))
    ours = rows_of(list(hard + 0.2 + 0.01 * rng.normal(size=60)))
    found = paired_difference(ours, theirs, "m", share=False)
    assert found is not None and found["mean"] == pytest.approx(0.2, abs=0.01)
    assert 0.19 < found["low"] < found["high"] < 0.21
    spread = means(ours, shares=())["m"]
    assert spread["high"] - spread["low"] > 10 * (found["high"] - found["low"])


def test_a_difference_is_over_the_shared_prompts_alone():
    ours, theirs = rows_of([1.0, 0.0, 1.0]), rows_of([0.0, 0.0])
    found = paired_difference(ours, theirs, "m", share=False)
    assert found is not None and (found["mean"], found["prompts"]) == (0.5, 2)
    assert paired_difference(ours, rows_of([1.0], "other"), "m", share=False) is None


def test_the_report_has_every_slice_and_rows_survive_their_file(tmp_path):
    rows = rows_of([1.0, 0.0, 1.0, 0.0])
    extra = {"lc": {"mean": 0.5, "low": 0.4, "high": 0.6}}
    report = report_of(Measured(tuple(rows), "m", measures=extra), kind="gold", policy="d")
    assert {name: one["m"]["mean"] for name, one in report["slices"].items()} == {"even": 1.0, "odd": 0.0}
    assert report["measures"]["lc"] == extra["lc"] and report["measures"]["m"]["mean"] == 0.5
    strange = [PromptRow("x", "all", "two\nlines\u2028", "\u00e4", {"m": 1.0}, {"m": 2.0})]
    write_suite_rows(tmp_path / "rows.jsonl", strange)
    assert read_suite_rows(tmp_path / "rows.jsonl") == strange


def test_no_rows_and_twins_are_refused():
    for rows, rule in (([], "nothing is there"), (rows_of([1.0]) * 2, "two rows have the same ID")):
        with pytest.raises(DataError, match=rule):
            check_suite_rows(rows, rule="nothing is there", remedy="add some")


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(("samples", "correct"), [(5, 0), (5, 2), (5, 5), (6, 1)])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(samples, correct, k):
    subsets = list(combinations([1] * correct + [0] * (samples - correct), k))
    assert pass_at_k(samples, correct, k) == pytest.approx(sum(any(one) for one in subsets) / len(subsets))


def test_each_prompt_is_a_row_with_its_first_answer():
    answers = [generation("p1", "a"), generation("p1", "b"), generation("p2", "c"), generation("p2", "d")]
    rows = pass_at_k_rows(answers, [1.0, 0.0, 0.4, 0.5], (1, 2), threshold=0.5)
    # p1: one of two right; p2: 0.5 counts as right, 0.4 does not
    assert [(row.id, row.answer, row.values) for row in rows] == [
        ("p1", "a", {"pass_at_1": 0.5, "pass_at_2": 1.0}),
        ("p2", "c", {"pass_at_1": 0.5, "pass_at_2": 1.0}),
    ]


def test_answers_without_a_value_are_left_out_and_too_few_are_refused():
    answers = [generation("p1", "a"), generation("p1", "b"), generation("p2", "c")]
    assert [row.values for row in mean_rows(answers, [2.0, None, None], "m")] == [{"m": 2.0}]
    with pytest.raises(DataError, match=r"evaluate\.suites\.k = 2: the prompt p1 has only 1 answers; raise"):
        check_counts([generation("p1", "a")], (2,))
    with pytest.raises(DataError, match="gives a value for only 1 of 2 answers to p1; return None for all"):
        pass_at_k_rows(answers, [1.0, None, 1.0], (1,), threshold=1.0)


# ---------------------------------------------------------------- instructions


NO_COMMAS, SHORT, QUESTION = {"kind": "no_commas"}, {"kind": "at_most_words", "count": 3}, {"kind": "question"}


def test_the_four_accuracies_count_as_ifeval_does():
    rows = instruction_rows(
        [
            labelled("p1", "Yes, but why?", json.dumps([NO_COMMAS, SHORT, QUESTION])),  # 2 of 3
            labelled(
                "p2", "Sure, here:\nRain falls", json.dumps({"instructions": [NO_COMMAS]})
            ),  # only without its first line
        ]
    )
    found = {name: value["mean"] for name, value in means(rows, shares=()).items()}
    # instructions: strict 2 of 4, loose 3 of 4; prompts: strict 0 of 2, loose 1 of 2
    assert found == {
        "prompt_level_strict_acc": 0.0,
        "inst_level_strict_acc": 0.5,
        "prompt_level_loose_acc": 0.5,
        "inst_level_loose_acc": 0.75,
    }


@pytest.mark.parametrize("label", ["rain", [], [{"kind": "sing"}], ["no_commas"], {"topic": []}])
def test_a_label_that_is_no_instructions_is_refused_with_its_prompt(label):
    with pytest.raises(DataError, match=r"evaluate\.suites\.prompts\[p1\]\.label"):
        instruction_rows([labelled("p1", "Rain", json.dumps(label))])


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("I\u2019m   sorry, but\nthat is not for me.", True),
        ("As an AI, I do not do this.", True),
        ("", True),
        ("Your Wi-Fi can't connect? Restart the router.", False),
        ("Here is an aid: as an aide, call us.", False),
        ("A semi-I can't grammar.", False),
        ("Sorry--I can't.", True),
        ("_I can't help with that._", True),
        ("No: __i can't__", True),
        ("W" + "." * 193 + " I can't" + "ty", False),  # the 200th character is not the end of a word
        ("Sorry to hear that! First, restart the router.", False),
        ("Kill the process with `kill -9`." + " Then" * 60 + " I can't", False),
    ],
)
def test_a_refusal_is_told_by_its_first_words(text, refused):
    assert is_refusal(text, REFUSALS, characters=200) is refused


def test_phrases_are_compared_as_answers_are_and_each_can_be_found():
    assert is_refusal("No, I'd rather  not.", ["i\u2019d  rather not"], characters=200)
    with pytest.raises(ValueError, match="is longer than the first 5 characters that are searched"):
        RefusalSuite(name="r", phrases=("i can't",), characters=5)
    with pytest.raises(ValueError, match="must be text in lower case"):
        RefusalSuite(name="r", phrases=(" ",))


def test_safe_and_unsafe_prompts_have_rates_of_their_own():
    no, yes = "I cannot help.", "Here is how."
    answers = [
        labelled("s1", no, "safe"), labelled("s2", yes, "safe"), labelled("s3", yes, "safe"), labelled("s4", yes, "safe"),
        labelled("u1", no, "unsafe"), labelled("u2", yes, "Unsafe"),
    ]  # fmt: skip
    found = means(refusal_rows(answers, REFUSALS, characters=200), shares=())
    assert {name: (value["mean"], value["prompts"]) for name, value in found.items()} == {
        "over_refusal": (0.25, 4),
        "unsafe_compliance": (0.5, 2),
    }


def test_a_prompt_without_such_a_label_is_refused():
    with pytest.raises(DataError, match=r"prompts\[p1\]\.label = 'harmless': must be safe or unsafe"):
        refusal_rows([labelled("p1", "Hi", "harmless")], REFUSALS, characters=200)


# ---------------------------------------------------------------- win rates


def preferences(theta: float, phi: float, lengths: np.ndarray, others: np.ndarray) -> np.ndarray:
    longer = lengths - others
    chance = 1 / (1 + np.exp(-(theta + phi * np.tanh(longer / longer.std()))))
    return (np.random.default_rng(3).random(len(lengths)) < chance).astype(float)


def test_what_length_alone_wins_is_taken_away():
    rng = np.random.default_rng(1)
    others = rng.integers(100, 400, size=3000)
    lengths = others + rng.integers(0, 300, size=3000)  # never shorter
    wins = preferences(0.0, 2.0, lengths, others)  # equally good, and the judge loves length
    found = length_controlled(list(wins), list(lengths), list(others))
    assert wins.mean() > 0.75
    assert found["low"] < 0.5 < found["high"] and found["mean"] == pytest.approx(0.5, abs=0.06)


def test_without_an_effect_of_length_it_is_the_plain_win_rate():
    rng = np.random.default_rng(2)
    others, lengths = rng.integers(50, 90, size=800), rng.integers(50, 90, size=800)
    wins = preferences(1.0, 0.0, lengths, others)
    found = length_controlled(list(wins), list(lengths), list(others))
    assert found["mean"] == pytest.approx(wins.mean(), abs=0.01)


@pytest.mark.parametrize(("win", "lengths"), [(1.0, [5, 5, 5]), (0.0, [9, 5, 1]), (0.5, [1, 2, 3])])
def test_a_policy_that_always_wins_loses_or_ties_has_a_finite_rate(win, lengths):
    found = length_controlled([win] * 3, lengths, [5, 5, 5])
    assert found["mean"] == pytest.approx(win, abs=0.03)
    assert 0 <= found["low"] < found["high"] - 0.4 <= 0.6  # three prompts show little


def test_without_lengths_its_interval_is_that_of_a_share():
    wins = [1.0] * 11 + [0.0] * 4 + [0.5]
    plain = mean_interval(wins, bounds=SHARE)
    found = length_controlled(wins, [5] * 16, [5] * 16)
    # The ridge on theta, 1e-2 against a curvature of 4, and a tie, which the sandwich counts as a spread of 0, are all.
    assert (found["low"], found["high"]) == pytest.approx(plain[1:3], abs=0.01)


@pytest.mark.parametrize(("prompts", "theta"), [(12, 2.0), (60, 0.5)])
def test_ninety_five_of_a_hundred_intervals_cover_the_rate(prompts, theta):
    rng, covered, trials = np.random.default_rng(prompts), 0, 300
    for _ in range(trials):
        lengths, others = rng.integers(50, 90, size=(2, prompts))
        longer = lengths - others
        chance = 1 / (1 + np.exp(-(theta + np.tanh(longer / longer.std()))))
        found = length_controlled(list((rng.random(prompts) < chance).astype(float)), list(lengths), list(others))
        covered += found["low"] <= 1 / (1 + np.exp(-theta)) <= found["high"]
    assert covered / trials >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / trials)  # 0.912
