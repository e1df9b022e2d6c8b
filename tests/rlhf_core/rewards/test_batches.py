"""What passes for a reward; batches: workers, further tries, telling the culprits apart; results by content in a file."""

import math
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rlhf_core.config.rewards import Compares, OnFailure
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards.batches import (
    FAILED_CALLS,
    BatchedReward,
    BatchFailed,
    ResultCache,
    RewardOutcome,
    checked,
    merged_logs,
    reason_of,
    screened,
    shortened,
    whole_groups,
)
from rlhf_core.types import ActionSpan, Completion, Generation, Message, Prompt
from tests.rlhf_core.rewards.answers import answer


def answers(*texts: str) -> list[Generation]:
    return [answer(text) for text in texts]


class Judge:
    """Scores by length and fails for some texts; it keeps the batches that it was asked about."""

    def __init__(self, *, fails: Sequence[str] = (), times: float = math.inf) -> None:
        self.fails = fails
        self.left = times
        self.asked: list[list[str]] = []

    def __call__(self, generations: Sequence[Generation]) -> RewardOutcome:
        texts = [one.completion.text for one in generations]
        self.asked.append(texts)
        if self.left > 0 and set(texts) & set(self.fails):
            self.left -= 1
            raise BatchFailed("rewards.judge: broke", reason="broke")
        return RewardOutcome(tuple(float(len(text)) for text in texts), logs={"asked": (1.0, 1)})


def batched(
    judge: Judge,
    *,
    batch_size: int = 0,
    retries: int = 0,
    on_failure: OnFailure = "invalid",
    compares: Compares = "nothing",
    cache: ResultCache | None = None,
    pauses: list[float] | None = None,
) -> BatchedReward:
    waited = [] if pauses is None else pauses
    return BatchedReward(
        "judge",
        [judge],
        batch_size=batch_size,
        retries=retries,
        on_failure=on_failure,
        compares=compares,
        cache=cache,
        pause=waited.append,
    )


def test_batches_have_their_size_and_values_their_order():
    judge = Judge()
    outcome = batched(judge, batch_size=2)(answers("a", "bb", "ccc", "dddd", "e"))
    assert outcome.values == (1.0, 2.0, 3.0, 4.0, 1.0)
    assert judge.asked == [["a", "bb"], ["ccc", "dddd"], ["e"]]
    assert outcome.logs == {"asked": (3.0, 3)}


def test_a_batch_that_failed_is_tried_again_after_pauses_that_double():
    pauses: list[float] = []
    judge = Judge(fails=["bb"], times=3)
    assert batched(judge, retries=3, on_failure="fail", pauses=pauses)(answers("a", "bb")).values == (1.0, 2.0)
    assert pauses == [0.5, 1.0, 2.0]
    with pytest.raises(RewardError, match="broke"):
        batched(Judge(fails=["bb"], times=2), retries=1, on_failure="fail")(answers("a", "bb"))


def test_only_the_answers_that_fail_alone_become_failures():
    judge = Judge(fails=["x"])
    outcome = batched(judge)(answers(*["a"] * 5, "x", *["bb"] * 10))
    assert outcome.failures == {5: "broke"}
    assert outcome.values == (1.0,) * 5 + (None,) + (2.0,) * 10
    assert len(judge.asked) == 9  # the whole, and two halves of 16, 8, 4, 2


def test_further_tries_come_before_the_halving_and_not_within_it():
    pauses: list[float] = []
    judge = Judge(fails=["x"])
    batched(judge, retries=2, pauses=pauses)(answers("a", "x"))
    assert judge.asked == [["a", "x"]] * 3 + [["a"], ["x"]]
    assert len(pauses) == 2


def test_a_reward_that_is_broken_altogether_is_given_up_on():
    judge = Judge(fails=["x"])
    outcome = batched(judge)(answers(*["x"] * 1000))
    assert len(outcome.failures) == 1000
    assert len(judge.asked) <= FAILED_CALLS + 2


def test_four_culprits_among_a_thousand_are_found():
    texts = ["a"] * 1000
    for at in (0, 333, 334, 999):
        texts[at] = "x"
    outcome = batched(Judge(fails=["x"]))(answers(*texts))
    assert sorted(outcome.failures) == [0, 333, 334, 999]
    assert sum(value == 1.0 for value in outcome.values) == 996


