"""Format the campaign's figures for the terminal and for a section of a document."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import psutil

from campaigns.durability.campaign import over_the_limit
from campaigns.durability.lives import Life


@dataclass(frozen=True)
class Campaign:
    """All observations. `other` are problems outside of lives: in undisturbed runs and in simultaneous runs."""

    command: str
    lives: Sequence[Life]
    real_lives: Sequence[Life]
    """Lives with Ray, vLLM and DeepSpeed."""
    other: Sequence[str]
    stages: int
    peace_s: float
    seconds: float

    @property
    def ok(self) -> bool:
        return not problems(self)


def markdown(campaign: Campaign) -> str:
    """Format a section with date, command, machine and tables."""
    cores, gib = os.cpu_count(), psutil.virtual_memory().total / 2**30
    kills = [kill for life in campaign.lives for kill in life.kills]
    lines = [
        f"{datetime.now(UTC):%Y-%m-%d}, `{campaign.command}`, {cores} cores, {gib:.0f} GiB.",
        "",
        "| measured | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in _totals(campaign)),
        "",
        *_others(campaign.lives),
        _table("kills by kind", Counter(kill.kind for kill in kills)),
        "",
        _table(
            "kills by what was about to happen, where the process knew", Counter(k.during for k in kills if k.during)
        ),
        "",
        _table("kills by stage", Counter(kill.stage for kill in kills)),
    ]
    if campaign.real_lives:
        lines += ["", *_real(campaign.real_lives)]
    wrong = problems(campaign)
    if wrong:
        lines += ["", "Not as it should be:", "", *(f"- {line}" for line in wrong)]
    return "\n".join(lines) + "\n"


def problems(campaign: Campaign) -> list[str]:
    """List all problems, one line each."""
    found = list(campaign.other)
    for life in (*campaign.lives, *campaign.real_lives):
        found += [f"{life.name}: {problem}" for problem in life.problems]
        found += [f"{life.name}: left over: {name}" for name in life.leftovers]
        found += [
            f"{life.name}: {repeat.label}: {repeat.steps} steps made again, it saves every {repeat.interval}"
            for repeat in life.repeats
            if over_the_limit(repeat)
        ]
    return found


def _totals(campaign: Campaign) -> list[tuple[str, str]]:
    lives = campaign.lives
    kills = [kill for life in lives for kill in life.kills]
    repeats = [repeat for life in lives for repeat in life.repeats]
    shares = [repeat.steps / repeat.interval for repeat in repeats] or [0.0]
    lingered = max((kill.lingered_s for kill in kills), default=0.0)
    return [
        ("pipelines completed", f"{len(lives)}, of {campaign.stages} stages each"),
        ("... of these recorded in MLflow", str(sum(life.mlflow for life in lives))),
        ("kills (SIGKILL)", str(len(kills))),
        ("pipelines whose every digest and metric is as the twin's", _share(life.problems for life in lives)),
        ("pipelines that left no process, lease or temporary file", _share(life.leftovers for life in lives)),
        (
            "... of these two runs at once, which computed each stage once",
            str(sum(life.name.startswith("two-of-two") for life in lives)),
        ),
        ("times that a stage went on after a kill", str(len(repeats))),
        ("steps made again, in checkpoint intervals", f"mean {sum(shares) / len(shares):.2f}, most {max(shares):.2f}"),
        ("... more than one interval (a checkpoint was on its way)", str(sum(share > 1 for share in shares))),
        ("longest life of a process after the kill of its parent", f"{lingered:.1f} s"),
        ("one pipeline in peace", f"{campaign.peace_s:.1f} s"),
        ("whole campaign", f"{campaign.seconds / 60:.1f} min"),
    ]


def _others(lives: Sequence[Life]) -> list[str]:
    """Tables of the disturbances other than kills, and of how the affected runs ended."""
    others = [life for life in lives if life.others]
    if not others:
        return []
    done = Counter(other.kind for life in others for other in life.others)
    moments = Counter(other.stage for life in others for other in life.others if other.stage)
    rows = [
        ("pipelines whose every digest and metric is as the twin's", _share(life.problems for life in others)),
        ("pipelines that left no process, lease or temporary file", _share(life.leftovers for life in others)),
    ]
    return [
        _table("stopped, edited, or with wrong clocks", done),
        *(f"| {name} | {value} |" for name, value in rows),
        "",
        _table(
            "how the run ended that was stopped, edited, or had wrong clocks",
            Counter(e for o in others for e in o.ends),
        ),
        "",
        _table("stopped or edited, by stage", moments),
        "",
    ]


def _real(lives: Sequence[Life]) -> list[str]:
    kills = [kill for life in lives for kill in life.kills]
    lingered = max((kill.lingered_s for kill in kills), default=0.0)
    return [
        _table("kills of a run with Ray, vLLM and DeepSpeed", Counter(kill.kind for kill in kills)),
        f"| pipelines whose every digest and metric is as the twin's | {_share(life.problems for life in lives)} |",
        f"| pipelines that left no process, lease or temporary file | {_share(life.leftovers for life in lives)} |",
        f"| last process gone after the kill | {lingered:.1f} s |",
        f"| seconds | {sum(life.seconds for life in lives):.0f} |",
        "",
        *_others(lives),
    ]


def _share(found: Iterable[Sequence[str]]) -> str:
    """Format how many lists of complaints are empty, and the total number."""
    empty = [not complaints for complaints in found]
    return f"{sum(empty)} of {len(empty)}"


def _table(title: str, counts: Counter[str]) -> str:
    rows = [f"| {name} | {number} |" for name, number in counts.most_common()]
    return "\n".join([f"| {title} | |", "|---|---|", *rows])
