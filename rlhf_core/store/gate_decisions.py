"""Keep what people decided at gates: one small file per gate and artifact, `roots/gates/<id>.json`.

A decision is about one artifact under one gate: an artifact that is made again with other content, or a gate with another
condition, is asked about again. A file is written when a run asks, and again when a person answers; the last answer counts.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rlhf_core.store.fingerprint import canonical_json, sha256_text
from rlhf_core.store.layout import StoreLayout, write_json
from rlhf_core.store.typed_json import Stored, read_stored

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


class GateRequest(Stored):
    """A question to a person: may what depends on this artifact go on?"""

    id: str
    gate: str
    """Name of the gate."""
    condition: dict[str, Any]
    """The stage and the condition of the gate."""
    digest: str
    """Digest of the artifact."""
    found: str
    """What was found, such as `accuracy_low 0.61 < 0.65`."""
    run: str
    """Name of the pipeline run that asked."""
    links: dict[str, str] = {}
    """Where the run that asked can be looked up, such as its flow run in Prefect."""
    asked: str
    answers: list[dict[str, str]] = []

    @property
    def answer(self) -> GateAnswer | None:
        """Return the last answer; None if nobody has decided."""
        return GateAnswer.model_validate(self.answers[-1]) if self.answers else None


@dataclass(frozen=True)
class GateDecisions:
    """The requests and answers in a store."""

    layout: StoreLayout

    def find(self, condition: Mapping[str, Any], digest: str) -> GateRequest | None:
        """Return the request for an artifact under a gate; None if nobody was asked."""
        return self._read(self._path(request_id(condition, digest)))

    def ask(
        self,
        gate: str,
        condition: Mapping[str, Any],
        digest: str,
        *,
        found: str,
        run: str,
        links: Mapping[str, str],
    ) -> GateRequest:
        """Write down that a run waits for a decision; earlier answers about the same artifact stay."""
        known = self.find(condition, digest)
        request = GateRequest(
            id=request_id(condition, digest),
            gate=gate,
            condition=dict(condition),
            digest=digest,
            found=found,
            run=run,
            links=dict(links),
            asked=now(),
            answers=[] if known is None else known.answers,
        )
        write_json(self._path(request.id), request.model_dump())
        return request

    def decide(self, request: GateRequest, answer: Answer, *, reason: str, by: str = "") -> GateAnswer:
        """Add an answer to a request, by the user of this process unless `by` names someone."""
        said = GateAnswer(answer=answer, by=by or user_name(), at=now(), reason=reason)
        answers = [*request.answers, said.model_dump()]
        write_json(self._path(request.id), request.model_copy(update={"answers": answers}).model_dump())
        return said

    def requests(self) -> list[GateRequest]:
        """Return all requests, oldest first."""
        found = (self._read(path) for path in self.layout.gates.glob("*.json"))
        return sorted((one for one in found if one is not None), key=lambda one: (one.asked, one.id))

    def _path(self, name: str) -> Path:
        return self.layout.gates / f"{name}.json"

    def _read(self, path: Path) -> GateRequest | None:
        return read_stored(path, GateRequest)


def request_id(condition: Mapping[str, Any], digest: str) -> str:
    """Return the name of the file for an artifact under a gate."""
    return sha256_text(canonical_json({"condition": dict(condition), "digest": digest}))


def user_name() -> str:
    """Return the name of the user of this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        return f"user {os.getuid()}"


def now() -> str:
    """Return the time in UTC to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
