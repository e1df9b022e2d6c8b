"""Apply records to MLflow. Only this module and `mlflow.py` know MLflow, which is imported on first use.

Only `MlflowClient` with explicit run ids is used: the fluent API keeps a run stack per thread. Every operation may be
repeated and then changes nothing.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.errors import distrust
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.tracking import redaction
from rlhf_core.tracking.mlflow_client import experiment_id, get_run, import_mlflow, open_client, run_path
from rlhf_core.tracking.outbox import Record, Refused, ServerUnreachable
from rlhf_core.tracking.policy_reference import folder_of, save_model_file
from rlhf_core.types import chunks

logger = logging.getLogger(__name__)

RUN_TAG = "rlhf.run"
KEY_TAG = "store.key"
DIGEST_TAG = "store.digest"
STORE_URI_TAG = "store.uri"
ATTEMPT_TAG = "attempt"
NOTE_TAG = "mlflow.note.content"
PARENT_TAG = "mlflow.parentRunId"
STAGES_TAG, STAGE_TAG = "rlhf.stages", "stage."
"""Tag of a pipeline's run with the runs of its stages by label, in JSON; beginning of a tag with a single run."""
KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Tag that shows an experiment on MLflow's training pages instead of those for applications."""
TABLES_TAG = "mlflow.loggedArtifacts"
EXTERNAL_TAG = "mlflow.model.isExternal"
VERSIONS_TAG = "mlflow.modelVersions"

