"""Verifiable rewards on answers as models write them."""

from decimal import Decimal

import pytest

from rlhf_core.rewards.verifiable import (
    answer_tag_match,
    boxed_format,
    boxed_match,
    exact_match,
    final_line_format,
    final_number,
    finished,
    read_boxed,
    read_final_number,
    think_format,
)
from tests.rlhf_core.rewards.answers import answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3 + 4 = 7 apples.\n#### 7", "7"),
        ("#### $1,234.50.", "1234.5"),
        ("#### 42 of them, not 43", "42"),
        (r"first 9, so \boxed{-12} and 5 left", "-12"),
        ("between 3 and 8, so 8.", "8"),
        ("the answer is 0.50", "0.5"),
        ("100", "100"),
        ("half: .5", "0.5"),
        ("a walk of 3-4 km", "4"),
        ("(2)-5", "5"),
        ("it falls to -5", "-5"),
    ],
)
def test_the_final_number_is_read_as_people_write_it(text, number):
    assert read_final_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["no idea", "#### none", ""])
def test_an_answer_without_a_number_has_none(text):
    assert read_final_number(text) is None


def test_final_number_compares_values_and_not_spellings():
    texts = ["#### 1,000", "it is 1000.00", "#### 1001", "who knows"]
    assert final_number([answer(text, label="so 10 * 100 #### 1000") for text in texts]) == [1.0, 1.0, 0.0, 0.0]


def test_a_number_elsewhere_does_not_earn_the_reward():
    assert final_number([answer("7 is the answer, or 8", label="7")]) == [0.0]


def test_exact_match_forgives_case_space_and_a_final_period_only():
    texts = [" paris. ", "Paris", "Paris, France", ""]
    assert exact_match([answer(text, label="Paris") for text in texts]) == [1.0, 1.0, 0.0, 0.0]


def test_boxes_are_read_with_balanced_braces():
    assert read_boxed(r"\boxed{1} \boxed{\frac{1}{2}} done") == r"\frac{1}{2}"
    assert read_boxed(r"\boxed{1") is None
    assert read_boxed("1") is None


def test_boxed_match_takes_the_last_box_as_number_or_text():
    texts = [r"\boxed{2} so \boxed{0.50}", r"\boxed{0.5} so \boxed{2}", "0.5"]
    assert boxed_match([answer(text, label=".5") for text in texts]) == [1.0, 0.0, 0.0]
    assert boxed_match([answer(r"\boxed{x + 1}", label=r"thus \boxed{X +  1}")]) == [1.0]


def test_answer_tags_need_their_format_and_the_label():
    right = "<think>2+2</think>\n<answer>4</answer>"
    assert answer_tag_match([answer(right, label="4"), answer(right, label="5"), answer("4", label="4")]) == [
        1.0,
        0.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think> <answer>b</answer>\n", 1.0),
        ("<think></think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> and more", 0.0),
        ("<think>a<think>c</think></think><answer>b</answer>", 0.0),
        ("<think>a</think><answer><answer>b</answer></answer>", 0.0),
        ("<think>1 < 2 and 3<4</think><answer>x <= <b>y</b></answer>", 1.0),
        ("<answer>b</answer>", 0.0),
    ],
)
def test_the_think_format_is_all_or_nothing(text, reward):
    assert think_format([answer(text)]) == [reward]


def test_the_box_format_wants_exactly_one_closed_box():
    assert boxed_format([answer(r"\boxed{1}"), answer(r"\boxed{1} \boxed{2}"), answer(r"\boxed{1")]) == [1.0, 0.0, 0.0]


def test_the_final_line_holds_the_one_number_and_ends_the_answer():
    good = [answer("4 + 4 = 8\n#### 8"), answer("so\n#### $1,050.")]
    bad = [
        answer("8"),
        answer("it is #### 8"),
        answer("\n#### 8 apples"),
        answer("\n#### 8\n#### 9"),
        answer("\n#### "),
    ]
    assert final_line_format([*good, *bad]) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert final_line_format([answer("\n#### 8", finish_reason="length")]) == [0.0]


def test_finished_sees_the_token_limit():
    assert finished([answer("a"), answer("a", finish_reason="length")]) == [1.0, 0.0]


@pytest.mark.parametrize("reward", [final_number, exact_match, boxed_match, answer_tag_match])
def test_a_prompt_without_a_label_is_an_error_and_not_a_zero(reward):
    with pytest.raises(ValueError, match="prompt p has no label"):
        reward([answer("4", label=" ")])


@pytest.mark.parametrize("reward", [final_number, exact_match, boxed_match, answer_tag_match])
@pytest.mark.parametrize("label", [".", r"\boxed{}", r"\boxed{ . }"])
def test_a_label_that_says_nothing_is_none(reward, label):
    with pytest.raises(ValueError, match="prompt p has no label"):
        reward([answer(label, label=label)])


@pytest.mark.parametrize("label", ['{"answer": 4, "level": 3}', "[4, 3]"])
def test_the_last_number_of_a_table_is_not_its_answer(label):
    with pytest.raises(ValueError, match="holds no number"):
        final_number([answer("3", label=label)])
