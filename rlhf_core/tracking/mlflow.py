"""Pipeline runs in MLflow: one parent run per pipeline run, one child run per stage key, re-opened on resume.

    tracker = MlflowTracker("sqlite:////data/mlflow.db", experiment="rlhf", artifact_root=Path("/data/artifacts"))
    run_id = tracker.start("nightly", run_id=None, params=profile, tags={"git.sha": sha})
    stage = tracker.stage("sft", key=key, params=config, tags={})
    stage.metrics(10, {"sft/loss": 2.1})
    stage.finish("FINISHED")
    tracker.finish("FINISHED", note="")

Nothing here raises for a server that is slow or down: every record goes through an `Outbox`. Only `start` raises, for a
server that refuses this user. The step from which on a resumed stage records again is taken from MLflow itself, per
metric, so charts have no saw-tooth.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.interfaces import RegistryState, StageTracker
from rlhf_core.processes.private_folder import private_folder
from rlhf_core.store.leases import Owner, is_gone
from rlhf_core.tracking import mlflow_client as owner
from rlhf_core.tracking import redaction
from rlhf_core.tracking.champions import registry_state
from rlhf_core.tracking.further import FurtherTrackers
from rlhf_core.tracking.memory import RunStatus
from rlhf_core.tracking.mlflow_client import TrackingError, database_file, open_client, run_url, tracking_errors
from rlhf_core.tracking.mlflow_delivery import Delivery
from rlhf_core.tracking.outbox import Outbox

logger = logging.getLogger(__name__)

OPEN_SECONDS = 120.0
"""Time limit of the first contact, which may import MLflow and create a database; later ones take milliseconds."""
CLOSE_SECONDS = 30.0  # a run must end although the server is slow; the spool keeps the rest
LARGEST_FILE = 64 * 2**20
"""Maximum size in bytes of a file for readers (figures, reports); weights and data stay in the store."""


class MlflowTracker:
    """One pipeline run. `uri` is a server (`http://127.0.0.1:5000`) or a database (`sqlite:////data/mlflow.db`).

    `artifact_root` is where a new experiment keeps its files; None leaves that to the server. `spool` is the folder for
    undelivered records: on this machine, shared by runs, by default next to the database or the root. `place` names the
    MLflow behind `uri` if it has several addresses: a run through the database then delivers the records that a run
    through the server left. `join` is the token of a run that another process opened and will end. `store` is the
    folder of the artifact store, from which MLflow loads registered policies. `further` trackers get the metrics, too.
    `locate` returns the present address of that MLflow, if it may change during the run.
    """

    def __init__(
        self,
        uri: str,
        *,
        experiment: str,
        artifact_root: Path | None,
        spool: Path | None = None,
        place: str = "",
        join: str = "",
        store: Path | None = None,
        further: FurtherTrackers | None = None,
        locate: Callable[[], str] | None = None,
    ) -> None:
        self._uri = uri
        self._token = join or uuid.uuid4().hex
        self._delivery = Delivery(uri, experiment=experiment, artifact_root=artifact_root, store=store, locate=locate)
        self._locate = locate or (lambda: uri)
        self._further = further or FurtherTrackers()
        folder = spool or _spool_folder(uri, artifact_root)
        self._outbox = Outbox(folder / _short(f"{place or uri} {experiment}"), self._delivery)

    @property
    def run_id(self) -> str:
        """The run's id, or "" until the server has been reached."""
        return self._id_of(self._token)

    @property
    def token(self) -> str:
        """Our own name of the run, with which another process can join it."""
        return self._token

    @property
    def offline(self) -> bool:
        """Whether the server was away at the last attempt; records then wait in the spool."""
        return self._outbox.offline

    def start(self, name: str, *, run_id: str | None, params: Mapping[str, Any], tags: Mapping[str, str]) -> str:
        """Open the parent run, or reopen `run_id`; return its id ("" while the server is away).

        Runs of killed processes of this machine that are still RUNNING are ended as KILLED. Raises TrackingError if the
        server refuses this user or cannot be used at all: the run would train for hours and record nothing.
        """
        self._open("open_run", name, self._token, params, tags, run_id=run_id or "", name=name)
        if self._outbox.flush(OPEN_SECONDS, retry=True):
            self._reconcile()
        refused = self._outbox.refused
        if refused is not None:
            self.finish("FAILED", note=str(refused))
            raise TrackingError(
                f"MLFLOW_TRACKING_URI = {refused}; without MLFLOW_TRACKING_URI, runs are tracked in the state folder"
            )
        return self.run_id

    def stage(
        self, label: str, *, key: str, params: Mapping[str, Any], tags: Mapping[str, str], fresh: bool = False
    ) -> MlflowStageTracker:
        """Open the run of the stage `key` below this one: one run per key, found again by its tag.

        `fresh` opens another one, for a stage that is made again from its beginning.
        """
        self._open("open_stage", label, key, params, tags, parent=self._token, label=label, fresh=fresh)
        self._outbox.flush(OPEN_SECONDS, retry=False)
        return MlflowStageTracker(self, key)

    @property
    def parent(self) -> MlflowStageTracker:
        """The tracker of the parent run itself: its own metrics, tables and files."""
        return MlflowStageTracker(self, self._token)

    def tag(self, tags: Mapping[str, str]) -> None:
        """Set tags of the parent run."""
        self._append("tag", self._token, tags=redaction.tags(tags))

    def describe(self, name: str, digest: str, text: str) -> None:
        """Describe, in Markdown, the version of a registered model with this digest."""
        self._append("describe", self._token, name=name, digest=digest, text=text)

    def cached(self, label: str, *, run_id: str | None, key: str) -> None:
        """Record on the parent run that `label` was taken from the store, and the run that made it."""
        self._append("cached", self._token, label=label, run_id=run_id or "", key=key)

    def finish(self, status: RunStatus, *, note: str) -> None:
        """End the run with its true status, put `note` (markdown) before its description, and deliver everything."""
        self._append("finish", self._token, status=status, note=note)
        self.leave()

    def leave(self) -> None:
        """Deliver everything, and leave the run open for the process that opened it."""
        self._outbox.close(CLOSE_SECONDS)
        self._further.close()

    def url(self, run_id: str) -> str:
        """Address of a run."""
        return run_url(self._uri, self._delivery.experiment_id, run_id)

    def _open(
        self, op: str, title: str, run: str, params: Mapping[str, Any], tags: Mapping[str, str], **fields: Any
    ) -> None:
        flat = redaction.flatten(params)
        self._further.stage(title, run, flat)
        shown = redaction.tags({**tags, **owner.in_one_tag()})
        self._append(op, run, params=flat, tags=shown, attempt=uuid.uuid4().hex, **fields)

    def _append(self, op: str, run: str, **fields: Any) -> None:
        self._outbox.append({"op": op, "run": run, **fields})

    def _id_of(self, token: str) -> str:
        return self._delivery.runs[token].run_id if token in self._delivery.runs else ""

    def _reconcile(self) -> None:
        try:
            end_dead_runs(self._delivery.client(), self._delivery.experiment_id)
        except Exception as error:  # a failed cleanup must not keep the run from starting
            logger.warning("tracking: could not end the runs of dead processes: %s", error)


