"""Publishing: a gate over the report's numbers, a model card, and an entry in the registry by reference.

Every policy that gets here is registered as `candidate`; `champion` moves only when every threshold holds, and never
back to a policy that was rolled back. A failed gate is an outcome, written down like a passed one.
"""

import json
import logging
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.errors import ConfigError, readable
from rlhf_core.interfaces import RegistryState
from rlhf_core.stage.context import StageContext
from rlhf_core.store.layout import MANIFEST
from rlhf_core.tracking.champions import move_tag
from rlhf_core.training.exports import EXPORTS
from rlhf_core.types import CHAMPION, PolicyRef, PublishedRef, ReportRef
from stages.publish import OPERATORS, ChallengeConfig, GateNote, PublishConfig, Threshold

logger = logging.getLogger(__name__)

CANDIDATE = "candidate"
HUB = "hub"
ROLLED_BACK: dict[str, Any] = {
    "metric": "was rolled back",
    "op": "<=",
    "than": "",
    "factor": 1.0,
    "value": 1.0,
    "threshold": 0.0,
    "pass": False,
}
"""The failed condition of a policy that a person has rolled back: only a person makes it champion again."""


def run(
    config: PublishConfig,
    *,
    policy: PolicyRef,
    report: ReportRef,
    champion: PolicyRef | None = None,
    context: StageContext,
) -> PublishedRef:
    """Judge `policy` by `report`, write gate.json and the model card, register by reference; return the result.

    `champion` is the policy that has to be beaten if the configuration has a challenge.
    """
    content = json.loads((context.path(report) / "report.json").read_text(encoding="utf-8"))
    name = name_of(config, policy, content)
    checks = [check(threshold, index, name, content) for index, threshold in enumerate(config.gate)]
    if config.challenge is not None and champion is not None and champion.digest != policy.digest:
        checks.append(challenge(config.challenge, name, champion, content))
    checks += few_prompts(config, name, checks, content)
    state = context.tracker.champions(config.name)
    if state is not None and policy.digest in state.rolled_back:
        checks.append(ROLLED_BACK)
    passed = all(entry["pass"] for entry in checks)
    if passed and config.challenge is not None:
        check_opponent(config, policy, champion, state)

    if config.hub:  # before anything is registered: it may fail
        copy_for_hub(context.path(policy), context.out / HUB)
    if not context.store.is_external(policy):
        context.store.pin(policy.uri, note=f"{config.name} {'champion' if passed else 'candidate'}")
    aliases = [CANDIDATE, CHAMPION] if passed else [CANDIDATE]
    tags = version_tags(name, content, context.key, passed)
    if passed:
        tags |= move_tag("publish", won(checks))
    version = context.tracker.register(config.name, policy.digest, aliases=aliases, tags=tags, uri=policy.uri)
    if not passed:
        failed = conditions([entry for entry in checks if not entry["pass"]])
        logger.warning(
            "%s: %s version %s is a candidate only, not met: %s", context.label, config.name, version, failed
        )
    gate = {
        "passed": passed,
        "policy": name,
        "digest": policy.digest,
        "checks": checks,
        "registry": {"name": config.name, "version": version, "aliases": aliases},
    }
    (context.out / "gate.json").write_text(json.dumps(gate, indent=2), encoding="utf-8")
    card = model_card(config, gate, policy, report, content)
    (context.out / "README.md").write_text(card, encoding="utf-8")
    if config.hub:
        write_hub_card(card, config.license, context.out / HUB)
    record(checks, context)
    return context.commit(PublishedRef, metrics={"gate/passed": float(passed), "gate/checks": float(len(checks))})


# ---------------------------------------------------------------- the gate


