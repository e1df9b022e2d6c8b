"""Print the decisions of a run and their reasons (`rlhf plan`, `rlhf explain`)."""

import argparse
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.cli.common import console, print_json, print_line, print_wrapped
from pipelines.cli.display import print_decisions
from pipelines.execution.key_metric import key_metric
from pipelines.execution.opening import plan_run, store_of
from pipelines.execution.plan import DIGITS, PENDING, PlannedStage, check_labels, outlook, version_lines
from pipelines.execution.request import RunRequest
from pipelines.flows.full import lifecycle
from pipelines.flows.graph import agents_of
from pipelines.flows.profile import PipelineConfig, profile_names
from pipelines.flows.recipe import drawn
from pipelines.services.home import Home
from rlhf_core.by_path import is_path
from rlhf_core.errors import ConfigError
from rlhf_core.stage.decision import target_of
from rlhf_core.store import attempts
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.records import KeyRecord
from rlhf_core.types import PolicyRef
from rlhf_core.user_code.dependencies import unseen_by_programs, unseen_reads
from rlhf_core.user_code.sources import DECLARATION, is_ours, reached_from

MOST_NOTES = 3
"""Lines of versions and of notes that `rlhf explain` prints without `--all`, so that 15 lines hold everything."""


def plan(options: argparse.Namespace) -> None:
    """Print the decision for every stage, how many stages run, and how long they took last time."""
    for option in ("on", "host_gib", "terms"):
        if value := getattr(options, option):
            raise ConfigError(f"--{option.replace('_', '-')}", value, "belongs to an estimate", "add --estimate")
    request = RunRequest.from_parameters(vars(options))
    config, store, planned = planned_stages(request)
    found = outlook(planned, store)
    notes: dict[str, list[str]] = {}
    for stage in planned:
        for line in _unseen(store, stage) + _rounded(stage):
            notes.setdefault(line, []).append(stage.label)
    if options.json:
        stages = [_decision(stage) | {"seconds": found.seconds.get(stage.label)} for stage in planned]
        counts = {"hits": found.hits, "to_run": len(found.seconds), "blocked": found.blocked, "seconds": found.total}
        graph = {step.label: {"stage": step.stage, "inputs": step.reads()} for step in config.steps()}
        print_json(
            {"profile": options.profile, "store": str(store.root), "graph": graph, "stages": stages, "notes": notes}
            | {"imports": imported_files(config, planned)}
            | counts
        )
        return
    for line in drawn(config.steps()) if config.recipe or config.rounds else ():
        print_wrapped(line)
    print_decisions([(stage.label, stage.decision) for stage in planned], console)
    for line, labels in notes.items():
        print_wrapped(f"{', '.join(labels)}: {line}")
    if files := imported_files(config, planned):
        print_wrapped(f"imports: {', '.join(files)}")
    print_wrapped(str(found))


def imported_files(config: PipelineConfig, planned: Sequence[PlannedStage]) -> list[str]:
    """The files of other packages, and of the user's, that a run of the profile imports, each once."""
    sampler = config.runtime.sampler
    paths = {sampler.type, config.runtime.executor_path, *(step.stage for step in config.steps())}
    named = {function.rpartition(":")[0] for stage in planned for function in stage.spec.callables}
    named |= {stage.spec.module for stage in planned} | {sampler.module}
    named |= {path.partition(":")[0] for path in paths if is_path(path)}
    modules = [one for name in sorted(named - {""}) if not is_ours(name) for one in reached_from(name)]
    here = Path.cwd()
    files = (module.path.resolve() for module in modules)
    return list(dict.fromkeys(str(one.relative_to(here) if one.is_relative_to(here) else one) for one in files))


def explain_stage(options: argparse.Namespace) -> None:
    """Print the decision for one stage and its grounds, in 15 lines, and the next command."""
    request = RunRequest.from_parameters(vars(options))
    if options.stage.endswith(".toml") or options.stage in profile_names():
        remedy = f"name a stage: rlhf explain STAGE --profile {shlex.quote(options.stage)}"
        raise ConfigError("explain", options.stage, "is a profile", remedy)
    _, store, planned = planned_stages(request, here=False)
    check_labels(planned, {"explain": [options.stage]})
    stage = next(stage for stage in planned if stage.label == options.stage)
    record = store.record(stage.decision.key) if stage.decision.key else None
    pending = any(ref.uri.startswith(PENDING) for ref in stage.spec.refs())
    payload = {} if pending else target_of(store, stage.spec, strict=request.strict).payload
    versions = [] if pending else list(version_lines(store, stage.spec, record))
    notes = _unseen(store, stage) + _rounded(stage)
    whole = {"payload": payload, "record": None if record is None else record.to_json()}
    following = _next(request, stage, record)
    if options.json:
        found = {"versions": versions, "notes": notes, "next": following}
        print_json(_decision(stage) | whole | found)
        return
    shown = None if options.all else MOST_NOTES
    facts = [*_facts(store, stage, record), *_shortened(versions, shown), *_shortened(notes, shown)]
    for line in (f"{stage.label}: {stage.decision.action}: {stage.decision.reason}", *facts):
        print_wrapped(line)
    for table in whole.values() if options.all else ():
        if table:
            console.print_json(json.dumps(table, default=str))
    print_line(f"next: {following}")


