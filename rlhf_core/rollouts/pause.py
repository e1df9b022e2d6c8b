"""Pause a run of policy optimization until a person has decided whether it goes on.

The run saves a checkpoint and ends as waiting. The pause is a part of that checkpoint, and what was decided one of the
report: a run whose answer came at once and one whose answer came a week later have the same result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rlhf_core.monitoring.watch import Alarm, plain
from rlhf_core.stage.context import StageContext
from rlhf_core.store.gate_decisions import GateAnswer, GateDecisions, Question

STATE = "paused"


@dataclass(frozen=True)
class Pause:
    """The alarms of a step at which a person has to decide; their monitors are named by the first."""

    alarms: tuple[Alarm, ...]

    @property
    def text(self) -> str:
        """Return what was found."""
        return "; ".join(f"monitor {one.monitor}: {one.text} at step {one.step}" for one in self.alarms)

    def question(self, context: StageContext) -> Question:
        """Return what a person is asked: may the computation of this key go on after what was found at this step?"""
        condition = {"after": context.label, "step": self.alarms[0].step, "found": self.text}
        return Question(gate=self.alarms[0].monitor, condition=condition, digest=context.key, found=self.text)

    def answer(self, context: StageContext) -> GateAnswer:
        """Return what a person has decided; raise StageWaiting, with the question as its condition, if nobody has."""
        question = self.question(context)
        request = GateDecisions(context.store.layout).find(question.id)
        if request is None or request.answer is None:
            context.checkpoints.settle()  # before the engines are released, because they may still be writing
            context.wait(
                f"{self.text}: paused, approve to go on, reject to end with the best checkpoint", asking(question)
            )
        return request.answer

    def state(self) -> list[dict[str, Any]]:
        """Return what a checkpoint must keep (JSON)."""
        return [plain(alarm) for alarm in self.alarms]

    @classmethod
    def restored(cls, state: Sequence[Mapping[str, Any]]) -> Self:
        """Return what `state` was called on."""
        return cls(tuple(Alarm(**alarm) for alarm in state))


def asking(question: Question) -> dict[str, Any]:
    """Return the condition under which a stage waits for the answer to a question."""
    return {"question": question.model_dump()}


def await_decision(context: StageContext) -> None:
    """Raise StageWaiting if the newest checkpoint pauses and nobody has decided: before engines are leased in vain."""
    newest = context.checkpoints.latest()
    if newest is not None and "guard" in newest.state and STATE in newest.state["guard"]:
        Pause.restored(newest.state["guard"][STATE]).answer(context)
