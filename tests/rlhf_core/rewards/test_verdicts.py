"""Scores in a judge's reply: what is read, and what is refused because it can be read in two ways."""

import pytest

from rlhf_core.config.rewards import JsonVerdict, PatternVerdict
from rlhf_core.rewards.verdicts import find_verdict, read_number, read_score, read_scores


@pytest.mark.parametrize(
    ("text", "verdict", "score"),
    [
        ("Score: 8", PatternVerdict(), 8.0),
        ("score = 3.5\nno: Score: 4", PatternVerdict(), 4.0),  # the last one counts
        ("SCORE:-1", PatternVerdict(), -1.0),
        ("**Score:** 8", PatternVerdict(), 8.0),
        ("__Score__: **7.5**", PatternVerdict(), 7.5),
        ('{"score": 8}', JsonVerdict(), 8.0),
        ('first {"score": 1}, final: ```{"why": {"x": 1}, "score": "2"}```', JsonVerdict(), 2.0),
    ],
)
def test_the_last_score_counts(text, verdict, score):
    assert read_score(text, verdict, low=-10, high=10) == score


@pytest.mark.parametrize(
    ("text", "verdict", "message"),
    [
        ("very good", PatternVerdict(), "holds no score"),
        ("Score: 11", PatternVerdict(), "not between 0 and 10"),
        ("Score: <7", PatternVerdict(), "holds no score"),
        ('{"score": [1]}', PatternVerdict(), "holds no score"),
        ('{"score": null}', JsonVerdict(), "holds no score"),
        ('{"score": "good"}', JsonVerdict(), "'good' is not a number"),
        ('{"score": NaN}', JsonVerdict(), "nan is not between"),
        ('{"points": 3}', JsonVerdict(), "holds no score"),
        ("{", JsonVerdict(), "holds no score"),
        ('{"a":' * 2000, JsonVerdict(), "holds no score"),
    ],
)
def test_an_answer_without_a_score_is_not_zero(text, verdict, message):
    with pytest.raises(ValueError, match=message):
        read_score(text, verdict, low=0, high=10)


def test_a_pattern_may_hold_the_list_of_scores():
    verdict = PatternVerdict(pattern=r"Scores: (.*)")
    assert read_scores("Scores: 1, 2\nFinal Scores: [3; -4.5]", verdict, count=2, low=-5, high=5) == [3.0, -4.5]


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("8/10", 8.0),
        ("8 points out of 10.", 8.0),
        ("7 (out of a maximum of 10)", 7.0),
        ("8点（10点満点）", 8.0),
        ("8 of ten", 8.0),
        ("8/10 (80%)", 8.0),
        ("8 (2 of 3 criteria are met)", 8.0),
        ("8 (20% of the facts are missing)", 8.0),
        ("7,5", 7.5),
        ("0,125", 0.125),
        ("７", 7.0),
        ("٧٫٥", 7.5),
        ("\u22125", -5.0),
        ("1e-1", 0.1),
        ("7, which is good", 7.0),
        ("7 - fine", 7.0),
        ("8.\n2 errors", 8.0),
        ("7. 5 errors", 7.0),
        ("**7.5**", 7.5),
        ("8/1e1", 8.0),
        ("8 (80/100)", 8.0),
        ("8 - right", 8.0),
        ("8 because 3 of 4 steps are right, 100% of the code runs and step 2 has 1 error", 8.0),
        ("8 (1 point off for style)", 8.0),
        ("8. I would give 10 with a proof", 8.0),
        ("8\nOn reflection, 3 parts are long", 8.0),
        ("8\nMaximum: 10", 8.0),
        ("8 stars out of 10 stars ⭐", 8.0),
        ("8 because of the top 5 list", 8.0),
        ("10/10 - 100% correct", 10.0),
    ],
)
def test_a_number_is_read_as_people_write_it(said, score):
    assert read_number(said, low=-10, high=10) == score
    assert read_score(f"**Score:** {said}", PatternVerdict(pattern=r"Score\W+?([-\d].*)"), low=-10, high=10) == score


