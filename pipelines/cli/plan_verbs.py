"""Print the decisions of a run and their reasons (`rlhf plan`, `rlhf explain`), or rebuild an artifact (`rlhf reproduce`)."""

from __future__ import annotations

import argparse
import json

from pipelines.cli.common import console
from pipelines.cli.display import decisions_table
from pipelines.execution.executor import RunOptions
from pipelines.execution.opening import plan_run, store_of
from pipelines.execution.plan import PENDING, PlannedStage, check_labels, version_lines
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import load_profile
from pipelines.services.home import Home
from rlhf_core.config.agents import EpisodeLimits
from rlhf_core.stage.decision import target_of
from rlhf_core.stage.key import Strictness
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.user_code.dependencies import unseen_by_programs, unseen_reads
from rlhf_core.user_code.sources import DECLARATION


def plan(options: argparse.Namespace) -> None:
    """Print the decision for every stage."""
    planned = _plan(options)
    console.print(decisions_table([(stage.label, stage.decision) for stage in planned], wide=console.is_terminal))
    store = store_of(load_profile(options.profile, options.overrides), Home.here())
    stages: dict[str, list[str]] = {}
    for stage in planned:
        for line in _unseen(store, stage) + _rounded(stage):
            stages.setdefault(line, []).append(stage.label)
    for line, labels in stages.items():
        console.print(f"{', '.join(labels)}: {line}", highlight=False, markup=False, soft_wrap=True)


def explain_stage(options: argparse.Namespace) -> None:
    """Print the decision for one stage with its key payload and its record."""
    planned = _plan(options)
    check_labels(planned, {"explain": [options.stage]})
    stage = next(stage for stage in planned if stage.label == options.stage)
    store = store_of(load_profile(options.profile, options.overrides), Home.here())
    said = [f"{stage.label}: {stage.decision.action}: {stage.decision.reason}", *_unseen(store, stage)]
    console.print("\n".join(said), highlight=False, markup=False, soft_wrap=True)
    if any(ref.uri.startswith(PENDING) for ref in stage.spec.refs()):
        console.print("its key depends on what the stages before it make")
        return
    console.print(f"key {stage.decision.key}", highlight=False)
    target = target_of(store, stage.spec, strict=_strictness(options))
    console.print_json(json.dumps(target.payload))
    record = store.record(stage.decision.key)
    for line in version_lines(store, stage.spec, record):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if record is not None:
        console.print_json(json.dumps(record.to_json(), default=str))


def _plan(options: argparse.Namespace) -> list[PlannedStage]:
    config = load_profile(options.profile, options.overrides)
    wanted = RunOptions(until=options.until, force=tuple(options.force), strict=_strictness(options))
    return plan_run(config, lifecycle, wanted, store=store_of(config, Home.here()))


def _unseen(store: ArtifactStore, stage: PlannedStage) -> list[str]:
    """Return the reads of the stage's functions and programs beyond its key, by their source and by its record."""
    agent = getattr(stage.spec.config, "agent", None)
    programs = unseen_by_programs(agent.read_files()) if isinstance(agent, EpisodeLimits) else []
    phrases = dict.fromkeys(phrase for function in stage.spec.callables for phrase in unseen_reads(function))
    record = store.record(stage.decision.key) if stage.decision.key else None
    return [f"not in the key: {phrase}; what counts: {DECLARATION} there" for phrase in phrases] + [
        *(f"not in the key: {phrase}; what counts: agent.files" for phrase in programs),
        *(f"not in the key, as seen when it ran: {note}" for note in (() if record is None else record.unseen)),
    ]


def _rounded(stage: PlannedStage) -> list[str]:
    """Return a note if the stage will merge adapters into bfloat16 weights, where small changes round away."""
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


def _strictness(options: argparse.Namespace) -> Strictness:
    return Strictness(code=options.strict_code, env=options.strict_env)
