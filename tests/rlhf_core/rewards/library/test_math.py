"""Mathematical answers against labels."""

import threading

import pytest

from rlhf_core.errors import RewardError
from rlhf_core.rewards.library import math as module
from rlhf_core.rewards.library.math import math_reward


def reward(answer: str, label: str | None, **options: float) -> float | None:
    pytest.importorskip("math_verify")
    return math_reward(["?"], [answer], [label], **options)[0]


@pytest.mark.parametrize(
    ("answer", "label", "expected"),
    [
        (r"so it is $\frac{1}{2}$", "0.5", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{1 + x^2}", "x^2+1", 1.0),
        (r"\boxed{1 + x^2}", "$x^2+1$", 1.0),
        ("It is 42 and then 40.", "42", 0.0),
        ("42", "42.", 1.0),
        (r"\boxed{0.00001}", "1e-05", 1.0),
        (r"\boxed{1000}", "1e3", 1.0),
        ("no number at all", "42", 0.0),
        ("42", "", None),
        ("42", None, None),
        ("42", '{"answer": 42}', None),
    ],
)
def test_an_answer_counts_by_what_it_means(answer, label, expected):
    assert reward(answer, label) == expected


def test_what_takes_too_long_is_not_judged_rather_than_wrong(monkeypatch):
    def forever(*arguments: object) -> bool:
        while True:
            try:
                sum(range(1000))
            except Exception:  # as math-verify does: our deadline must get through
                continue

    monkeypatch.setattr(module, "_equal", forever)
    assert reward("1", "1", timeout_s=0.2) is None


def test_a_thread_is_refused_because_the_deadline_is_a_signal():
    problems: list[RewardError] = []

    def run() -> None:
        try:
            math_reward(["?"], ["1"], ["1"])
        except RewardError as error:
            problems.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in str(problems[0])
