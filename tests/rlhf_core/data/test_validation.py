"""The drop report."""

from __future__ import annotations

import pytest

from rlhf_core.data.limits import Drop, DropReport, Origin
from rlhf_core.errors import DataError


def report_of(reasons: list[str], *, read: int) -> DropReport:
    report = DropReport()
    report.rows_read["s"] = read
    for line, reason in enumerate(reasons, start=1):
        report.add("s", Origin("f.jsonl", line), reason)
    return report


def test_reasons_are_counted_without_their_detail() -> None:
    report = report_of(["duplicate: of f:1", "malformed: x", "duplicate: of f:2"], read=9)
    assert report.counts() == {"duplicate": 2, "malformed": 1}


def test_the_file_names_every_row() -> None:
    written = report_of(["malformed: x"], read=9).to_json()
    assert written["rows_read"] == {"s": 9}
    assert written["dropped"] == 1
    assert written["drops"] == [{"source": "s", "file": "f.jsonl", "line": 1, "reason": "malformed: x"}]


def test_too_many_malformed_rows_are_an_error_that_names_the_first() -> None:
    report = report_of(["malformed: empty turn", "malformed: other"], read=20)
    report.check_malformed("s", report.drops, max_bad_fraction=0.1)  # 2 of 20 are just allowed
    with pytest.raises(
        DataError, match=r"f\.jsonl:1'.*empty turn \(2 of 20 rows.*at most 9\.0% may be.*max_bad_fraction"
    ):
        report.check_malformed("s", report.drops, max_bad_fraction=0.09)


def test_no_malformed_row_is_never_an_error() -> None:
    report_of([], read=0).check_malformed("s", list[Drop](), max_bad_fraction=0.0)
