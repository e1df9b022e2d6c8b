"""Plan a pipeline: run the same function over the same stages, with a runner that only decides."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from pipelines.execution.budget import check_comparisons
from pipelines.execution.gates import Gatekeeper
from pipelines.execution.packages import check_packages
from pipelines.execution.reward_arguments import check_rewards
from pipelines.flows.full import lifecycle
from pipelines.flows.graph import RunStage, Stages
from pipelines.flows.nodes import PARTS
from pipelines.flows.profile import PipelineConfig
from rlhf_core.config.monitors import is_named, remedy_of
from rlhf_core.errors import ConfigError, nearest
from rlhf_core.stage.code import remembered_code
from rlhf_core.stage.decision import Decision, decide
from rlhf_core.stage.key import StageSpec, Strictness
from rlhf_core.stage.versions import other_versions
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.fingerprint import hash_file, sha256_text
from rlhf_core.store.records import KeyRecord
from rlhf_core.types import ArtifactRef, PreparedDataRef
from stages.prepare_data import PrepareDataConfig, wanted_tables
from stages.table import numbers_of

R = TypeVar("R", bound=ArtifactRef)
Pipeline = Callable[[PipelineConfig, Stages], object]

NONE_YET: Mapping[str, ArtifactRef] = MappingProxyType({})
DIGITS = 12
"""Number of digits of a key or digest in output; other commands accept this abbreviation."""
PENDING, HELD = "pending://", "held://"
"""Beginnings of the uris of placeholders: for a stage that has yet to run, and for a stage held back by a gate."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage of the pipeline and the decision for it at the moment."""

    label: str
    spec: StageSpec
    decision: Decision
    gates_hold: bool = True
    """Whether the gates after a stage in the store hold."""


class ReachedUntil(BaseException):
    """Raised to end a pipeline after the stage that `until` names; not an error."""


@dataclass(frozen=True)
class UntilStage:
    """A `RunStage` that ends the pipeline after the stage called `until`."""

    run_stage: RunStage
    until: str

    def __call__(self, spec: StageSpec, kind: type[R]) -> R:
        ref = self.run_stage(spec, kind)
        if spec.label == self.until:
            raise ReachedUntil
        return ref


def run_until(config: PipelineConfig, pipeline: Pipeline, stages: Stages, until: str) -> None:
    """Run a pipeline up to the stage `until`; if empty, all of it."""
    with suppress(ReachedUntil):
        pipeline(config, replace(stages, run_stage=UntilStage(stages.run_stage, until)))


def plan_stages(
    config: PipelineConfig,
    store: ArtifactStore,
    *,
    pipeline: Pipeline = lifecycle,
    until: str = "",
    force: Collection[str] = (),
    strict: Strictness = Strictness(),
    here: bool = True,
) -> list[PlannedStage]:
    """Decide for every stage in order whether it runs; a stage whose input does not exist yet is RUN.

    A stage behind a gate that does not hold is BLOCKED. Raises ConfigError for labels and metrics that the pipeline does not
    have, for a budget that the pipeline exceeds, and for a reward without an argument; and for a missing package unless the
    stages would run on other machines than `here`.
    """
    gates = Gatekeeper(config.gates, store, config.name)
    planner = Planner(store, config.name, force=frozenset(force), strict=strict, gates=gates)
    stages = gates.stages(config, planner)
    with store.shared.snapshot(), remembered_code():
        run_until(config, pipeline, stages, until)
    check_labels(planner.stages, {"--until": [until] if until else [], "--force": force})
    check_gates(config, pipeline, {stage.label: stage.spec for stage in planner.stages}, until=until)
    specs = [stage.spec for stage in planner.stages]
    check_comparisons(config.budget, specs)
    to_run = [stage.spec for stage in planner.stages if stage.decision.action != "HIT"]
    if here:
        check_packages(config, to_run, engines_needed(planner.stages))
    check_rewards(to_run, specs)
    return planner.stages


@dataclass(frozen=True)
class Outlook:
    """How many stages of a plan are taken from the store, and how long the others took last time."""

    hits: int
    blocked: int
    seconds: Mapping[str, float | None]
    """Label of each stage that will run -> seconds of its last result in this pipeline; None without one."""
    newest: str = ""
    """When the newest of the hits was made."""

    @property
    def total(self) -> float | None:
        """Seconds of all stages that will run and have a time; None if none has."""
        known = [seconds for seconds in self.seconds.values() if seconds is not None]
        return sum(known) if known or not self.seconds else None

    def __str__(self) -> str:
        counts = [f"{self.hits} hit{'s' * (self.hits != 1)}", f"{len(self.seconds)} to run"] + [
            f"{self.blocked} blocked"
        ] * bool(self.blocked)
        untimed = sum(seconds is None for seconds in self.seconds.values())
        if self.newest and not self.seconds and not self.blocked:
            return f"{counts[0]}, the newest made {self.newest}"
        if self.seconds and self.total is None:
            counts.append("no estimate: the store has no earlier result of them")
        elif self.seconds:
            counts.append(f"about {duration(self.total or 0.0)} as last time")
            counts += [f"without {untimed} of unknown time"] * bool(untimed)
        return ", ".join(counts)


