"""Check whether a waiting run may continue: enough judgments exist, or a question is answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.store.gate_decisions import GateDecisions
from rlhf_core.store.layout import StoreLayout


def answers_awaited(questions: Sequence[str], store: Path) -> dict[str, Any]:
    """Return the condition of a run that goes on when one of these questions in the store is answered."""
    return {"questions": list(questions), "store": str(store.resolve())}


def may_go_on(condition: Mapping[str, Any], *, uri: str) -> bool:
    """Return whether the condition of a waiting run is met; `uri` is the address of MLflow."""
    if "questions" in condition:
        decisions = GateDecisions(StoreLayout(Path(condition["store"])))
        found = (decisions.find(question) for question in condition["questions"])
        return any(one is not None and one.answer is not None for one in found)
    # MLflow, 3 s: only a run that waits for annotators needs it here.
    from rlhf_core.annotation.people import is_met

    return is_met(condition, uri=uri)
