"""Answer the question of a gate or a pause, for `rlhf approve`, `rlhf reject` and the form in Prefect."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.execution.gates import SHORT_ID
from pipelines.execution.opening import store_of
from pipelines.flows.profile import find_profile, load_profile, profile_digest
from pipelines.services.home import Home
from rlhf_core.errors import ConfigError
from rlhf_core.stage.gate_decisions import Answer, GateAnswer, GateDecisions, GateRequest
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.opening import store_root


@dataclass(frozen=True)
class Meant:
    """Selects a question by its run and gate, and by the beginning of its id or of the artifact's digest."""

    run: str
    """A profile, the name of a run, or the name or id of its flow run in Prefect."""
    gate: str
    artifact: str = ""
    question: str = ""


def answer_gate(
    meant: Meant, answer: Answer, *, reason: str, store: str = "", by: str = ""
) -> tuple[GateRequest, GateAnswer]:
    """Record the answer to the question of a gate; return the question and the answer.

    Raises ConfigError, with a list of the open questions, unless exactly one question matches.
    """
    if not reason.strip():
        raise ConfigError("reason", reason, "is empty", "give a reason; it is kept with the decision")
    where, run, profile = place_of_run(meant.run, store)
    decisions = GateDecisions(where.shared)
    request = choose_request(decisions.requests(), meant, run=run, profile=profile)
    return request, decisions.decide(request, answer, reason=reason.strip(), by=by)


def place_of_run(run: str, store: str) -> tuple[ArtifactStore, str, str]:
    """Find the store with the question of a run, the name of the run, and the digest of its profile.

    `run` may also be a profile.
    """
    try:
        find_profile(run)
    except ConfigError:  # not a profile, so the name or id of a run
        return ArtifactStore(store_root(store) if store else Home.here().store), run, ""
    config = load_profile(run)
    own = store_of(config, Home.here())
    return (ArtifactStore(store_root(store)) if store else own), config.name, profile_digest(config)


def choose_request(requests: Sequence[GateRequest], meant: Meant, *, run: str, profile: str = "") -> GateRequest:
    """Select the only question that matches.

    Raises ConfigError with a list of candidates if this is ambiguous or impossible.

    If several questions match, prefer questions of this profile, then the most recent if no other one is open. An
    answered question is never chosen while another one is open.
    """
    of_run = [one for one in requests if one.asked_in(run)]
    of_gate = [one for one in of_run if one.question.gate == meant.gate]
    if not of_gate:
        asked = (
            ", ".join(sorted({f"{who.run} {one.question.gate}" for one in requests for who in one.askers})) or "none"
        )
        rule = f"no gate of this name waits in {run!r}"
        raise ConfigError("gate", meant.gate, rule, f"name one that has (run and gate): {asked}")
    found = [one for one in of_gate if one.question.digest.startswith(meant.artifact)]
    if not found:
        known = ", ".join(one.question.digest[:SHORT_ID] for one in of_gate)
        raise ConfigError(
            "artifact", meant.artifact, "no question of the gate is about it", f"its questions are about {known}"
        )
    found = [one for one in found if one.id.startswith(meant.question)]
    if not found:
        raise ConfigError(
            "question", meant.question, "the gate has no such question", f"its questions are {list_requests(of_gate)}"
        )
    own = [one for one in found if any(who.profile == profile for who in one.askers)] or found
    if len(own) == 1 and (own[0].answer is None or all(one.answer is not None for one in found)):
        return own[0]
    waiting = [one for one in own if one.answer is None]
    if len(waiting) == 1 and all(one.asked <= waiting[0].asked for one in own):
        return waiting[0]
    rule = f"has {len(found)} questions: {list_requests(found)}"
    raise ConfigError("gate", meant.gate, rule, "add --question")


def list_requests(requests: Sequence[GateRequest]) -> str:
    """Questions for a person to choose from, the open ones first, each group in order from the most recent."""
    ordered = sorted(requests, key=lambda one: (one.answer is None, one.asked, one.id), reverse=True)
    return "; ".join(
        f"{one.id[:SHORT_ID]} ({'open' if one.answer is None else f'answered: {one.answer}'}, "
        f"{one.question.found or 'no condition'}, {one.question.condition['after']} {one.question.digest[:SHORT_ID]}, "
        f"waited for by {', '.join(dict.fromkeys(who.run for who in one.askers))} {one.asked})"
        for one in ordered
    )
