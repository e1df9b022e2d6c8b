"""Build an artifact again, with its whole lineage, from what the store recorded, and compare it byte by byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipelines.execution.lazy_runtime import KeptRuntime
from pipelines.flows.graph import GivenInput, Stages
from pipelines.flows.inputs import find_artifact
from rlhf_core.config.annotators import People
from rlhf_core.config.engines import RuntimeConfig
from rlhf_core.errors import ArtifactError, ConfigError, explain
from rlhf_core.evaluation.lineage import lineage
from rlhf_core.schema.base import Config
from rlhf_core.stage.decision import changed_modules, differences
from rlhf_core.stage.key import StageSpec, key_payload
from rlhf_core.stage.run import execute
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.fingerprint import hash_tree, module_digests
from rlhf_core.store.layout import write_json
from rlhf_core.store.records import KeyRecord, other_versions, versions
from rlhf_core.store.typed_json import Stored, read_stored
from rlhf_core.tracking.memory import MemoryStageTracker
from rlhf_core.types import ArtifactRef
from stages.table import STAGES, Input

FILE = "file://"
NOTE = "reproduction.json"
"""File of a store in which an artifact is made again: which one, and by which code."""
ENGINES = ("trainer", "sampler")


@dataclass(frozen=True)
class Rebuilt:
    """A stage that was run again."""

    label: str
    digest: str
    """Digest of the artifact that was recorded."""
    found: str
    """Digest of the one that was made now."""
    seconds: float
    files: tuple[str, ...] = ()
    """Files that differ, if the recorded artifact is still in its store."""
    earlier: bool = False
    """Whether an earlier attempt at the same reproduction, which was stopped, has made it."""

    @property
    def same(self) -> bool:
        """Return whether it is the same bytes."""
        return self.digest == self.found


def ancestors(name: str, store: ArtifactStore) -> list[KeyRecord]:
    """Return the records of the stages that led to an artifact, in the order in which they run.

    Raises ArtifactError if no stage made it, and ConfigError if one of the stages cannot be run again.
    """
    ref, records = find_artifact(store, ArtifactRef, name), {record.key: record for record in store.records()}
    found = [records[ancestor.key] for ancestor in lineage(list(records.values()), [ref.digest])]
    if not found:
        raise ArtifactError(explain("artifact", name, "no stage of this store made it", "name one that a run has made"))
    for record in found:
        _check_repeatable(record)
    return found


def _check_repeatable(record: KeyRecord) -> None:
    if record.stage not in STAGES:
        rule = "this version has no such stage"
        raise ConfigError(explain(f"{record.label}.stage", record.stage, rule, "use the version that made it"))
    if record.stage == "publish":
        rule = "registers a model, which is not done twice"
        raise ConfigError(
            explain(f"{record.label}.stage", record.stage, rule, "reproduce the policy that it published")
        )
    if isinstance(getattr(config_of(record), "annotator", None), People):
        rule = "was made by people, who would have to judge again"
        raise ConfigError(explain(f"{record.label}.annotator", "mlflow", rule, "reproduce what does not depend on it"))


def config_of(record: KeyRecord) -> Config:
    """Return the configuration of a recorded stage; raise ConfigError if it cannot be read from the record."""
    stored: Mapping[str, Any] = record.config or record.payload["config"]
    stage = STAGES[record.stage]
    # The section of a profile may say more than the stage reads, such as `start_from`.
    known = {name for kind in stage.configs for name in kind.model_fields}
    try:
        config: Config = TypeAdapter(stage.config).validate_python(
            {name: value for name, value in stored.items() if name in known}
        )
    except ValidationError as error:
        first = error.errors()[0]
        rule = f"its recorded configuration cannot be read: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ConfigError(explain(record.label, record.key[:12], rule, "use the version that made it")) from None
    return config


def changes(record: KeyRecord) -> list[str]:
    """Return the code and package differences since the stage ran."""
    modules = changed_modules(record.code, module_digests(STAGES[record.stage].module))
    code = [f"code changed: {', '.join(modules)}"] if modules else []
    return code + other_versions(record.environment)


class Reproduction(Stored):
    """What is made again in a folder, and by which code: an attempt that was stopped goes on only if it is the same."""

    target: str
    """Digest of the artifact."""
    code: dict[str, dict[str, str]]
    """Digest of each module, by label of the stage."""
    versions: dict[str, str]


def claim_folder(folder: Path, records: Sequence[KeyRecord], *, source: Path, home_store: Path) -> None:
    """Make a folder the store of a reproduction. Raises ConfigError unless it is empty, or belongs to this one already."""
    place = folder.resolve()
    for root, rule in (
        (source.resolve(), "is in the store that has the artifact"),
        (home_store.resolve(), "is in the store of the state folder"),
    ):
        if place.is_relative_to(root):
            raise ConfigError(explain("--into", str(folder), rule, "name an empty folder"))
    code = {record.label: dict(module_digests(STAGES[record.stage].module)) for record in records}
    ours = Reproduction(target=records[-1].handle.digest, code=code, versions=dict(versions()))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        _check_same(folder, ours)
    else:
        write_json(folder / NOTE, ours.model_dump())


def _check_same(folder: Path, ours: Reproduction) -> None:
    found = read_stored(folder / NOTE, Reproduction) if folder.is_dir() else None
    if found is None or found.target != ours.target:
        rule = "is not empty, and holds no attempt to make this artifact again"
        raise ConfigError(explain("--into", str(folder), rule, "name an empty folder"))
    labels = found.code.keys() | ours.code.keys()
    modules = {
        name for label in labels for name in changed_modules(found.code.get(label, {}), ours.code.get(label, {}))
    }
    changed = [*sorted(modules), *changed_modules(found.versions, ours.versions)]
    if changed:
        rule = f"was begun with other code or packages ({', '.join(changed)})"
        raise ConfigError(explain("--into", str(folder), rule, "name another empty folder"))


@dataclass
class Workshop:
    """The empty store in which stages are run again, and what was made there so far."""

    source: ArtifactStore
    into: ArtifactStore
    runtime: RuntimeConfig
    """Where the engines run; how they are configured is taken from the records."""
    made: dict[str, ArtifactRef] = field(default_factory=dict)
    """Digest of an artifact that was recorded -> the one that takes its place."""
    engines: KeptRuntime = field(default_factory=KeptRuntime)

    def rebuild(self, record: KeyRecord, progress: Callable[[int, int, str], None]) -> Rebuilt:
        """Run a stage again on what was made so far; raise ConfigError if it would not be the same stage."""
        began, spec = time.monotonic(), self.spec(record)
        runtime = self.engines.of(self._runtime_of(record))
        ref, decision = execute(self.into, spec, runtime=runtime, tracker=MemoryStageTracker(), progress=progress)
        for old, name in _named(record.handle):
            self.made[old.digest] = getattr(ref, name) if name else ref
        files = () if ref.digest == record.handle.digest else tuple(self._different_files(record.handle, ref))
        seconds, earlier = time.monotonic() - began, decision.action == "HIT"
        return Rebuilt(record.label, record.handle.digest, ref.digest, seconds, files, earlier)

    def spec(self, record: KeyRecord) -> StageSpec:
        """Return the stage of a record with the artifacts made here as inputs.

        Raises ConfigError for files or functions of the user's that have changed since.
        """
        specs: list[StageSpec] = []

        def note(spec: StageSpec, kind: type[Any]) -> Any:
            specs.append(spec)
            return record.handle

        stages = Stages(note, seed=record.payload["seed"], runtime=self._runtime_of(record))
        stages.run(record.stage, record.label, config_of(record), type(record.handle), **self._inputs(record))
        (spec,) = specs
        now = key_payload(spec)
        other = {**record.payload, "inputs": now["inputs"]}
        for payload in (now, other):  # changed code of ours was said before; what was computed decides
            payload.pop("code", None)
            payload.pop("take", None)
        found = list(differences(record.label, other, now, {}, {}))
        if found:
            rule = f"is not the stage that was recorded: {'; '.join(found)}"
            raise ConfigError(explain(record.label, record.key[:12], rule, "restore what has changed"))
        return spec

    def _runtime_of(self, record: KeyRecord) -> RuntimeConfig:
        tree = self.runtime.model_dump(mode="json", exclude_none=True)
        for engine in ENGINES:
            recorded = record.payload["engines"].get(engine)
            if recorded is not None:
                alike = all(tree[engine].get(name) == recorded.get(name) for name in ("type", "engine"))
                tree[engine] = (tree[engine] if alike else {}) | recorded
        return RuntimeConfig.model_validate(tree)

    def _inputs(self, record: KeyRecord) -> dict[str, GivenInput]:
        rows, given = STAGES[record.stage].inputs, record.payload["inputs"]
        found: dict[str, GivenInput] = {}
        for name, value in given.items():
            if isinstance(value, Mapping):
                found[name] = {label: self._input(record, rows[name], digest) for label, digest in value.items()}
            else:
                found[name] = self._input(record, rows[name], value)
        return found

    def _input(self, record: KeyRecord, row: Input, digest: str) -> ArtifactRef:
        if digest in self.made:
            return self.made[digest]
        for uri in record.inputs:
            folder = Path(uri.removeprefix(FILE))
            if uri.startswith(FILE) and folder.is_dir():
                ref = self.into.external(row.kind, folder)
                if ref.digest == digest:
                    return ref
        rule = "neither a record of this store nor an unchanged folder has this input"
        raise ArtifactError(
            explain(f"{record.label}.inputs", digest[:12], rule, "restore it, or name another artifact")
        )

    def _different_files(self, old: ArtifactRef, new: ArtifactRef) -> Iterator[str]:
        if not self.source.folder(old.uri).is_dir():
            return
        before, after = (hash_tree(store.path(ref)) for store, ref in ((self.source, old), (self.into, new)))
        yield from sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _named(handle: ArtifactRef) -> Iterator[tuple[ArtifactRef, str]]:
    """Yield a handle with "" and the handles of its folders with the names of their fields."""
    yield handle, ""
    for name in type(handle).model_fields:
        child = getattr(handle, name)
        if isinstance(child, ArtifactRef):
            yield child, name


def rebuild_all(
    records: Sequence[KeyRecord],
    workshop: Workshop,
    *,
    keep_going: bool,
    progress: Callable[[str, int, int, str], None],
    done: Callable[[Rebuilt], None],
) -> list[Rebuilt]:
    """Run the stages of the records again, in order; stop after the first that differs unless `keep_going`."""
    found = []
    try:
        for record in records:
            label = record.label
            found.append(workshop.rebuild(record, lambda *step, label=label: progress(label, *step)))  # type: ignore[misc]
            done(found[-1])
            if not found[-1].same and not keep_going:
                break
    finally:
        workshop.engines.close()
    return found