def planned_stages(
    request: RunRequest, *, here: bool = True
) -> tuple[PipelineConfig, ArtifactStore, list[PlannedStage]]:
    """The profile, its store and the plan; packages are not missed for stages that would not run `here`."""
    config = request.config()
    store = store_of(config, Home.here())
    return config, store, plan_run(config, lifecycle, request.options(), store=store, here=here)


def _decision(stage: PlannedStage) -> dict[str, Any]:
    decision = stage.decision
    return {"stage": stage.label, "decision": decision.action, "reason": decision.reason, "key": decision.key}


def _facts(store: ArtifactStore, stage: PlannedStage, record: KeyRecord | None) -> Iterator[str]:
    """Yield a line for each thing that the decision rests on: key, inputs, attempts, result."""
    yield f"key: {stage.decision.key or 'depends on what the stages before it make'}"
    inputs = [f"{name} {_shown_input(value)}" for name, value in stage.spec.inputs.items()]
    if inputs:
        yield f"inputs: {', '.join(inputs)}"
    if record is None and stage.decision.key:
        problem = store.damage(stage.decision.key)
        yield from [f"cannot be used: {problem}"] if problem else []
    past = attempts.history(store.attempts(stage.decision.key)) if stage.decision.key else []
    if past and record is None:
        failure = f": {past[-1].failure}" if past[-1].failure else ""
        yield f"attempts: {len(past)}, the last one {past[-1].status}{failure}"
    made = record or store.latest(stage.label, stage.spec.pipeline)
    if made is not None:
        metric = key_metric(made.metrics)
        said = "artifact" if record else f"last result, of {made.made}"
        measured = f", {metric}" if metric else ""
        tries = f"{made.attempts} attempt{'s' * (made.attempts != 1)}"
        yield f"{said}: {made.handle.digest[:DIGITS]}{measured}, {made.seconds:.1f} s in {tries}"
        yield f"in: {store.folder(made.handle.uri)}"


def _shown_input(value: Any) -> str:
    """The digest of an input, or the stage that will make it; of several inputs, each with its name."""
    if isinstance(value, Mapping):
        return f"({', '.join(f'{name} {_shown_input(ref)}' for name, ref in value.items())})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown_input, value))})"
    uri: str = value.uri
    return f"of {uri.removeprefix(PENDING)}" if uri.startswith(PENDING) else value.digest[:DIGITS]


def _shortened(lines: Sequence[str], most: int | None) -> list[str]:
    more = [f"and {len(lines) - most} more: --all"] if most is not None and len(lines) > most else []
    return [*lines[:most], *more]


def _next(request: RunRequest, stage: PlannedStage, record: KeyRecord | None) -> str:
    """The next command for a reader of the explanation."""
    if record is not None and isinstance(record.handle, PolicyRef):
        return shlex.join(["rlhf", "chat", record.handle.digest[:DIGITS], "--profile", request.profile])
    words = ["rlhf", "run", request.profile, *(word for text in request.overrides for word in ("--set", text))]
    if stage.decision.action != "BLOCKED":  # a whole run names the question that blocks it
        words += ["--until", stage.label]
    words += ["--force", stage.label] if record is not None or stage.label in request.force else []
    return shlex.join(words)


def _unseen(store: ArtifactStore, stage: PlannedStage) -> list[str]:
    """Reads of the stage's functions and programs that the key does not cover, by their source and by the record."""
    agents = agents_of(stage.spec.config)
    programs = {phrase: key for key, agent in agents.items() for phrase in unseen_by_programs(agent.read_files())}
    phrases = dict.fromkeys(phrase for function in stage.spec.callables for phrase in unseen_reads(function))
    record = store.record(stage.decision.key) if stage.decision.key else None
    return [f"not in the key: {phrase}; what counts: {DECLARATION} there" for phrase in phrases] + [
        *(f"not in the key: {phrase}; what counts: {key}.files" for phrase, key in programs.items()),
        *(f"not in the key, as seen when it ran: {note}" for note in (() if record is None else record.unseen)),
    ]


def _rounded(stage: PlannedStage) -> list[str]:
    """A note if the stage will merge adapters into bfloat16 weights, where small changes are rounded away."""
    trainer = stage.spec.engines.get("trainer", {})
    lora = getattr(stage.spec.config, "lora", None)
    if (
        lora is None
        or stage.decision.action == "HIT"
        or (trainer["dtype"], trainer["engine"]) != ("bfloat16", "deepspeed")
    ):
        return []
    return [
        "adapters are merged into bfloat16 weights, which lose changes below about 1/500 of a weight (docs/algorithms.md)"
    ]