def outlook(stages: Sequence[PlannedStage], store: ArtifactStore) -> Outlook:
    """Estimate the outlook of a plan from the records of the same stages in the store."""
    actions = [stage.decision.action for stage in stages]
    seconds, dates = {}, []
    for stage in stages:
        if stage.decision.action == "HIT" and (found := store.record(stage.decision.key)) is not None:
            dates.append(found.made)
        if stage.decision.action not in ("HIT", "BLOCKED"):
            record = store.latest(stage.label, stage.spec.pipeline)
            seconds[stage.label] = None if record is None else record.seconds
    return Outlook(actions.count("HIT"), actions.count("BLOCKED"), seconds, max(dates, default=""))


def duration(seconds: float) -> str:
    """Format a time span for people.

    >>> [duration(seconds) for seconds in (0.4, 40, 100, 3600, 200000)]
    ['1 s', '40 s', '1.7 min', '1.0 h', '2.3 days']
    """
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 90.0)):
        if seconds >= size:
            return f"{seconds / (60.0 if unit == 'min' else size):.1f} {unit}"
    return f"{max(1, round(seconds))} s"


def engines_needed(stages: Sequence[PlannedStage]) -> set[str]:
    """Engines (`trainer`, `sampler`) needed by the stages that are not cached."""
    working = (stage for stage in stages if stage.decision.action not in ("HIT", "BLOCKED"))
    named = {engine for stage in working for engine in stage.spec.engines}
    return named & {"trainer", "sampler"}


def check_labels(stages: list[PlannedStage], named: Mapping[str, Collection[str]]) -> None:
    """Raise ConfigError if a named stage is not part of the pipeline."""
    labels = [stage.label for stage in stages]
    for option, wanted in named.items():
        for label in wanted:
            if label not in labels:
                rule = f"no such stage; this pipeline has {', '.join(labels)}"
                raise ConfigError(option, label, rule, nearest(label, labels, otherwise="name one of them"))


def check_gates(config: PipelineConfig, pipeline: Pipeline, specs: Mapping[str, StageSpec], *, until: str) -> None:
    """Raise ConfigError for a gate after a stage that is not part of the pipeline, or on a number that it does not measure.

    `until` ended the plan early.
    """
    if until and any(gate.after not in specs for gate in config.gates):
        specs = all_specs(config, pipeline)
    for index, gate in enumerate(config.gates):
        if gate.after not in specs:
            rule = f"no such stage; this pipeline has {', '.join(specs)}"
            remedy = nearest(gate.after, list(specs), otherwise="name one of them")
            raise ConfigError(f"gates[{index}].after", gate.after, rule, remedy)
        numbers = numbers_of(specs[gate.after], specs)
        known = [] if numbers is None else [*numbers.record, *numbers.report]
        if gate.metric and numbers is not None and not is_named(gate.metric, known):
            rule = f"{gate.after} measures no such number"
            raise ConfigError(f"gates[{index}].metric", gate.metric, rule, remedy_of(gate.metric, known))


def all_specs(
    config: PipelineConfig, pipeline: Pipeline, *, until: str = "", made: Mapping[str, ArtifactRef] = NONE_YET
) -> dict[str, StageSpec]:
    """All stages of a pipeline by label, in order, up to `until`.

    Raises ConfigError if a stage needs a part that an artifact in `made` (label: artifact) does not have.
    """
    specs: dict[str, StageSpec] = {}

    def note(spec: StageSpec, kind: type[R]) -> R:
        specs[spec.label] = spec
        return expect(made[spec.label], kind, spec.label) if spec.label in made else placeholder(spec, kind)

    stages = Stages(note, seed=config.seed, runtime=config.runtime, outside=stand_in)
    run_until(config, pipeline, stages, until)
    return specs


def stand_in(key: str, name: str, kind: type[R]) -> R:
    """A handle that stands for an artifact from outside the run, which is not looked up."""
    return kind(uri=name, digest=name)