@pytest.mark.parametrize(
    ("said", "rule"),
    [
        ("1/5", "on another scale"),
        ("3 Punkte von 5", "on another scale"),
        ("3（满分5分）", "on another scale"),
        ("4 on a 5-point scale", "on another scale"),
        ("1%", "on another scale"),
        ("4 out of five", "on another scale"),
        ("3\u20445", "on another scale"),
        ("3\n/5", "several ways"),
        ("4 (1-5)", "on another scale"),
        ("4 (5 is best)", "on another scale"),
        ("3, with 5 being the highest", "on another scale"),
        ("8\\%", "on another scale"),
        ("4/5e0", "on another scale"),
        ("8 out of a hundred", "on another scale"),
        ("8 as a percentage", "on another scale"),
        ("4⭐/5⭐", "on another scale"),
        ("4\nMax: five, not 5", "in several ways"),
        ("4. The 1 is 5", "in several ways"),
        ("8 (1/0)", "on another scale"),
        ("7, maybe 8", "in several ways"),
        ("7..8", "in several ways"),
        ("7\nFinal: 6", "in several ways"),
        ("8 is too high", "in several ways"),
        ("8_500", "in several ways"),
        ("8€", "in several ways"),
        ("1,000", "in several ways"),
        ("1\u00a0000", "in several ways"),
        ("7-8", "in several ways"),
        ("4 * 2 = 8", "in several ways"),
        ("0·8", "in several ways"),
        ("7½", "in several ways"),
        ("7th", "in several ways"),
        ("good", "not a number"),
    ],
)
def test_a_number_on_another_scale_or_of_two_readings_is_no_score(said, rule):
    with pytest.raises(ValueError, match=rule):
        read_number(said, low=0, high=10)


def test_the_highest_possible_score_is_not_the_score():
    assert read_score("Score: 8\nMaximum score: 10", PatternVerdict(), low=0, high=10) == 8.0
    assert read_score('{"score": 8, "max_score": 10}', JsonVerdict(), low=0, high=10) == 8.0
    for field in (
        '"max_score": 5',
        '"outOf": 5',
        '"scale": "1-5"',
        '"score_max": 5',
        '"points possible": 5',
        '"unit": "%"',
        '"scale": "five"',
        '"why": "I rate from 1 to 5."',
    ):
        with pytest.raises(ValueError, match="on another scale"):
            read_score(f'{{"score": 4, {field}}}', JsonVerdict(), low=0, high=10)


def test_percentages_are_scores_where_scores_go_to_a_hundred():
    assert read_number("80 %", low=0, high=100) == 80.0


def test_a_pattern_that_matches_the_last_digit_is_named():
    with pytest.raises(ValueError, match="a part of a number"):
        read_score("Score: 10", PatternVerdict(pattern=r".*(\d+)"), low=0, high=10)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 0.9, "criteria": {"clear": {"score": 3}}}', 0.9),
        ('{"details": [{"score": 2}, {"score": 10}], "score": 9}', 9.0),
        ('[1] lacks a `{`. {"score": 8}', 8.0),
        ('The form is {"score": <number>}. {"score": 8}', 8.0),
        ('\\frac{a}{b} {"score": 8, "why": "no }"}', 8.0),
        ('<think>{"score": 2}</think>{"score": "8/10"} {"name": "x"}', 8.0),
    ],
)
def test_the_field_of_an_outermost_object_counts(text, score):
    assert read_score(text, JsonVerdict(), low=0, high=10) == score


@pytest.mark.parametrize(
    "text",
    [
        '{"criteria": {"clear": {"score": 3}}}',
        '[{"score": 2}, {"score": 10}]',
        '[{"score": 2}, {"score": 10}',
        '{"score": 7,5, "criteria": {"score": 3}}',
        "{score: 9, 'criteria': {\"score\": 3}}",
        '{"score": 9, "details": [{"score": 2}',
        '{"score": 9, "score": 2}',
        '<think>{"score": 2}</think> It is fine.',
        '<think>{"score": 2}',
    ],
)
def test_a_score_inside_of_something_else_is_not_the_score(text):
    assert find_verdict(text, JsonVerdict()) is None


@pytest.mark.parametrize("value", ["true", "[8]", '{"value": 8}', '"8 or 9"', '"3 out of 5"'])
def test_a_field_must_be_one_number(value):
    with pytest.raises(ValueError, match="judge's score"):
        read_score(f'{{"score": {value}}}', JsonVerdict(), low=0, high=10)


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        ("7,5; 8", [7.5, 8.0]),
        ("7,5, 8", [7.5, 8.0]),
        ("8,9", [8.0, 9.0]),
        ("8 9", [8.0, 9.0]),
        ("[8/10, 9/10]", [8.0, 9.0]),
    ],
)
def test_a_list_of_scores_is_cut_between_its_numbers(text, scores):
    verdict = PatternVerdict(pattern=r"Scores: (.*)")
    assert read_scores(f"Scores: {text}", verdict, count=2, low=0, high=10) == scores