class MlflowStageTracker(StageTracker):
    """The tracker of one stage, or of the parent run; created by `MlflowTracker.stage` and `MlflowTracker.parent`."""

    def __init__(self, tracker: MlflowTracker, key: str) -> None:
        self._tracker = tracker
        self._key = key

    @property
    def run_id(self) -> str:
        """The run's id, or "" until the server has been reached."""
        return self._tracker._id_of(self._key)

    @property
    def uri(self) -> str:
        return self._tracker._locate()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        if len(finite) < len(values):  # charts cannot show them; metrics.jsonl keeps them
            logger.warning(
                "step %d: skipping metrics that are not finite: %s", step, ", ".join(sorted(set(values) - set(finite)))
            )
        if finite:
            self._append("metrics", step=step, values=finite, time=int(time.time() * 1000))
            self._tracker._further.metrics(self._key, step, finite)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._append("table", name=name, columns=list(columns), rows=[list(row) for row in rows])

    def file(self, path: Path, folder: str) -> None:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            logger.warning("tracking: %s has %d bytes and is not copied to the tracking server", path, size)
            return
        # The original may move into the store before the background thread reads it.
        holder = Path(tempfile.mkdtemp(dir=self._tracker._outbox.folder, prefix="file-"))
        self._append("file", path=str(Path(shutil.copyfile(path, holder / path.name)).resolve()), folder=folder)

    def dataset(self, name: str, digest: str, context: str) -> None:
        self._append("dataset", name=name, digest=digest, context=context)

    def model(self, name: str, digest: str, uri: str) -> None:
        self._append("model", name=name, digest=digest, uri=uri)

    def input_model(self, digest: str) -> None:
        self._append("input_model", digest=digest)

    def set_tags(self, values: Mapping[str, str]) -> None:
        self._append("set_tags", tags=redaction.tags(values))

    def register(
        self, name: str, digest: str, *, aliases: Sequence[str], tags: Mapping[str, str], uri: str = ""
    ) -> str:
        """Register the model of `digest` under `name`; return the version, "pending" while the server is away."""
        token = uuid.uuid4().hex
        self._append("register", id=token, name=name, digest=digest, aliases=list(aliases), tags=dict(tags), uri=uri)
        self._tracker._outbox.flush(OPEN_SECONDS, retry=False)
        return self._tracker._delivery.versions.get(token, "pending")

    def champions(self, name: str) -> RegistryState | None:
        try:
            return registry_state(self.uri, name)
        except TrackingError as error:
            logger.warning("tracking: the champions of %s are unknown: %s", name, error)
            return None

    def flush(self) -> bool:
        """Deliver waiting records, for instance at a checkpoint; return whether everything arrived."""
        return self._tracker._outbox.flush(CLOSE_SECONDS, retry=False)

    def finish(self, status: RunStatus) -> None:
        """End the stage's run with its true status."""
        self._append("finish", status=status, note="")
        self._tracker._outbox.flush(CLOSE_SECONDS, retry=False)
        self._tracker._further.close(self._key)

    def _append(self, op: str, **fields: Any) -> None:
        self._tracker._append(op, self._key, **fields)


