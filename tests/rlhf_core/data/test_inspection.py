import json
from pathlib import Path
from typing import Any

from rlhf_core.config.data import Source, Use
from rlhf_core.data.inspection import SourceReport, inspect


def report(folder: Path, rows: list[dict[str, Any]], **options: Any) -> SourceReport:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    use = Use(demonstrations=0.2, preferences=0.2, prompts=0.2, eval_prompts=0.2, steps=0.2)
    return inspect(Source(name="s", path=str(path), use=use, **options))


def test_rows_are_counted_by_the_reason_that_drops_them_with_their_first_lines(tmp_path):
    pair = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "seen": 1}
    same = [pair | {"chosen": "5", "prompt": f"{n}?"} for n in range(4)]
    found = report(tmp_path, [pair, *same, pair, pair | {"chosen": "Four"}])
    assert (found.format, found.rows_read, found.usable) == ("preference", 7, 2)
    assert [str(reason) for reason in found.dropped] == [
        "4 malformed: chosen equals rejected, at rows.jsonl:2, rows.jsonl:3, rows.jsonl:4, ...",
        f"1 duplicate (of {tmp_path / 'rows.jsonl'}:1), at rows.jsonl:6",
    ]
    assert found.columns_read == ("prompt", "chosen", "rejected")
    assert found.columns_not_read == {"seen": 3}  # of the rows that can be read, the duplicate among them
    # Both rows have one prompt, which a table of prompts keeps once.
    assert found.tables == {"demonstrations": 2, "preferences": 2, "prompts": 1, "eval_prompts": 1, "steps": 0}
    assert found.empty == {"steps": "no judged steps: a prompt, completions and their labels are needed"}
    assert found.rows[0] == "user: 2+2?\nchosen:\nassistant: 【4】\nrejected:\nassistant: 【5】"


def test_columns_that_only_dropped_rows_have_are_not_read(tmp_path):
    rows = [
        {"prompt": "2+2?", "completion": "", "margin": 3},
        {"messages": "Hi"},
        {"prompt": "2+2?", "completion": "4"},
    ]
    found = report(tmp_path, rows)
    assert (found.usable, found.columns_read) == (1, ("prompt", "completion"))
    assert found.columns_not_read == {"margin": 1, "messages": 1}


def test_a_demonstration_is_shown_with_every_answer_trained(tmp_path):
    turns = [("user", "2+2?"), ("assistant", "4"), ("user", "sure?"), ("assistant", "y" * 401)]
    found = report(tmp_path, [{"messages": [{"role": role, "content": said} for role, said in turns]}])
    assert found.rows == (
        f"user: 2+2?\nassistant: 【4】\nuser: sure?\nassistant: 【{'y' * 400} ... (401 characters)】",
    )


def test_tools_calls_and_their_results_are_shown(tmp_path):
    calls = [{"function": {"name": "add", "arguments": {"a": 2, "b": "é"}}}, {"name": "now", "arguments": {}}]
    turns = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
        {"role": "tool", "name": "add", "content": "4"},
        {"role": "assistant", "content": "And now?", "tool_calls": calls},
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "content": "4"},
    ]
    tools = [{"name": name, "description": "", "parameters": {}} for name in ("add", "now")]
    (shown,) = report(tmp_path, [{"messages": turns, "tools": tools}]).rows
    assert shown.splitlines() == [
        "tools: add, now",
        "user: 2+2?",
        'assistant: 【add({"a": 2, "b": "é"})】',
        "tool add: 4",
        "assistant: 【And now?",
        'add({"a": 2, "b": "é"})',
        "now({})】",
        "tool: noon",
        "assistant: 【4】",
    ]


def test_a_source_that_cannot_be_read_has_the_error(tmp_path):
    rows = [{"prompt": "2+2?", "completion": "4", "label": number} for number in (0, 1)]
    found = report(tmp_path, rows)
    assert found.problem.startswith("data.sources[s].label_coding = 'auto': the labels are 0, 1")
    assert inspect(Source(name="s", path=str(tmp_path / "no.jsonl"), use=Use(prompts=1.0))).problem.endswith(
        "does not exist; check the path"
    )
