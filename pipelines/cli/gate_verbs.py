"""Answer what a gate has asked (`rlhf approve`, `rlhf reject`)."""

from __future__ import annotations

import argparse

from pipelines.cli.common import console
from pipelines.execution.approving import answer_gate
from rlhf_core.store.gate_decisions import Answer, GateRequest

FLOW_RUN = "prefect.flow_run_id"


def approve(options: argparse.Namespace) -> None:
    """Let what depends on the artifact go on, with the next run of the same command."""
    _answer(options, "approve")


def reject(options: argparse.Namespace) -> None:
    """Hold back for good what depends on the artifact."""
    _answer(options, "reject")


def _answer(options: argparse.Namespace, answer: Answer) -> None:
    request, said = answer_gate(
        options.run, options.gate, answer, reason=options.reason, artifact=options.artifact, store=options.store
    )
    line = f"gate {request.gate}, {request.condition['after']} {request.digest[:12]}: {said}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(next_step(request), highlight=False, soft_wrap=True)


def next_step(request: GateRequest) -> str:
    """Return what makes the run that asked go on."""
    again = "the run goes on, or ends as blocked, with the same command as before"
    if FLOW_RUN not in request.links:
        return again
    return f"{again}, or with `rlhf resume {request.links[FLOW_RUN]}`"
