"""Print the predicted memory and time of each stage (`rlhf plan --estimate`), and reject plans that do not fit."""

import argparse
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipelines.cli.common import print_json, print_line
from pipelines.cli.plan_verbs import planned_stages
from pipelines.execution.plan import PlannedStage, duration
from pipelines.execution.request import RunRequest
from pipelines.flows.profile import PipelineConfig
from rlhf_contrib.planner.estimate import Estimate, Load, alike, estimates, refusal
from rlhf_contrib.planner.hardware import Hardware, hardware_of
from rlhf_contrib.planner.memory import human
from rlhf_core.errors import ConfigError
from rlhf_core.runtime.cluster import available_memory
from rlhf_core.store.artifacts import ArtifactStore

logger = logging.getLogger(__name__)

NOTHING_RUN = "from formulas and data sheets: nothing of this was measured on a GPU (docs/cluster.md)"


def estimate(options: argparse.Namespace) -> None:
    """Print the estimate of each stage that will run. Raises ConfigError for the stage that fits least."""
    config, store, planned = planned_stages(RunRequest.from_parameters(vars(options)), here=False)
    runtime, on = config.runtime, hardware_of(options.on, config.runtime, host_gib=options.host_gib)
    prompt_tokens = config.prepare_data.max_prompt_tokens
    found = estimates(planned, store, runtime, on, prompt_tokens)
    error = refusal(found, planned, store, runtime, on, prompt_tokens)
    if options.json:
        refused = "" if error is None else str(error)
        print_json(
            {"profile": options.profile, "on": on.name, "stages": [as_json(one) for one in found], "refused": refused}
        )
    else:
        for line in table(found, on, terms=options.terms):
            print_line(line)
    if error is not None:
        raise error


def warn_of_memory(config: PipelineConfig, planned: Sequence[PlannedStage], store: ArtifactStore) -> None:
    """Log a warning for the stage that exceeds the host memory of this machine or control group the most.

    The nodes of a cluster at RAY_ADDRESS are other machines and are not compared.
    """
    if os.environ.get("RAY_ADDRESS"):
        return
    try:
        on = replace(hardware_of("", config.runtime), host=available_memory())
        found = estimates(planned, store, config.runtime, on, config.prepare_data.max_prompt_tokens)
    except ConfigError as error:  # a shape that is not known yet, or a mix of models on CPUs and on GPUs
        logger.info("host memory is not compared with an estimate: %s", error)
        return
    loads = [(load, one.label) for one in found for load in one.loads if load.where in ("node", "machine")]
    short = [(load, label) for load, label in loads if not load.fits]
    if short:
        load, label = max(short, key=lambda pair: pair[0].total)
        logger.warning(
            "%s needs %s GB of host memory by estimate, and this machine or its control group gives %s: the kernel may end "
            "its workers; see `rlhf plan --estimate --terms`",
            *(label, human(load.total), human(load.limit)),
        )


def table(found: Sequence[Estimate], on: Hardware, *, terms: bool) -> list[str]:
    """Format a Markdown table with one line per memory of each stage, and one line for time."""
    lines = [f"On {on.name}, in GB (1e9 bytes); {NOTHING_RUN}.", ""]
    lines += ["| stage | memory | needs | of | most while | fits |", "|---|---|--:|--:|---|---|"]
    groups = alike(found)
    for labels, one in groups:
        for load in one.loads:
            fits = "yes" if load.fits else "**no**"
            shown = f"{human(load.total)} | {human(load.limit)} | {load.moment or '-'} | {fits}"
            lines.append(f"| {named(labels)} | {load.where} | {shown} |")
    if terms:
        lines.append("")
        lines += [f"{named(labels)}, {load.where}: {parts(load)}" for labels, one in groups for load in one.loads]
    timed = [f"| {named(labels)} | {seconds(one)} |" for labels, one in groups if one.seconds]
    return [*lines, *(["", "| stage | seconds of a step, at the longest rows |", "|---|---|"] if timed else []), *timed]


def named(labels: Sequence[str]) -> str:
    """A short name for stages that have the same estimate.

    >>> named(["iterative_dpo/1/dpo", "iterative_dpo/2/dpo", "iterative_dpo/3/dpo"])
    'iterative_dpo/1/dpo and 2 like it'
    """
    return labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} like it"


def parts(load: Load) -> str:
    """Format the terms of a memory, largest first."""
    ordered = sorted(load.terms.items(), key=lambda term: -term[1])
    return ", ".join(f"{name.replace('_', ' ')} {human(size)}" for name, size in ordered if size >= 5e7) or "little"


def seconds(one: Estimate) -> str:
    """Format the seconds of a step by part, and the duration of all steps if their number is known."""
    total = sum(one.seconds.values())
    made = ", ".join(f"{name} {size:.3g}" for name, size in one.seconds.items())
    every = f"; {one.steps} steps: {duration(total * one.steps)}" if one.steps else ""
    return f"{total:.3g} ({made}){every}"


def as_json(one: Estimate) -> dict[str, Any]:
    """The estimate of a stage as JSON values, in bytes and seconds."""
    return {
        "stage": one.label,
        "fits": one.fits,
        "memory": [
            {"where": load.where, "bytes": load.total, "limit": load.limit, "fits": load.fits, "moment": load.moment}
            | {"terms": dict(load.terms)}
            for load in one.loads
        ],
        "roles": [
            {"role": role.label, "parameters": role.parameters, "trained": role.trained_parameters}
            | {
                "resident": dict(memory.resident),
                "moments": {name: dict(added) for name, added in memory.moments.items()},
            }
            for role, memory in one.roles
        ],
        "seconds": dict(one.seconds),
        "steps": one.steps,
        "kv_tokens": one.kv_tokens,
    }
