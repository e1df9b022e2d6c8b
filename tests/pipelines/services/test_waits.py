"""Whether a run that waits may go on: an answer to one of its questions, or enough judgments."""

from __future__ import annotations

from pipelines.services.waits import answers_awaited, may_go_on
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.gate_decisions import GateDecisions, Question


def test_a_run_goes_on_when_one_of_its_questions_is_answered(store: ArtifactStore) -> None:
    decisions = GateDecisions(store.layout)
    questions = [Question(gate=name, condition={"after": "sft"}, digest="d1", run="night") for name in ("a", "b", "c")]
    asked = [decisions.ask(question, run="night", links={}) for question in questions[:2]]
    condition = answers_awaited([question.id for question in questions], store.root)
    assert not may_go_on(condition, uri="")
    decisions.decide(asked[1], "reject", reason="no")
    assert may_go_on(condition, uri="")
