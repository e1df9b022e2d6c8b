from __future__ import annotations

from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.gate_decisions import GateDecisions, user_name

CONDITION = {"after": "sft", "metric": "loss", "op": "<", "value": 1.0, "name": "quality"}


def test_answers_stay_when_the_question_is_asked_again(store: ArtifactStore) -> None:
    decisions = GateDecisions(store.layout)
    request = decisions.ask("quality", CONDITION, "d1", found="loss 2 >= 1", run="night", links={})
    assert request.answer is None and decisions.requests() == [request]
    said = decisions.decide(request, "reject", reason="too high")
    assert said.by == user_name() and str(said).startswith(f"rejected by {user_name()} at 20")
    again = decisions.ask("quality", CONDITION, "d1", found="loss 2 >= 1", run="day", links={"page": "x"})
    assert again.answer == said and (again.run, again.links) == ("day", {"page": "x"})
    decisions.decide(again, "approve", reason="fine", by="ada")
    found = decisions.find(CONDITION, "d1")
    assert found is not None and found.answer is not None
    assert (found.answer.answer, found.answer.by, len(found.answers)) == ("approve", "ada", 2)


def test_another_artifact_or_condition_is_another_question(store: ArtifactStore) -> None:
    decisions = GateDecisions(store.layout)
    decisions.ask("quality", CONDITION, "d1", found="", run="night", links={})
    assert decisions.find(CONDITION, "d2") is None
    assert decisions.find(CONDITION | {"value": 2.0}, "d1") is None


def test_a_damaged_file_is_a_question_that_was_not_asked(store: ArtifactStore) -> None:
    decisions = GateDecisions(store.layout)
    decisions.ask("quality", CONDITION, "d1", found="", run="night", links={})
    (path,) = store.layout.gates.iterdir()
    path.write_text("{")
    assert decisions.find(CONDITION, "d1") is None and decisions.requests() == []


def test_collecting_garbage_keeps_decisions(store: ArtifactStore) -> None:
    decisions = GateDecisions(store.layout)
    decisions.ask("quality", CONDITION, "d1", found="", run="night", links={})
    store.gc(False, keep_days=0.0)
    assert decisions.find(CONDITION, "d1") is not None and store.verify() == []
