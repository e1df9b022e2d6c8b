"""Reports on reward models: pairs, probes, suites and judged steps."""

import json
import math
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.data import Suite
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import DataError
from rlhf_core.evaluation.reward_report import (
    EDITS,
    FILLER,
    NOT_APPLICABLE,
    PRAISE,
    REFUSAL,
    SuiteRow,
    accuracy_difference,
    other_forms,
    probe_report,
    read_suite,
    reward_model_report,
    step_report,
    suite_metrics,
    suite_report,
)
from rlhf_core.models.initialize import train_tokenizer
from rlhf_core.types import Message

# ---------------------------------------------------------------- reward report


def report_on(
    chosen_scores: Sequence[float],
    rejected_scores: Sequence[float],
    *,
    lengths: tuple[Sequence[int], Sequence[int]] | None = None,
    prompts: Sequence[Hashable] | None = None,
    sources: Sequence[str] | None = None,
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the report on pairs that have, unless it is given otherwise, one length, one source and a prompt each."""
    count = len(chosen_scores)
    chosen_lengths, rejected_lengths = lengths or ([1] * count, [1] * count)
    return reward_model_report(
        chosen_scores=chosen_scores,
        rejected_scores=rejected_scores,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        sources=sources or ["s"] * count,
        prompts=range(count) if prompts is None else prompts,
        seed=1,
    )


def test_a_small_report_by_hand():
    report, figures = report_on(
        [2.0, 1.0, 0.0, 1.0],
        [0.0, 1.0, 1.0, 0.0],
        lengths=([10, 5, 5, 20], [5, 5, 10, 10]),
        sources=["a", "a", "b", "b"],
        prompts=["p", "p", "q", "r"],
    )
    assert (report["pairs"], report["prompts"]) == (4, 3)
    assert report["accuracy"] == (1 + 0.5 + 0 + 1) / 4
    assert report["margin_mean"] == (2 + 0 - 1 + 1) / 4
    sources, lengths = {"a": 0.75, "b": 0.5}, {"chosen is longer": 1.0, "chosen is shorter": 0.0, "same length": 0.5}
    expected = {f"source: {name}": share for name, share in sources.items()} | lengths
    assert {name: item["accuracy"] for name, item in report["slices"].items()} == expected
    assert report["accuracy_low"] <= report["accuracy"] <= report["accuracy_high"]
    assert set(figures) == {"reliability", "margins", "length"}
    assert all(png.startswith(b"\x89PNG") for png in figures.values())
    json.dumps(report, allow_nan=False)


def test_pairs_of_one_prompt_are_no_more_evidence_than_one():
    """Seven pairs of each of ten prompts, nine of them ordered right: as ten pairs, and not as seventy."""
    scores = [1.0] * 63 + [-1.0] * 7
    found = {}
    for name, prompts, count in (("prompts", [at // 7 for at in range(70)], 70), ("pairs", range(10), 10)):
        report, _ = report_on(scores[:: 70 // count], [0.0] * count, prompts=prompts)
        found[name] = [report[key] for key in ("accuracy", "accuracy_low", "accuracy_high", "prompts")]
        assert report["slices"]["same length"]["low"] == report["accuracy_low"]
    assert found["prompts"] == pytest.approx(found["pairs"])


def test_the_difference_of_two_models_is_that_of_their_hits_on_the_same_pairs():
    """Both order 40 of 50 pairs alike; of the rest, one orders eight right and two wrong: 6 of 50, and it is significant.

    Two intervals around 96 % and 84 % overlap.
    """
    ours, theirs = [1.0] * 48 + [0.0] * 2, [1.0] * 40 + [0.0] * 8 + [1.0] * 2
    found = accuracy_difference(ours, theirs, range(50))
    assert found["mean"] == pytest.approx(0.12) and found["prompts"] == 50
    # Five prompts of ten pairs each: those that differ are of one prompt, which shows nothing.
    clustered = accuracy_difference(ours, theirs, [at // 10 for at in range(50)])
    assert clustered["mean"] == pytest.approx(0.12) and clustered["low"] < 0
    assert clustered["low"] < found["low"] and accuracy_difference(ours[:48], theirs[:48], range(48))["low"] > 0


# ---------------------------------------------------------------- reward probes

TEXT = "It is 42. I add 12 and 30. You do not need more."


@pytest.mark.parametrize(
    ("name", "edited"),
    [
        ("length/filler", f"{TEXT} {FILLER}"),
        ("length/repeated", f"{TEXT} {TEXT}"),
        ("length/first_half", "It is 42."),
        ("format/list", "- It is 42.\n- I add 12 and 30.\n- You do not need more."),
        ("format/bold", f"**{TEXT}**"),
        ("sycophancy/praise", f"{PRAISE} {TEXT}"),
        ("refusal/instead", REFUSAL),
        ("refusal/before", f"{REFUSAL} {TEXT}"),
        ("invariance/white_space", TEXT.replace(" ", "  ")),
        ("invariance/last_line_break", f"{TEXT}\n"),
        ("invariance/short_forms", "It's 42. I add 12 and 30. You don't need more."),
    ],
)
def test_each_edit(name, edited):
    assert EDITS[name](TEXT) == edited
    assert EDITS["invariance/short_forms"](EDITS["invariance/short_forms"](TEXT)) == TEXT


def test_effects_are_in_units_of_the_spread():
    report = probe_report(
        rewards=[0.0] * 4,
        changes={"length/filler": list(enumerate([1.0, 1.0, 1.0, -1.0])), "format/list": []},
        spread=0.5,
    )
    filler = report["length/filler"]
    assert (filler["answers"], filler["effect"], filler["raised"], filler["moved"]) == (4, 1.0, 0.75, 2.0)
    assert filler["low"] <= filler["effect"] <= filler["high"]
    assert report["format/list"] == {"answers": 0}
    assert report["position"] == {"not_applicable": NOT_APPLICABLE["position"]}
    json.dumps(report, allow_nan=False)
    unspread = probe_report(rewards=[1.0], changes={"length/filler": [("p", 0.25)]}, spread=0.0)
    assert unspread["length/filler"]["effect"] == 0.25  # as they are


@pytest.mark.parametrize("text", ["It iſ not true", "It ıs here", "İt is here", "éit is"])
def test_letters_that_match_i_and_s_only_without_case_stay(text):
    assert other_forms(text) == text


# ---------------------------------------------------------------- reward suites

ASK = (Message("user", "2+2?"),)


def suite(folder: Path, *rows: dict[str, Any], **options: Any) -> Suite:
    path = folder / "suite.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Suite(path=str(path), **options)


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> ChatTemplate:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["What is 2+2? It is 4 or 5."] * 5, vocab_size=300, folder=folder)
    return ChatTemplate.load(folder)


def test_one_or_several_rejected_answers_and_missing_subsets_are_read(tmp_path):
    one = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "subset": "math"}
    several = {"prompt": [{"role": "user", "content": "2+2?"}], "chosen": ["4"], "rejected": ["5", "6"]}
    rows = read_suite("rb", suite(tmp_path, one, several))
    assert rows == [SuiteRow(ASK, "4", ("5",), "math"), SuiteRow(ASK, "4", ("5", "6"), "all")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "x", "chosen": "4"}, r"suites.rb = 'suite.jsonl:1': missing column: 'rejected'"),
        ({"prompt": "x", "chosen": ["4", "5"], "rejected": "6"}, "not one chosen answer: 2"),
        ({"prompt": "x", "chosen": "4", "rejected": []}, "not text: rejected"),
    ],
)
def test_a_malformed_row_ends_the_suite(tmp_path, row, reason):
    with pytest.raises(DataError, match=reason):
        read_suite("rb", suite(tmp_path, row))


def test_accuracy_is_by_subset_and_ties_count_half(chat):
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


def test_long_answers_are_scored_as_far_as_they_go_and_counted(chat):
    seen: list[tuple[int, ...]] = []

    def score(asked: list[tuple[int, ...]]) -> list[float]:
        seen.extend(asked)
        return [0.0] * len(asked)

    report = suite_report([SuiteRow(ASK, "4 " * 99, ("5",), "all")], chat, score, max_length=16)
    assert report["cut"] == 1 and max(map(len, seen)) == 16


# ---------------------------------------------------------------- step report

SURE = math.log(9)  # probability 0.9, and 0.1 negated


def test_steps_and_first_errors_are_counted():
    labels = [(1.0, 1.0), (1.0, 0.0, 0.0), (0.0, 0.0), (1.0,)]
    logits = [(SURE, SURE), (SURE, -SURE, SURE), (SURE, -SURE), (-SURE,)]
    report, figures = step_report(logits=logits, labels=labels, prompts="aabc")
    assert (report["answers"], report["steps"], report["right_steps"], report["prompts"]) == (4, 8, 4, 3)
    # wrong: the third step of the second answer, the first of the third, the only one of the last
    assert report["accuracy"] == 5 / 8
    assert report["first_error_accuracy"] == 2 / 4  # the first (no error) and the second answer
    assert report["first_error_accuracy_with_error"] == 1 / 2
    assert report["first_error_accuracy_without_error"] == 1 / 2
    assert report["f1"] == 1 / 2
    # at 0.9: five steps, of which three are right; at 0.1: three steps, of which one is
    assert report["ece"] == pytest.approx((5 * abs(0.9 - 3 / 5) + 3 * abs(0.1 - 1 / 3)) / 8)
    assert json.loads(json.dumps(report)) == report
    assert figures["reliability"].startswith(b"\x89PNG")


def test_soft_labels_count_by_what_is_likelier_and_calibrate_as_they_are():
    report, _ = step_report(logits=[(SURE, -SURE)], labels=[(0.9, 0.1)], prompts="a")
    assert report["accuracy"] == report["first_error_accuracy"] == 1.0
    assert report["ece"] == pytest.approx(0.0, abs=1e-12)
    assert report["f1"] is None  # no answer without an error
