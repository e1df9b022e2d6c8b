"""Judge gates: block the stages after an artifact whose gate does not hold, until a person decides or for good.

A gate is judged from the record of its stage, or from the stage's report.json, whenever the stage has run or was a hit. That
costs nothing, and gates are in no key. The same rules serve the plan and the run.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pipelines.flows.checks import REGISTERED, STORED
from pipelines.flows.graph import FindOutside, RunGroup, RunStage, Stages, ungrouped
from pipelines.flows.inputs import Opponents, find_artifact, parts
from pipelines.flows.profile import PipelineConfig
from pipelines.flows.run_rules import OPPOSITE, GateConfig
from pipelines.services.home import Home
from pipelines.services.user_servers import tracking_uri
from pipelines.services.waits import answers_awaited
from rlhf_core.errors import ArtifactError, ConfigError, nearest
from rlhf_core.stage.gate_decisions import GateAnswer, GateDecisions, Question
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.stopping import RunBlocked, RunHalted, StageWaiting
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import CHAMPION, ArtifactRef, PolicyRef, Prompt, PromptsRef, title
from stages.publish import GateNote, PublishConfig
from stages.table import STAGES

R = TypeVar("R", bound=ArtifactRef)

Outcome = Literal["passed", "warned", "blocked", "waiting", "approved", "rejected"]
REPORT = "report.json"
SHOWN = 40
"""Number of metrics that an error lists."""
_END = re.compile(r"[/_](low|high)$")
SHORT_ID = 12
"""Number of digits by which people name a question."""


class StageHeld(RunHalted):
    """Raised for a stage that is not run because a gate holds back an input; the run continues without the stage."""

    def __init__(self, message: str, state: str) -> None:
        super().__init__(message)
        self.state = state


@dataclass(frozen=True)
class GateVerdict:
    """Verdict of a gate on one artifact."""

    gate: GateConfig
    label: str
    question: Question
    """Question to a person; its `found` is the comparison, empty for a gate without a condition."""
    outcome: Outcome
    answer: GateAnswer | None = None

    @property
    def found(self) -> str:
        """The comparison, such as `accuracy_low 0.61 < 0.65`."""
        return self.question.found

    @property
    def holds(self) -> bool:
        """Whether the stages after the artifact may run."""
        return self.outcome in ("passed", "warned", "approved")

    @property
    def why(self) -> str:
        """The finding and the decision."""
        asked = "" if self.found or self.answer else "a person has to approve it"
        return "; ".join(part for part in (self.found, str(self.answer or ""), asked) if part)

    def __str__(self) -> str:
        words = {"blocked": "BLOCKED by", "rejected": "BLOCKED by", "waiting": "WAITING at", "warned": "warning of"}
        return f"{words.get(self.outcome, f'{self.outcome} at')} gate {self.gate.title}: {self.why}"


@dataclass
class Gatekeeper:
    """The gates of one run or plan, the verdicts so far, and the artifacts that they hold back."""

    gates: Sequence[GateConfig]
    store: ArtifactStore
    run: str
    """Name of the run, whose questions and answers are its own."""
    verdicts: list[GateVerdict] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Labels of the stages that were not run."""
    _held: dict[str, GateVerdict] = field(default_factory=dict)
    """Uri of an artifact that is held back -> the verdict."""

    def stages(self, config: PipelineConfig, run_stage: RunStage, *, group: RunGroup = ungrouped) -> Stages:
        """The stages of the profile, run by `run_stage`, with access to results in the store and the registry."""
        return Stages(
            run_stage,
            config.seed,
            config.runtime,
            champion_of(config.publish, self.store),
            decisions=self.notes,
            group=group,
            outside=outside_of(config, self.store),
            prompts=prompt_reader(self.store),
        )

    def judge(self, spec: StageSpec, ref: ArtifactRef, metrics: Mapping[str, float]) -> list[GateVerdict]:
        """Judge the gates after a stage that has this artifact and these metrics; return the verdicts.

        Raises ConfigError for a metric that the stage does not have.
        """
        found = []
        for index, gate in enumerate(self.gates):
            if gate.after == spec.label:
                folder = self.store.path(ref) if gate.metric else Path()
                found.append(self._judged(gate, index, spec, ref.digest, metrics, folder))
        self.verdicts += found
        for verdict in found:
            if not verdict.holds:
                self._held |= {one.uri: verdict for one in artifacts_behind(spec, ref)}
        return found

    def hold(self, spec: StageSpec) -> GateVerdict | None:
        """The verdict that holds back a stage, None if it may run. `publish` runs only if every gate holds."""
        failed = [verdict for verdict in self.verdicts if not verdict.holds]
        found = [self._held[ref.uri] for ref in spec.refs() if ref.uri in self._held]
        found += failed if spec.name == "publish" else []
        return min(found, key=lambda verdict: verdict.outcome == "waiting", default=None)

    def skip(self, spec: StageSpec, ref: ArtifactRef, verdict: GateVerdict) -> None:
        """Block the stages after `ref`, the placeholder for the artifact of a stage that is not run."""
        self.skipped.append(spec.label)
        self._held |= {one.uri: verdict for one in (ref, *parts(ref))}

    def notes(self) -> tuple[GateNote, ...]:
        """The verdicts so far, for the model card."""
        return tuple(
            GateNote(name=one.gate.title, found=one.found, outcome=one.outcome, answer=str(one.answer or ""))
            for one in self.verdicts
        )

    def check(self) -> None:
        """Raise StageWaiting if a person has to decide, RunBlocked if a gate does not hold."""
        blocked = [verdict for verdict in self.verdicts if not verdict.holds and verdict.outcome != "waiting"]
        waiting = [verdict for verdict in self.verdicts if verdict.outcome == "waiting"]
        said = [str(verdict) for verdict in blocked]
        said += [
            f"{verdict} ({verdict.label}): {commands(verdict.question, self.run, self.store.root)}"
            for verdict in waiting
        ]
        left = f" (not run: {', '.join(self.skipped)})" if self.skipped else ""
        if waiting:
            ids = [verdict.question.id for verdict in waiting]
            raise StageWaiting("; ".join(said) + left, answers_awaited(ids, self.store.root))
        if blocked:
            raise RunBlocked("; ".join(said) + left)

    def _judged(
        self, gate: GateConfig, index: int, spec: StageSpec, digest: str, metrics: Mapping[str, float], folder: Path
    ) -> GateVerdict:
        said = ""
        if gate.metric:
            holds, said = judge_metric(gate, index, known_numbers(metrics, folder))
            if holds:
                return GateVerdict(gate, spec.label, self._question(gate, digest, said), "passed")
        question = self._question(gate, digest, said)
        if gate.otherwise == "approve":
            request = GateDecisions(self.store.shared).find(question.id)
            answer = None if request is None else request.answer
            outcome: Outcome = "waiting" if answer is None else "approved" if answer.answer == "approve" else "rejected"
            return GateVerdict(gate, spec.label, question, outcome, answer)
        return GateVerdict(gate, spec.label, question, "warned" if gate.otherwise == "warn" else "blocked")

    def _question(self, gate: GateConfig, digest: str, found: str) -> Question:
        return Question(gate=gate.title, condition=gate_condition(gate), digest=digest, found=found, run=self.run)


