import json
from pathlib import Path

import pytest

from pipelines.cli.main import main


@pytest.fixture
def questions(tmp_path) -> Path:
    path = tmp_path / "qa.jsonl"
    rows = [{"question": f"{n}+1?", "answer": f"#### {n + 1}", "id": n} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{not JSON\n")
    return path


def test_a_file_is_described_without_a_profile(questions, capsys):
    assert main(["data", str(questions)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "qa.jsonl: 21 rows, format question_answer",
        "  columns read: question, answer",
        "  not read (rows): id (20)",
        "  usable 20, dropped 1",
    ]
    assert lines[4].startswith("    1 malformed: not JSON") and lines[4].endswith("at qa.jsonl:21")
    assert "    demonstrations 20" in lines and "    assistant: 【#### 1】" in lines
    assert main(["data", str(questions), "--json"]) == 0
    (source,) = json.loads(capsys.readouterr().out)["sources"]
    assert (source["name"], source["usable"], source["tables"]["prompts"]) == ("qa.jsonl", 20, 20)
    assert source["dropped"][0]["first"] == [{"file": str(questions), "line": 21}]


def test_unknown_columns_get_the_function_to_paste(tmp_path, capsys):
    (tmp_path / "own.csv").write_text("ask,\x1b[31mreply\n2+2?,4\n")
    (tmp_path / "other.csv").write_text("question,answer\n1,2\n")
    assert main(["data", str(tmp_path / "other.csv")]) == 0
    assert main(["data", str(tmp_path / "own.csv"), str(tmp_path / "other.csv")]) == 2
    out = capsys.readouterr().out
    assert "malformed: unknown columns" in out and "\x1b" not in out
    assert 'def to_row(row):\n    return row | {"prompt": row.pop("ask"), "completion": row.pop("ANSWER")}' in out


def test_the_sources_of_a_profile_are_described_with_their_tables(questions, tmp_path, capsys):
    profile = tmp_path / "own.toml"
    use = "{demonstrations = 0.5, prompts = 0.5}"
    profile.write_text(
        f'extends = "tiny/full"\n[prepare_data.data]\ntype = "files"\n[[prepare_data.data.sources]]\n'
        f'name = "qa"\npath = "{questions}"\nuse = {use}\n'
    )
    assert main(["data", "--profile", str(profile), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["tables"]["rows"]
    assert rows["demonstrations"] + rows["eval_demonstrations"] + rows["prompts"] == 20
    strict = ["--set", "prepare_data.data.max_bad_fraction=0"]
    assert main(["data", "--profile", str(profile), *strict]) == 2
    assert "prepare_data would fail: data.sources[qa]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["data"], "rlhf data = []: files or a profile are needed"),
        (["data", "--profile", "tiny/full"], "prepare_data.data.type = 'support': is a synthetic world"),
    ],
)
def test_what_cannot_be_described_is_refused(arguments, line, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(line)


def lines_of(tmp_path, capsys, *rows, status=0):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["data", str(tmp_path / "rows.jsonl")]) == status
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_answers_that_are_judged_alone_are_no_pairs(tmp_path, capsys):
    rows = [{"prompt": f"q{number}", "completion": "a", "label": number % 2 == 0} for number in range(4)]
    lines = lines_of(tmp_path, capsys, *rows)
    assert "feedback       4" in lines
    assert "preferences    none: no pair of answers: those to a prompt are all good or all bad" in lines
    pair = {"prompt": "q0", "completion": "b", "label": False}
    assert {"preferences    1", "feedback       3"} <= set(lines_of(tmp_path, capsys, *rows, pair))


def test_more_malformed_rows_than_a_run_takes_are_pointed_out(tmp_path, capsys):
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "r", "chosen": "a", "rejected": "a"}]
    stop = "prepare_data would stop: 1 of 2 rows are malformed, and data.max_bad_fraction is 0.05"
    assert stop in lines_of(tmp_path, capsys, *rows, status=2)
    assert stop not in lines_of(tmp_path, capsys, rows[0])