class Short(Judge):
    def __call__(self, generations: Sequence[Generation]) -> RewardOutcome:
        super().__call__(generations)
        return RewardOutcome((1.0,))


def test_a_wrong_number_of_values_fails_the_batch_at_once():
    judge = Short()
    outcome = batched(judge, batch_size=2, retries=3)(answers("a", "b", "c"))
    assert outcome.values == (None, None, 1.0)
    assert outcome.failures == dict.fromkeys((0, 1), "returned 1 values for 2 generations")
    assert len(judge.asked) == 2
    with pytest.raises(RewardError, match="1: values for 2 generations"):
        batched(Short(), on_failure="fail")(answers("a", "b"))


class NotANumber(Judge):
    def __call__(self, generations: Sequence[Generation]) -> RewardOutcome:
        outcome = super().__call__(generations)
        texts = [one.completion.text for one in generations]
        return RewardOutcome(
            tuple(math.nan if text == "x" else value for text, value in zip(texts, outcome.values, strict=True))
        )


def test_a_value_that_is_no_reward_fails_alone_and_is_not_asked_for_again():
    judge = NotANumber()
    outcome = batched(judge, retries=3)(answers("a", "x"))
    assert outcome.values == (1.0, None)
    assert outcome.failures[1].startswith("returned nan")
    assert len(judge.asked) == 1
    with pytest.raises(RewardError, match=r"rewards\.judge\[prompt p\] = nan"):
        batched(NotANumber(), on_failure="fail", retries=3)(answers("a", "x"))


def test_a_configuration_that_cannot_work_is_no_failure_of_an_answer():
    def ask(generations: Sequence[Generation]) -> RewardOutcome:
        raise ConfigError("install it")

    with pytest.raises(ConfigError):
        BatchedReward("x", [ask], batch_size=0, retries=3, on_failure="invalid")(answers("a"))


def test_several_workers_answer_at_the_same_time():
    meeting = threading.Barrier(3, timeout=20)

    def ask(generations: Sequence[Generation]) -> RewardOutcome:
        meeting.wait()  # returns when three are here
        return RewardOutcome(tuple(float(one.completion.text) for one in generations))

    reward = BatchedReward("x", [ask] * 3, batch_size=0, retries=0, on_failure="fail")
    assert reward(answers("0", "1", "2", "3", "4", "5")).values == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)


def test_a_worker_answers_one_batch_at_a_time():
    busy = threading.Lock()

    def ask(generations: Sequence[Generation]) -> RewardOutcome:
        assert busy.acquire(blocking=False)
        busy.release()
        return RewardOutcome((0.0,) * len(generations))

    BatchedReward("x", [ask], batch_size=1, retries=0, on_failure="fail")(answers(*"abcdefgh"))


def test_what_is_alike_is_asked_for_once_and_what_is_known_not_again(tmp_path):
    judge = Judge(fails=["x"])
    path = tmp_path / "cache.jsonl"
    reward = batched(judge, cache=ResultCache("one", path))
    assert reward(answers("a", "bb", "a")).values == (1.0, 2.0, 1.0)
    assert judge.asked == [["a", "bb"]]
    assert reward(answers("bb", "ccc")).values == (2.0, 3.0)
    assert judge.asked[1:] == [["ccc"]]
    again = Judge()
    assert batched(again, cache=ResultCache("one", path))(answers("ccc", "a")).values == (3.0, 1.0)
    assert again.asked == []


def test_a_failure_is_not_cached(tmp_path):
    judge = Judge(fails=["x"], times=1)
    reward = batched(judge, cache=ResultCache("one", tmp_path / "cache.jsonl"))
    outcome = reward(answers("x", "a", "x"))
    assert outcome.values == (1.0, 1.0, 1.0)  # the halves succeeded
    judge.left = math.inf
    judge.fails = ["y"]
    assert reward(answers("y", "a", "y")).failures == {0: "broke", 2: "broke"}
    judge.fails = []
    assert reward(answers("y")).values == (1.0,)


