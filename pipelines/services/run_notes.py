"""Record every run of this state folder in a small file, which `rlhf runs` lists without Prefect and MLflow."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pipelines.services.home import Home
from rlhf_core.processes.identity import here, process_stat, process_state, user_name
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.store.layout import read_json, write_json

logger = logging.getLogger(__name__)

RUNNING, COMPLETED, CLOSED = "Running", "Completed", "Closed"
"""States of a run, as Prefect names them; it is closed if a later run of the same profile has finished its work."""
KEPT = 1000
"""Number of runs whose records are kept; of a kilobyte each."""
LONGEST_MESSAGE = 500  # characters of a message in a note, which lists show
_COMMAND = re.compile(r"`(rlhf [^`]+)`")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run: its profile and options, its process, and its outcome. Times are seconds of the wall clock."""

    id: str
    name: str
    profile: str
    """Name or path of the profile; "" for a run of a deployment, which is given its configuration."""
    digest: str
    """Digest of the configuration."""
    overrides: list[str]
    until: str
    store: str
    user: str
    host: list[str]
    """Machine, boot and process namespace, to which the numbers of processes belong."""
    pid: int
    pid_started: int
    began: float
    changed: float
    state: str = RUNNING
    message: str = ""
    headline: str = ""
    flow_run: str = ""
    policies: dict[str, str] = field(default_factory=dict)
    """Stage -> digest of the policy or reward model that it has made or found."""

    @property
    def seconds(self) -> float:
        """Duration of the run in seconds, so far if it is still running."""
        return (time.time() if self.state == RUNNING else self.changed) - self.began

    @property
    def following(self) -> str:
        """The command that resumes the run; "" if none is needed."""
        if self.state in (RUNNING, COMPLETED, CLOSED):
            return ""
        named = _COMMAND.search(self.message)
        if named is not None:
            return named[1]
        if self.flow_run:
            return f"rlhf resume {self.flow_run[:8]}"
        return shlex.join(["rlhf", "run", self.profile, *(word for one in self.overrides for word in ("--set", one))])

    def finishes(self, other: RunRecord) -> bool:
        """Whether this run has completed the unfinished work of the other one, of the same profile."""
        named, same = (self.profile, self.overrides), self.digest == other.digest
        return (
            self.state == COMPLETED
            and self.changed > other.changed
            and (same or (bool(self.profile) and named == (other.profile, other.overrides)))
            and self.store == other.store
            and self.until in ("", other.until)
        )


@dataclass
class RunNote:
    """The record of the run of this process, rewritten at each change."""

    home: Home
    record: RunRecord = field(repr=False)

    def change(self, **changes: str | dict[str, str]) -> None:
        """Change fields of the record. A disk that cannot be written to costs the line in `rlhf runs`, not the run."""
        said = without_secrets(str(changes.get("message", self.record.message)))[:LONGEST_MESSAGE]
        self.record = replace(self.record, **{**changes, "message": said}, changed=time.time())  # type: ignore[arg-type]
        try:
            write_json(self._path, asdict(self.record), durable=False)
            for path in sorted(self._path.parent.glob("*.json"))[:-KEPT]:
                path.unlink(missing_ok=True)
                path.with_suffix(".html").unlink(missing_ok=True)
        except OSError as error:
            logger.warning("could not record the run: %s", error)

    def finishes_another(self) -> bool:
        """Whether an unfinished run exists that this one, once completed, has finished."""
        done = replace(self.record, state=COMPLETED, changed=time.time())
        return any(
            done.finishes(one) for one in run_records(self.home) if one.state not in (RUNNING, COMPLETED, CLOSED)
        )

    @property
    def page(self) -> Path:
        """File of the run's report for readers."""
        return self._path.with_suffix(".html")

    @property
    def _path(self) -> Path:
        return folder(self.home) / f"{self.record.began:.6f}-{self.record.id}.json"


def new_note(
    home: Home, name: str, *, profile: str, digest: str, overrides: Sequence[str], until: str, store: Path
) -> RunNote:
    """The note of a run that begins; nothing is written before its first change."""
    began, started = time.time(), process_stat(os.getpid())
    record = RunRecord(
        secrets.token_hex(4), name, profile, digest, list(overrides), until, str(store.resolve()), user_name(),
        list(here()), os.getpid(), -1 if started is None else started[1], began, began,
    )  # fmt: skip
    return RunNote(home, record)


def whereabouts(profile: str) -> str:
    """The name of a shipped profile, or the absolute path of a file: `rlhf resume` may run in another folder."""
    path = Path(profile)
    return str(path.resolve()) if path.is_file() else profile


def folder(home: Home) -> Path:
    return home.root / "runs"


def run_records(home: Home) -> list[RunRecord]:
    """Records of all runs, newest first, with their true state: crashed and closed ones do not change theirs."""
    found: list[RunRecord] = []
    for path in sorted(folder(home).glob("*.json"), reverse=True):
        table = read_json(path)
        with suppress(TypeError):  # of another version
            found.append(RunRecord(**(table or {})))
    found = [
        replace(one, state="Crashed", message="its process was killed") if _has_crashed(one) else one for one in found
    ]
    return list(_with_closed(found))


def runs_with(home: Home, store: Path, stage: str) -> list[RunRecord]:
    """The runs that have a model of this stage, which is still in the store; newest first."""
    from rlhf_core.store.opening import open_store  # pydantic, which `rlhf runs` does without

    shared, root = open_store(store), str(store.resolve())
    found = [one for one in run_records(home) if one.store == root and stage in one.policies]
    return [one for one in found if shared.has(one.policies[stage])]


def _with_closed(found: Sequence[RunRecord]) -> Iterator[RunRecord]:
    finished = [one for one in found if one.state == COMPLETED]
    for one in found:
        by = next((other for other in finished if other.finishes(one)), None)
        halted = one.state not in (RUNNING, COMPLETED) and by is not None
        yield replace(one, state=CLOSED, message=f"a later run finished it: {by.name}") if halted and by else one


def _has_crashed(record: RunRecord) -> bool:
    is_local = record.state == RUNNING and tuple(record.host) == here()
    return is_local and process_state(record.pid, record.pid_started) == "gone"
