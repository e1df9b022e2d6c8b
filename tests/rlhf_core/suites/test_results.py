"""Means, intervals and paired differences over the rows of a suite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlhf_core.errors import DataError
from rlhf_core.evaluation.intervals import SHARE, mean_interval
from rlhf_core.suites.results import (
    Measured,
    Row,
    check_rows,
    difference,
    means,
    read_rows,
    report_of,
    shares_among,
    write_rows,
)


def rows_of(values: list[float], measure: str = "m") -> list[Row]:
    return [
        Row(f"p{at}", "even" if at % 2 == 0 else "odd", "?", "!", {measure: value}) for at, value in enumerate(values)
    ]


@pytest.mark.parametrize("share", [True, False])
def test_the_interval_is_that_of_a_share_or_of_any_mean(share: bool) -> None:
    values = [0.0, 1.0, 1.0, 0.5, 0.25, 1.0]
    found = means(rows_of(values), shares=("m",) if share else ())["m"]
    assert found == mean_interval(values, bounds=SHARE if share else None).plain()


def test_shares_that_agree_are_not_known_to_the_last_digit() -> None:
    rows = rows_of([1.0] * 8)
    assert shares_among(rows) == ("m",) and shares_among(rows_of([1.0, 0.5])) == ()
    assert means(rows, shares=("m",))["m"]["low"] < 0.7
    found = difference(rows, rows, "m", share=True)
    assert found is not None and found["low"] < 0 < found["high"]


def test_weights_make_it_a_mean_over_what_is_inside_the_prompts() -> None:
    rows = [Row("a", "all", "", "", {"m": 1.0}, {"m": 3.0}), Row("b", "all", "", "", {"m": 0.0}, {"m": 1.0})]
    assert means(rows, shares=())["m"]["mean"] == 0.75


def test_a_paired_difference_is_sharper_than_two_intervals() -> None:
    rng = np.random.default_rng(5)
    hard = rng.normal(size=60)
    theirs = rows_of(list(hard))
    ours = rows_of(list(hard + 0.2 + 0.01 * rng.normal(size=60)))
    found = difference(ours, theirs, "m", share=False)
    assert found is not None and found["mean"] == pytest.approx(0.2, abs=0.01)
    assert 0.19 < found["low"] < found["high"] < 0.21
    spread = means(ours, shares=())["m"]
    assert spread["high"] - spread["low"] > 10 * (found["high"] - found["low"])


def test_a_difference_is_over_the_shared_prompts_alone() -> None:
    ours, theirs = rows_of([1.0, 0.0, 1.0]), rows_of([0.0, 0.0])
    found = difference(ours, theirs, "m", share=False)
    assert found is not None and (found["mean"], found["prompts"]) == (0.5, 2)
    assert difference(ours, rows_of([1.0], "other"), "m", share=False) is None


def test_the_report_has_every_slice_and_rows_survive_their_file(tmp_path: Path) -> None:
    rows = rows_of([1.0, 0.0, 1.0, 0.0])
    extra = {"lc": {"mean": 0.5, "low": 0.4, "high": 0.6}}
    report = report_of(Measured(tuple(rows), "m", measures=extra), kind="gold", policy="d")
    assert {name: one["m"]["mean"] for name, one in report["slices"].items()} == {"even": 1.0, "odd": 0.0}
    assert report["measures"]["lc"] == extra["lc"] and report["measures"]["m"]["mean"] == 0.5
    strange = [Row("x", "all", "two\nlines\u2028", "\u00e4", {"m": 1.0}, {"m": 2.0})]
    write_rows(tmp_path / "rows.jsonl", strange)
    assert read_rows(tmp_path / "rows.jsonl") == strange


def test_no_rows_and_twins_are_refused() -> None:
    for rows, rule in (([], "nothing is there"), (rows_of([1.0]) * 2, "two rows have the same ID")):
        with pytest.raises(DataError, match=rule):
            check_rows(rows, rule="nothing is there", remedy="add some")
