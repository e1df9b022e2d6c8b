"""Prompts of a suite from local rows."""

import json
from pathlib import Path

import pytest

from rlhf_core.data.tables import read_prompts
from rlhf_core.errors import ConfigError, DataError
from stages.suite_prompts import SuitePromptsConfig, content_digests
from tests.support.workshop import Workshop


def written(folder: Path, *rows: object) -> str:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(folder / "rows.jsonl")


def test_rows_become_prompts_with_labels_and_slices(store, tmp_path):
    label = {"instructions": [{"kind": "no_commas"}]}
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    path = written(tmp_path, {"q": "1+1?", "a": 2, "level": "easy"}, {"q": turns, "a": label, "level": "hard"})
    config = SuitePromptsConfig(path=path, prompt="q", label="a", slice="level")
    ref, decision = Workshop(store).run("suite_prompts", config, {}, files=content_digests(config))
    first, second = read_prompts(store.path(ref))
    assert (first.messages[0].content, first.label, first.source) == ("1+1?", "2", "easy")
    assert ([one.role for one in second.messages], json.loads(second.label)) == (["system", "user"], label)
    assert Workshop(store).metrics(decision) == {"prompts": 2, "slices": 2}


@pytest.mark.parametrize(
    ("rows", "rule"),
    [
        ([{"prompt": "a"}, {"text": "b"}], r"'rows.jsonl:2': has no column 'prompt'"),
        ([{"prompt": "a"}, {"prompt": "a"}], r"'rows.jsonl:2': repeats an earlier row"),
        ([], r"has no rows"),
    ],
)
def test_a_suite_is_read_whole_or_not_at_all(store, tmp_path, rows, rule):
    with pytest.raises(DataError, match=rule):
        Workshop(store).run("suite_prompts", SuitePromptsConfig(path=written(tmp_path, *rows)), {})


@pytest.mark.parametrize(
    ("label", "kinds", "rule"),
    [
        ("harmless", ("refusal",), r"label = 'harmless': must be safe or unsafe"),
        ([{"kind": "no_dots"}], ("instructions",), r"has an instruction that cannot be checked \('no_dots'\)"),
        ([{"kind": "at_most_words"}], ("instructions",), r"has an instruction that cannot be checked \('count'\)"),
        ("be kind", ("instructions",), "describes no instructions"),
    ],
)
def test_labels_that_a_suite_cannot_read_are_refused(store, tmp_path, label, kinds, rule):
    config = SuitePromptsConfig(path=written(tmp_path, {"prompt": "a", "label": label}), label_kinds=kinds)
    with pytest.raises(DataError, match=rule):
        Workshop(store).run("suite_prompts", config, {})


def test_a_label_column_that_is_named_exists(store, tmp_path):
    config = SuitePromptsConfig(path=written(tmp_path, {"prompt": "a", "answer": "b"}), label="anwser")
    with pytest.raises(DataError, match="has no column 'anwser'"):
        Workshop(store).run("suite_prompts", config, {})


def test_a_file_that_changed_since_the_plan_is_refused(store, tmp_path):
    config = SuitePromptsConfig(path=written(tmp_path, {"prompt": "a"}))
    planned = content_digests(config)
    written(tmp_path, {"prompt": "b"})
    with pytest.raises(ConfigError, match="has changed since the run was planned"):
        Workshop(store).run("suite_prompts", config, {}, files=planned)
    with pytest.raises(ConfigError, match=r"evaluate\.suites\.prompts\.path = 'gone.jsonl': is not a file"):
        content_digests(SuitePromptsConfig(path="gone.jsonl"))
