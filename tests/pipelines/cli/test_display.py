from __future__ import annotations

import io

from rich.console import Console

from pipelines.cli.common import key_metric
from pipelines.cli.display import LiveDisplay, PlainDisplay, decisions_table, open_display, results_table
from rlhf_core.stage.decision import Decision

REPORT = {
    "settings": {"level": 0.95},
    "policies": {
        "sft": {
            "gold": {"mean": 1.234, "low": 1.1, "high": 1.36},
            "kl": {"mean": 0.0, "low": 0.0, "high": 0.0, "kind": "estimate"},
            "tokens": {"mean": 31.26, "low": 30.0, "high": 32.0},
            "entropy": 0.516,
        },
        "best-of-8 (sft)": {
            "gold": {"mean": 2.0, "low": 1.9, "high": 2.1},
            "kl": {"mean": 1.2044, "low": 1.2, "high": 1.2, "kind": "bound"},
            "win_rate": {"mean": 0.7, "low": 0.65, "high": 0.75, "against": "sft"},
        },
    },
}


def printed(thing: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(thing)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_results_have_a_row_per_policy_with_intervals() -> None:
    lines = printed(results_table(REPORT)).splitlines()
    assert lines[2].split() == ["sft", "1.23", "[1.10,", "1.36]", "0.00", "31.3", "0.52"]
    assert lines[3].split()[-6:] == ["2.10]", "<=", "1.20", "0.70", "[0.65,", "0.75]"]


def test_a_measure_that_no_policy_has_gets_no_column() -> None:
    assert "RM score" not in printed(results_table(REPORT))


def test_the_number_that_says_most_is_shown() -> None:
    assert key_metric({"steps": 3, "eval/loss": 2.5}) == "eval/loss 2.5"
    assert key_metric({"sft/train/loss": 2.0, "sft/eval/loss": 1.5}) == "eval/loss 1.5"
    assert key_metric({"steps": 3}) == ""


def test_the_loss_before_training_is_not_shown_as_the_result() -> None:
    assert key_metric({"before/eval/loss": 6.28, "eval/loss": 0.37}) == "eval/loss 0.37"
    assert key_metric({"before/eval/loss": 6.28}) == ""


def test_lines_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=100)
    display = open_display(console)
    assert isinstance(display, PlainDisplay)
    decision = Decision("RUN", "first run", "k" * 64, None)
    with display:
        display.started("sft", decision)
        display.progress("sft", 1, 9, "loss 2.0")
        display.progress("sft", 2, 9, "loss 1.9")
        display.finished("sft", decision, {"eval/loss": 1.5}, 3.0)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "sft: RUN: first run",
        "sft: 1/9 loss 2.0",
        "sft: done in 3.0 s  eval/loss 1.5",
    ]


def test_a_live_table_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=140, force_terminal=True, color_system=None)
    display = open_display(console)
    assert isinstance(display, LiveDisplay)
    run, hit = Decision("RUN", "first run", "k" * 64, None), Decision("HIT", "made yesterday", "h" * 64, None)
    with display:
        for label, decision in (("prepare_data", hit), ("sft", run), ("ppo", run)):
            display.planned(label, decision)
        display.started("prepare_data", hit)
        display.finished("prepare_data", hit, {}, 0.0)
        display.started("sft", run)
        display.progress("sft", 3, 9, "loss 2.0")
    text = printed(display._render())
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "HIT" in rows["prepare_data"] and "made yesterday" in rows["prepare_data"]
    assert "loss 2.0" in rows["sft"]
    assert "first run" in rows["ppo"]


def test_brackets_are_shown_as_they_are() -> None:
    said = r"sft.pattern: [a-z] -> [/b] [bold]x[/bold] \[y]"
    decision = Decision("RUN", said, "k" * 64, None)
    assert said in printed(decisions_table([("s[0]", decision)], wide=True))
    assert "s[0]" in printed(decisions_table([("s[0]", decision)], wide=True))
    report = {"settings": REPORT["settings"], "policies": {"p[/b]": REPORT["policies"]["sft"]}}  # type: ignore[index]
    assert "p[/b]" in printed(results_table(report))
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    with open_display(console) as display:
        display.planned("waits", Decision("RUN", "[/b]", "k" * 64, None))
        display.started("works[0]", Decision("RUN", "[/a]", "k" * 64, None))
        display.progress("works[0]", 1, 2, "[/c]")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "works[0]" in shown and "[/c]" in shown and "[/b]" in shown