def name_of(config: PublishConfig, policy: PolicyRef, report: Mapping[str, Any]) -> str:
    """Name of the policy in the report. Raises ConfigError if the report is not about this policy."""
    names = [name for name in report["order"] if report["policies"][name]["digest"] == policy.digest]
    if config.policy:
        if config.policy not in report["order"]:
            known = ", ".join(report["order"])
            raise ConfigError("publish.policy", config.policy, f"is not in the report ({known})", "name one of these")
        if config.policy not in names:
            raise ConfigError(
                "publish.policy",
                config.policy,
                "the report evaluates other weights under this name",
                "publish the policy that was evaluated",
            )
        return config.policy
    if not names:
        raise ConfigError(
            "publish.policy", policy.digest[:12], "was not evaluated in this report", "evaluate it, then publish it"
        )
    return names[-1]


def check(threshold: Threshold, index: int, name: str, report: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate one threshold: the measured value, the bound, and whether the threshold holds."""
    key = f"publish.gate[{index}].metric"
    value = metric(report, name, threshold.metric, key)
    bound = threshold.value
    if bound is None:
        other = metric(report, threshold.than, threshold.metric, key)
        bound = None if other is None else threshold.factor * other
    return {
        "metric": threshold.metric,
        "op": threshold.op,
        "than": threshold.than,
        "factor": threshold.factor,
        "value": value,
        "threshold": bound,
        "pass": value is not None and bound is not None and OPERATORS[threshold.op](value, bound),
    }


def few_prompts(
    config: PublishConfig, name: str, checks: Sequence[Mapping[str, Any]], report: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The failed condition that each number rests on at least `least_prompts` prompts; [] if it holds."""
    rows = report["policies"]
    found = [
        value["prompts"]
        for entry in checks
        for policy in (name, entry["than"])
        if policy
        for value in along(rows[policy], entry["metric"])[0]
        if isinstance(value, Mapping) and "prompts" in value
    ]
    least = min(found, default=config.least_prompts)
    if least >= config.least_prompts:
        return []
    condition = {"metric": "prompts", "op": ">=", "than": "", "factor": 1.0, "pass": False}
    return [condition | {"value": float(least), "threshold": float(config.least_prompts)}]


def challenge(config: ChallengeConfig, name: str, champion: PolicyRef, report: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison with the champion as a condition: the interval of the difference is above the margin."""
    measure, key = f"{config.metric}_over_{CHAMPION}", "publish.challenge.metric"
    rows = report["policies"]
    if CHAMPION not in rows or rows[CHAMPION]["digest"] != champion.digest:
        rule = f"the report does not evaluate the champion {champion.digest[:12]}"
        raise ConfigError(key, config.metric, rule, "run the pipeline again, or leave the champion out")
    if measure not in rows[name]:
        rule = "the report does not compare with the champion by it"
        remedy = "set evaluate.evaluate.gold" if config.metric == "gold" else "train a reward model"
        raise ConfigError(key, config.metric, rule, f"{remedy}, or choose another metric")
    low = metric(report, name, f"{measure}/low", key)
    return {
        "metric": f"{measure}/low",
        "op": ">",
        "than": "",
        "factor": 1.0,
        "value": low,
        "threshold": config.margin,
        "pass": low is not None and low > config.margin,
    }


def check_opponent(
    config: PublishConfig, policy: PolicyRef, champion: PolicyRef | None, state: RegistryState | None
) -> None:
    """Raise ConfigError unless the policy was compared with the current champion, or is the current champion itself."""
    compared = champion.digest if champion is not None else ""
    if state is None:
        rule = "the registry does not answer, so the current champion is unknown"
    elif state.champion not in (compared, policy.digest):
        rule = f"the champion is {_short(state.champion)} now, and the policy was compared with {_short(compared)}"
    else:
        return
    raise ConfigError("publish.challenge", config.name, rule, "run again")


def _short(digest: str) -> str:
    return digest[:12] or "none"


def won(checks: Sequence[Mapping[str, Any]]) -> str:
    """One line on why a policy becomes champion."""
    return conditions(checks) or "no conditions were set"


def conditions(checks: Sequence[Mapping[str, Any]]) -> str:
    """Format conditions together with the measured values.

    >>> conditions([{"metric": "gold/low", "value": 0.25, "op": ">", "threshold": 0.5}])
    'gold/low 0.25 > 0.5'
    """
    return ", ".join(
        f"{entry['metric']} {_figure(entry['value'], '.6g')} {entry['op']} {_figure(entry['threshold'], '.6g')}"
        if entry is not ROLLED_BACK
        else "not rolled back"
        for entry in checks
    )


def _figure(value: float | None, form: str) -> str:
    return "not known (no interval)" if value is None else format(value, form)


def along(row: Any, path: str) -> tuple[list[Any], str]:
    """Walk from a row along `path`: the values on the way, and the rest of the path that cannot be followed.

    Names in `path` may contain / and dots.

    >>> along({"sources": {"a/b": {"gold": 2.0}}}, "sources/a/b/kl")
    ([{'sources': {'a/b': {'gold': 2.0}}}, {'a/b': {'gold': 2.0}}, {'gold': 2.0}], 'kl')
    """
    for name in sorted(row, key=len, reverse=True) if path and isinstance(row, Mapping) else ():
        if re.match(rf"{re.escape(name)}([/.]|$)", path):
            values, left = along(row[name], path[len(name) + 1 :])
            return [row, *values], left
    return [row], path


def metric(report: Mapping[str, Any], policy: str, path: str, key: str) -> float | None:
    """The number at `path` in the policy's row; None for an interval bound that has too few prompts.

    Raises ConfigError that lists the available names.
    """
    if policy not in report["policies"]:
        known = ", ".join(report["policies"])
        raise ConfigError(key, path, f"the report has no policy {policy!r} ({known})", "name one of these")
    (*_, found), left = along(report["policies"][policy], path)
    if left in ("low", "high") and isinstance(found, Mapping) and "mean" in found:
        return None
    if left:
        known = ", ".join(found) if isinstance(found, Mapping) else "a number"
        raise ConfigError(key, path, f"{policy} has no {left!r} there ({known})", "name a metric of the report")
    if isinstance(found, Mapping):
        raise ConfigError(key, path, "is not a number", f"add one of {', '.join(found)} to the path")
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise ConfigError(key, path, f"is {found!r}, not a number", "name a metric of the report")
    return float(found)


def record(checks: Sequence[Mapping[str, Any]], context: StageContext) -> None:
    """Hand the gate and the card to the tracker."""
    rows = [[entry["metric"], entry["op"], entry["threshold"], entry["value"], entry["pass"]] for entry in checks]
    context.tracker.table("gate", ["metric", "op", "threshold", "value", "pass"], rows)
    for file in ("gate.json", "README.md"):
        context.tracker.file(context.out / file, "")


def version_tags(name: str, report: Mapping[str, Any], key: str, passed: bool) -> dict[str, str]:
    """Tags of the registered version: its origin, its results, and the place of the report."""
    row = report["policies"][name]
    tags = {"stage": name, "gate": "passed" if passed else "failed", "publish.key": key}
    for measure in ("gold", "reward_model", "win_rate", "kl"):
        if measure in row:
            tags[f"eval.{measure}"] = f"{row[measure]['mean']:.4g}"
    return tags


# ---------------------------------------------------------------- the model card


def model_card(
    config: PublishConfig, gate: Mapping[str, Any], policy: PolicyRef, report: ReportRef, content: Mapping[str, Any]
) -> str:
    """The model card in Markdown: description, intended use, results and lineage."""
    name, row = gate["policy"], content["policies"][gate["policy"]]
    verdict = "passed" if gate["passed"] else "not passed"
    registry, digest = gate["registry"], policy.digest
    registered = f"registered as version {registry['version']} ({', '.join(registry['aliases'])})"
    judged = f"Held-out prompts: {row['prompts']}; intervals at {content['settings']['level']:.0%}."
    parts = [
        f"# {config.name}",
        f"Policy `{name}`, weights `{digest}`. Gate: **{verdict}**; {registered}.",
        f"## Intended use\n\n{config.intended_use}",
        f"## Evaluation\n\n{judged} Report `{report.digest[:12]}`.\n\n{_measures(row)}",
        f"## Gate\n\n{_gate_table(gate['checks'])}",
        f"## Decisions\n\n{_decisions(config.decisions)}",
        f"## Made from\n\n{_made_from(content['lineage'])}",
        f"## Configuration\n\n{_configurations(content['lineage'])}",
        f"## License\n\n{config.license}",
    ]
    return "\n\n".join(parts) + "\n"


def copy_for_hub(policy: Path, folder: Path) -> None:
    """Copy the policy's files to a folder that can be written to; the store's own files and folders are read-only.

    Policies that its training exported along the way are separate models, and left out.
    """
    ours = shutil.ignore_patterns(MANIFEST, EXPORTS)
    shutil.copytree(policy, folder, copy_function=shutil.copyfile, ignore=ours)
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        path.chmod(path.stat().st_mode | stat.S_IRWXU)


def write_hub_card(card: str, license: str, folder: Path) -> None:
    """Write the card with the header of the Hugging Face Hub, so that the folder is ready for upload."""
    is_id = re.fullmatch(r"[a-z0-9][a-z0-9.-]*", license.lower()) is not None
    header = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": license.lower() if is_id else "other",
        "tags": ["rlhf"],
    }
    lines = "\n".join(f"{name}: {json.dumps(value)}" for name, value in header.items())
    (folder / "README.md").write_text(f"---\n{lines}\n---\n\n{card}", encoding="utf-8")


def _measures(row: Mapping[str, Any]) -> str:
    return "\n".join(["| measure | value | interval |", "|---|---|---|", *_measure_lines(row, "")])


def _measure_lines(row: Mapping[str, Any], of: str) -> list[str]:
    lines = list[str]()
    for name, value in row.items():
        if name == "sources":
            lines += [line for source, part in value.items() for line in _measure_lines(part, f" of {source}")]
        elif isinstance(value, Mapping):
            against = f" against {value['against']}" if "against" in value else ""
            interval = f"{readable(value['low'])} to {readable(value['high'])}" if "low" in value else "not known"
            lines.append(f"| {name}{of}{against} | {readable(value['mean'])} | {interval} |")
        elif isinstance(value, float):
            lines.append(f"| {name}{of} | {readable(value)} | |")
    return lines


def _gate_table(checks: Sequence[Mapping[str, Any]]) -> str:
    if not checks:
        return "No thresholds were set."
    lines = ["| metric | must be | is | |", "|---|---|---|---|"]
    for entry in checks:
        than = f" ({entry['factor']:g} × {entry['than']})" if entry["than"] else ""
        verdict = "passes" if entry["pass"] else "**fails**"
        bound = f"{entry['op']} {_figure(entry['threshold'], '.4g')}{than}"
        lines.append(f"| {entry['metric']} | {bound} | {_figure(entry['value'], '.4g')} | {verdict} |")
    return "\n".join(lines)


def _decisions(notes: Sequence[GateNote]) -> str:
    if not notes:
        return "The run had no gates."
    lines = ["| gate | found | outcome | decision |", "|---|---|---|---|"]
    cells = ([_cell(text) for text in (one.name, one.found, one.outcome, one.answer)] for one in notes)
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)])


def _cell(text: str) -> str:
    """Format a text as one line of a table.

    >>> print(_cell("a | b\\nc"))
    a \\| b c
    """
    return " ".join(text.split()).replace("|", "\\|")


def _made_from(lineage: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for node in lineage:
        parents = f", from {', '.join(node['parents'])}" if node["parents"] else ""
        lines.append(f"- **{node['label']}** `{node['digest']}`{parents}")
    return "\n".join(lines) or "Not known to the store."


def _configurations(lineage: Sequence[Mapping[str, Any]]) -> str:
    blocks = [f"`{node['label']}`\n\n```json\n{json.dumps(node['config'], indent=1)}\n```" for node in lineage]
    return "\n\n".join(blocks) or "Not known to the store."
