"""Answer what a gate has asked: the same for `rlhf approve`, `rlhf reject` and the form in Prefect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipelines.execution.opening import store_of
from pipelines.flows.profile import find_profile, load_profile
from pipelines.services.home import Home
from rlhf_core.errors import ConfigError, explain
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.gate_decisions import Answer, GateAnswer, GateDecisions, GateRequest


def answer_gate(
    run: str, gate: str, answer: Answer, *, reason: str, artifact: str = "", store: str = "", by: str = ""
) -> tuple[GateRequest, GateAnswer]:
    """Write down the answer to what a gate of a run has asked; return the question and the answer.

    `run` is a profile, the name of a run, or the name or id of its flow run in Prefect. `artifact` is the beginning of a
    digest. Raises ConfigError if nothing or more than one thing was asked.
    """
    if not reason.strip():
        raise ConfigError(explain("reason", reason, "is empty", "say why: it is kept with the decision"))
    where, name = place_of(run, store)
    decisions = GateDecisions(where.layout)
    request = chosen(decisions.requests(), name, gate, artifact)
    return request, decisions.decide(request, answer, reason=reason.strip(), by=by)


def place_of(run: str, store: str) -> tuple[ArtifactStore, str]:
    """Return the store in which a run asked, and the name of the run; `run` may be a profile."""
    try:
        find_profile(run)
    except ConfigError:  # not a profile, so the name or id of a run
        return ArtifactStore(Path(store).expanduser() if store else Home.here().store), run
    config = load_profile(run)
    own = store_of(config, Home.here())
    return (ArtifactStore(Path(store).expanduser()) if store else own), config.name


def chosen(requests: Sequence[GateRequest], run: str, gate: str, artifact: str) -> GateRequest:
    """Return the only request that is meant; the one asked last if that has an answer. Raises ConfigError."""
    of_run = [one for one in requests if run in (one.run, *one.links.values())]
    of_gate = [one for one in of_run if one.gate == gate]
    if not of_gate:
        asked = ", ".join(sorted({f"{one.run} {one.gate}" for one in requests})) or "none"
        rule = f"no gate of this name has asked in {run!r}"
        raise ConfigError(explain("gate", gate, rule, f"name one that has (run and gate): {asked}"))
    found = [one for one in of_gate if one.digest.startswith(artifact)]
    if not found:
        known = ", ".join(one.digest[:12] for one in of_gate)
        raise ConfigError(explain("artifact", artifact, "the gate has not asked about it", f"it has about {known}"))
    newest = max(found, key=lambda one: one.asked)
    if newest.answer is not None:
        return newest
    found = [one for one in found if one.answer is None]
    if len(found) > 1:
        known = ", ".join(f"{one.digest[:12]} ({one.found or 'no condition'}, asked {one.asked})" for one in found)
        raise ConfigError(explain("gate", gate, f"has asked about {len(found)} artifacts: {known}", "add --artifact"))
    return newest
