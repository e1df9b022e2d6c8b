"""Apply records to MLflow. Only this module and `mlflow.py` know MLflow, which is imported on first use.

Only `MlflowClient` with explicit run ids is used: the fluent API keeps a run stack per thread. Every operation may be
repeated and then changes nothing.

Queue records for a tracking server: they are written to a spool file first and delivered by a background thread.

A server that is slow, down or gone costs the caller one line in a file. Records that are undelivered when the process
ends, killed or not, are delivered by the next process that opens the same folder. A record may be delivered twice
(after a kill between its delivery and its removal from the spool), so delivery must be idempotent.
"""

import fcntl
import json
import logging
import re
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeAlias

from rlhf_core.errors import distrust
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.tracking import redaction
from rlhf_core.tracking.mlflow_client import experiment_id, get_run, import_mlflow, open_client, run_path
from rlhf_core.tracking.policy_reference import folder_of, save_model_file

# ---------------------------------------------------------------- outbox

logger = logging.getLogger(__name__)

Record: TypeAlias = dict[str, Any]

FLUSH_SECONDS = 2.0  # charts follow within seconds, at one request for many points
FLUSH_POINTS = 500  # half of METRICS_PER_REQUEST
FIRST_RETRY_SECONDS = 2.0  # a restart of the server takes a few seconds
LONGEST_RETRY_SECONDS = 60.0  # so that records arrive within a minute of its return


class Unreachable(Exception):
    """The server could not be reached; the same records are retried later."""


class Refused(Unreachable):
    """The server cannot be used with these settings (credentials, a driver that is missing) until they are changed."""


