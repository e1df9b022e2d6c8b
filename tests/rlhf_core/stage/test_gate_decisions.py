from concurrent.futures import ThreadPoolExecutor

import pytest

from rlhf_core.errors import ArtifactError
from rlhf_core.processes.identity import user_name
from rlhf_core.stage.gate_decisions import GateAnswer, GateDecisions, Question
from rlhf_core.store.layout import write_json
from rlhf_core.store.protocol import update

CONDITION = {"after": "sft", "metric": "loss", "op": "<", "value": 1.0, "name": "quality"}
ASKED = Question(gate="quality", condition=CONDITION, digest="d1", found="loss 2 >= 1", run="night")


def test_answers_stay_when_the_question_is_asked_again(store):
    decisions = GateDecisions(store.shared)
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
    decisions = GateDecisions(store.shared)
    read_before = decisions.ask(ASKED, run="night", links={})
    for name in ("ada", "bob"):  # both have read the question while it had no answer
        decisions.decide(read_before, "approve", reason="fine", by=name)
    asked = decisions.ask(ASKED, run="night", links={})
    assert [one.by for one in asked.answers] == ["ada", "bob"]


def test_two_answers_at_once_are_both_kept(store):
    decisions = GateDecisions(store.shared)
    request = decisions.ask(ASKED, run="night", links={})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: decisions.decide(request, "approve", reason="fine", by=name), "abcdefgh"))
    found = decisions.find(ASKED.id)
    assert found is not None and sorted(one.by for one in found.answers) == list("abcdefgh")


def test_questions_with_schema_1_keep_their_answers_in_order(store):
    folder = store.root / "roots" / "gates" / ASKED.id
    asker = {"run": "night", "profile": "", "links": {}, "asked": "2026-01-01T00:00:00+00:00"}
    write_json(folder / "question.json", ASKED.model_dump())
    write_json(folder / "asked-0123456789abcdef.json", asker)
    for number, name in ((1, "b"), (2, "a")):
        said = GateAnswer(answer="approve", by=name, at="2026-01-01T00:00:01+00:00", reason="fine")
        write_json(folder / f"answer-{number:06d}.json", said.model_dump())
    decisions = GateDecisions(store.shared)
    (request,) = decisions.requests()
    assert request.question == ASKED and [one.by for one in request.answers] == ["b", "a"]
    decisions.decide(request, "reject", reason="no", by="c")
    found = decisions.find(ASKED.id)
    assert found is not None and [one.by for one in found.answers] == ["b", "a", "c"]


def test_another_artifact_condition_or_run_is_another_question(store):
    decisions = GateDecisions(store.shared)
    decisions.decide(decisions.ask(ASKED, run="night", links={}), "approve", reason="fine")
    others = ({"digest": "d2"}, {"condition": CONDITION | {"value": 2.0}}, {"run": "day"})
    for other in others:
        assert decisions.find(ASKED.model_copy(update=other).id) is None
        assert decisions.ask(ASKED.model_copy(update=other), run="day", links={}).answer is None
    assert len(decisions.requests()) == 1 + len(others)


def test_a_question_that_cannot_be_read_is_an_error_and_never_an_earlier_answer(store):
    decisions = GateDecisions(store.shared)
    request = decisions.ask(ASKED, run="night", links={})
    update(store.shared, f"gates/{request.id}", lambda value: value | {"answers": [{"answer": "perhaps"}]})
    with pytest.raises(ArtifactError, match=r"^question = 'gates/.*cannot be read"):
        decisions.find(request.id)


def test_collecting_garbage_keeps_decisions(store):
    decisions = GateDecisions(store.shared)
    decisions.ask(ASKED, run="night", links={})
    store.gc(False, keep_days=0.0)
    assert decisions.find(ASKED.id) is not None and store.verify() == []
