"""Print what a run would do and why (`rlhf plan`, `rlhf explain`)."""

from __future__ import annotations

import argparse
import json

from pipelines.cli.common import console
from pipelines.cli.display import decisions_table
from pipelines.execution.executor import RunOptions
from pipelines.execution.opening import plan_run, store_of
from pipelines.execution.plan import PENDING, PlannedStage, check_labels
from pipelines.execution.versions import version_lines
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import load_profile
from pipelines.services.home import Home
from rlhf_core.stage.decision import target_of
from rlhf_core.stage.key import Strictness
from rlhf_core.user_code.dependencies import unseen_reads
from rlhf_core.user_code.sources import DECLARATION


def plan(options: argparse.Namespace) -> None:
    """Print the decision for every stage."""
    planned = _plan(options)
    console.print(decisions_table([(stage.label, stage.decision) for stage in planned], wide=console.is_terminal))


def explain(options: argparse.Namespace) -> None:
    """Print the decision for one stage with its key payload and its record."""
    planned = _plan(options)
    check_labels(planned, {"explain": [options.stage]})
    stage = next(stage for stage in planned if stage.label == options.stage)
    said = [f"{stage.label}: {stage.decision.action}: {stage.decision.reason}"]
    for function in stage.spec.callables:
        said += [f"not in the key: {phrase}; what counts: {DECLARATION} there" for phrase in unseen_reads(function)]
    console.print("\n".join(said), highlight=False, markup=False, soft_wrap=True)
    if any(ref.uri.startswith(PENDING) for ref in stage.spec.refs()):
        console.print("its key depends on what the stages before it make")
        return
    console.print(f"key {stage.decision.key}", highlight=False)
    store = store_of(load_profile(options.profile, options.overrides), Home.here())
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


def _strictness(options: argparse.Namespace) -> Strictness:
    return Strictness(code=options.strict_code, env=options.strict_env)
