"""Plan a pipeline: run the same function over the same stages, with a runner that only decides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from pipelines.flows.full import lifecycle
from pipelines.flows.graph import Stages
from pipelines.flows.profile import PipelineConfig
from rlhf_core.errors import ConfigError
from rlhf_core.stage.decision import Decision, decide
from rlhf_core.stage.key import StageSpec, Strictness
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.index import remembered_code
from rlhf_core.types import (
    ArtifactRef,
    DemonstrationsRef,
    PolicyRef,
    PreferencesRef,
    PreparedDataRef,
    PromptsRef,
    StepsRef,
)

R = TypeVar("R", bound=ArtifactRef)
Pipeline = Callable[[PipelineConfig, Stages], object]

PENDING = "pending://"


@dataclass(frozen=True)
class PlannedStage:
    """A stage of the pipeline and the decision for it at the moment."""

    label: str
    spec: StageSpec
    decision: Decision


class ReachedUntil(BaseException):
    """Raised to end a pipeline after the stage that `until` names; not an error."""


def plan(
    config: PipelineConfig,
    store: ArtifactStore,
    *,
    pipeline: Pipeline = lifecycle,
    until: str = "",
    force: Collection[str] = (),
    strict: Strictness = Strictness(),
) -> list[PlannedStage]:
    """Return the decision for every stage in order; a stage whose input does not exist yet is RUN."""
    planner = Planner(store, until=until, force=frozenset(force), strict=strict)
    with remembered_code(store.layout), suppress(ReachedUntil):
        pipeline(config, Stages(planner, seed=config.seed, runtime=config.runtime))
    check_labels(planner.stages, {"--until": [until] if until else [], "--force": force})
    return planner.stages


def engines_needed(stages: Sequence[PlannedStage]) -> set[str]:
    """Return the engines (`trainer`, `sampler`) needed by the stages that are not cached."""
    named = {engine for stage in stages if stage.decision.action != "HIT" for engine in stage.spec.engines}
    return named & {"trainer", "sampler"}


def check_labels(stages: list[PlannedStage], named: Mapping[str, Collection[str]]) -> None:
    """Raise ConfigError if a named stage is not part of the pipeline."""
    labels = [stage.label for stage in stages]
    for option, wanted in named.items():
        for label in wanted:
            if label not in labels:
                raise ConfigError(f"{option} {label!r}: no such stage; this pipeline has {', '.join(labels)}")


@dataclass
class Planner:
    """A `RunStage` that records the decision for each stage and returns the artifact of a hit or a placeholder."""

    store: ArtifactStore
    until: str = ""
    force: frozenset[str] = frozenset()
    strict: Strictness = Strictness()
    stages: list[PlannedStage] = field(default_factory=list)

    def __call__(self, spec: StageSpec, kind: type[R]) -> R:
        decision = self._decide(spec)
        self.stages.append(PlannedStage(spec.label, spec, decision))
        if spec.label == self.until:
            raise ReachedUntil
        if decision.action == "HIT":
            record = self.store.record(decision.key)
            if record is not None:
                return expect(record.handle, kind, spec.label)
        return placeholder(spec.label, kind)

    def _decide(self, spec: StageSpec) -> Decision:
        for ref in spec.refs():
            if ref.uri.startswith(PENDING):
                upstream = ref.uri.removeprefix(PENDING)
                # Its content may turn out unchanged; then this stage is a hit after all.
                return Decision("RUN", f"after {upstream}", "", None)
        return decide(self.store, spec, force=spec.label in self.force, strict=self.strict)


def expect(ref: ArtifactRef, kind: type[R], label: str) -> R:
    """Return `ref` if it is of the kind that the pipeline expects from a stage; raise TypeError if not."""
    if not isinstance(ref, kind):
        raise TypeError(f"{label}: returned {type(ref).__name__}, not {kind.__name__}")
    return ref


def placeholder(label: str, kind: type[R]) -> R:
    """Return a handle that stands for the future result of the stage `label`."""
    uri = PENDING + label
    if kind is PreparedDataRef:
        parts = {
            "demonstrations": DemonstrationsRef(uri=uri, digest=uri),
            "preferences": PreferencesRef(uri=uri, digest=uri),
            "prompts": PromptsRef(uri=uri, digest=uri),
            "eval_prompts": PromptsRef(uri=uri, digest=uri),
            "base": PolicyRef(uri=uri, digest=uri),
            "steps": StepsRef(uri=uri, digest=uri),
        }
        return kind(uri=uri, digest=uri, **parts)
    return kind(uri=uri, digest=uri)
