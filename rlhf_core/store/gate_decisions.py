"""Keep the questions and decisions of gates and pauses: one folder per question, `roots/gates/<id>`.

A question is about one artifact under one gate in runs of one name: an artifact that is made again with other content, or a
gate with another condition, is asked about again, and the answer for one run lets no other one go on. `question.json` has
what was found, an `asked-*.json` the run that waits, an `answer-*.json` the answer of a person; the last one
counts. No file is written twice with another content, so a run that asks while a person answers loses nothing.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rlhf_core.errors import ArtifactError
from rlhf_core.processes.identity import user_name
from rlhf_core.store.fingerprint import canonical_json, sha256_text
from rlhf_core.store.layout import StoreLayout, bring, write_json
from rlhf_core.store.places.local import alone
from rlhf_core.store.typed_json import Stored, read_stored

Answer = Literal["approve", "reject"]
QUESTION = "question.json"
ASKERS = "asked-*.json"
ANSWERS = "answer-*.json"
_ANSWER = re.compile(r"answer-(\d{1,9})(-.*)?\.json")


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
        """Return the name of its folder; the finding follows from the rest and is no part of it."""
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
        """Return the last answer; None without a decision."""
        return self.answers[-1] if self.answers else None

    @property
    def asked(self) -> str:
        """Return the time of the last request."""
        return self.askers[-1].asked

    def asked_in(self, run: str) -> bool:
        """Return whether a run of this name, or a flow run of this id, waits for it."""
        return any(run in (one.run, *one.links.values()) for one in self.askers)


@dataclass(frozen=True)
class GateDecisions:
    """The questions and answers in a store."""

    layout: StoreLayout

    def find(self, question: str) -> GateRequest | None:
        """Return the question with this id, with its runs and answers; None if there is none."""
        folder = self.layout.gates / question
        bring(folder)
        asked = read_stored(folder / QUESTION, Question)
        read = (read_stored(path, Asker) for path in sorted(folder.glob(ASKERS)))
        askers = sorted((one for one in read if one is not None), key=lambda one: one.asked)
        if asked is None or not askers:
            return None
        return GateRequest(asked, tuple(askers), tuple(self._answers(folder)))

    def ask(self, question: Question, *, run: str, profile: str = "", links: Mapping[str, str]) -> GateRequest:
        """Write down that a run waits for a decision; earlier answers to the same question stay."""
        folder = self.layout.gates / question.id
        if read_stored(folder / QUESTION, Question) != question:
            write_json(folder / QUESTION, question.model_dump())
        asker = Asker(run=run, profile=profile, links=dict(links), asked=now())
        identity = sha256_text(canonical_json(asker.model_dump(exclude={"asked"})))
        write_json(folder / f"asked-{identity[:16]}.json", asker.model_dump())
        found = self.find(question.id)
        assert found is not None  # it was just written
        return found

    def decide(self, request: GateRequest, answer: Answer, *, reason: str, by: str = "") -> GateAnswer:
        """Add an answer to a question, by the user of this process unless `by` names someone."""
        said = GateAnswer(answer=answer, by=by or user_name(), at=now(), reason=reason)
        folder = self.layout.gates / request.id
        with alone(self.layout.leases):  # two may answer at once: each number is one answer's
            number = max((number for number, _ in _numbered(folder)), default=0) + 1
            while not _claims(folder / f"answer-{number:06d}.json"):
                number += 1
            write_json(folder / f"answer-{number:06d}.json", said.model_dump())
        return said

    def requests(self) -> list[GateRequest]:
        """Return all questions, the most recent at the end."""
        bring(self.layout.gates)
        found = (self.find(folder.name) for folder in self.layout.gates.glob("*") if folder.is_dir())
        return sorted((one for one in found if one is not None), key=lambda one: (one.asked, one.id))

    def _answers(self, folder: Path) -> list[GateAnswer]:
        found = [(number, path.name, _read_answer(path)) for number, path in _numbered(folder)]
        # Two files of one number are of an earlier version.
        ordered = sorted((number, answer.at, name, answer) for number, name, answer in found if answer is not None)
        return [answer for *_, answer in ordered]


def _numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield number and path of each answer. Raises ArtifactError for a file that has another name."""
    for path in sorted(folder.glob(ANSWERS)):
        found = _ANSWER.fullmatch(path.name)
        if found is None:
            raise ArtifactError("answer", str(path), "is not named as an answer", "move it out of this folder")
        yield int(found[1]), path


def _claims(path: Path) -> bool:
    """Return whether the number of an answer was free; the listing of a network file system may be a little old."""
    try:
        path.open("xb").close()
    except FileExistsError:
        return False
    return True


def _read_answer(path: Path) -> GateAnswer | None:
    """Return an answer; None for a number that was claimed by a process that was killed before it had answered.

    Raises ArtifactError if it cannot be read: an earlier answer must not count in its place.
    """
    answer = read_stored(path, GateAnswer)
    if answer is None and path.lstat().st_size:
        rule = "is not a whole answer"
        raise ArtifactError("answer", str(path), rule, "remove it, and answer again if it was the last one")
    return answer


def now() -> str:
    """Return the time in UTC to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
