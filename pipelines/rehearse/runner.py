"""Run the graph of a cut profile in a private store, stage by stage, and continue after stages that fail."""

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pipelines.execution.budget import check_comparisons
from pipelines.execution.gates import known_numbers
from pipelines.execution.local import LazyRuntime
from pipelines.execution.packages import missing_packages
from pipelines.execution.plan import (
    PENDING,
    all_specs,
    check_gates,
    expect,
    placeholder,
)
from pipelines.flows.full import graph, lifecycle
from pipelines.flows.graph import Stages
from pipelines.flows.nodes import Node
from pipelines.flows.profile import PipelineConfig
from pipelines.rehearse import (
    checks,
    problems,
    rows,
)
from pipelines.rehearse.cut import cut_profile, simulate_people
from pipelines.rehearse.models import write_tiny_policy, write_tiny_reward_model
from pipelines.rehearse.probes import WrittenAnswers, probe_rewards
from pipelines.rehearse.problems import NodeResult, Rehearsal
from pipelines.rehearse.servers import Servers, silent_engines
from rlhf_core.config.models import InitModel, PretrainedModel
from rlhf_core.config.runtime import VllmServerSamplerConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.tables import (
    read_demonstrations,
    read_preferences,
    read_prompts,
)
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.run import execute
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.layout import read_json
from rlhf_core.tracking.memory import MemoryTracker
from rlhf_core.types import (
    ArtifactRef,
    PolicyRef,
    PreparedDataRef,
    Prompt,
    PromptsRef,
)
from stages.import_reward_model import ImportRewardModelConfig

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=ArtifactRef)
ROWS_CHECKED = 200
"""Rows of a table, besides the few that are kept, whose text is compared with their messages."""


def rehearse(
    config: PipelineConfig,
    *,
    show: Callable[[str], None] = lambda line: None,
) -> Rehearsal:
    """Run a profile on a few rows with tiny models; return the cuts, the executed stages, and all problems.

    Nothing of it stays: the store is private, and nothing is registered.
    """
    found = Rehearsal()
    nodes = check_plan(config, found)
    runtime = config.runtime
    parts = [("runtime.trainer", runtime.trainer), ("runtime.sampler", runtime.sampler), ("track", config.track)]
    found.add(problems.PACKAGES, *missing_packages([*parts, *((node.path, node.config) for node in nodes)]))
    if not nodes:
        return found
    found.add(problems.UNSEEN, *checks.unseen_code(nodes))
    found.add(problems.GROUPS, *checks.flat_groups(nodes))
    sampler = config.runtime.sampler
    if isinstance(sampler, VllmServerSamplerConfig):
        found.add(problems.SERVERS, *silent_engines(sampler.urls))
    servers = Servers()
    with tempfile.TemporaryDirectory(prefix="rehearse-") as folder, servers.open():
        try:
            cut, found.cuts = cut_profile(config, Replacements(Path(folder) / "models", servers))
        except RlhfError as error:
            found.add(problems.STAGE, checks.text_of(error, config.name))
            return found
        store = ArtifactStore(Path(folder) / "store")
        store.create()
        run = RehearsalRun(
            config,
            nodes,
            cut,
            store,
            servers,
            found,
            show,
        )
        try:
            run.all_stages()
        finally:
            run.runtime.close()
    found.add(problems.SERVERS, *servers.problems())
    asked = [
        f"{one.key}: {one.asked} requests, of which {len(one.replies)} went to the server" for one in servers.routes
    ]
    found.facts += asked
    return found


def check_plan(config: PipelineConfig, found: Rehearsal) -> list[Node]:
    """Plan the uncut profile; return its nodes, or none if the plan is refused."""
    try:
        specs = all_specs(config, lifecycle)
    except RlhfError as error:
        kind = problems.PACKAGES if "not installed" in str(error) else problems.STAGE
        found.add(kind, checks.text_of(error, config.name))
        return []
    for check, kind in (
        (
            lambda: check_gates(
                config,
                lifecycle,
                specs,
                until="",
            ),
            problems.GATES,
        ),
        (lambda: check_comparisons(config.budget, list(specs.values())), problems.STAGE),
    ):
        try:
            check()
        except RlhfError as error:
            found.add(kind, checks.text_of(error, config.name))
    return graph(config)


