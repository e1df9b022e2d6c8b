"""What a server scores with, without the server."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlhf_core.errors import RewardError
from rlhf_core.rewards.batches import RewardOutcome
from rlhf_core.rewards.server import Query, as_it_stands, function_score, rendered, reward_model_score
from rlhf_core.types import Generation, Message


class Model:
    """Scores a sequence by its sum; keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def scores(self, sequences: Sequence[tuple[int, ...]]) -> list[float]:
        self.seen += sequences
        return [float(sum(sequence)) for sequence in sequences]


def tokenize(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def test_a_function_gets_prompt_answer_and_label_as_they_were_sent() -> None:
    seen: list[Generation] = []

    def reward(generations: Sequence[Generation]) -> RewardOutcome:
        seen.extend(generations)
        return RewardOutcome((1.0, None), logs={"hits": (1.0, 2)})

    outcome = function_score(reward)([Query("2+2? 4", "2+2? ", "4"), Query("no prompt", "", "")])
    assert outcome == RewardOutcome((1.0, None), logs={"hits": (1.0, 2)})
    assert [(one.prompt.messages, one.completion.text, one.prompt.label) for one in seen] == [
        ((Message("user", "2+2? "),), "4", "4"),
        ((Message("user", ""),), "no prompt", ""),
    ]


@pytest.mark.parametrize(
    ("values", "problem"), [((1.0,), "for 2 answers"), ((1.0, float("nan")), r"rewards\[1\] = nan")]
)
def test_what_json_cannot_say_is_refused(values: tuple[float, ...], problem: str) -> None:
    score = function_score(lambda generations: RewardOutcome(values))
    with pytest.raises(RewardError, match=problem):
        score([Query("a", "", ""), Query("b", "", "")])


def test_a_rendered_query_is_read_as_it_stands_and_cut_like_in_training() -> None:
    model = Model()
    score = reward_model_score(model, as_it_stands(tokenize), max_length=3)  # type: ignore[arg-type]
    assert score([Query("ab", "a", ""), Query("abcd", "", "")]).values == (97.0 + 98, 97.0 + 98 + 99)
    assert model.seen == [(97, 98), (97, 98, 99)]
    with pytest.raises(RewardError, match="no token"):
        score([Query("", "", "")])


def test_a_plain_query_is_rendered_by_the_template_with_an_end_of_turn() -> None:
    encode = rendered(lambda prompt, answer: (*tokenize(f"<{prompt}>{answer}"), 0))
    assert encode(Query("hi you", "hi ", "")) == (*b"<hi >you", 0)
    with pytest.raises(RewardError, match="does not begin with it"):
        encode(Query("you", "hi", ""))
