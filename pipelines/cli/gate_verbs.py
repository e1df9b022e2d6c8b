"""Answer what a gate has asked (`rlhf approve`, `rlhf reject`)."""

from __future__ import annotations

import argparse

from pipelines.cli.common import console
from pipelines.execution.approving import Meant, answer_gate
from rlhf_core.store.gate_decisions import Answer, GateRequest

FLOW_RUN = "prefect.flow_run_id"


def approve(options: argparse.Namespace) -> None:
    """Let what depends on the artifact go on, with the next run of the same command."""
    _answer(options, "approve")


def reject(options: argparse.Namespace) -> None:
    """Hold back for good what depends on the artifact."""
    _answer(options, "reject")


def _answer(options: argparse.Namespace, answer: Answer) -> None:
    meant = Meant(options.run, options.gate, artifact=options.artifact, question=options.question)
    request, said = answer_gate(meant, answer, reason=options.reason, store=options.store)
    asked = request.question
    line = f"gate {asked.gate}, {asked.condition['after']} {asked.digest[:12]}: {said}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(next_step(request), highlight=False, soft_wrap=True)


def next_step(request: GateRequest) -> str:
    """Return what makes the run that asked go on."""
    again = "the run goes on, or ends as blocked, with the same command as before"
    links = request.askers[-1].links
    return f"{again}, or with `rlhf resume {links[FLOW_RUN]}`" if FLOW_RUN in links else again