_NOT_IN_METRICS = re.compile(r"[^\w.\- :/]")
"""Characters that MLflow refuses in the name of a metric, and with it all metrics of the request: `pass@1` has one."""
_RUN_LINK = re.compile(r"\(runs:/([0-9a-f]{32})")  # as `run_url` writes it without a server
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

    def __init__(
        self,
        uri: str,
        *,
        experiment: str,
        artifact_root: Path | None,
        store: Path | None = None,
        locate: Callable[[], str] | None = None,
    ) -> None:
        self._uri = uri
        self._locate = locate or (lambda: uri)
        self._connected = ""
        self._experiment = experiment
        self._artifact_root = artifact_root
        self._store = store
        self._client: Any = None
        self._mlflow: Any = None
        self._failing: tuple[Record | None, int] = (None, 0)
        self._opened: set[str] = set()
        """Ids of the pipeline's runs that this process has opened."""
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
                raise ServerUnreachable(
                    f"{without_secrets(self._uri)} does not answer ({_first_line(error)})"
                ) from error
            logger.warning(
                "tracking: the server rejected %s, which is skipped: %s", records[0]["op"], _first_line(error)
            )
        return max(1, len(batch))

    def client(self) -> Any:
        """The MlflowClient, connected on first use and when the runs are at another address than before."""
        uri = self._locate()
        if self._client is None or uri != self._connected:
            client, self._connected = open_client(uri), uri
            self.experiment_id = experiment_id(client, self._experiment, self._artifact_root, tags=KIND)
            self._client, self._mlflow = client, import_mlflow()
        return self._client

    def _may_recover(self, error: Exception, record: Record) -> bool:
        """Whether the record may succeed later: not if MLflow refused it, nor if it alone keeps failing."""
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
        self._opened.add(self._open(client, record, found, record["name"], tags).run_id)

    def _open_stage(self, client: Any, record: Record) -> None:
        """Open the run of a stage: its key's run, which later attempts continue, or a fresh one."""
        parent = self._run(client, record["parent"])
        key, label = record["run"], record["label"]
        # The record of a fresh run may be delivered twice; the second time, the run of this attempt exists.
        found = self._search(client, *(("attempt.id", record["attempt"]) if record["fresh"] else (KEY_TAG, key)))
        tags = redaction.tags(record["tags"]) | {KEY_TAG: key, PARENT_TAG: parent.run_id, "stage": label}
        link = f"[pipeline run]({run_path(self.experiment_id, parent.run_id)})"
        tags[NOTE_TAG] = _note(f"**{label}** of {link}, store key `{key}`", tags)
        run = self._open(client, record, found, f"{label} · {parent.name}" if parent.name else label, tags)
        self._note_stage(client, parent, label, run.run_id)

    def _open(self, client: Any, record: Record, found: Any, name: str, tags: dict[str, str]) -> Run:
        """Create a run, or continue the run that was found.

        MLflow keeps the first value of a parameter. Values that differ in a later attempt become tags.
        """
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
        for part in chunks(rows, PARAMS_PER_REQUEST):
            client.log_batch(run.run_id, params=part)
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
        """Note a cache hit on the pipeline's run, with the run that made the result."""
        parent = self._run(client, record["run"])
        run_id = record["run_id"]
        if not run_id:
            found = self._search(client, KEY_TAG, record["key"])
            run_id = found.info.run_id if found else f"key {record['key'][:12]}"
        self._note_stage(client, parent, record["label"], f"{run_id} (cached)")
        if record["run_id"].isalnum():
            self._finish_killed(client, run_id)

    def _note_stage(self, client: Any, parent: Run, label: str, run: str) -> None:
        """Note the run of a stage on the pipeline's run: in the tag of all stages, which only the opener of that run writes.

        A job of Ray, and a table that is too long, get a tag for the stage.
        """
        stages = json.dumps(json.loads(parent.tags.get(STAGES_TAG, "{}")) | {label: run})
        tag = f"{STAGE_TAG}{label}"
        if parent.run_id not in self._opened or len(stages) > redaction.TAG_CHARACTERS:
            client.set_tag(parent.run_id, tag, run)
            return
        client.set_tag(parent.run_id, STAGES_TAG, stages)
        parent.tags[STAGES_TAG] = stages
        if parent.tags.pop(tag, ""):  # of an earlier attempt
            client.delete_tag(parent.run_id, tag)

    def _finish_killed(self, client: Any, run_id: str) -> None:
        """End the run that made a committed artifact as FINISHED if it is KILLED: a kill came between commit and end."""
        killed = f"attributes.run_id = '{run_id}' and attributes.status = 'KILLED'"
        for found in client.search_runs([self.experiment_id], filter_string=killed, max_results=1):
            client.set_terminated(run_id, status="FINISHED", end_time=found.info.end_time)

    def _finish(self, client: Any, record: Record) -> None:
        """End a run, unless another process continues it, and put its note above its description."""
        run = self._run(client, record["run"])
        if record["status"] != "FINISHED" and self._is_anothers(client, run):
            logger.warning("tracking: run %s continues in another process, so it is not ended here", run.run_id)
            return
        if record["note"] and record["note"] not in run.tags.get(NOTE_TAG, ""):
            note = f"{without_secrets(self._linked(client, record['note']))}\n\n{run.tags.get(NOTE_TAG, '')}"
            client.set_tag(run.run_id, NOTE_TAG, note[: redaction.TAG_CHARACTERS])
        client.set_terminated(run.run_id, status=record["status"])

    def _linked(self, client: Any, note: str) -> str:
        """Rewrite the links of a description to MLflow's pages so that they work under any server address."""

        def link(found: re.Match[str]) -> str:
            run = get_run(client, found[1])  # a hit may be of another experiment
            return found[0] if run is None else f"({run_path(run.info.experiment_id, found[1])}"

        return _RUN_LINK.sub(link, note).replace(f"({without_secrets(self._uri).rstrip('/')}/#/", "(#/")

    def _is_anothers(self, client: Any, run: Run) -> bool:
        """Whether another process has opened the stage's run since: it took the stage over and will end it."""
        attempt = client.get_run(run.run_id).data.tags.get("attempt.id")
        return KEY_TAG in run.tags and bool(attempt != run.tags.get("attempt.id"))

    def _run(self, client: Any, token: str) -> Run:
        """Find the run with our name `token`; a run that an earlier process opened is found by its tag."""
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
        for part in chunks(points, METRICS_PER_REQUEST):
            client.log_batch(run.run_id, metrics=part)
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
        """Find the version of the registered model with a digest, or create it, and set its aliases."""
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
        """Create a version of a registered model. It does not wait: the weights are in the store and not copied."""
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
        """Find the id of the model with this digest, which can be loaded from `uri`; create it if missing."""
        model_id = self._find_model(client, digest)
        if model_id is None:
            return self._create_model(client, name, digest, uri, run_id)
        if uri and STORE_URI_TAG not in (model := client.get_logged_model(model_id)).tags:  # so far an input only
            save_model_file(self._mlflow, client, model, folder_of(uri, self._store))
            client.set_logged_model_tags(model_id, {STORE_URI_TAG: uri})
        return model_id


def registry_name(name: str) -> str:
    """Replace the characters in `name` that the registry refuses."""
    return re.sub(r"[/:]", "-", name)


def _version_of(client: Any, name: str, digest: str) -> Any:
    """Find the version of a registered model with this digest; None if it does not exist."""
    versions = client.search_model_versions(f"name = '{name}'")
    return next((version for version in versions if version.tags.get(DIGEST_TAG) == digest), None)


def _why_refused(error: Exception) -> str:
    """Explain why a first contact failed, with a remedy, if waiting cannot help; "" if the server may just be away."""
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
    """Select the metrics records at the front that belong to one run."""
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