class Outbox:
    """An ordered queue of records, backed by a file.

    `deliver(records)` gets the oldest records, delivers some of them and returns how many are finished (delivered or
    given up, at least one). It raises `Unreachable` if it cannot continue now. It runs in the outbox's own thread.
    """

    def __init__(self, folder: Path, deliver: Callable[[Sequence[Record]], int]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._deliver = deliver
        self._path = folder / f"{uuid.uuid4().hex}.jsonl"
        self._file = self._path.open("a", encoding="utf-8")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._queue: deque[Record] = deque()
        self._points = 0
        self._appended = 0
        self._done = 0
        self._tries = 0
        self._offline = False
        self._refused: Refused | None = None
        self._hurry = False
        self._closing = False
        self._condition = threading.Condition()
        self._adopt()
        self._thread = threading.Thread(target=self._work, name="tracking-outbox", daemon=True)
        self._thread.start()

    @property
    def offline(self) -> bool:
        """Return whether the last delivery found no server."""
        return self._offline

    @property
    def refused(self) -> Refused | None:
        """Return why the last delivery was refused, until the server accepts one."""
        return self._refused

    def append(self, record: Record) -> None:
        """Queue `record` (JSON-able); returns at once."""
        line = json.dumps(record, default=str) + "\n"
        with self._condition:
            if self._closing:
                logger.warning("tracking: a record of %s arrived after the end of the run and is dropped", record["op"])
                return
            try:
                self._file.write(line)
                self._file.flush()
            except OSError as error:  # a full disk costs the spool its durability, but must not stop the training
                logger.warning("tracking: %s: %s; the record is kept in memory only", self._path, error)
            self._queue.append(record)
            self._appended += 1
            self._points += _points(record)
            if self._points >= FLUSH_POINTS:
                self._condition.notify_all()

    def flush(self, timeout_s: float, *, retry: bool) -> bool:
        """Wait until everything queued so far is delivered; return False if the server is away or time is up.

        A server that is known to be down is contacted again only with `retry`.
        """
        with self._condition:
            if self._closing or (self._offline and not retry):
                return self._done >= self._appended
            target, tries = self._appended, self._tries
            self._hurry = True
            self._condition.notify_all()
            self._condition.wait_for(
                lambda: self._done >= target or (self._offline and self._tries > tries), timeout=timeout_s
            )
            return self._done >= target

    def close(self, timeout_s: float) -> bool:
        """Deliver as many records as possible, stop, and leave the rest in the spool for the next process."""
        self.flush(timeout_s, retry=True)
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(timeout=timeout_s)
        with self._condition:
            left = len(self._queue)  # what was under way when the time was up may have arrived since
            if not left:
                self._path.unlink(missing_ok=True)
            self._file.close()
        if left:
            logger.warning("tracking: %d records are kept in %s, and the next run sends them", left, self._path)
        return not left

    def _adopt(self) -> None:
        """Take over the records of processes that are gone: those whose spool file is not locked."""
        for path in sorted(self.folder.glob("*.jsonl"), key=_modified):
            if path == self._path:
                continue
            try:
                with path.open("r+", encoding="utf-8") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    for record in _read(file):
                        self.append(record)
                    path.unlink()
            except (BlockingIOError, FileNotFoundError):
                continue

    def _work(self) -> None:
        retry_s = FIRST_RETRY_SECONDS
        while self._wait(retry_s if self._offline else FLUSH_SECONDS):
            try:
                self._drain()
            except Unreachable as error:
                retry_s = min(2 * retry_s, LONGEST_RETRY_SECONDS) if self._offline else FIRST_RETRY_SECONDS
                self._went_offline(error)
            except Exception:  # a bug in the delivery must not end the thread, and with it the records
                logger.exception("tracking: delivery failed")
                self._went_offline(None)

    def _wait(self, seconds: float) -> bool:
        """Sleep until there is a reason to deliver; return False when it is time to stop."""
        deadline = time.monotonic() + seconds
        with self._condition:
            while not self._closing and not self._hurry:
                left = deadline - time.monotonic()
                if left <= 0 or (self._points >= FLUSH_POINTS and not self._offline):
                    break
                self._condition.wait(left)
            self._hurry = False
            return not self._closing

    def _drain(self) -> None:
        while True:
            with self._condition:
                records = [self._queue[index] for index in range(min(len(self._queue), FLUSH_POINTS))]
                if not records:
                    self._tries += 1
                    self._condition.notify_all()
                    return
            done = self._deliver(records)
            with self._condition:
                for _ in range(done):
                    self._points -= _points(self._queue.popleft())
                self._done += done
                if self._offline:
                    logger.info("tracking: the server answers again")
                    self._offline, self._refused = False, None
                if not self._queue:
                    self._file.truncate(0)
                self._condition.notify_all()
            if self._closing:
                return

    def _went_offline(self, error: Unreachable | None) -> None:
        with self._condition:
            if not self._offline and error is not None:
                logger.warning("tracking: %s; records are kept in %s and sent later", error, self._path)
            self._offline = True
            self._refused = error if isinstance(error, Refused) else None
            self._tries += 1
            self._condition.notify_all()


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has just adopted it
        return 0.0


def _points(record: Record) -> int:
    return len(record["values"]) if record["op"] == "metrics" else 1


def _read(file: IO[str]) -> list[Record]:
    """Return the complete records of a spool file; a line that a kill or a full disk cut short is left out."""
    records = []
    for line in file:
        try:
            records.append(json.loads(line))
        except ValueError:
            logger.warning("tracking: %s: skipping an incomplete record", file.name)
    return records


# ---------------------------------------------------------------- mlflow delivery

RUN_TAG = "rlhf.run"
KEY_TAG = "store.key"
DIGEST_TAG = "store.digest"
STORE_URI_TAG = "store.uri"
ATTEMPT_TAG = "attempt"
NOTE_TAG = "mlflow.note.content"
PARENT_TAG = "mlflow.parentRunId"
KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Tag that shows an experiment on MLflow's training pages instead of those for applications."""
TABLES_TAG = "mlflow.loggedArtifacts"
EXTERNAL_TAG = "mlflow.model.isExternal"
VERSIONS_TAG = "mlflow.modelVersions"

_NOT_IN_METRICS = re.compile(r"[^\w.\- :/]")
"""Characters that MLflow refuses in the name of a metric, and with it all metrics of the request: `pass@1` has one."""
_RUN_LINK = re.compile(r"\(runs:/([0-9a-f]{32})")  # as `run_url` writes it where there is no server
METRICS_PER_REQUEST = 1000  # limit of `log_batch`
PARAMS_PER_REQUEST = 100  # limit of `log_batch`
DATASET_DIGEST = 32
"""Length of a dataset digest; MLflow takes at most 36 characters."""
DESCRIPTION_CHARACTERS = 5000
"""Length of the description of a model's version in MLflow's database."""
TRIES_OF_ONE_RECORD = 3  # then it is given up, so that later ones arrive

_BUSY = "TEMPORARILY_UNAVAILABLE"
"""MLflow's error code for a database that is locked, full or away; reading it may still work."""
_REFUSED = {
    "BAD_REQUEST",
    "ENDPOINT_NOT_FOUND",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "MALFORMED_REQUEST",
    "NOT_FOUND",
    "PERMISSION_DENIED",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
}


@dataclass
class Run:
    """A run as stored in MLflow. `last_step` is the watermark: metric name -> last recorded step."""

    run_id: str
    params: dict[str, str]
    tags: dict[str, str]
    last_step: dict[str, int] = field(default_factory=dict)
    name: str = ""


class Delivery:
    """The connection to one experiment. Only the outbox's thread calls it; `runs` and `versions` may be read."""

    def __init__(self, uri: str, *, experiment: str, artifact_root: Path | None, store: Path | None = None) -> None:
        self._uri = uri
        self._experiment = experiment
        self._artifact_root = artifact_root
        self._store = store
        self._client: Any = None
        self._mlflow: Any = None
        self._failing: tuple[Record | None, int] = (None, 0)
        self.experiment_id = ""
        self.runs: dict[str, Run] = {}
        """Our own name of a run (a stage's key, a pipeline run's token) -> the run."""
        self.versions: dict[str, str] = {}
        """Token of a register record -> version."""

    def __call__(self, records: Sequence[Record]) -> int:
        """Apply the oldest of `records`; return how many are finished (see `Outbox`)."""
        batch = _same_run_metrics(records)
        try:
            client = self.client()
            if batch:
                self._metrics(client, batch)
            else:
                getattr(self, f"_{records[0]['op']}")(client, records[0])
        except Exception as error:
            opens = self._client is None or records[0]["op"] == "open_run"
            if opens and (why := _why_refused(error)):
                raise Refused(f"{without_secrets(self._uri)}: {why}") from error
            if self._may_recover(error, records[0]):
                raise Unreachable(f"{without_secrets(self._uri)} does not answer ({_first_line(error)})") from error
            logger.warning(
                "tracking: the server rejected %s, which is skipped: %s", records[0]["op"], _first_line(error)
            )
        return max(1, len(batch))

    def client(self) -> Any:
        """Return the MlflowClient, connected on first use."""
        if self._client is None:
            client = open_client(self._uri)
            self.experiment_id = experiment_id(client, self._experiment, self._artifact_root, tags=KIND)
            self._client, self._mlflow = client, import_mlflow()
        return self._client

    def _may_recover(self, error: Exception, record: Record) -> bool:
        """Return whether the record may succeed later: not if MLflow refused it, nor if it alone keeps failing."""
        if self._client is None or getattr(error, "error_code", "") == _BUSY:
            return True
        if isinstance(error, (FileNotFoundError, KeyError, TypeError)) or getattr(error, "error_code", "") in _REFUSED:
            return False
        failing, times = self._failing
        self._failing = (record, times + 1 if failing is record else 1)
        if self._failing[1] < TRIES_OF_ONE_RECORD:
            return True
        try:
            self._client.get_experiment(self.experiment_id)
        except Exception:  # the server is away for every record, not for this one
            return True
        return False

    # ---------------------------------------------------------------- runs

    def _open_run(self, client: Any, record: Record) -> None:
        found = get_run(client, record["run_id"]) if record["run_id"] else self._search(client, RUN_TAG, record["run"])
        tags = redaction.tags(record["tags"]) | {RUN_TAG: record["run"]}
        tags[NOTE_TAG] = _note(f"**{record['name']}**: a run of the pipeline; its stages are the runs below it.", tags)
        self._open(client, record, found, record["name"], tags)

    def _open_stage(self, client: Any, record: Record) -> None:
        parent = self._run(client, record["parent"])
        key, label = record["run"], record["label"]
        # The record of a fresh run may be delivered twice; the second time, the run of this attempt exists.
        found = self._search(client, *(("attempt.id", record["attempt"]) if record["fresh"] else (KEY_TAG, key)))
        tags = redaction.tags(record["tags"]) | {KEY_TAG: key, PARENT_TAG: parent.run_id, "stage": label}
        link = f"[pipeline run]({run_path(self.experiment_id, parent.run_id)})"
        tags[NOTE_TAG] = _note(f"**{label}** of {link}, store key `{key}`", tags)
        run = self._open(client, record, found, f"{label} · {parent.name}" if parent.name else label, tags)
        client.set_tag(parent.run_id, f"stage.{label}", run.run_id)

    def _open(self, client: Any, record: Record, found: Any, name: str, tags: dict[str, str]) -> Run:
        first = found is None
        entity = client.create_run(self.experiment_id, tags=tags, run_name=name) if first else found
        run = _as_run(entity)
        if run.tags.get("attempt.id") != record["attempt"]:
            tags |= {ATTEMPT_TAG: str(int(run.tags.get(ATTEMPT_TAG, "0")) + 1), "attempt.id": record["attempt"]}
        params = redaction.flatten(record["params"])
        new = {key: value for key, value in params.items() if key not in run.params}
        changed = {key: value for key, value in params.items() if run.params.get(key, value) != value}
        tags |= {f"attempt.{key}"[: redaction.KEY_CHARACTERS]: value for key, value in changed.items()}
        if not first:
            client.update_run(run.run_id, status="RUNNING")
        rows = [self._mlflow.entities.Param(key, value) for key, value in new.items()]
        for start in range(0, len(rows), PARAMS_PER_REQUEST):
            client.log_batch(run.run_id, params=rows[start : start + PARAMS_PER_REQUEST])
        client.log_batch(run.run_id, tags=[self._mlflow.entities.RunTag(key, value) for key, value in tags.items()])
        run.tags |= tags
        run.params |= new
        self.runs[record["run"]] = run
        return run

    def _tag(self, client: Any, record: Record) -> None:
        run = self._run(client, record["run"])
        client.log_batch(
            run.run_id, tags=[self._mlflow.entities.RunTag(key, value) for key, value in record["tags"].items()]
        )

    def _cached(self, client: Any, record: Record) -> None:
        parent = self._run(client, record["run"])
        run_id = record["run_id"]
        if not run_id:
            found = self._search(client, KEY_TAG, record["key"])
            run_id = found.info.run_id if found else f"key {record['key'][:12]}"
        client.set_tag(parent.run_id, f"stage.{record['label']}", f"{run_id} (cached)")
        if record["run_id"].isalnum():
            self._finish_killed(client, run_id)

    def _finish_killed(self, client: Any, run_id: str) -> None:
        """End the run that made a committed artifact as FINISHED if it is KILLED: a kill came between commit and end."""
        killed = f"attributes.run_id = '{run_id}' and attributes.status = 'KILLED'"
        for found in client.search_runs([self.experiment_id], filter_string=killed, max_results=1):
            client.set_terminated(run_id, status="FINISHED", end_time=found.info.end_time)

    def _finish(self, client: Any, record: Record) -> None:
        run = self._run(client, record["run"])
        if record["status"] != "FINISHED" and self._is_anothers(client, run):
            logger.warning("tracking: run %s continues in another process, so it is not ended here", run.run_id)
            return
        if record["note"] and record["note"] not in run.tags.get(NOTE_TAG, ""):
            note = f"{without_secrets(self._linked(client, record['note']))}\n\n{run.tags.get(NOTE_TAG, '')}"
            client.set_tag(run.run_id, NOTE_TAG, note[: redaction.TAG_CHARACTERS])
        client.set_terminated(run.run_id, status=record["status"])

    def _linked(self, client: Any, note: str) -> str:
        """Return a description whose links to MLflow's pages work there, whatever the server's address will be."""

        def link(found: re.Match[str]) -> str:
            run = get_run(client, found[1])  # a hit may be of another experiment
            return found[0] if run is None else f"({run_path(run.info.experiment_id, found[1])}"

        return _RUN_LINK.sub(link, note).replace(f"({without_secrets(self._uri).rstrip('/')}/#/", "(#/")

    def _is_anothers(self, client: Any, run: Run) -> bool:
        """Return whether another process has opened the stage's run since: it took the stage over and will end it."""
        attempt = client.get_run(run.run_id).data.tags.get("attempt.id")
        return KEY_TAG in run.tags and bool(attempt != run.tags.get("attempt.id"))

    def _run(self, client: Any, token: str) -> Run:
        """Return the run with our name `token`; a run that an earlier process opened is found by its tag."""
        if token not in self.runs:
            found = self._search(client, KEY_TAG, token) or self._search(client, RUN_TAG, token)
            if found is None:
                raise KeyError(f"no run has the tag {token}")
            self.runs[token] = _as_run(found)
        return self.runs[token]

    def _search(self, client: Any, tag: str, value: str) -> Any:
        found = client.search_runs([self.experiment_id], filter_string=f"tags.`{tag}` = '{value}'", max_results=1)
        return found[0] if found else None

    # ---------------------------------------------------------------- what happened in a run

    def _metrics(self, client: Any, records: Sequence[Record]) -> None:
        """Log the new points only: MLflow keeps both points of a step that is logged twice (saw-tooth charts)."""
        run = self._run(client, records[0]["run"])
        last = dict(run.last_step)
        points = []
        for record in records:
            for own_name, value in record["values"].items():
                name = _NOT_IN_METRICS.sub("_", own_name)
                if name in last and record["step"] <= last[name]:
                    continue
                last[name] = record["step"]
                points.append(self._mlflow.entities.Metric(name, value, record["time"], record["step"]))
        for start in range(0, len(points), METRICS_PER_REQUEST):
            client.log_batch(run.run_id, metrics=points[start : start + METRICS_PER_REQUEST])
        run.last_step = last

    def _table(self, client: Any, record: Record) -> None:
        """Write a table as `mlflow.log_table` does, without downloading and appending to an earlier one."""
        run = self._run(client, record["run"])
        path = f"{record['name']}.json"
        client.log_text(run.run_id, json.dumps({"columns": record["columns"], "data": record["rows"]}), path)
        listed = json.loads(run.tags.get(TABLES_TAG, "[]"))
        entry = {"path": path, "type": "table"}
        if entry not in listed:
            run.tags[TABLES_TAG] = json.dumps([*listed, entry])
            client.set_tag(run.run_id, TABLES_TAG, run.tags[TABLES_TAG])

    def _file(self, client: Any, record: Record) -> None:
        run = self._run(client, record["run"])
        copy = Path(record["path"])
        client.log_artifact(run.run_id, str(copy), record["folder"] or None)
        shutil.rmtree(copy.parent, ignore_errors=True)

    def _dataset(self, client: Any, record: Record) -> None:
        source = json.dumps({"digest": record["digest"]})
        dataset = self._mlflow.entities.Dataset(record["name"], record["digest"][:DATASET_DIGEST], "store", source)
        tag = self._mlflow.entities.InputTag("mlflow.data.context", record["context"])
        inputs = [self._mlflow.entities.DatasetInput(dataset, [tag])]
        client.log_inputs(self._run(client, record["run"]).run_id, datasets=inputs)

    # ---------------------------------------------------------------- models, by reference

    def _model(self, client: Any, record: Record) -> None:
        run = self._run(client, record["run"])
        model_id = self._made_model(client, record["name"], record["digest"], record["uri"], run.run_id)
        outputs = client.get_run(run.run_id).outputs
        if model_id not in {output.model_id for output in (outputs.model_outputs if outputs else ())}:
            client.log_outputs(run.run_id, [self._mlflow.entities.LoggedModelOutput(model_id, 0)])

    def _input_model(self, client: Any, record: Record) -> None:
        run = self._run(client, record["run"])
        model_id = self._find_model(client, record["digest"])
        if model_id is None:  # a model that no stage made, such as a user's own
            model_id = self._create_model(client, "input", record["digest"], "", None)
        client.log_inputs(run.run_id, models=[self._mlflow.entities.LoggedModelInput(model_id)])

    def _set_tags(self, client: Any, record: Record) -> None:
        run = self._run(client, record["run"])
        for key, value in record["tags"].items():
            client.set_tag(run.run_id, key, value)
        run.tags |= record["tags"]

    def _register(self, client: Any, record: Record) -> None:
        name, digest = registry_name(record["name"]), record["digest"]
        run = self._run(client, record["run"])
        # Records of earlier versions have no uri.
        model_id = self._made_model(client, name, digest, record.get("uri", ""), run.run_id)
        if not client.search_registered_models(filter_string=f"name = '{name}'"):
            client.create_registered_model(name)
        tags = redaction.tags(record["tags"]) | {DIGEST_TAG: digest}
        version = _version_of(client, name, digest)
        if version is None:
            version = self._create_version(client, name, model_id, tags)
        else:
            for key, value in tags.items():
                client.set_model_version_tag(name, version.version, key, value)
        for alias in record["aliases"]:
            client.set_registered_model_alias(name, alias, version.version)
        self.versions[record["id"]] = str(version.version)

    def _describe(self, client: Any, record: Record) -> None:
        name = registry_name(record["name"])
        version = _version_of(client, name, record["digest"])
        if version is not None:
            text = without_secrets(self._linked(client, record["text"]))[:DESCRIPTION_CHARACTERS]
            client.update_model_version(name, version.version, text)

    def _create_version(self, client: Any, name: str, model_id: str, tags: dict[str, str]) -> Any:
        model = client.get_logged_model(model_id)
        version = client.create_model_version(
            name,
            source=f"models:/{model_id}",
            run_id=model.source_run_id,
            tags=tags,
            model_id=model_id,
            await_creation_for=0,
        )
        listed = json.loads(model.tags.get(VERSIONS_TAG, "[]"))
        listed.append({"name": name, "version": version.version})
        client.set_logged_model_tags(model_id, {VERSIONS_TAG: json.dumps(listed, default=str)})  # the link in the UI
        return version

    def _find_model(self, client: Any, digest: str) -> str | None:
        found = client.search_logged_models(
            [self.experiment_id], filter_string=f"tags.`{DIGEST_TAG}` = '{digest}'", max_results=1
        )
        return found[0].model_id if found else None

    def _create_model(self, client: Any, name: str, digest: str, uri: str, run_id: str | None) -> str:
        """Create an external model (`mlflow.create_external_model` without global state); weights are not copied."""
        tags = {DIGEST_TAG: digest, EXTERNAL_TAG: "true"} | ({STORE_URI_TAG: uri} if uri else {})
        name = re.sub(r"[/:.%\"']", "-", name)
        model = client.create_logged_model(
            self.experiment_id, name=name, source_run_id=run_id, tags=tags, model_type="causal-lm"
        )
        save_model_file(self._mlflow, client, model, folder_of(uri, self._store))
        client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)

    def _made_model(self, client: Any, name: str, digest: str, uri: str, run_id: str) -> str:
        """Return the id of the model with this digest, which can be loaded from `uri`; create it if missing."""
        model_id = self._find_model(client, digest)
        if model_id is None:
            return self._create_model(client, name, digest, uri, run_id)
        if uri and STORE_URI_TAG not in (model := client.get_logged_model(model_id)).tags:  # so far an input only
            save_model_file(self._mlflow, client, model, folder_of(uri, self._store))
            client.set_logged_model_tags(model_id, {STORE_URI_TAG: uri})
        return model_id