@dataclass
class Planner:
    """A `RunStage` that records the decision for each stage and returns the artifact of a hit or a placeholder."""

    store: ArtifactStore
    pipeline: str = ""
    """Name of the profile, whose earlier stages a decision is compared with."""
    force: frozenset[str] = frozenset()
    strict: Strictness = Strictness()
    gates: Gatekeeper | None = None
    stages: list[PlannedStage] = field(default_factory=list)

    def __call__(self, spec: StageSpec, kind: type[R]) -> R:
        spec = replace(spec, pipeline=self.pipeline)
        verdict = None if self.gates is None else self.gates.hold(spec)
        if self.gates is not None and verdict is not None:
            self.stages.append(PlannedStage(spec.label, spec, Decision("BLOCKED", str(verdict), "", None)))
            ref = placeholder(spec, kind, HELD)
            self.gates.skip(spec, ref, verdict)
            return ref
        decision = self._decide(spec)
        record = self.store.record(decision.key) if decision.action == "HIT" else None
        if record is None:
            self.stages.append(PlannedStage(spec.label, spec, decision))
            return placeholder(spec, kind)
        made = expect(record.handle, kind, spec.label)
        verdicts = [] if self.gates is None else self.gates.judge(spec, made, record.metrics)
        self.stages.append(PlannedStage(spec.label, spec, decision, all(verdict.holds for verdict in verdicts)))
        return made

    def _decide(self, spec: StageSpec) -> Decision:
        for ref in spec.refs():
            if ref.uri.startswith(PENDING):
                upstream = ref.uri.removeprefix(PENDING)
                # Its content may turn out unchanged; then this stage is a hit after all.
                return Decision("RUN", f"after {upstream}", "", None)
        return decide(self.store, spec, force=spec.label in self.force, strict=self.strict)


def expect(ref: ArtifactRef, kind: type[R], label: str) -> R:
    """Check that `ref` is of the kind that the pipeline expects from a stage, and return it.

    Raises TypeError if not.
    """
    if not isinstance(ref, kind):
        raise TypeError(f"{label}: returned {type(ref).__name__}, not {kind.__name__}")
    return ref


def placeholder(spec: StageSpec, kind: type[R], beginning: str = PENDING) -> R:
    """A handle that stands for the missing result of a stage."""
    uri = beginning + spec.label
    if kind is PreparedDataRef:
        parts = {name: of(uri=uri, digest=uri) for name, of in PARTS.items()}
        if isinstance(spec.config, PrepareDataConfig):  # a missing table is found now, not after the stage has run
            parts = {name: parts[name] for name in ("base", *wanted_tables(spec.config.data))}
        return kind(uri=uri, digest=uri, **parts)
    return kind(uri=uri, digest=uri)


# ---------------------------------------------------------------- versions

TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
CHAT_TEMPLATE = "chat_template.jinja"


def version_lines(store: ArtifactStore, spec: StageSpec, record: KeyRecord | None) -> Iterator[str]:
    """Yield the differences to the versions that made the stage: from `record`, or from its last result if it must run.

    Packages count only with `--strict-env`. Tokenizers and chat templates are files of the inputs, which always count,
    so they never differ for a hit.
    """
    made = record or store.latest(spec.label, spec.pipeline)
    if made is None:
        return
    yield from other_versions(made.environment) or ["packages: the same versions as when it was made"]
    if record is not None:
        return
    then, now = input_versions(store, made.inputs), input_versions(store, (ref.uri for ref in spec.refs()))
    for name in sorted(then.keys() | now.keys()):
        before, after = (table[name][:12] if name in table else "none" for table in (then, now))
        if before != after:
            yield f"{name}: {before} -> {after}"


def input_versions(store: ArtifactStore, uris: Iterable[str]) -> dict[str, str]:
    """A digest of all tokenizers and a digest of all chat templates among the inputs that still exist."""
    tokenizers, templates = [], []
    for uri in uris:
        folder = store.folder(uri)
        tokenizers += [f"{name} {hash_file(folder / name)}" for name in TOKENIZER if (folder / name).is_file()]
        templates += [sha256_text(text) for text in [_chat_template(folder)] if text]
    found = {"tokenizer": tokenizers, "chat template": templates}
    # Each once, in any order: a record lists an input that two parts of a stage read once.
    return {name: sha256_text("\n".join(sorted(set(parts)))) for name, parts in found.items() if parts}


def _chat_template(folder: Path) -> str:
    if (folder / CHAT_TEMPLATE).is_file():
        return (folder / CHAT_TEMPLATE).read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    table = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return json.dumps(table["chat_template"]) if "chat_template" in table else ""
