from pathlib import Path

from rlhf_core.processes.identity import user_name
from rlhf_core.store.gate_decisions import GateAnswer, GateDecisions, Question
from rlhf_core.store.layout import write_json

CONDITION = {"after": "sft", "metric": "loss", "op": "<", "value": 1.0, "name": "quality"}
ASKED = Question(gate="quality", condition=CONDITION, digest="d1", found="loss 2 >= 1", run="night")


def test_answers_stay_when_the_question_is_asked_again(store):
    decisions = GateDecisions(store.layout)
    request = decisions.ask(ASKED, run="night", links={"flow": "f1"})
    assert request.answer is None and decisions.requests() == [request]
    said = decisions.decide(request, "reject", reason="too high")
    assert said.by == user_name() and str(said).startswith(f"rejected by {user_name()} at 20")
    again = decisions.ask(ASKED, run="night", links={"flow": "f2"})
    assert again.answer == said and again.asked_in("f1") and again.asked_in("f2") and not again.asked_in("f3")
    decisions.decide(again, "approve", reason="fine", by="ada")
    found = decisions.find(ASKED.id)
    assert found is not None and found.answer is not None
    assert (found.answer.answer, found.answer.by, len(found.answers), len(found.askers)) == ("approve", "ada", 2, 2)


def test_an_answer_that_is_given_while_a_run_asks_again_is_kept(store):
    decisions = GateDecisions(store.layout)
    read_before = decisions.ask(ASKED, run="night", links={})
    for name in ("ada", "bob"):  # both have read the question while it had no answer
        decisions.decide(read_before, "approve", reason="fine", by=name)
    asked = decisions.ask(ASKED, run="night", links={})
    assert [one.by for one in asked.answers] == ["ada", "bob"]


def test_two_answers_at_once_have_numbers_of_their_own(store, monkeypatch):
    decisions = GateDecisions(store.layout)
    request = decisions.ask(ASKED, run="night", links={})
    decisions.decide(request, "approve", reason="fine", by="ada")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", lambda self, pattern: iter(()))  # bob has listed the folder before ada answered
        decisions.decide(request, "reject", reason="no", by="bob")
    found = decisions.find(ASKED.id)
    assert found is not None and [one.by for one in found.answers] == ["ada", "bob"]
    assert sorted(path.name for path in (store.layout.gates / ASKED.id).glob("answer-*")) == [
        "answer-000001.json",
        "answer-000002.json",
    ]


def test_answers_of_one_number_are_ordered_by_their_time(store):
    """As an earlier version may have written them."""
    decisions = GateDecisions(store.layout)
    request = decisions.ask(ASKED, run="night", links={})
    for name, at in (("b", "2026-01-01T00:00:00+00:00"), ("a", "2026-01-01T00:00:01+00:00")):
        said = GateAnswer(answer="approve", by=name, at=at, reason="fine")
        write_json(store.layout.gates / request.id / f"answer-000001-{name}.json", said.model_dump())
    found = decisions.find(ASKED.id)
    assert found is not None and [one.by for one in found.answers] == ["b", "a"]


def test_another_artifact_condition_or_run_is_another_question(store):
    decisions = GateDecisions(store.layout)
    decisions.decide(decisions.ask(ASKED, run="night", links={}), "approve", reason="fine")
    others = ({"digest": "d2"}, {"condition": CONDITION | {"value": 2.0}}, {"run": "day"})
    for other in others:
        assert decisions.find(ASKED.model_copy(update=other).id) is None
        assert decisions.ask(ASKED.model_copy(update=other), run="day", links={}).answer is None
    assert len(decisions.requests()) == 1 + len(others)


def test_a_damaged_file_is_a_question_that_was_not_asked_and_its_answers_stay(store):
    decisions = GateDecisions(store.layout)
    decisions.decide(decisions.ask(ASKED, run="night", links={}), "approve", reason="fine", by="ada")
    (folder,) = store.layout.gates.iterdir()
    (folder / "question.json").write_text("{")
    assert decisions.find(ASKED.id) is None and decisions.requests() == []
    asked = decisions.ask(ASKED, run="night", links={})
    assert asked.question == ASKED and asked.answer is not None and asked.answer.by == "ada"


def test_collecting_garbage_keeps_decisions(store):
    decisions = GateDecisions(store.layout)
    decisions.ask(ASKED, run="night", links={})
    store.gc(False, keep_days=0.0)
    assert decisions.find(ASKED.id) is not None and store.verify() == []