def registry_name(name: str) -> str:
    """Return `name` with the characters that the registry refuses replaced."""
    return re.sub(r"[/:]", "-", name)


def _version_of(client: Any, name: str, digest: str) -> Any:
    """Return the version of a registered model with this digest; None if there is none."""
    versions = client.search_model_versions(f"name = '{name}'")
    return next((version for version in versions if version.tags.get(DIGEST_TAG) == digest), None)


def _why_refused(error: Exception) -> str:
    """Return why a first contact failed, with a remedy, if waiting cannot help; "" if the server may just be away."""
    if getattr(error, "error_code", "") in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, of a user who may write there"
        return f"refuses this user ({without_secrets(_first_line(error))}); {remedy}"
    if why := distrust(str(error)):
        return f"has a certificate that is not trusted ({why}); set REQUESTS_CA_BUNDLE to that of its authority"
    if isinstance(error, ModuleNotFoundError):
        return f"needs the package {error.name}; pip install 'rlhf-lifecycle[server]' has it, and those for PostgreSQL"
    return ""


def _as_run(entity: Any) -> Run:
    # `_metric_objs` has the latest point of every metric with its step; the public history is one request per metric.
    last = {metric.key: metric.step for metric in entity.data._metric_objs}
    return Run(entity.info.run_id, dict(entity.data.params), dict(entity.data.tags), last, entity.info.run_name)


def _same_run_metrics(records: Sequence[Record]) -> list[Record]:
    """Return the metrics records at the front that belong to one run."""
    batch: list[Record] = []
    for record in records:
        if record["op"] != "metrics" or record["run"] != records[0]["run"]:
            break
        batch.append(record)
    return batch


def _note(heading: str, tags: Mapping[str, str]) -> str:
    links = [
        f"- [{name}]({value})" for name, value in sorted(tags.items()) if value.startswith(("http://", "https://"))
    ]
    return "\n".join([heading, "", *links]).strip()


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return without_secrets(text[0][:300] if text else type(error).__name__)
