"""Render the report as one HTML file that works offline, on phones and screens, in light and dark mode."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment

from rlhf_core.evaluation.intervals import ends

TEMPLATE = Path(__file__).with_name("report.html.jinja")


@dataclass(frozen=True, slots=True)
class ReportColumn:
    """A column of the table: the path of a measure in a policy's row, its name, its number format and its meaning."""

    path: str
    name: str
    form: str
    help: str


JUDGED = (
    ReportColumn("gold", "gold reward", ".3f", "The reward that nothing was trained on, mean over prompts"),
    ReportColumn(
        "improvement", "difference", "+.3f", "Mean paired difference to the policy that the win rate is against"
    ),
    ReportColumn("win_rate", "win rate", ".1%", "Share of prompts with the better answer, ties half"),
    ReportColumn("reward_model", "reward model", ".3f", "Score of the trained reward model, mean over prompts"),
    ReportColumn("kl", "KL", ".2f", "Nats per answer to the reference"),
)
STYLE = (
    ReportColumn("tokens", "tokens", ".1f", "Mean length of an answer"),
    ReportColumn("truncated", "cut off", ".1%", "Answers that ended at the token limit"),
    ReportColumn("entropy", "entropy", ".2f", "Nats per token, estimated from sampled tokens"),
    ReportColumn("repetition", "repeated", ".1%", "Trigrams that occurred before in the same answer"),
    ReportColumn("kl_per_token", "KL / token", ".4f", "Nats per token to the reference"),
    ReportColumn("distinct_2", "distinct", ".1%", "Different bigrams over all bigrams of all answers"),
    ReportColumn("failed", "failed", ".0f", "Episodes that could not be ended; no other figure counts them"),
)
WITH_BAR = ("gold", "reward_model")


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt with one answer per policy: (policy, text, {"gold": ..., "reward model": ...})."""

    prompt: str
    answers: tuple[tuple[str, str, dict[str, float]], ...]


def render_report(
    report: Mapping[str, Any],
    *,
    title: str,
    figures: Sequence[tuple[str, bytes]],
    samples: Sequence[Sample],
    colors: Mapping[str, str],
) -> str:
    """Render the HTML page.

    `report` is the content of report.json, `figures` are (caption, PNG), `colors` of policies.
    """
    policies: dict[str, dict[str, Any]] = report["policies"]
    best = best_policy(report)
    page = Environment(autoescape=True, trim_blocks=False).from_string(TEMPLATE.read_text(encoding="utf-8"))
    return page.render(
        title=title,
        lead=_lead(report),
        cards=_cards(report, best),
        tables=[
            _table("Policies", JUDGED, policies, best, colors),
            *_by_source(report, best, colors),
            _table("How they write", STYLE, policies, best, colors),
        ],
        footnote=_footnote(report),
        figures=[{"caption": text, "data": base64.b64encode(png).decode()} for text, png in figures],
        samples=[_sample(sample, colors) for sample in samples],
        lineage=report["lineage"],
        settings=json.dumps(report["settings"], indent=2),
        footer=f"Stage key {report['key']}" if report["key"] else "",
    )


def best_policy(report: Mapping[str, Any]) -> str:
    """The policy with the highest reward. A best-of-n row is not a policy and does not count."""
    measure = report["compared_by"]
    policies = report["policies"]
    names = [name for name in report["order"] if measure in policies[name]]
    return max(names, key=lambda name: policies[name][measure]["mean"]) if names else report["order"][-1]


def _lead(report: Mapping[str, Any]) -> str:
    row = report["policies"][report["order"][0]]
    judges = {"gold": "the gold reward", "reward_model": "the reward model", "": "their answers alone"}
    by = judges[report["compared_by"]]
    return f"{len(report['order'])} policies answer the same {row['prompts']} held-out prompts and are judged by {by}."


def _cards(report: Mapping[str, Any], best: str) -> list[dict[str, str]]:
    row = report["policies"][best]
    measure = report["compared_by"]
    cards = [("best policy", best, f"{row['samples']} answers")]
    if measure:
        name = "gold reward" if measure == "gold" else "reward model"
        cards.append((name, _number(row[measure]["mean"], ".3f"), _range(row[measure], ".3f")))
    if "win_rate" in row:
        wins = row["win_rate"]
        cards.append((f"win rate against {wins['against']}", f"{wins['mean']:.1%}", _range(wins, ".1%")))
    if "kl" in row:
        cards.append((f"KL to {report['reference']}", _number(row["kl"]["mean"], ".2f"), "nats per answer"))
    return [dict(zip(("label", "value", "note"), card, strict=True)) for card in cards]


def _table(
    title: str,
    columns: Sequence[ReportColumn],
    policies: Mapping[str, Mapping[str, Any]],
    best: str,
    colors: Mapping[str, str],
) -> dict[str, Any]:
    """Build the table of the columns for which at least one policy has a value."""
    shown = [column for column in columns if any(column.path in row for row in policies.values())]
    rows = [
        {
            "name": name,
            "best": name == best,
            "color": colors[name],
            "cells": [_cell(row, column, policies) for column in shown],
        }
        for name, row in policies.items()
    ]
    return {"title": title, "columns": shown, "rows": rows}


def _by_source(report: Mapping[str, Any], best: str, colors: Mapping[str, str]) -> list[dict[str, Any]]:
    """Build the table of the compared measure, or else of lengths, by source; [] if all prompts have one source."""
    column = next(column for column in (*JUDGED, *STYLE) if column.path == (report["compared_by"] or "tokens"))
    rows = {
        name: {source: part[column.path] for source, part in row["sources"].items() if column.path in part}
        for name, row in report["policies"].items()
        if "sources" in row
    }
    sources = dict.fromkeys(source for row in rows.values() for source in row)
    columns = [ReportColumn(source, source, column.form, column.help) for source in sources]
    return [_table(f"By source: {column.name}", columns, rows, best, colors)] if columns else []


def _cell(row: Mapping[str, Any], column: ReportColumn, policies: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    value = row[column.path] if column.path in row else None
    if not isinstance(value, Mapping):
        return {"text": "–" if value is None else _number(value, column.form), "range": "", "bar": None, "tone": ""}
    text, note, bar = _number(value["mean"], column.form), _range(value, column.form), None
    if "kind" in value and value["kind"] == "bound":
        text, note = f"≤ {text}", "bound"
    if column.path == "win_rate":
        note = f"{note} vs {value['against']}"
    if column.path in WITH_BAR:
        bar = _bar(value, [other[column.path] for other in policies.values() if column.path in other])
    return {"text": text, "range": note, "bar": bar, "tone": _tone(column, value)}


def _tone(column: ReportColumn, value: Mapping[str, Any]) -> str:
    """The color class of a comparison, or "" if its interval includes equality."""
    even = {"improvement": 0.0, "win_rate": 0.5}
    if column.path not in even:
        return ""
    low, high = ends(value)
    known = "low" in value
    return "up" if known and low > even[column.path] else "down" if known and high < even[column.path] else ""


def _bar(value: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> dict[str, str]:
    low, high = min(ends(other)[0] for other in others), max(ends(other)[1] for other in others)
    width = (high - low) or 1.0

    def place(x: float) -> float:
        return 100 * (x - low) / width

    return {
        "left": f"{place(ends(value)[0]):.1f}",
        "width": f"{place(ends(value)[1]) - place(ends(value)[0]):.1f}",
        "mean": f"{place(value['mean']):.1f}",
    }


def _range(value: Mapping[str, float], form: str) -> str:
    return f"{_number(value['low'], form)} … {_number(value['high'], form)}" if "low" in value else "no interval"


def _number(value: float, form: str) -> str:
    """Format a number. A number that rounds to zero has no sign.

    >>> _number(-0.0001, ".2f"), _number(-0.2, ".2f")
    ('0.00', '-0.20')
    """
    text = format(value, form)
    return format(0.0, form) if not any(digit in text for digit in "123456789") else text


def _footnote(report: Mapping[str, Any]) -> str:
    level = report["settings"]["level"]
    text = f"Ranges are {level:.0%} intervals over prompts; one prompt, or few that are alike, may have none."
    if any("kl" in row for row in report["policies"].values()):
        text += (
            f" KL is the mean over answers of the summed log-probability ratio to {report['reference']}, in nats;"
            " that of a best-of-n row is the bound log n − (n − 1)/n."
        )
    return text


def _sample(sample: Sample, colors: Mapping[str, str]) -> dict[str, Any]:
    values = [next(iter(numbers.values()), 0.0) for _, _, numbers in sample.answers]
    top = max(values, default=0.0)
    scored = any(numbers for _, _, numbers in sample.answers)
    answers = [
        {
            "policy": policy,
            "color": colors[policy],
            "text": text,
            "numbers": "  ".join(f"{name} {number:.2f}" for name, number in numbers.items()),
            "top": scored and value == top,
        }
        for (policy, text, numbers), value in zip(sample.answers, values, strict=True)
    ]
    return {"prompt": sample.prompt, "answers": answers}
