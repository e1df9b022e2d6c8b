"""A language model as annotator: both orders, ties, malformed replies, and verdicts that outlive a kill."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.annotation.judge import (
    Judged,
    JudgingStopped,
    ask_judge,
    judge_report,
    question,
    read_choice,
    read_verdicts,
)
from rlhf_core.annotation.proposing import Comparison
from rlhf_core.config.annotators import JudgeAnnotator
from rlhf_core.errors import RewardError
from rlhf_core.rewards.judge import CORRECTION
from rlhf_core.schema.base import keyed
from rlhf_core.types import Message
from tests.support.chat_server import ChatServer

RULE = "Longer is better."


@pytest.fixture
def server() -> Iterator[ChatServer]:
    made = ChatServer()
    yield made
    made.close()


def comparison(name: str, first: str = "a long answer", second: str = "short") -> Comparison:
    return Comparison(name, (Message("user", f"request {name}"),), "", "test", first, second, "sft", "ppo")


def config(server: ChatServer, **given: Any) -> JudgeAnnotator:
    return JudgeAnnotator.model_validate({"url": server.url, "model": "m", "retries": 1, "concurrency": 2} | given)


def judged(
    server: ChatServer,
    rows: list[Comparison],
    journal: Path,
    *,
    stopping: Callable[[], bool] = lambda: False,
    **given: Any,
) -> Judged:
    return ask_judge(
        config(server, **given),
        rows,
        rubric=RULE,
        key="collect.annotator",
        journal=journal,
        stopping=stopping,
        progress=lambda *_: None,
        pause=lambda _: None,
    )


def longer(asked: str) -> str:
    """Prefer the longer answer, wherever it stands."""
    first, _, second = asked.partition("Answer A:\n")[2].partition("Say in one sentence")[0].partition("Answer B:\n")
    return f"It is longer. Better: {'A' if len(first.strip()) > len(second.strip()) else 'B'}"


def test_both_orders_are_asked_and_a_choice_that_survives_the_swap_counts(server, tmp_path):
    server.says = longer
    found = judged(server, [comparison("c1"), comparison("c2", "short", "a long answer")], tmp_path / "j")
    assert [one.choice for one in found.judgments] == ["first", "second"]
    assert len(server.requests) == 4 and found.failures == {}
    said = [(one.comparison, one.order, one.choice) for one in found.verdicts]
    assert said[:2] == [("c1", "given", "first"), ("c1", "swapped", "second")]
    assert said[2:] == [("c2", "given", "second"), ("c2", "swapped", "first")]
    [one, _] = found.judgments
    assert one.annotator == "judge:m" and one.reason.count("It is longer.") == 2
    asked = server.requests[0]["messages"][0]["content"]
    assert RULE in asked and "request c1" in asked and "sft" not in asked


def test_a_judge_that_prefers_a_place_is_a_tie_and_the_report_says_which_place(server, tmp_path):
    """c1 is answered honestly, c2 and c3 by place, c4 by A and then a tie: 3 of 4 verdicts change with the order."""

    def says(asked: str) -> str:
        if "request c1" in asked:
            return longer(asked)
        if "request c4" in asked and asked.index("a long answer") > asked.index("short"):
            return "Better: tie"
        return "Better: A"

    server.says = says
    found = judged(server, [comparison(f"c{n}") for n in range(1, 5)], tmp_path / "j")
    assert [one.choice for one in found.judgments] == ["first", "tie", "tie", "tie"]
    report = judge_report(found.verdicts, [comparison(f"c{n}") for n in range(1, 5)])
    assert (report["changed"]["mean"], report["toward_first"]["mean"]) == (0.75, 0.5)
    assert report["toward_second"]["mean"] == 0.0 and report["questions"] == 8


def test_a_reply_without_a_verdict_is_asked_again_and_counted(server, tmp_path):
    server.says = lambda asked: "**Better: Answer A.**" if asked == CORRECTION else "Both have their merits."
    found = judged(server, [comparison("c1")], tmp_path / "j")
    assert found.judgments[0].choice == "tie"  # A both times
    report = judge_report(found.verdicts, [comparison("c1"), comparison("c2")])
    assert (report["malformed"], report["failed"]) == (2, 0)
    roles = [message["role"] for message in server.requests[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_a_comparison_without_a_verdict_has_no_judgment(server, tmp_path):
    server.says = lambda asked: "I cannot decide." if "request c1" in asked or asked == CORRECTION else longer(asked)
    found = judged(server, [comparison("c1"), comparison("c2")], tmp_path / "j", on_failure="invalid", corrections=1)
    assert [one.comparison for one in found.judgments] == ["c2"]
    assert found.failures == {"c1": "I cannot decide."}
    report = judge_report(found.verdicts, [comparison("c1"), comparison("c2")])
    assert report["malformed"] == 4  # two replies in each order


def test_a_failure_ends_the_stage_and_keeps_what_was_answered(server, tmp_path):
    server.says = lambda asked: 404 if "request c2" in asked else longer(asked)
    rows = [comparison("c1"), comparison("c2")]
    with pytest.raises(RewardError, match=r"answered 404.*no verdict on comparison c2"):
        judged(server, rows, tmp_path / "j", concurrency=1)
    server.says, before = longer, len(server.requests)
    found = judged(server, rows, tmp_path / "j", concurrency=1)
    assert [one.choice for one in found.judgments] == ["first", "first"]
    assert len(server.requests) == before + 2  # those of c2


def test_a_stopped_judge_is_asked_only_for_what_is_missing(server, tmp_path):
    server.says = longer
    rows = [comparison(f"c{n}") for n in range(6)]
    with pytest.raises(JudgingStopped):
        judged(server, rows, tmp_path / "j", stopping=lambda: True, concurrency=1)
    kept = len(read_verdicts(tmp_path / "j"))
    assert 0 < kept == len(server.requests) < 12
    with (tmp_path / "j").open("a") as stream:
        stream.write('\n{"comparison": "c5", "order"')  # cut off by a kill
    found = judged(server, rows, tmp_path / "j")
    assert len(found.judgments) == 6 and len(server.requests) == 12


@pytest.mark.parametrize(
    ("reply", "choice"),
    [
        ("Better: A", "first"),
        ("Because ...\n**Better:** B", "second"),
        ("Better: Answer B.", "second"),
        ("better = tie", "tie"),
        ("Answer B names it, so Better: B", "second"),
        ("On style Better: A\nOn facts Better: B", ""),
        ("It is not Better: A", ""),
        ("Better: neither", "both_bad"),
        ("Better: A\nNo. Better: B", "second"),
        ("Better: a good answer would apologize", ""),
        ("Better: C", ""),
        ("", ""),
        ('{"why": "it is", "better": "B"}', "second"),
        ('{"better": 2}', ""),
    ],
)
def test_verdicts_are_read_as_models_write_them(reply, choice):
    as_json = {"verdict": {"type": "json", "field": "better"}} if reply.startswith("{") else {}
    annotator = JudgeAnnotator.model_validate({"url": "http://host/v1", "model": "m"} | as_json)
    assert read_choice(reply, annotator.verdict) == choice


def test_answers_are_not_filled_in_again():
    one = comparison("c1", "{second}", "{rubric}")
    template = "{rubric}|{prompt}|{first}|{second}|{other}"
    assert question(template, one, "given", RULE) == f"{RULE}|request c1|{{second}}|{{rubric}}|{{other}}"
    assert question(template, one, "swapped", RULE) == f"{RULE}|request c1|{{rubric}}|{{second}}|{{other}}"


def test_the_model_and_the_rubric_decide_the_key_and_the_address_does_not():
    def key(**given: Any) -> str:
        return json.dumps(keyed(JudgeAnnotator.model_validate({"url": "http://a/v1", "model": "m"} | given)))

    same = {"url": "http://b/v1", "timeout_s": 1, "concurrency": 3, "retries": 0, "token_env": "T", "corrections": 0}
    assert key(**same) == key()
    for other in ({"model": "n"}, {"rubric": RULE}, {"temperature": 1.0}, {"max_tokens": 9}, {"version": "2"}):
        assert key(**other) != key()


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"url": "host:8000"}, "must begin with http"),
        ({"template": "{prompt} {first}"}, "must hold {second}"),
        ({"rubric": "r", "rubric_file": "f"}, "stands in place of rubric"),
        ({"rubric_file": "f", "template": "{prompt} {first} {second}"}, "must hold {rubric}"),
        ({"token_env": "sk-hunter2"}, "must be the name of an environment variable"),
    ],
)
def test_a_judge_that_cannot_work_is_refused(given, rule):
    with pytest.raises((ValidationError, ValueError), match=rule):
        JudgeAnnotator.model_validate({"url": "http://a/v1", "model": "m"} | given)