def test_what_was_settled_before_a_failure_ends_the_stage_is_not_paid_for_again(tmp_path):
    judge, path = Judge(fails=["x"]), tmp_path / "cache.jsonl"
    with pytest.raises(RewardError):
        batched(judge, batch_size=2, on_failure="fail", cache=ResultCache("one", path))(answers("a", "bb", "x"))
    again = Judge()
    assert batched(again, batch_size=2, cache=ResultCache("one", path))(answers("a", "bb", "x")).values == (
        1.0,
        2.0,
        1.0,
    )
    assert again.asked == [["x"]]


class Graded(Judge):
    """Gives a score beside each value."""

    def __call__(self, generations: Sequence[Generation]) -> RewardOutcome:
        outcome = super().__call__(generations)
        return RewardOutcome(
            outcome.values, logs=outcome.logs, scores=tuple(-value for value in outcome.values if value)
        )


def test_scores_stay_with_their_answers_through_batches_halves_and_the_cache(tmp_path):
    reward = batched(Graded(), batch_size=2)
    assert reward(answers("a", "bb", "ccc")).scores == (-1.0, -2.0, -3.0)
    assert batched(Graded(fails=["x"]))(answers("a", "x", "ccc")).scores == (-1.0, None, -3.0)
    assert batched(Judge(fails=["x"]))(answers("a", "x", "ccc")).scores == ()
    path = tmp_path / "cache.jsonl"
    batched(Graded(), cache=ResultCache("one", path))(answers("a"))
    again = Graded()
    found = batched(again, cache=ResultCache("one", path))(answers("bb", "a"))
    assert (found.values, found.scores, again.asked) == ((2.0, 1.0), (-2.0, -1.0), [["bb"]])


# ---------------------------------------------------------------- what is compared stays together


def of_prompts(**texts: Sequence[str]) -> list[Generation]:
    return [replace(one, prompt=replace(one.prompt, id=name)) for name, some in texts.items() for one in answers(*some)]


def test_the_answers_to_a_prompt_are_not_parted():
    rows = of_prompts(a=["x"] * 3, b=["x"] * 2, c=["x"] * 4)
    pieces = whole_groups(rows, at_least=2)
    assert ["".join(one.prompt.id for one in piece) for piece in pieces] == ["aaa", "bb", "cccc"]
    assert [len(piece) for piece in whole_groups(rows, at_least=4)] == [5, 4]
    assert whole_groups([], at_least=4) == []


def test_a_group_that_fails_fails_as_a_whole_and_is_never_asked_in_parts():
    judge = Judge(fails=["bad"])
    rows = of_prompts(a=["1", "22"], b=["3", "bad", "4"], c=["5"])
    outcome = batched(judge, compares="group")(rows)
    assert judge.asked == [
        ["1", "22", "3", "bad", "4", "5"],
        ["1", "22"],
        ["3", "bad", "4", "5"],
        ["3", "bad", "4"],
        ["5"],
    ]
    assert outcome.values == (1.0, 2.0, None, None, None, 1.0)
    assert set(outcome.failures) == {2, 3, 4}


def test_a_batch_that_is_compared_fails_as_a_whole():
    judge = Judge(fails=["bad"])
    outcome = batched(judge, compares="batch")(of_prompts(a=["1", "22"], b=["bad"]))
    assert judge.asked == [["1", "22", "bad"]]
    assert set(outcome.failures) == {0, 1, 2}


# ---------------------------------------------------------------- cache

PROMPT = Prompt("p", (Message("user", "2+2?"),), "4", "sums")
ANSWER = Completion((5, 6), (-0.5, -0.1), "4", "stop", 3, 7)
ONE = Generation(PROMPT, (1,), ANSWER)


@pytest.mark.parametrize(
    "other",
    [
        replace(ONE, prompt=replace(PROMPT, label="5")),
        replace(ONE, prompt=replace(PROMPT, messages=(Message("user", "2+3?"),))),
        replace(ONE, prompt=replace(PROMPT, messages=(Message("system", "2+2?"),))),
        replace(ONE, completion=replace(ANSWER, text="5")),
        replace(ONE, completion=replace(ANSWER, token_ids=(5, 7))),
        replace(ONE, completion=replace(ANSWER, finish_reason="length")),
        replace(ONE, completion=replace(ANSWER, spans=(ActionSpan(0, 1, 3, 0.5),))),
        replace(ONE, completion=replace(ANSWER, extras={"turns": 2.0})),
    ],
)
def test_whatever_a_reward_can_see_is_part_of_the_key(other):
    cache = ResultCache("one", None)
    assert cache.key(other) != cache.key(ONE)


