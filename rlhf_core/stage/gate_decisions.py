"""Keep the questions and decisions of gates and pauses: one table per question, `gates/<id>`.

A question is about one artifact under one gate in runs of one name: an artifact that is made again with other content, or a
gate with another condition, is asked about again, and the answer for one run lets no other one continue. The table has the
finding, the runs that wait, and the answers of people, of which the last counts. It changes by compare-and-set, so a run that
asks while a person answers loses nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import ValidationError

from rlhf_core.errors import ArtifactError
from rlhf_core.processes.identity import user_name
from rlhf_core.store.fingerprint import canonical_json, sha256_text
from rlhf_core.store.protocol import Store, StoredTable, update
from rlhf_core.store.typed_json import Stored

Answer = Literal["approve", "reject"]


class GateAnswer(Stored):
    """A person's answer, with who gave it, when (ISO 8601 in UTC) and why."""

    answer: Answer
    by: str
    at: str
    reason: str

    def __str__(self) -> str:
        said = "approved" if self.answer == "approve" else "rejected"
        return f"{said} by {self.by} at {self.at}: {self.reason}"


class Question(Stored):
    """A question to a person: may the stages after this artifact run?

    >>> asked = Question(gate="quality", condition={"after": "sft"}, digest="d1", run="night")
    >>> asked.id == asked.model_copy(update={"run": "day"}).id
    False
    """

    gate: str
    """Name of the gate."""
    condition: dict[str, Any]
    """The stage and the condition of the gate."""
    digest: str
    """Digest of the artifact, or the key of the stage that pauses."""
    found: str = ""
    """The finding, such as `accuracy_low 0.61 < 0.65`."""
    run: str = ""
    """Name of the runs whose question it is; "" for a stage that pauses, whose result all runs share."""

    @property
    def id(self) -> str:
        """The name of its folder; the finding follows from the rest and is no part of it."""
        return sha256_text(canonical_json(self.model_dump(exclude={"found"})))


class Asker(Stored):
    """A run that waits for the answer to a question."""

    run: str
    """Name of the run."""
    profile: str = ""
    """Digest of its configuration."""
    links: dict[str, str] = {}
    """Where it can be looked up, such as its flow run in Prefect."""
    asked: str
    """Time of its last request (ISO 8601 in UTC)."""


@dataclass(frozen=True)
class GateRequest:
    """A question with the runs that wait for it and its answers, both in order of time."""

    question: Question
    askers: tuple[Asker, ...]
    answers: tuple[GateAnswer, ...] = ()

    @property
    def id(self) -> str:
        return self.question.id

    @property
    def answer(self) -> GateAnswer | None:
        """The last answer; None without a decision."""
        return self.answers[-1] if self.answers else None

    @property
    def asked(self) -> str:
        """Time of the last request."""
        return self.askers[-1].asked

    def asked_in(self, run: str) -> bool:
        """Whether a run of this name, or a flow run of this id, waits for it."""
        return any(run in (one.run, *one.links.values()) for one in self.askers)


@dataclass(frozen=True)
class GateDecisions:
    """The questions and answers in a store."""

    store: Store

    def find(self, question: str) -> GateRequest | None:
        """The question with this id, with its runs and answers; None if it was never asked."""
        found = self.store.read(f"gates/{question}")
        return None if found is None else _request(found)

    def ask(self, question: Question, *, run: str, profile: str = "", links: Mapping[str, str]) -> GateRequest:
        """Note that a run waits for a decision. Earlier answers to the same question stay."""
        asker = Asker(run=run, profile=profile, links=dict(links), asked=now())
        identity = sha256_text(canonical_json(asker.model_dump(exclude={"asked"})))[:16]

        def edit(value: dict[str, Any]) -> dict[str, Any]:
            askers = value.get("askers", {}) | {identity: asker.model_dump()}
            return {"answers": [], **value, "question": question.model_dump(), "askers": askers}

        found = _request(update(self.store, f"gates/{question.id}", edit))
        assert found is not None  # it was just written
        return found

    def decide(self, request: GateRequest, answer: Answer, *, reason: str, by: str = "") -> GateAnswer:
        """Add an answer to a question, by the user of this process unless `by` names someone."""
        said = GateAnswer(answer=answer, by=by or user_name(), at=now(), reason=reason)
        added = said.model_dump()
        update(self.store, f"gates/{request.id}", lambda value: value | {"answers": [*value["answers"], added]})
        return said

    def requests(self) -> list[GateRequest]:
        """All questions, the most recent at the end."""
        found = (_request(table) for table in self.store.tables("gates/"))
        return sorted((one for one in found if one is not None), key=lambda one: (one.asked, one.id))


def _request(table: StoredTable) -> GateRequest | None:
    """The question in a table; None before anyone has asked it. Raises ArtifactError if an answer cannot be read."""
    try:
        asked = Question.model_validate(table.value["question"])
        askers = sorted(map(Asker.model_validate, table.value["askers"].values()), key=lambda one: one.asked)
        answers = tuple(map(GateAnswer.model_validate, table.value["answers"]))
    except (KeyError, ValidationError) as error:
        rule = f"cannot be read ({str(error).splitlines()[0]})"
        raise ArtifactError("question", table.name, rule, "run again to ask anew, and answer again") from None
    return GateRequest(asked, tuple(askers), answers) if askers else None


def now() -> str:
    """The time in UTC to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
