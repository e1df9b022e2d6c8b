import io
import re

import pytest
from rich.console import Console

from pipelines.cli.display import LiveDisplay, PlainDisplay, open_display, print_decisions, results_tables
from pipelines.execution.key_metric import key_metric
from pipelines.execution.plan import Outlook, PlannedStage
from rlhf_core.stage.decision import Decision
from tests.support.toy_stage import toy_spec

REPORT = {
    "settings": {"level": 0.95},
    "policies": {
        "sft": {
            "gold": {"mean": 1.234, "low": 1.1, "high": 1.36},
            "kl": {"mean": -1e-4, "low": -2e-4, "high": 0.0, "kind": "estimate"},
            "tokens": {"mean": 31.26, "low": 30.0, "high": 32.0},
            "entropy": 0.516,
        },
        "best-of-8 (sft)": {
            "gold": {"mean": 2.0, "low": 1.9, "high": 2.1},
            "kl": {"mean": 1.2044, "low": 1.2, "high": 1.2, "kind": "bound"},
            "win_rate": {"mean": 0.7, "low": 0.65, "high": 0.75, "against": "sft"},
            "sources": {
                "sums": {"gold": {"mean": 0.5, "low": 0.4, "high": 0.6}, "kl": {"mean": 9.0}},
                "desk": {"gold": {"mean": 3.5}},
            },
        },
    },
}


def printed(thing: object, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(thing)
    return console.file.getvalue()


def test_results_have_a_row_per_policy_with_intervals():
    lines = printed(results_tables(REPORT, 160)).splitlines()
    assert lines[2].split() == ["sft", "1.23", "[1.10,", "1.36]", "0.00", "31.3", "0.52"]
    assert lines[3].split()[-6:] == ["2.10]", "<=", "1.20", "0.70", "[0.65,", "0.75]"]
    assert "gold reward by source" in lines[-4]  # as wide as its table
    assert lines[-2].split() == ["policy", "sums", "desk"]
    assert lines[-1].split() == ["best-of-8", "(sft)", "0.50", "[0.40,", "0.60]", "3.50"]


def test_a_measure_that_no_policy_has_gets_no_column():
    assert "RM score" not in printed(results_tables(REPORT, 160))


def test_results_are_not_cut_in_a_narrow_terminal():
    """The widest row has 15 + 17 + 7 + 6 + 7 + 17 columns and a space after each, 75: intervals go to lines below."""
    lines = printed(results_tables(REPORT, 70), 70).splitlines()
    assert "\u2026" not in "".join(lines) and max(map(len, lines)) <= 70
    assert [line.split() for line in lines[4:6]] == [["sft", "1.23", "0.00", "31.3", "0.52"], ["[1.10,", "1.36]"]]


def test_the_number_that_says_most_is_shown():
    assert key_metric({"steps": 3, "eval/loss": 2.5}) == "eval/loss 2.5"
    assert key_metric({"sft/train/loss": 2.0, "sft/eval/loss": 1.5}) == "eval/loss 1.5"
    assert key_metric({"steps": 3}) == ""


def test_the_loss_before_training_is_not_shown_as_the_result():
    assert key_metric({"before/eval/loss": 6.28, "eval/loss": 0.37}) == "eval/loss 0.37"
    assert key_metric({"before/eval/loss": 6.28}) == ""


def test_lines_where_there_is_no_terminal():
    console = Console(file=io.StringIO(), width=100)
    display = open_display(console)
    assert isinstance(display, PlainDisplay)
    decision = Decision("RUN", "first run", "k" * 64, None)
    with display:
        display.started("sft", decision)
        display.progress("sft", 1, 9, "loss 2.0")
        display.progress("sft", 2, 9, "loss 1.9")
        display.finished("sft", decision, {"eval/loss": 1.5}, 3.0)
    assert console.file.getvalue().splitlines() == [
        "sft: RUN: first run",
        "sft: 1/9 loss 2.0",
        "sft: done in 3.0 s  eval/loss 1.5",
    ]


HIT = Decision("HIT", "made yesterday", "h" * 64, None)
RUN = Decision("RUN", f"ppo.kl_coef: 0.05 -> 0.1, {' '.join(f'change{n}' for n in range(40))}", "k" * 64, None)
LABELS = ["prepare_data", "iterative_dpo/round_1/generate", "online/round_1/iterative_dpo/round_2/generate", "ppo"]


@pytest.mark.parametrize("width", [80, 100, 120, None])
def test_a_plan_shows_decision_stage_key_and_the_whole_reason_in_any_terminal(width):
    console = Console(file=io.StringIO(), width=width or 60, force_terminal=width is not None, color_system=None)
    print_decisions([(label, RUN) for label in LABELS], console)
    text = console.file.getvalue()
    lines = text.splitlines()
    assert text.count("RUN ") == text.count("k" * 12) == len(LABELS)
    assert text.count("change") == 40 * len(LABELS) and text.replace(" ", "").count("change39") == len(LABELS)
    assert all(line.split()[0] == "RUN" for line in lines) if width is None else max(map(len, lines)) <= width
    assert len(lines) == len(LABELS) if width is None else "".join(text.split()).count("ppo.kl_coef") == len(LABELS)


def tree(stages: dict[str, Decision], *, force_terminal: bool = True) -> list[str]:
    console = Console(file=io.StringIO(), width=80, force_terminal=force_terminal, color_system="standard")
    print_decisions(list(stages.items()), console)
    return console.file.getvalue().splitlines()


def test_a_part_of_a_plan_that_is_all_hits_is_one_line():
    hit = Decision("HIT", "made 2026-11-28 16:37 UTC in 10.1 s", "h" * 64, None)
    changed = Decision("HIT", f"{hit.reason}; code changed since (a)", "i" * 64, None)
    run = Decision("RUN", "after sft", "", None)
    rounds = [f"iterative_dpo/round_{number}/{stage}" for number in (1, 2) for stage in ("generate", "dpo")]
    stages = {"sft": hit, **dict.fromkeys(rounds[:3], hit), rounds[3]: changed, "evaluate/sft/generate": hit}
    lines = tree(stages | {"evaluate/ppo/generate": run, "evaluate": run})
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in lines]
    assert plain == [
        "decision stage          key          why (times in UTC)",
        f"HIT      sft            {'h' * 12} 2026-11-28 16:37, 10.1 s",
        "HIT      iterative_dpo               4 hits; code changed since (a)",
        "         evaluate/",
        f"HIT        sft/generate {'h' * 12} 2026-11-28 16:37, 10.1 s",
        "RUN        ppo/generate              after sft",
        "RUN        evaluate                  after sft",
    ]
    assert "\x1b[1;36mRUN" in lines[-1], "in bold"
    assert len(tree(stages, force_terminal=False)) == len(stages), "a line for each stage in a pipe"


