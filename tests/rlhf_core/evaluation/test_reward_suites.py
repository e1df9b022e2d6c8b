"""Suites are scored whole, by subset, as answers are scored in use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.data import Suite
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import DataError
from rlhf_core.evaluation.reward_report import SuiteRow, read_suite, suite_metrics, suite_report
from rlhf_core.models.initialise import train_tokenizer
from rlhf_core.types import Message

ASK = (Message("user", "2+2?"),)


def suite(folder: Path, *rows: dict[str, Any], **options: Any) -> Suite:
    path = folder / "suite.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Suite(path=str(path), **options)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["What is 2+2? It is 4 or 5."] * 5, vocab_size=300, folder=folder)
    return ChatTemplate.load(folder)


def test_one_or_several_rejected_answers_and_missing_subsets_are_read(tmp_path: Path) -> None:
    rows = read_suite(
        "rb",
        suite(
            tmp_path,
            {"prompt": "2+2?", "chosen": "4", "rejected": "5", "subset": "math"},
            {"prompt": [{"role": "user", "content": "2+2?"}], "chosen": ["4"], "rejected": ["5", "6"]},
        ),
    )
    assert rows == [SuiteRow(ASK, "4", ("5",), "math"), SuiteRow(ASK, "4", ("5", "6"), "all")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "x", "chosen": "4"}, r"suites.rb = 'suite.jsonl:1': missing column: 'rejected'"),
        ({"prompt": "x", "chosen": ["4", "5"], "rejected": "6"}, "not one chosen answer: 2"),
        ({"prompt": "x", "chosen": "4", "rejected": []}, "not text: rejected"),
    ],
)
def test_a_malformed_row_ends_the_suite(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read_suite("rb", suite(tmp_path, row))


def test_accuracy_is_by_subset_and_ties_count_half(chat: ChatTemplate) -> None:
    def score(asked: list[tuple[int, ...]]) -> list[float]:
        return [float(chat.decode(ids).count("4")) for ids in asked]

    rows = [
        SuiteRow(ASK, "4", ("5",), "math"),
        SuiteRow(ASK, "4", ("5", "44"), "math"),
        SuiteRow(ASK, "5", ("6",), "c++"),
    ]
    report = suite_report(rows, chat, score, max_length=64)
    assert {name: figures["accuracy"] for name, figures in report["subsets"].items()} == {"math": 0.5, "c++": 0.5}
    assert (report["accuracy"], report["macro_accuracy"], report["rows"], report["cut"]) == (0.5, 0.5, 3, 0)
    metrics = suite_metrics({"rb": report})
    assert metrics["suites/rb/c__/accuracy"] == 0.5  # names of metrics allow no plus
    assert metrics["suites/rb/math/low"] <= metrics["suites/rb/math/accuracy"] == 0.5


def test_long_answers_are_scored_as_far_as_they_go_and_counted(chat: ChatTemplate) -> None:
    seen: list[tuple[int, ...]] = []

    def score(asked: list[tuple[int, ...]]) -> list[float]:
        seen.extend(asked)
        return [0.0] * len(asked)

    report = suite_report([SuiteRow(ASK, "4 " * 99, ("5",), "all")], chat, score, max_length=16)
    assert report["cut"] == 1 and max(map(len, seen)) == 16