@pytest.mark.parametrize("text", ["3/5, 4/5", "1: 8, 2: 9", "7 to 8, 9"])
def test_a_list_of_other_numbers_is_refused(text):
    with pytest.raises(ValueError, match="judge's score"):
        read_scores(f"Scores: {text}", PatternVerdict(pattern=r"Scores: (.*)"), count=2, low=0, high=10)


@pytest.mark.parametrize("tag", ["<think>", "<scratchpad>", "<Reflection>", "[THINK]", "◁think▷", "<seed:think>"])
def test_a_score_among_thoughts_is_no_score(tag):
    end = tag.replace(tag[0], f"{tag[0]}/", 1)
    for text in (f"{tag}Score: 3? Hm", f"{tag}Score: 3?{end} It is fine."):
        with pytest.raises(ValueError, match="holds no score"):
            read_score(text, PatternVerdict(), low=0, high=10)
    assert read_score(f"{tag}Score: 3?{end} <answer>Score: 7</answer>", PatternVerdict(), low=0, high=10) == 7.0
    assert read_score(f"Score: 7 {tag}or 3{end}", PatternVerdict(), low=0, high=10) == 7.0


def test_only_tags_of_verdicts_and_of_the_pattern_are_read():
    with pytest.raises(ValueError, match="holds no score"):
        read_score("<example>Score: 3</example>", PatternVerdict(), low=0, high=10)
    verdict = PatternVerdict(pattern=r"<quality>(\d+)</quality>")
    assert read_score("<quality>3</quality>", verdict, low=0, high=10) == 3.0


@pytest.mark.parametrize("said", ["1. 8\n2. 3", "1) 8\n2) 3"])
def test_numbers_of_a_list_are_no_scores(said):
    with pytest.raises(ValueError, match="name answers"):
        read_scores(f"Scores:\n{said}", PatternVerdict(pattern=r"(?s)Scores:\s*(.*)"), count=2, low=0, high=10)


@pytest.mark.parametrize(
    "other", ["Style score: 3", "Passing score: 5", "(not Score: 3)", "Subscore: 3", "Top score: 10"]
)
def test_the_score_of_something_else_is_not_the_score(other):
    assert read_score(f"Score: 7\n{other}", PatternVerdict(), low=0, high=10) == 7.0
    assert read_score("Helpfulness score: 7", PatternVerdict(), low=0, high=10) == 7.0
    with pytest.raises(ValueError, match="holds several scores"):
        read_score("Clarity score: 7\nStyle score: 8", PatternVerdict(), low=0, high=10)


@pytest.mark.parametrize("score", ["Score: 4", '{"score": 4}', '```json\n{"score": 4}\n```'])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", " // out of 5"),
        ("", " out of 5"),
        ("", "/5"),
        ("", "%"),
        ("", "\n(Scale: 1-5)"),
        ("", " (1-5)"),
        ("", ", max 5"),
        ("", " where 5 is best"),
        ("Out of 5: ", ""),
        ("On a scale of 1-5:\n", ""),
        ("Score out of 5:\n```json\n", "\n```"),
        ("The scale is 1-5. ", ""),
    ],
)
def test_a_scale_beside_the_score_counts(score, before, after):
    with pytest.raises(ValueError, match=r"another scale|several ways"):
        read_score(f"{before}{score}{after}", JsonVerdict() if "{" in score else PatternVerdict(), low=0, high=10)


@pytest.mark.parametrize(
    "text",
    [
        "Clarity 3/5, accuracy 4/5.\n{}",
        "{}\nOf 5 facts 3 are right.",
        "2 of 5 claims are wrong. {}, 2 errors",
        "{}\n\nBreakdown: style 4/5",
        "On a scale of 0 to 10: {}",
        "{} (out of 10)",
    ],
)
def test_other_numbers_beside_the_score_are_ignored(text):
    for score, verdict in (("Score: 8", PatternVerdict()), ('{"score": 8}', JsonVerdict())):
        assert read_score(text.replace("{}", score), verdict, low=0, high=10) == 8.0