@dataclass(frozen=True)
class EndedRun:
    """A run that was RUNNING although its process is gone, and is KILLED now."""

    experiment: str
    name: str
    run_id: str
    owner: Owner


def end_dead_runs(client: Any, experiment_id: str, *, experiment: str = "") -> list[EndedRun]:
    """End the RUNNING runs whose process is gone as KILLED; return them.

    Only processes of this machine are checked: processes of another machine may still be alive.
    """
    ended = []
    for run in client.search_runs([experiment_id], filter_string="attributes.status = 'RUNNING'"):
        process: Owner | None = owner.from_tags(run.data.tags)
        if process is not None and is_gone(process):
            client.set_terminated(run.info.run_id, status="KILLED")
            ended.append(EndedRun(experiment or experiment_id, run.info.run_name, run.info.run_id, process))
    return ended


def end_all_dead_runs(uri: str) -> list[EndedRun]:
    """End the runs of dead processes in every experiment behind `uri`; raise TrackingError if it does not answer."""
    with tracking_errors(uri):
        client = open_client(uri)
        experiments = client.search_experiments()
        return [run for one in experiments for run in end_dead_runs(client, one.experiment_id, experiment=one.name)]


def _spool_folder(uri: str, artifact_root: Path | None) -> Path:
    if artifact_root is not None:
        return artifact_root / ".spool"
    if (database := database_file(uri)) is not None:
        return database.parent / ".mlflow-spool"
    return private_folder(Path(tempfile.gettempdir()) / f"rlhf-mlflow-spool-{os.getuid()}")


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