PATH = f"/data/{'long_' * 20}name.jsonl"


def test_the_reasons_of_a_plan_break_only_between_words():
    """At 80 columns a reason has 80 - 9 - 14 - 13 = 44 columns here, and without a key 13 more."""
    after = "after a_stage_with_quite_a_long_name/generate/x"  # 47 columns
    stages = {
        "data": Decision("RUN", f"file changed: {PATH}, seed 1 -> 2", "k" * 64, None),
        "reward_model2": Decision("RUN", after, "", None),
        "sft": Decision("RUN", "changed: sft.optimizer.learning_rate: 0.001 -> 0.002, seed: 1 -> 2", "k" * 64, None),
    }
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in tree(stages)[1:]]
    assert plain == [
        f"RUN      data          {'k' * 12}",
        "          file changed:",
        f"          {PATH},",
        "          seed 1 -> 2",
        f"RUN      reward_model2 {after}",
        f"RUN      sft           {'k' * 12} changed: sft.optimizer.learning_rate: 0.001",
        f"{' ' * 36}-> 0.002, seed: 1 -> 2",
    ]


def test_a_reason_names_a_stage_of_the_same_part_without_the_part():
    after = {"a/r1/x": "base", "a/r1/y": "a/r1/x", "a/r2/x": "a/r1/y", "a/r2/y": "a/r2/x", "b": "a/r2/y"}
    lines = tree({label: Decision("RUN", f"after {one}", "", None) for label, one in after.items()})
    reasons = [line.rpartition("after ")[2].strip() for line in lines if "after" in line]
    assert [re.sub(r"\x1b\[[0-9;]*m", "", one).strip() for one in reasons] == ["base", "x", "r1/y", "x", "a/r2/y"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_of_hits_alone_is_one_line_with_the_newest_date_and_in_a_pipe_a_line_per_stage(terminal):
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system=None)
    with open_display(console) as display:
        display.expect([], Outlook(2, 0, {}, "2026-11-28 16:37 UTC"))
        for label in ("sft", "ppo"):
            display.planned(label, HIT)
            display.started(label, HIT)
            display.finished(label, HIT, {}, 0.0)
    shown = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", console.file.getvalue()).split("\n")
    hits = [] if terminal else ["sft: HIT: made yesterday", "ppo: HIT: made yesterday"]
    assert [line.strip() for line in shown if line.strip()] == ["2 hits, the newest made 2026-11-28 16:37 UTC", *hits]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_live_table_shows_decision_and_stage_in_any_terminal(width):
    display = live(width, LABELS, seconds=dict.fromkeys(LABELS, 30.0))
    display.started("ppo", RUN)
    display.progress("ppo", 3, 9, "loss 2.0")
    lines = shown(display, width)
    rows = {line.split()[1]: line for line in lines if line.startswith("RUN ")}
    assert all(label.endswith(name.strip("\u2026")) for label, name in zip(LABELS, rows, strict=True))
    assert "loss 2.0" in rows["ppo"] and max(map(len, lines)) <= width
    assert "ppo.kl" in rows["prepare_data"] and rows["prepare_data"].rstrip().endswith("\u2026")
    assert lines[-1].startswith("about 1.5 min left")