@pytest.mark.parametrize(
    "rest", ["scale" + "-" * 9000, "of a " * 2000, "1" * 9000, "1 " * 4000, "` " * 4000, "(1-" * 3000]
)
def test_a_long_reply_is_read_in_linear_time(rest):
    with pytest.raises(ValueError, match="score"):  # with nested repetitions this takes hours
        read_number(f"8 {rest} 9", low=0, high=10)


@pytest.mark.parametrize(
    ("text", "high"),
    [
        ("Score: 3. After checking, I settle on Score: 8", 10),
        ("Clarity - Score: 3\nAccuracy - Score: 9\nWeighted Score: 6", 10),
        ("Score: 3\nAverage Score: 8", 10),
        ("Answer A Score: 8\nAnswer B Score: 3", 10),
        ("Score: 4. No, three.", 10),
        ("Score: 1. No, zero.", 1),
        ("Score: 5. On reflection, 3.", 10),
        ("Score: 5\nRating: 3", 10),
        ("Score: 5 (perfect score)", 10),
        ("Score: 5, the maximum", 10),
        ("Score: 1 (full marks)", 10),
        ("Score: 4. 5 is best.", 10),
        ("Score: 4. Scores go from one to five.", 10),
        ("1 (worst) to 5 (best)\nScore: 4", 10),
        ("Score: 4\nFull marks: 7", 10),
        ("Score: 4. A perfect answer would get 5.", 10),
        ("5 - excellent\nScore: 4", 10),
        ("Score: 4. That is 4 out of 5.", 10),
        ("Score: 4\n★★★★☆", 10),
        ("Score: [4/5]", 10),
        ("Score (1-5): [4]", 10),
        ("Score: 3. Make it 8.", 10),
    ],
)
def test_a_score_that_a_later_word_changes_is_asked_for_again(text, high):
    with pytest.raises(ValueError, match="judge's"):
        read_score(text, PatternVerdict(), low=0, high=high)


@pytest.mark.parametrize(
    "text",
    [
        *("Score: 6. Well, upon reconsideration, 4.", "Score: 6\n\nUpon reconsideration: 4", "Score: 6. Let me adjust to 4."),
        *("Score: 6. That seems too high. I'd go with 4.", "Score: 6. I think 4 is fairer.", "Score: 6. Minus 2 for errors.", "Score: 9 for style, 3 for accuracy"),
        *("Score: 6. Downgraded to 4 because of the typo.", "Score: 6. After a penalty of 2, it is 4."),
        *("Score: 4. Where 1 is awful and 5 is flawless.", "Score: 4. (1=awful, 5=flawless)", "With 5 as the ideal.\nScore: 4"),
        *("I rate on 1..5.\nScore: 4", "Score: 4. My grades run 0 through 5.", "Score: 1 (worst)", "Score: 1 - the lowest score."),
    ],
)  # fmt: skip
def test_other_words_that_change_a_score_or_its_scale_are_understood(text):
    with pytest.raises(ValueError, match="judge's"):
        read_score(text, PatternVerdict(), low=0, high=10)


def test_the_lowest_score_may_be_called_so():
    assert read_score("Score: 1 (worst)", PatternVerdict(), low=1, high=5) == 1
    assert read_score("Score: 3. Worst part: the end.", PatternVerdict(), low=1, high=5) == 3


@pytest.mark.parametrize("other", ['"final_score": 4', '"revised_score": 4', '"limit": 5', '"rubric_max": 5'])
def test_another_field_may_say_what_the_score_is(other):
    with pytest.raises(ValueError, match=r"two scores|another scale"):
        read_score(f'{{"score": 8, {other}}}', JsonVerdict(), low=0, high=10)
    assert read_score('{"score": 8, "final_score": 8, "limit": 10}', JsonVerdict(), low=0, high=10) == 8


@pytest.mark.parametrize(
    "said", ["8 (second), 1 (first)", "8 (B), 1 (A)", "8 for the second, 1 for the first", "8 - latter, 1"]
)
def test_scores_with_names_of_answers_may_be_in_another_order(said):
    with pytest.raises(ValueError, match="name answers"):
        read_scores(f"Scores: {said}", PatternVerdict(pattern=r"Scores: (.*)"), count=2, low=0, high=10)


@pytest.mark.parametrize("after", ["No wait: 6", "\nActually 6.", "\n\nCorrection: 6", "// out of 100"])
def test_an_object_that_a_later_word_changes_is_asked_for_again(after):
    with pytest.raises(ValueError, match="judge's"):
        read_score(f'{{"score": 8}} {after}', JsonVerdict(), low=0, high=10)
    assert read_score('{"score": 8}\nThe answer has 2 errors.', JsonVerdict(), low=0, high=10) == 8.0


