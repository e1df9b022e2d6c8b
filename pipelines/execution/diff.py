"""Compare two runs, artifacts or profiles: configuration, code, inputs, metrics, and answers to the same prompts."""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pipelines.execution.opening import store_of
from pipelines.execution.plan import DIGITS, PENDING, PlannedStage, plan_stages
from pipelines.execution.summary import Measure, stage_measures
from pipelines.flows.inputs import find_artifact
from pipelines.flows.profile import entry_name, find_profile, load_profile, profile_names
from pipelines.services.home import Home
from rlhf_core.config.former_names import present_option
from rlhf_core.data.shards import read_generations
from rlhf_core.errors import ArtifactError, ConfigError, nearest
from rlhf_core.evaluation.lineage import handles, lineage
from rlhf_core.stage.decision import changed_modules, differences, stage_code
from rlhf_core.stage.key import key_payload
from rlhf_core.stage.versions import other_versions
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.records import KeyRecord
from rlhf_core.tracking.pipeline_runs import find_run
from rlhf_core.tracking.redaction import flatten
from rlhf_core.types import ArtifactRef, GenerationsRef

NOWHERE = "not there"


@dataclass(frozen=True)
class StageSide:
    """A stage on one side. `record` is None for a stage of a profile that has not run yet."""

    payload: Mapping[str, Any]
    code: Mapping[str, str]
    record: KeyRecord | None


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    name: str
    store: ArtifactStore
    stages: Mapping[str, StageSide]
    """By label, in the order in which they run."""
    config: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> value of a whole profile; empty for an artifact."""
    gone: tuple[str, ...] = ()
    """Labels of stages without a record in the store: it is gone, or the run ended before they were made."""
    digest: str = ""
    """Digest of the artifact; empty for a profile or a run."""


@dataclass(frozen=True)
class Difference:
    """Differences in one stage: `own` are in the stage itself, `inputs` in its inputs."""

    label: str
    own: tuple[str, ...]
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class AnswerPair:
    """Answers of both sides to the same prompt."""

    prompt: str
    ours: str
    theirs: str


def side_of(name: str, overrides: Sequence[str], store: ArtifactStore, home: Home, uri: str) -> Side:
    """Resolve a name: a profile, an artifact by label, digest or folder, or an MLflow run by name or id.

    `uri` is the address of MLflow. Raises ConfigError if it is none of these, or if overrides have no profile to change.
    """
    try:
        find_profile(name)
    except ConfigError:
        if overrides:
            rule = f"{name!r} is no profile, and nothing else can be changed"
            raise ConfigError("--set", overrides[0], rule, "name a profile, or leave it out") from None
        try:
            return of_artifact(name, store)
        except ArtifactError:
            run = find_run(uri, name)
            if run is None:
                rule = "is no profile, no label or digest of an artifact, no folder, and no name or id of an MLflow run"
                known = [*profile_names(), *{record.label for record in store.records()}]
                lists = "see `rlhf runs`, `rlhf store ls` and `rlhf profiles`"
                raise ConfigError("diff", name, rule, nearest(name, known, otherwise=lists)) from None
            records = {label: store.record(key) for label, key in run.keys.items()}
            stages = {label: of_record(record) for label, record in records.items() if record is not None}
            gone = tuple(label for label, record in records.items() if record is None)
            return Side(name, store, stages, run.params, gone)
    config = load_profile(name, overrides)
    own = store_of(config, home)
    stages = {stage.label: of_planned(stage, own) for stage in plan_stages(config, own, here=False)}
    values = flatten(config.model_dump(mode="json", exclude={"notify"}))  # secrets hidden, as MLflow keeps them
    return Side(" ".join([name, *overrides]), own, stages, values)


def of_artifact(name: str, store: ArtifactStore) -> Side:
    """The stages that led to an artifact. Raises ArtifactError if the store has none of this name."""
    ref, records = find_artifact(store, ArtifactRef, name), store.records()
    listed = {record.key: record for record in records}
    made = [listed[ancestor.key] for ancestor in lineage(records, [ref.digest])]
    counts = Counter(record.label for record in made)
    stages, gone = {}, []
    for one in made:
        digest = one.handle.digest
        label = one.label if counts[one.label] == 1 else f"{one.label} {digest[:DIGITS]}"
        record = store.record(one.key)
        if record is None:
            gone.append(label)
        else:
            stages[label] = of_record(record)
    return Side(name, store, stages, gone=tuple(gone), digest=ref.digest)


def of_record(record: KeyRecord) -> StageSide:
    """An executed stage, from its record."""
    return StageSide(record.payload, record.code, record)


def of_planned(stage: PlannedStage, store: ArtifactStore) -> StageSide:
    """A stage of a profile, from its record if it has run and from its configuration if not."""
    record = store.record(stage.decision.key) if stage.decision.action == "HIT" else None
    code = stage_code(stage.spec) if record is None else record.code
    return StageSide(key_payload(stage.spec), code, record)


# ---------------------------------------------------------------- differences


def config_differences(ours: Side, theirs: Side) -> list[tuple[str, str, str]]:
    """Key, value here and value there, for every key that differs between two profiles or runs."""
    if not ours.config or not theirs.config:
        return []
    here, there = (dict(_by_name(side.config)) for side in (ours, theirs))
    return [
        (key, here.get(key, NOWHERE), there.get(key, NOWHERE))
        for key in [*here, *(key for key in there if key not in here)]
        if here.get(key) != there.get(key)
    ]


def _by_name(config: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each key and value under the key's current name; entries of lists of tables are keyed by their names."""
    for key, text in config.items():
        try:
            entries = ast.literal_eval(text) if text.startswith("[{") else []
        except (ValueError, SyntaxError):  # a long value is cut in MLflow
            entries = []
        names = [entry_name(entry) if isinstance(entry, Mapping) else "" for entry in entries]
        if names and all(names) and len(set(names)) == len(names):
            yield from flatten({present_option(key): dict(zip(names, entries, strict=True))}).items()
        else:
            yield present_option(key), text


