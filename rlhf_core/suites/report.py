"""Render the report over all suites as an HTML page: tables by policy, suite and slice, and the worst regressions."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from jinja2 import Environment

from rlhf_core.evaluation.intervals import LEVEL
from rlhf_core.evaluation.report import TEMPLATE
from rlhf_core.suites.results import ENDS, PromptRow, paired_difference

Suites: TypeAlias = Mapping[str, Mapping[str, tuple[dict[str, Any], list[PromptRow]]]]
"""Suite -> policy -> its report.json and its rows."""
Cell: TypeAlias = dict[str, Any]
NO_NAMES: Mapping[str, str] = MappingProxyType({})
NO_CELL: Cell = {"text": "–", "range": "", "bar": None, "tone": ""}
TEXT_SHOWN = 2000
"""Characters of an answer in the report."""
BY_ROW: Mapping[str, str] = {"length_controlled_win_rate": "win_rate"}
"""Headline that no prompt has a value of -> the measure that stands for it by slice, in differences and regressions."""


# ---------------------------------------------------------------- numbers


def overview(suites: Suites, *, reference: str, opponents: Mapping[str, str] = NO_NAMES) -> dict[str, Any]:
    """Content of report.json: per suite the measures of every policy, and their differences to `reference`.

    `opponents` names the opponent of each `<suite>/<policy>`.
    """
    found = {}
    for suite, policies in suites.items():
        first = next(iter(policies.values()))[0]
        rows = {}
        for policy, (report, its_rows) in policies.items():
            rows[policy] = {name: report[name] for name in ("measures", "slices", "facts")}
            if f"{suite}/{policy}" in opponents:
                rows[policy]["opponent"] = opponents[f"{suite}/{policy}"]
            if policy != reference:
                rows[policy]["difference"] = (
                    _differences((report, its_rows), policies[reference])
                    if comparable(policies, policy, reference)
                    else {}
                )
        found[suite] = {name: first[name] for name in ("type", "headline")} | {
            "lower_is_better": sorted({name for report, _ in policies.values() for name in report["lower_is_better"]}),
            "policies": rows,
        }
    names = list(dict.fromkeys(policy for policies in suites.values() for policy in policies))
    return {"reference": reference, "policies": names, "level": LEVEL, "suites": found}


def comparable(policies: Mapping[str, tuple[dict[str, Any], list[PromptRow]]], policy: str, reference: str) -> bool:
    """Whether both have results with the same meaning: win rates have it only against the same opponent."""
    if reference not in policies:
        return False
    mine, other = (policies[name][0]["facts"] for name in (policy, reference))
    return opponent_digest(mine) == opponent_digest(other)


def opponent_digest(facts: Mapping[str, Any]) -> str:
    """Digest of the policy that answers were compared with, "" for suites without one."""
    return str(facts["opponent"]) if "opponent" in facts else ""


def by_row(headline: str) -> str:
    """The measure of single prompts that corresponds to a headline."""
    return BY_ROW[headline] if headline in BY_ROW else headline


def _differences(
    ours: tuple[Mapping[str, Any], Sequence[PromptRow]], theirs: tuple[Mapping[str, Any], Sequence[PromptRow]]
) -> dict[str, dict[str, float]]:
    (report, rows), (other, base) = ours, theirs
    found = {
        name: paired_difference(rows, base, name, share=name in report["shares"] and name in other["shares"])
        for name in report["measures"]
    }
    return {name: value for name, value in found.items() if value is not None}


def headline_metrics_of(report: Mapping[str, Any]) -> dict[str, float]:
    """The stage's metrics: `<suite>/<policy>/<measure>`, with `_low`, `_high` and the difference to the reference.

    Of measures by task, only the headline is among them.
    """
    metrics: dict[str, float] = {}
    for suite, found in report["suites"].items():
        for policy, row in found["policies"].items():
            for name, value in row["measures"].items():
                if "/" in name and name != found["headline"]:
                    continue
                path = f"{suite}/{policy}/{name}"
                metrics |= {path: value["mean"]} | {f"{path}_{end}": value[end] for end in ENDS if end in value}
                if "difference" in row and name in row["difference"]:
                    change = row["difference"][name]
                    metrics[f"{path}_difference"] = change["mean"]
                    metrics |= {f"{path}_difference_{end}": change[end] for end in ENDS if end in change}
    return metrics


def worst(suites: Suites, *, reference: str, count: int) -> list[dict[str, Any]]:
    """Find, per suite, the prompts where a policy's headline is furthest below the reference's, with both answers."""
    found = []
    for suite, policies in suites.items():
        if reference not in policies:
            continue
        base = {row.id: row for row in policies[reference][1]}
        falls = []
        for policy, (report, rows) in policies.items():
            name = by_row(report["headline"])
            sign = -1.0 if name in report["lower_is_better"] else 1.0
            for row in rows if policy != reference and comparable(policies, policy, reference) else ():
                if row.id in base and name in row.values and name in base[row.id].values:
                    fall = sign * (base[row.id].values[name] - row.values[name])
                    falls += [(fall, policy, name, row, base[row.id])] if fall > 0 else []
        falls.sort(key=lambda one: -one[0])  # stable: equal ones stay in the order of policies and prompts
        found += [
            {
                "suite": suite,
                "policy": policy,
                "measure": name,
                "slice": row.slice,
                "prompt": row.prompt,
                "value": row.values[name],
                "reference": other.values[name],
                "answer": row.answer[:TEXT_SHOWN],
                "answer_of_the_reference": other.answer[:TEXT_SHOWN],
            }
            for _, policy, name, row, other in falls[:count]
        ]
    return found


# ---------------------------------------------------------------- page


def render_suites(report: Mapping[str, Any], regressions: Sequence[Mapping[str, Any]]) -> str:
    """Render the HTML page, which works offline."""
    suites, reference = report["suites"], report["reference"]
    page = Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    tables = [_overview_table(report)]
    if len(report["policies"]) > 1 and any(reference in found["policies"] for found in suites.values()):
        tables.append(_difference_table(report))
    for suite, found in suites.items():
        tables += _suite_tables(suite, found)
    settings = {name: report[name] for name in ("reference", "level")}
    facts = {suite: {name: row["facts"] for name, row in found["policies"].items()} for suite, found in suites.items()}
    return page.render(
        title="Evaluation suites",
        lead=f"{len(report['policies'])} policies in {len(suites)} suites.",
        cards=[],
        tables=tables,
        footnote=(
            f"Ranges are {report['level']:.0%} intervals over prompts; one prompt, or few that are alike, may have none. "
            f"Differences to {reference} are paired: prompt by prompt, over those that both answered; of win rates "
            "only where both have the same opponent. "
            "An arrow after a measure means that lower is better."
        ),
        figures=[],
        samples_title="Worst regressions",
        samples=[_sample(row, reference) for row in regressions],
        lineage=[],
        settings=json.dumps(settings | {"suites": facts}, indent=2),
        footer=f"Stage key {report['key']}",
    )


def _overview_table(report: Mapping[str, Any]) -> dict[str, Any]:
    suites = report["suites"]
    cells: dict[str, list[Cell]] = {policy: [] for policy in report["policies"]}
    for found in suites.values():
        name = found["headline"]
        of_all = [row["measures"][name] for row in found["policies"].values() if name in row["measures"]]
        for policy, line in cells.items():
            line.append(_cell(_part(found, policy, "measures"), name, bar_among=of_all))
    columns = [_column(suite, found["headline"], found) for suite, found in suites.items()]
    return _table("Policies by suites", columns, cells, best=report["reference"])


def _difference_table(report: Mapping[str, Any]) -> dict[str, Any]:
    names = {suite: by_row(found["headline"]) for suite, found in report["suites"].items()}
    cells: dict[str, list[Cell]] = {policy: [] for policy in report["policies"] if policy != report["reference"]}
    for suite, found in report["suites"].items():
        lower = names[suite] in found["lower_is_better"]
        for policy, line in cells.items():
            changes = _part(found, policy, "difference")
            line.append(_cell(changes, names[suite], form="+.3f", lower_is_better=lower, tone=True))
    columns = [_column(suite, names[suite], found, measure=names[suite]) for suite, found in report["suites"].items()]
    return _table(f"Difference to {report['reference']}", columns, cells)


def _suite_tables(suite: str, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The table of all measures of a suite, and a table of its headline by slice if it has several slices."""
    policies, headline_name = found["policies"], by_row(found["headline"])
    measures = list(dict.fromkeys(name for row in policies.values() for name in row["measures"]))
    slices = list(dict.fromkeys(name for row in policies.values() for name in row["slices"]))
    tables = []
    if len(measures) > 1:
        cells = {policy: [_cell(row["measures"], name) for name in measures] for policy, row in policies.items()}
        columns = [_column(name, "", found, measure=name) for name in measures]
        if any("opponent" in row for row in policies.values()):
            columns.append({"name": "against", "help": found["type"]})
            for policy, row in policies.items():
                cells[policy].append(NO_CELL | {"text": row["opponent"]} if "opponent" in row else NO_CELL)
        tables.append(_table(f"{suite}: all measures", columns, cells))
    by_slice = [
        name for name in slices if any(headline_name in row["slices"].get(name, {}) for row in policies.values())
    ]
    if len(by_slice) > 1:
        cells = {
            policy: [_cell(row["slices"].get(name, {}), headline_name) for name in by_slice]
            for policy, row in policies.items()
        }
        columns = [_column(name, headline_name, found) for name in by_slice]
        tables.append(_table(f"{suite}: {headline_name} by slice", columns, cells))
    return tables