@pytest.mark.parametrize(
    ("steps", "phase"),
    [
        ([], "starting engines"),
        ([("sft", 1, 9)], "\u2501"),
        ([("sft", 9, 9)], "saving"),
        ([("other", 1, 2), ("other", 2, 2)], "preparing"),
    ],
)
def test_a_live_row_names_what_a_stage_does_that_no_bar_shows(steps, phase):
    display = live(120, ["other", "sft"], seconds={})
    display.started("other", RUN)
    for label, done, total in steps:
        display.progress(label, done, total, "")
    display.started("sft", RUN)
    assert phase in next(line for line in shown(display, 120) if " sft " in line)


def test_the_rows_around_the_running_stage_are_shown_where_the_terminal_is_too_low_for_all():
    labels = [f"stage_{number}" for number in range(30)]
    display = live(80, labels, seconds={})
    for label in labels[:20]:
        display.started(label, HIT)
        display.finished(label, HIT, {}, 0.0)
    display.started("stage_20", RUN)
    lines = shown(display, 80)
    assert len(lines) == 24 - 1 and any("stage_20" in line for line in lines)
    assert lines[-1].startswith("9 stages above, 0 below; 10 stages left, time unknown")
    display.__exit__()
    assert len(shown(display, 80)) == 1 + len(labels)


def live(width: int, labels: list[str], seconds: dict[str, float | None]) -> LiveDisplay:
    """Return a live display of planned stages that need both engines."""
    display = open_display(Console(file=io.StringIO(), width=width, height=24, force_terminal=True, color_system=None))
    assert isinstance(display, LiveDisplay)
    stages = [
        PlannedStage(label, toy_spec(label=label, engines={"trainer": {}, "sampler": {}}), RUN) for label in labels
    ]
    display.expect(stages, Outlook(0, 0, seconds))
    for label in labels:
        display.planned(label, RUN)
    return display


def shown(display: LiveDisplay, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(display._render())
    return console.file.getvalue().splitlines()


def test_brackets_are_shown_as_they_are():
    said = r"sft.pattern: [a-z] -> [/b] [bold]x[/bold] \[y]"
    decision = Decision("RUN", said, "k" * 64, None)
    plain = Console(file=io.StringIO())
    print_decisions([("s[0]", decision)], plain)
    assert f"s[0] {'k' * 12} {said}" in plain.file.getvalue()
    report = {"settings": REPORT["settings"], "policies": {"p[/b]": REPORT["policies"]["sft"]}}
    assert "p[/b]" in printed(results_tables(report, 160))
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    with open_display(console) as display:
        display.planned("waits", Decision("RUN", "[/b]", "k" * 64, None))
        display.started("works[0]", Decision("RUN", "[/a]", "k" * 64, None))
        display.progress("works[0]", 1, 2, "[/c]")
    shown = console.file.getvalue()
    assert "works[0]" in shown and "[/c]" in shown and "[/b]" in shown