def not_compared(ours: Side, theirs: Side) -> dict[str, str]:
    """Stages whose results cannot be compared, with the reason."""
    found = dict.fromkeys((*ours.gone, *theirs.gone), "the store has no record of it")
    for label, here in ours.stages.items():
        there = theirs.stages.get(label)
        if there is not None and (here.record is None or there.record is None):
            found[label] = "not made yet"
    return found


def stage_differences(ours: Side, theirs: Side) -> list[Difference]:
    """Differences by stage, in the order in which the stages run, without equal stages."""
    found = []
    gone = {*ours.gone, *theirs.gone}
    for label in [*ours.stages, *(label for label in theirs.stages if label not in ours.stages)]:
        if label in gone:
            continue
        here, there = ours.stages.get(label), theirs.stages.get(label)
        if here is None or there is None:
            found.append(Difference(label, (f"only in {(ours if there is None else theirs).name}",)))
            continue
        phrases = list(_phrases(label, here, there))
        inputs = tuple(phrase for phrase in phrases if phrase.startswith("input "))
        own = tuple(phrase for phrase in phrases if phrase not in inputs)
        if phrases:
            found.append(Difference(label, own, inputs))
    return found


def first_difference(found: Sequence[Difference]) -> Difference | None:
    """The first stage that differs by itself, and not only by its inputs."""
    return next((one for one in found if one.own), None)


def _phrases(label: str, here: StageSide, there: StageSide) -> Iterator[str]:
    before, after = (_with_known_inputs(side.payload, other.payload) for side, other in ((here, there), (there, here)))
    strict = [payload.pop("code", "") for payload in (before, after)]
    yield from differences(label, before, after, here.code, there.code)
    modules = changed_modules(here.code, there.code)
    if modules:
        counted = "" if strict[0] != strict[1] else " (not in the key)"
        yield f"code{counted}: {', '.join(modules)}"
    if here.record is not None and there.record is not None:
        yield from other_versions(here.record.environment, there.record.environment)


def _with_known_inputs(payload: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A payload without the inputs that either side has not made yet."""
    unknown = {name for table in (payload, other) for name, value in table["inputs"].items() if PENDING in str(value)}
    return {**payload, "inputs": {name: value for name, value in payload["inputs"].items() if name not in unknown}}


def metric_differences(ours: Side, theirs: Side) -> list[tuple[str, Measure | None, Measure | None]]:
    """`stage: metric` with its number on both sides, for the metrics of common stages that differ."""
    found = []
    for label, here in ours.stages.items():
        there = theirs.stages.get(label)
        if there is None or here.record is None or there.record is None:
            continue
        if here.record.handle.digest == there.record.handle.digest:
            continue
        numbers = [
            stage_measures(side.store, record.handle, record.metrics)
            for side, record in ((ours, here.record), (theirs, there.record))
        ]
        for name in dict.fromkeys([*numbers[0], *numbers[1]]):
            pair = numbers[0].get(name), numbers[1].get(name)
            if pair[0] != pair[1]:
                found.append((f"{label}: {name}", *pair))
    return found


def different_answers(ours: Side, theirs: Side, count: int) -> list[AnswerPair]:
    """The first `count` prompts that both sides answered differently, from the last stage that generated on both.

    If one side has not run this stage yet, answers of an earlier policy do not replace the missing ones.
    """
    here, there = (_generations(side) for side in (ours, theirs))
    shared = [label for label in here if label in there and here[label].digest != there[label].digest]
    pairs = [(here[label], there[label]) for label in reversed(shared)]
    if not pairs and here and there:  # two policies of different stages: the last answers of each
        last, their_last = list(here)[-1], list(there)[-1]
        unknown = not_compared(ours, theirs)
        pairs = [] if last in unknown or their_last in unknown else [(here[last], there[their_last])]
    for mine, other in pairs:
        found = list(islice(_different(ours.store, mine, theirs.store, other), count))
        if found:
            return found
    return []


def _generations(side: Side) -> dict[str, GenerationsRef]:
    """Answers generated by the stages themselves, plus answers in the store by the last policy."""
    records = [stage.record for stage in side.stages.values() if stage.record is not None]
    found = {record.label: record.handle for record in records if isinstance(record.handle, GenerationsRef)}
    made = {ref.digest for ref in handles(records[-1].handle)} if records else set()
    for record in side.store.records():
        handle = record.handle
        if isinstance(handle, GenerationsRef) and made & set(handle.parents) and side.store.holds(handle):
            found.setdefault(record.label, handle)
    return found


def _different(
    store: ArtifactStore, ref: GenerationsRef, other_store: ArtifactStore, other: GenerationsRef
) -> Iterator[AnswerPair]:
    theirs: dict[str, str] = {}
    for generation in read_generations(other_store.path(other)):
        theirs.setdefault(generation.prompt.id, generation.completion.text)
    seen: set[str] = set()
    for generation in read_generations(store.path(ref)):
        prompt = generation.prompt
        if prompt.id in theirs and prompt.id not in seen and generation.completion.text != theirs[prompt.id]:
            yield AnswerPair(prompt.messages[-1].content, generation.completion.text, theirs[prompt.id])
        seen.add(prompt.id)