def _table(
    title: str, columns: Sequence[Mapping[str, str]], cells: Mapping[str, Sequence[Cell]], best: str = ""
) -> dict[str, Any]:
    rows = [{"name": policy, "best": policy == best, "cells": line} for policy, line in cells.items()]
    return {"title": title, "columns": columns, "rows": rows}


def _part(found: Mapping[str, Any], policy: str, part: str) -> Mapping[str, Any]:
    """A part of a policy's results in a suite; empty if it has no such part, or was not measured."""
    row = found["policies"][policy] if policy in found["policies"] else {}
    return row[part] if part in row else {}


def _column(name: str, explained: str, found: Mapping[str, Any], measure: str = "") -> dict[str, str]:
    lower = (measure or found["headline"]) in found["lower_is_better"]
    return {"name": f"{name} ↓" if lower else name, "help": explained or found["type"]}


def _cell(
    measures: Mapping[str, Mapping[str, float]],
    name: str,
    *,
    form: str = ".3f",
    bar_among: Sequence[Mapping[str, float]] = (),
    lower_is_better: bool = False,
    tone: bool = False,
) -> Cell:
    if name not in measures:
        return NO_CELL
    value = measures[name]
    if "low" not in value:
        return NO_CELL | {"text": format(value["mean"], form)}
    better = (value["high"] < 0 if lower_is_better else value["low"] > 0) if tone else False
    worse = (value["low"] > 0 if lower_is_better else value["high"] < 0) if tone else False
    note = f"{value['low']:{form}} … {value['high']:{form}}"
    bar = _bar(value, [one for one in bar_among if "low" in one]) if bar_among else None
    return {
        "text": format(value["mean"], form),
        "range": note,
        "bar": bar,
        "tone": "up" if better else "down" if worse else "",
    }


def _bar(value: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> dict[str, str]:
    low, high = min(other["low"] for other in others), max(other["high"] for other in others)
    left, mean, right = (100 * (value[end] - low) / ((high - low) or 1.0) for end in ("low", "mean", "high"))
    return {"left": f"{left:.1f}", "width": f"{right - left:.1f}", "mean": f"{mean:.1f}"}


def _sample(row: Mapping[str, Any], reference: str) -> dict[str, Any]:
    title = f"{row['suite']}, {row['policy']}: {row['measure']} {row['reference']:.2f} → {row['value']:.2f}"
    answers = [
        {
            "policy": reference,
            "text": row["answer_of_the_reference"],
            "numbers": f"{row['reference']:.2f}",
            "top": True,
        },
        {"policy": row["policy"], "text": row["answer"], "numbers": f"{row['value']:.2f}", "top": False},
    ]
    return {"prompt": f"{title} — {row['prompt'][:TEXT_SHOWN]}", "answers": answers}