def gate_condition(gate: GateConfig) -> dict[str, Any]:
    """The subject of an approval besides the artifact: the stage and the condition."""
    return gate.model_dump(mode="json", exclude={"otherwise"}) | {"name": gate.title}


def commands(question: Question, run: str, store: Path) -> str:
    """Commands that answer a question of a run; they have to name a store that is not the usual one."""
    words = [run, question.gate, "--question", question.id[:SHORT_ID]]
    words += [] if store.resolve() == Home.here().store.resolve() else ["--store", str(store)]
    command = f"{shlex.join(words)} --reason ..."
    return f"`rlhf approve {command}` or `rlhf reject {command}`"


def artifacts_behind(spec: StageSpec, ref: ArtifactRef) -> Iterator[ArtifactRef]:
    """Yield the artifacts that a gate after the stage holds back: its own, and the input that its report judges."""
    yield from (ref, *parts(ref))
    judges = STAGES[spec.name].judges if spec.name in STAGES else ()
    if judges:
        name, entry = judges
        table = spec.inputs[name]
        if isinstance(table, Mapping) and entry in table:
            yield table[entry]


def known_numbers(metrics: Mapping[str, float], folder: Path) -> dict[str, float]:
    """The metrics of a record, and the numbers of report.json by their path."""
    report = folder / REPORT
    return (dict(numbers(json.loads(report.read_text(encoding="utf-8")))) if report.is_file() else {}) | dict(metrics)


def judge_metric(gate: GateConfig, index: int, known: Mapping[str, float]) -> tuple[bool, str]:
    """Evaluate a gate's condition: whether it holds, and the comparison.

    Raises ConfigError that lists the known names. A number from fewer than `least_prompts` prompts does not hold, nor
    does an interval bound that is missing because of too few prompts.
    """
    prompts = prompts_behind(gate.metric, known)
    if gate.metric not in known and prompts is not None and _END.search(gate.metric):
        return False, f"{gate.metric} is not known: {prompts:g} prompts give no interval"
    found = value_of(gate, index, known)
    holds = gate.holds(found)
    said = f"{gate.metric} {found:.6g} {gate.op if holds else OPPOSITE[gate.op]} {gate.value:.6g}"
    if prompts is not None and prompts < gate.least_prompts:
        return False, f"{said} of {prompts:g} prompts, where {gate.least_prompts} are needed"
    return holds, said


