"""The report about annotators, against figures computed by hand and published ones."""

import pytest

from rlhf_core.annotation.agreement import judgment_report, krippendorff_alpha
from rlhf_core.annotation.proposing import Choice, Comparison, Judgment
from rlhf_core.types import Message


def comparison(name: str, *, repeats: str = "", expected: str = "") -> Comparison:
    return Comparison(name, (Message("user", name),), "", "test", "A", "B", "sft", "sft", repeats, expected)


def test_alpha_is_that_of_krippendorffs_example():
    """Krippendorff 2011, section C: nominal data, four observers, missing values; alpha = 0.743."""
    table = [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
        [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
    ]
    units = [[row[item] for row in table if row[item] is not None] for item in range(12)]
    assert krippendorff_alpha(units) == pytest.approx(0.743, abs=5e-4)  # printed with three digits


def test_alpha_without_overlap_is_unknown_and_of_one_value_is_1():
    assert krippendorff_alpha([["a"], ["b"]]) is None
    assert krippendorff_alpha([["a", "a"], ["a", "a"]]) == 1.0


def test_the_report_counts_what_people_did():
    asked = [
        *(comparison(f"c{n}") for n in range(4)),
        comparison("c0-again", repeats="c0"),
        comparison("c1-again", repeats="c1"),
        comparison("check", expected="second"),
    ]
    ada: list[Choice] = ["first", "first", "first", "tie", "second", "first", "second"]
    judgments = [Judgment(one.id, "ada", choice) for one, choice in zip(asked, ada, strict=True)]
    bob: dict[str, Choice] = {"c0": "first", "c1": "second", "c3": "tie", "check": "first"}
    judgments += [Judgment(name, "bob", choice) for name, choice in bob.items()]
    report = judgment_report(asked, judgments)
    assert report["judgments"] == 11 and report["comparisons"] == 4
    assert report["choices"] == {"first": 4, "tie": 2, "second": 1}
    assert report["agreement"]["mean"] == pytest.approx(2 / 3) and report["agreement"]["count"] == 3
    assert report["consistency"]["mean"] == 0.5  # c0 the other side of c0-again, c1 the same side
    assert report["attention"]["mean"] == 0.5
    assert report["first_chosen"]["mean"] == pytest.approx(5 / 7)  # repeats have sides too, ties have none
    assert report["annotators"]["ada"]["attention"] == 1.0 and report["annotators"]["bob"]["attention"] == 0.0
    assert report["annotators"]["bob"]["consistency"] is None


def test_what_was_not_measured_is_none():
    report = judgment_report([comparison("c")], [Judgment("c", "ada", "tie")])
    assert report["agreement"] is report["alpha"] is report["first_chosen"] is report["consistency"] is None


def test_agreement_with_a_known_reward_counts_choices_of_a_side_where_the_rewards_differ():
    """Of c0 to c5, c3 is a tie, c4 has equal rewards and c5 none: ada is right about c0 and c1 and wrong about c2."""
    choices: list[Choice] = ["first", "second", "first", "tie", "first", "second"]
    judgments = [Judgment(f"c{n}", "ada", choice) for n, choice in enumerate(choices)]
    gold = {"c0": 2.0, "c1": -0.5, "c2": -1.0, "c3": 1.0, "c4": 0.0}
    report = judgment_report([comparison(f"c{n}") for n in range(6)], judgments, gold=gold)
    assert report["gold"]["count"] == 3 and report["gold"]["mean"] == pytest.approx(2 / 3)
    assert report["annotators"]["ada"]["gold"] == pytest.approx(2 / 3)
    assert judgment_report([comparison("c0")], judgments[:1])["gold"] is None