@dataclass
class Replacements:
    """Replaces pretrained models by tiny ones, servers by their routes, and people by a program."""

    folder: Path
    servers: Servers
    made: dict[str, Any] = field(default_factory=dict)

    def __call__(self, config: Any, key: str) -> Any:
        """The options in place of `config` at a key of the profile."""
        if isinstance(config, PretrainedModel):
            return self._once(config, lambda folder: write_tiny_policy(config, folder, key=key))
        if isinstance(config, ImportRewardModelConfig):
            path = self._once(config, lambda folder: write_tiny_reward_model(config.path, folder))
            return config.model_copy(update={"path": path})
        return simulate_people(self.servers.in_place(config, key))

    def _once(self, config: Any, write: Callable[[Path], Any]) -> Any:
        same = f"{type(config).__name__} {config.model_dump_json()}"
        if same not in self.made:
            self.made[same] = write(self.folder / str(len(self.made)))
        return self.made[same]


@dataclass
class RehearsalRun:
    """A rehearsal under way. It is the `RunStage` of the graph."""

    config: PipelineConfig
    nodes: Sequence[Node]
    """Nodes of the uncut profile, by which problems are named."""
    cut: PipelineConfig
    store: ArtifactStore
    servers: Servers
    found: Rehearsal
    show: Callable[[str], None]
    lengths: dict[str, Any] = field(default_factory=dict)
    base: PolicyRef | None = None

    def __post_init__(self) -> None:
        self.runtime = LazyRuntime(self.cut.runtime)
        self.tracker = MemoryTracker()
        self.keys = {node.label: node.path for node in self.nodes}

    def all_stages(self) -> None:
        """Run the graph, then check lengths by the rows that were prepared."""
        stages = Stages(
            self,
            self.cut.seed,
            self.cut.runtime,
            outside=self.stand_in,
            prompts=self.prompts,
        )
        try:
            lifecycle(self.cut, stages)
        except RlhfError as error:
            self.found.add(problems.STAGE, checks.text_of(error, self.config.name))
        if self.base is None:
            return
        context = checks.context_of(self.config, self.store.path(self.base))
        self.found.add(problems.CONTEXT, *checks.long_prompts(self.nodes, self.lengths, context))
        self.found.add(problems.ROWS, *checks.cut_rows(self.nodes, self.lengths))

    def __call__(self, spec: StageSpec, kind: type[R]) -> R:
        """Run one stage; after a failure, a placeholder stands for its result."""
        missing = [ref.uri.removeprefix(PENDING) for ref in spec.refs() if ref.uri.startswith(PENDING)]
        if missing:
            self._note(spec, f"after {missing[0]}", 0.0)
            return placeholder(spec, kind)
        began = time.monotonic()
        try:
            ref = expect(self._execute(spec), kind, spec.label)
        except Exception as error:
            logger.warning("%s: failed", spec.label, exc_info=error)
            key = self.keys.get(spec.label, spec.label)
            self.found.add(class_of_error(error), checks.text_of(error, key))
            self._note(spec, "failed", time.monotonic() - began)
            return placeholder(spec, kind)
        self._check_record(spec, ref)
        if isinstance(ref, PreparedDataRef):
            ref = expect(self._few_rows(spec, ref), kind, spec.label)
        self._note(spec, "ran", time.monotonic() - began)
        return ref

    def _execute(self, spec: StageSpec) -> ArtifactRef:
        tracker = self.tracker.stage(
            spec.label,
            key=spec.label,
            params={},
            tags={},
        )
        ref, _ = execute(
            self.store,
            spec,
            runtime=self.runtime,
            tracker=tracker,
            progress=lambda done, total, message: None,
        )
        return ref

    def _note(self, spec: StageSpec, state: str, seconds: float) -> None:
        self.found.nodes.append(
            NodeResult(
                spec.label,
                spec.name,
                state,
                seconds,
            )
        )
        self.show(f"{spec.label}: {state}" + (f", {seconds:.1f} s" if seconds else ""))

    def _check_record(self, spec: StageSpec, ref: ArtifactRef) -> None:
        """Add the problems that the record of a finished stage shows: numbers that gates miss, and unseen code."""
        record = next((one for one in self.store.records() if one.label == spec.label), None)
        if record is None:
            return
        known = known_numbers(record.metrics, self.store.path(ref))
        self.found.add(problems.GATES, *checks.missing_numbers(self.config, spec.label, known))
        remedy = "declare it in DEPENDS_ON (docs/keys.md), or raise a version when it changes"
        for phrase in record.unseen:
            # Judges and reward servers are reached at the address of the rehearsal.
            if self.servers.address.removeprefix("http://") not in phrase:
                key = self.keys.get(spec.label, spec.label)
                self.found.add(
                    problems.UNSEEN,
                    checks.explain(
                        key,
                        spec.name,
                        f"its function {phrase}",
                        remedy,
                    ),
                )

    # ------------------------------------------------------------ rows

    def _few_rows(self, spec: StageSpec, data: PreparedDataRef) -> PreparedDataRef:
        """Check all rows that were prepared, and return a few of them as the data of all later stages."""
        assert data.base is not None
        self.found.add(problems.ROWS, *checks.dropped_rows(spec.label, self.store.path(data)))
        chat, key = ChatTemplate.load(self.store.path(data.base)), f"{self.keys[spec.label]}.chat_template"
        template = str(getattr(spec.config, "chat_template", ""))
        answered = self._answered_rows(data)
        longest = [sorted(table, key=rows.row_characters)[-8:] for table in answered]
        first = [table[:ROWS_CHECKED] for table in answered]
        texts = [row for table in (*longest, *first) for row in table]
        silent = checks.silent_words(chat, texts, key=key, template=template)
        self.found.add(problems.TEMPLATE, *silent)
        module = "pipelines.rehearse.rows"
        few = StageSpec(
            name="rows",
            module=module,
            version=1,
            code="warn",
            config=rows.RowsConfig(unused_tokens=not isinstance(spec.config.model, InitModel)),  # type: ignore[attr-defined]
            inputs={"data": data},
            seed=spec.seed,
            label=f"{spec.label}/rows",
            engines={},
        )
        made = expect(self._execute(few), PreparedDataRef, few.label)
        measured: dict[str, Any] = read_json(self.store.path(made) / rows.LENGTHS) or {}
        self.lengths |= {f"{spec.label}/{name}": one for name, one in measured.items()}
        most = max(measured, key=lambda name: measured[name]["row"])
        tokens, row = measured[most]["row"], measured[most]["id"]
        self.found.facts.append(f"{spec.label}: the longest row is {row} of {most}, with {tokens} tokens")
        if self.base is None:
            self.base = made.base
            self._probe(data, answered, chat)
        return made

    def _answered_rows(self, data: PreparedDataRef) -> list[list[Any]]:
        """The training rows with answers, by table."""
        tables = ((data.demonstrations, read_demonstrations), (data.preferences, read_preferences))
        return [list(read(self.store.path(ref) / "train.parquet")) for ref, read in tables if ref is not None]

    def _probe(self, data: PreparedDataRef, answered: Sequence[Sequence[Any]], chat: ChatTemplate) -> None:
        tables = {"prompts": data.prompts, "eval_prompts": data.eval_prompts}
        prompts = {name: read_prompts(self.store.path(ref)) for name, ref in tables.items() if ref is not None}
        probe_rewards(
            graph(self.cut),
            prompts,
            WrittenAnswers.of(row for table in answered for row in table),
            chat,
            self.servers.routes,
            self.store.root / "probes",
            self.found,
        )

    # ------------------------------------------------------------ artifacts from outside

    def stand_in(self, key: str, name: str, kind: type[R]) -> R:
        """The base model in place of a policy of an earlier run. Raises ConfigError for other artifacts."""
        if issubclass(PolicyRef, kind) and self.base is not None:
            self.found.facts.append(f"{key}: the rehearsal has the base model in place of {name}")
            return self.base  # type: ignore[return-value]
        rule = f"a {kind.__name__} of an earlier run, which the rehearsal does not read"
        raise ConfigError(
            key,
            name,
            rule,
            "name a step of this profile",
        )

    def prompts(self, ref: PromptsRef) -> Sequence[Prompt]:
        """Prompts that were made already."""
        return read_prompts(self.store.path(ref)) if ref.uri.startswith("store://") else ()


def class_of_error(error: BaseException) -> str:
    """The class of problem that the error of a stage is."""
    text = str(error)
    if "lora.target_" in text:
        return problems.ADAPTERS
    if "the template does not render" in text or text.startswith("chat_template"):
        return problems.TEMPLATE
    if "not installed" in text:
        return problems.PACKAGES
    if text.startswith("rewards."):
        return problems.REWARD_FAILS
    return problems.STAGE