def prompts_behind(metric: str, known: Mapping[str, float]) -> float | None:
    """Number of prompts behind a metric, None if it is not recorded.

    It is the nearest `prompts` or `<measure>_prompts`.

    >>> prompts_behind("policies/ppo/gold/low", {"policies/ppo/gold/prompts": 48.0, "policies/sft/gold/prompts": 64.0})
    48.0
    >>> prompts_behind("pass_at_1_low", {"pass_at_1_prompts": 12.0, "prompts": 30.0})
    12.0
    """
    if metric == "prompts" or metric.endswith(("/prompts", "_prompts")):
        return None
    measure, above = _END.sub("", metric), metric.split("/")[:-1]
    names = [f"{name}{end}" for name in (metric, measure) for end in ("_prompts", "/prompts")]
    names += ["/".join([*above[:depth], "prompts"]) for depth in range(len(above), -1, -1)]
    return next((known[name] for name in names if name in known), None)


def value_of(gate: GateConfig, index: int, known: Mapping[str, float]) -> float:
    """The number that a gate names. Raises ConfigError that lists the known names."""
    if gate.metric in known:
        return known[gate.metric]
    names = sorted(known)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    rule = f"{gate.after} has no such metric; it has {', '.join(names[:SHOWN]) or 'none'}{more}"
    remedy = nearest(gate.metric, names, otherwise="name one of them")
    raise ConfigError(f"gates[{index}].metric", gate.metric, rule, remedy)


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield path -> number for every number in a report.

    >>> dict(numbers({"policies": {"ppo": {"gold": {"low": 1.5}}}, "order": ["ppo"]}))
    {'policies/ppo/gold/low': 1.5}
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from numbers(item, f"{path}/{name}" if path else str(name))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)


# ---------------------------------------------------------------- champion


def champion_of(publish: PublishConfig | None, store: ArtifactStore) -> Opponents | None:
    """The champion that `[publish.challenge]` compares with; None without that section or without a champion.

    Raises ConfigError if the champion's weights are not in this store, TrackingError if the registry does not answer.
    """
    if publish is None or publish.challenge is None:
        return None
    from rlhf_core.tracking.champions import champion_digests  # MLflow's parts, which most plans do without

    name = publish.name
    digest, previous = champion_digests(tracking_uri(Home.here()), name)
    if not digest:
        return None
    try:
        current = find_artifact(store, PolicyRef, digest)
    except ArtifactError:
        rule = f"the champion of {name} ({digest[:12]}) is not in the store {store.root}"
        remedy = "use the store that it was made in, or remove [publish.challenge] for this run"
        raise ConfigError("publish.challenge", name, rule, remedy) from None
    with suppress(ArtifactError):  # needed only when the champion is made again; then it has no opponent
        return Opponents(current, find_artifact(store, PolicyRef, previous) if previous else None)
    return Opponents(current)


# ---------------------------------------------------------------- inputs of a recipe from outside the run


def outside_of(config: PipelineConfig, store: ArtifactStore) -> FindOutside:
    """A function that finds artifacts of earlier runs: `store:DIGEST`, `champion`, `models:/NAME/VERSION`.

    It raises ConfigError for an artifact that is not in the store, and TrackingError if the registry does not answer.
    """

    def find(key: str, name: str, kind: type[R]) -> R:
        digest = name.removeprefix(STORED) if name.startswith(STORED) else registered(key, name, config)
        try:
            return find_artifact(store, kind, digest)
        except ArtifactError:
            rule = f"{title(kind)} of this digest ({digest[:12]}) is not in the store {store.root}"
            raise ConfigError(key, name, rule, "`rlhf store ls` lists what there is") from None

    return find


def prompt_reader(store: ArtifactStore) -> Callable[[PromptsRef], Sequence[Prompt]]:
    """A function that reads prompts; the result is empty for prompts that do not exist yet."""

    def read(ref: PromptsRef) -> Sequence[Prompt]:
        from rlhf_core.data.tables import read_prompts  # pyarrow, for rewards that read rubrics

        return read_prompts(store.path(ref)) if ref.uri.startswith(("store://", "file://")) else ()

    return read


def registered(key: str, name: str, config: PipelineConfig) -> str:
    """Digest of a registered policy: `champion` (of `publish.name`), `models:/NAME@champion`, `models:/NAME/3`."""
    from rlhf_core.tracking.champions import read_champions  # MLflow's parts, which most plans do without

    model, version = CHAMPION, ""
    if name == CHAMPION:
        if config.publish is None:
            raise ConfigError(
                key, name, "the profile has no [publish] that names the model", f'"models:/NAME@{CHAMPION}" does'
            )
        model = config.publish.name
    else:
        model, _, version = name.removeprefix(REGISTERED).partition("/")
        model = model.removesuffix(f"@{CHAMPION}")
    champions = read_champions(tracking_uri(Home.here()), model)
    version = version or (champions.current if champions else "")
    if champions is None or not champions.digests.get(version):
        rule = f"the registry has no version {version!r} of {model}" if version else f"{model} has no champion"
        raise ConfigError(key, name, rule, f"`rlhf champion {model}` lists the versions")
    return champions.digests[version]
