"""pass@k and means per prompt, by hand."""

from __future__ import annotations

from itertools import combinations

import pytest

from rlhf_core.errors import DataError
from rlhf_core.suites.results import check_counts, mean_rows, pass_at_k, pass_at_k_rows
from tests.support.workshop import generation


@pytest.mark.parametrize(("samples", "correct"), [(5, 0), (5, 2), (5, 5), (6, 1)])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(samples: int, correct: int, k: int) -> None:
    subsets = list(combinations([1] * correct + [0] * (samples - correct), k))
    assert pass_at_k(samples, correct, k) == pytest.approx(sum(any(one) for one in subsets) / len(subsets))


def test_each_prompt_is_a_row_with_its_first_answer() -> None:
    answers = [generation("p1", "a"), generation("p1", "b"), generation("p2", "c"), generation("p2", "d")]
    rows = pass_at_k_rows(answers, [1.0, 0.0, 0.4, 0.5], (1, 2), threshold=0.5)
    # p1: one of two right; p2: 0.5 counts as right, 0.4 does not
    assert [(row.id, row.answer, row.values) for row in rows] == [
        ("p1", "a", {"pass_at_1": 0.5, "pass_at_2": 1.0}),
        ("p2", "c", {"pass_at_1": 0.5, "pass_at_2": 1.0}),
    ]


def test_answers_without_a_value_are_left_out_and_too_few_are_refused() -> None:
    answers = [generation("p1", "a"), generation("p1", "b"), generation("p2", "c")]
    assert [row.values for row in mean_rows(answers, [2.0, None, None], "m")] == [{"m": 2.0}]
    with pytest.raises(DataError, match=r"evaluate\.suites\.k = 2: the prompt p1 has only 1 answers; raise"):
        check_counts([generation("p1", "a")], (2,))
    with pytest.raises(DataError, match="gives a value for only 1 of 2 answers to p1; return None for all"):
        pass_at_k_rows(answers, [1.0, None, 1.0], (1,), threshold=1.0)