def test_who_sampled_the_answer_is_not_and_which_reward_is():
    cache = ResultCache("one", None)
    again = replace(ANSWER, seed=8, policy_version=4, logprobs=(-0.2, -0.3))
    assert cache.key(replace(ONE, completion=again)) == cache.key(ONE)
    assert ResultCache("two", None).key(ONE) != cache.key(ONE)


def test_a_file_cut_off_by_a_kill_is_read_up_to_there_and_written_on(tmp_path):
    path = tmp_path / "work" / "cache.jsonl"
    cache = ResultCache("one", path)
    cache.add(answers("a", "b"), RewardOutcome((0.1, None)))
    cache.add(answers("c"), RewardOutcome((3.0,)))
    path.write_text(path.read_text()[:-3])
    second = ResultCache("one", path)
    a, b, c = map(second.key, answers("a", "b", "c"))
    assert (second.known[a], second.known[b]) == (RewardOutcome((0.1,)), RewardOutcome((None,)))
    assert c not in second.known
    second.add(answers("c"), RewardOutcome((4.0,)))
    assert ResultCache("one", path).known[c].values == (4.0,)


def test_a_file_from_before_there_were_scores_is_read(tmp_path):
    path = tmp_path / "cache.jsonl"
    path.write_text('\n["a", 0.5]')
    cache = ResultCache("one", path)
    assert cache.known == {"a": RewardOutcome((0.5,))}
    cache.add(answers("b"), RewardOutcome((1.0,), scores=(0.25,)))
    assert ResultCache("one", path).known == {
        "a": RewardOutcome((0.5,)),
        cache.key(answers("b")[0]): RewardOutcome((1.0,), scores=(0.25,)),
    }


# ---------------------------------------------------------------- outcomes

GENERATIONS = [answer("said", prompt=name) for name in "abc"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -2e6])
def test_a_value_that_is_no_reward_is_a_failure_and_never_zero(value):
    given = RewardOutcome((0.5, value, None), logs={"n": (1.0, 1)})
    outcome = screened("quality", given, GENERATIONS, on_failure="invalid")
    assert outcome.values == (0.5, None, None)
    assert outcome.failures == {1: f"returned {value}: must be finite and within +-1e+06"}
    assert outcome.logs == {"n": (1.0, 1)}
    with pytest.raises(RewardError, match=r"rewards\.quality\[prompt b\].*'said'"):
        screened("quality", given, GENERATIONS, on_failure="fail")


def test_earlier_failures_stay():
    given = RewardOutcome((None, float("nan"), 1.0), {0: "late"})
    assert set(screened("q", given, GENERATIONS, on_failure="invalid").failures) == {0, 1}


@pytest.mark.parametrize("values", [(), (1.0,), (1.0,) * 4])
def test_a_wrong_number_of_values_is_nobodys_in_particular(values):
    with pytest.raises(BatchFailed, match=f"rewards.q = {len(values)}: values for 3 generations") as failed:
        screened("q", RewardOutcome(values), GENERATIONS, on_failure="invalid")
    assert not failed.value.divisible


def test_a_reason_is_one_short_line():
    assert reason_of(BatchFailed("a\nlong message", reason="late")) == "late"
    assert reason_of(RewardError("two\nlines")) == "two lines"
    assert len(shortened("x" * 500)) == 200
    assert shortened("half a \ud83d") == "half a ?", "no file holds the other half"


def test_logs_add_up():
    assert merged_logs([{"a": (1.0, 2)}, {"a": (2.0, 1), "b": (0.0, 1)}]) == {"a": (3.0, 3), "b": (0.0, 1)}


def test_every_checked_value_is_a_reward():
    assert checked("gold", [1.0, 0.5], GENERATIONS[:2]) == [1.0, 0.5]
    for values, problem in (
        ((0.0, math.nan), r"\[prompt b\] = nan"),
        ((1.0, None), r"\[prompt b\] = None"),
        ((0.0,), " = 1: values for 2"),
    ):
        with pytest.raises(RewardError, match=rf"rewards\.gold{problem}"):
            checked("gold", values, GENERATIONS[:2])