@pytest.mark.parametrize(
    ("text", "low", "high", "score"),
    [
        ("Score: 1 (on a scale from -1 to 1)", -1, 1, 1.0),
        ("Score: -1 (on a scale of -1 to +1)", -1, 1, -1.0),
        ("Score: -0.5 (range [-1, 1])", -1, 1, -0.5),
        ("Score: 4 (1 = worst, 5 = best)", 1, 5, 4.0),
        ("Score: 10 (full marks)", 0, 10, 10.0),
        ("Score: [8/10]. 10 is best", 0, 10, 8.0),
        ("**Score (0-10):** 8. The top 5 list has 2 errors", 0, 10, 8.0),
    ],
)
def test_a_scale_with_both_ends_is_understood(text, low, high, score):
    assert read_score(text, PatternVerdict(), low=low, high=high) == score


def test_scores_may_begin_with_a_point():
    assert read_scores("Scores: .8, .9", PatternVerdict(pattern=r"Scores: (.*)"), count=2, low=0, high=1) == [0.8, 0.9]


@pytest.mark.parametrize(
    "text",
    [
        *("An ideal answer has Score: 10. This gets 2.", "Do not give Score: 10", "If it were right, Score: 10", "Score: 10?"),
        *("Score: 6\n\n5", "Score: 6. Second thoughts: 5", "Score: 6. I retract that. 4 it is", "Score: 6\n6 - 2 = 4"),
        *("Clarity - Score: 3\nAccuracy - Score: 9", "Score: 3\nScore: 9", "Score: 6. Minus one point."),
        *("Score: 0.8 (i.e. 80%)", "I use 0 to 5.\nScore: 4", "Score: 4 stars", "Score: 2 (lower is better)"),
        *("Score: 10 (very poor)", "Score: 0 - excellent", "10 = terrible. Score: 10"),
        *('{"score": 6}\n\n5', '{"score": 6}\n{"score": 4}', 'Schema: {"score": 5}', '{"score": 6, "overall": 4}'),
        *('{"score": 0.8, "percent": 80}', '{"score": 4, "unit": "stars"}'),
    ],
)  # fmt: skip
def test_a_reply_with_a_second_number_that_nothing_explains_is_asked_for_again(text):
    with pytest.raises(ValueError, match="judge's"):
        read_score(text, JsonVerdict() if "{" in text else PatternVerdict(), low=0, high=10)


@pytest.mark.parametrize(
    "text", ["Score: 1 star", "Score: 1 = terrible", "Score: 1 (very poor)", "I use 0 to 10.\nScore: 1"]
)
def test_the_top_of_a_small_scale_is_not_the_bottom_of_a_larger_one(text):
    with pytest.raises(ValueError, match="judge's"):
        read_score(text, PatternVerdict(), low=0, high=1)


@pytest.mark.parametrize(
    "after",
    [
        *("The correct answer is 4.", "3 + 4 is 7, as it says.", "1. It is clear.\n2. It is short.", "It took place in 1969."),
        *("Style score: 3", "The answer says 5.", "With sources it would be 10.", "For n = 0 it fails.", "1 fact is wrong."),
    ],
)  # fmt: skip
def test_explained_numbers_after_a_score_change_nothing(after):
    assert read_score(f"Score: 6\n{after}", PatternVerdict(), low=0, high=10) == 6.0
    assert read_score(f'{{"score": 6}}\n{after}', JsonVerdict(), low=0, high=10) == 6.0


@pytest.mark.parametrize(
    "field", ['"order": ["B", "A"]', '"ids": [2, 1]', '"order": "second, first"', '"reverse": true']
)
def test_scores_in_another_order_are_refused(field):
    for text in (f'{{"scores": [8, 1], {field}}}', f'{{{field}, "scores": [8, 1]}}'):
        with pytest.raises(ValueError, match="name answers"):
            read_scores(text, JsonVerdict(field="scores"), count=2, low=0, high=10)
    text = '{"scores": [8, 1], "order": ["A", "B"], "best": 1, "errors": [2, 1]}'
    assert read_scores(text, JsonVerdict(field="scores"), count=2, low=0, high=10) == [8.0, 1.0]
