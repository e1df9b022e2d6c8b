"""Print what a run would do and why (`rlhf plan`, `rlhf explain`)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pipelines.cli.common import console, store_folder
from pipelines.cli.display import PlainDisplay, decisions_table
from pipelines.execution.executor import RunOptions
from pipelines.execution.opening import plan_run, store_of
from pipelines.execution.plan import PENDING, PlannedStage, check_labels, version_lines
from pipelines.execution.reproduce import Rebuilt, Workshop, ancestors, changes, claim_folder, rebuild_all
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import load_profile
from pipelines.services.home import Home
from rlhf_core.config.agents import EpisodeLimits
from rlhf_core.config.engines import RuntimeConfig
from rlhf_core.errors import ConfigError, explain
from rlhf_core.stage.decision import target_of
from rlhf_core.stage.key import Strictness
from rlhf_core.stage.stopping import on_signals
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
    """Return what the stage's functions and programs read that its key does not see: by their text, and by its record."""
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


# ---------------------------------------------------------------- reproduce verb

EXIT_DIFFERENT = 1
SHOWN_FILES = 5


def reproduce(options: argparse.Namespace) -> int:
    """Run the stages that led to an artifact again; return 1 if the bytes differ."""
    source, runtime = ArtifactStore(store_folder(options)), _runtime(options)
    records = ancestors(options.artifact, source)
    target = records[-1].handle.digest
    folder = Path(options.into).expanduser() if options.into else Home.here().root / "reproduced" / target[:12]
    claim_folder(folder, records, source=source.root, home_store=Home.here().store)
    _say(f"{options.artifact}: {target[:12]}, {len(records)} stages, made again in {folder}")
    found = [f"{record.label}: {change}" for record in records for change in changes(record)]
    for line in found or ["code and packages: as they were"]:
        _say(line)
    display, workshop = PlainDisplay(console), Workshop(source, ArtifactStore(folder), runtime)
    with on_signals():
        rebuilt = rebuild_all(
            records, workshop, keep_going=options.keep_going, progress=display.progress, done=_say_stage
        )
    return _say_end(rebuilt, len(records))


def _runtime(options: argparse.Namespace) -> RuntimeConfig:
    if options.profile:
        return load_profile(options.profile, options.overrides).runtime
    if options.overrides:
        rule = "changes a profile, and none is named"
        raise ConfigError(explain("--set", options.overrides[0], rule, "add --profile PROFILE, or leave it out"))
    return RuntimeConfig()


def _say_stage(one: Rebuilt) -> None:
    said = "the same bytes" if one.same else f"DIFFERENT: {one.digest[:12]} is {one.found[:12]} now"
    more = f" and {len(one.files) - SHOWN_FILES} more" if len(one.files) > SHOWN_FILES else ""
    files = f" ({', '.join(one.files[:SHOWN_FILES])}{more})" if one.files else ""
    when = "made by the earlier attempt in this folder" if one.earlier else f"{one.seconds:.1f} s"
    _say(f"{one.label}: {said}{files}, {when}")


def _say_end(rebuilt: list[Rebuilt], count: int) -> int:
    differing = [one.label for one in rebuilt if not one.same]
    if not differing:
        earlier = sum(one.earlier for one in rebuilt)
        _say(
            f"reproduced: all stages are the same bytes{f' ({earlier} made by the earlier attempt)' if earlier else ''}"
        )
        return 0
    left = count - len(rebuilt)
    rest = f"; {left} stages after it were not run: --keep-going runs them" if left else ""
    end = "" if rebuilt[-1].same else "the artifact is not; "
    _say(f"not reproduced: {end}the first that differs is {differing[0]}{rest}")
    return EXIT_DIFFERENT


def _say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
