"""Store a stage as a JSON file from which a job runs it as the flow would have; the file has no secrets."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.flows.profile import PipelineConfig
from rlhf_core.errors import ArtifactError, explain
from rlhf_core.schema.base import Config
from rlhf_core.stage.key import StageInput, StageSpec, Strictness
from rlhf_core.store.layout import read_json, write_json
from rlhf_core.store.records import restore_handle, stored_handle
from rlhf_core.types import ArtifactRef


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A stage and its surroundings. `job_id` is the name of the job on the cluster.

    `key` is the submitter's: a job that computes another key sees other code or other files. `tracking` is the token of
    the pipeline run to which the stage's tracking run belongs, "" for a tracker that no other process can join.
    """

    job_id: str
    key: str
    stage: StageSpec
    config: PipelineConfig
    store: Path
    force: bool
    strict: Strictness
    tracking: str


def write_spec(path: Path, job: JobSpec) -> None:
    """Write the job to a file, durably."""
    table = {
        "job_id": job.job_id,
        "key": job.key,
        "stage": stored_stage(job.stage),
        "config": job.config.model_dump(mode="json", exclude_none=True),
        "store": str(job.store),
        "force": job.force,
        "strict_code": job.strict.code,
        "strict_env": job.strict.env,
        "tracking": job.tracking,
    }
    write_json(path, table)


def read_spec(path: Path) -> JobSpec:
    """Return the job that `write_spec` wrote; raise ArtifactError if there is no such file."""
    table = read_json(path)
    if table is None:
        rule, remedy = (
            "cannot be read here",
            "make the store available to the flow and to the cluster under the same path",
        )
        raise ArtifactError(explain("job", str(path), rule, remedy))
    return JobSpec(
        job_id=table["job_id"],
        key=table["key"],
        stage=restore_stage(table["stage"]),
        config=PipelineConfig.model_validate(table["config"]),
        store=Path(table["store"]),
        force=table["force"],
        strict=Strictness(code=table["strict_code"], env=table.get("strict_env", False)),
        tracking=table["tracking"],
    )


def stored_stage(spec: StageSpec) -> dict[str, Any]:
    """Return a stage as a JSON table, from which `restore_stage` rebuilds it."""
    kind = type(spec.config)
    return {
        "name": spec.name,
        "module": spec.module,
        "version": spec.version,
        "code": spec.code,
        "config": {"type": f"{kind.__module__}:{kind.__qualname__}", "fields": spec.config.model_dump(mode="json")},
        "inputs": {name: _stored_input(value) for name, value in spec.inputs.items()},
        "seed": spec.seed,
        "label": spec.label,
        "engines": spec.engines,
        "callables": list(spec.callables),
    }


def restore_stage(stored: Mapping[str, Any]) -> StageSpec:
    """Return the stage that `stored_stage` stored, with its original types, so that its key is the same."""
    module, _, name = stored["config"]["type"].partition(":")
    kind = getattr(importlib.import_module(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, Config)):
        rule, remedy = "is not a configuration class", "use the version of this program that wrote it"
        raise ArtifactError(explain("stage.config.type", stored["config"]["type"], rule, remedy))
    return StageSpec(
        name=stored["name"],
        module=stored["module"],
        version=stored["version"],
        code=stored["code"],
        config=kind.model_validate(stored["config"]["fields"]),
        inputs={name: _restore_input(value) for name, value in stored["inputs"].items()},
        seed=stored["seed"],
        label=stored["label"],
        engines=stored["engines"],
        callables=tuple(stored["callables"]),
    )


def _stored_input(value: StageInput) -> Any:
    if isinstance(value, ArtifactRef):
        return stored_handle(value)
    if isinstance(value, tuple):
        return [stored_handle(ref) for ref in value]
    return {"table": {label: stored_handle(ref) for label, ref in value.items()}}


def _restore_input(stored: Any) -> StageInput:
    if isinstance(stored, list):
        return tuple(restore_handle(item) for item in stored)
    if "table" in stored:
        return {label: restore_handle(item) for label, item in stored["table"].items()}
    return restore_handle(stored)
