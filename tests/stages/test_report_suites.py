"""The report over all suites: differences to the reference, slices, regressions, and one page."""

import json
from pathlib import Path

from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.suites.results import Measured, PromptRow, report_of, write_suite_rows
from rlhf_core.types import ReportRef
from stages.report_suites import ReportSuitesConfig
from tests.support.workshop import Workshop


def result(
    store: ArtifactStore, folder: Path, values: list[float], *, measure: str, failures: bool = False
) -> ReportRef:
    rows = tuple(
        PromptRow(f"p{at}", "a" if at < 2 else "b", f"question {at} <script>", f"answer {value}", {measure: value})
        for at, value in enumerate(values)
    )
    lower = (measure,) if failures else ()
    folder.mkdir(parents=True)
    report = report_of(Measured(rows, measure, lower), kind="gold", policy="d")
    (folder / "report.json").write_text(json.dumps(report))
    write_suite_rows(folder / "rows.jsonl", rows)
    return store.external(ReportRef, folder)


def test_policies_by_suites_with_differences_slices_and_regressions(store, tmp_path):
    results = {
        "math/sft": result(store, tmp_path / "1", [0.0, 1.0, 1.0, 0.0], measure="pass_at_1"),
        "math/ppo": result(store, tmp_path / "2", [1.0, 1.0, 0.0, 1.0], measure="pass_at_1"),
        "safety/sft": result(store, tmp_path / "3", [0.0, 0.0], measure="unsafe_compliance", failures=True),
        "safety/ppo": result(store, tmp_path / "4", [1.0, 0.0], measure="unsafe_compliance", failures=True),
    }
    shop = Workshop(store)
    ref, decision = shop.run("report_suites", ReportSuitesConfig(regressions_shown=4), {"results": results})
    report = json.loads((store.path(ref) / "report.json").read_text())
    assert report["policies"] == ["sft", "ppo"] and list(report["suites"]) == ["math", "safety"]
    ppo = report["suites"]["math"]["policies"]["ppo"]
    assert (ppo["difference"]["pass_at_1"]["mean"], ppo["difference"]["pass_at_1"]["prompts"]) == (0.25, 4)
    assert {name: one["pass_at_1"]["mean"] for name, one in ppo["slices"].items()} == {"a": 1.0, "b": 0.5}
    assert "difference" not in report["suites"]["math"]["policies"]["sft"]
    # one prompt got worse in each suite: of failures, more is worse
    assert [(row["suite"], row["prompt"], row["reference"], row["value"]) for row in report["regressions"]] == [
        ("math", "question 2 <script>", 1.0, 0.0),
        ("safety", "question 0 <script>", 0.0, 1.0),
    ]
    metrics = shop.metrics(decision)
    assert metrics["math/ppo/pass_at_1"] == 0.75 and metrics["math/ppo/pass_at_1_difference"] == 0.25
    assert metrics["safety/ppo/unsafe_compliance_difference"] == 0.5 and "math/sft/pass_at_1_low" in metrics
    page = (store.path(ref) / "report.html").read_text()
    assert "Policies by suites" in page and "Difference to sft" in page and "math: pass_at_1 by slice" in page
    assert "Worst regressions" in page and "question 2 &lt;script&gt;" in page and "<script" not in page
    assert "http://" not in page and "https://" not in page
    assert shop.tracker.tables["regressions"][1][0][:5] == ("math", "ppo", "question 2 <script>", 0.0, 1.0)


def win_rates(store: ArtifactStore, folder: Path, values: list[float], opponent: str) -> ReportRef:
    rows = tuple(
        PromptRow(f"p{at}", "a" if at < 2 else "b", f"question {at}", f"answer {value}", {"win_rate": value})
        for at, value in enumerate(values)
    )
    found = {"length_controlled_win_rate": {"mean": 0.5, "low": 0.4, "high": 0.6, "prompts": 4.0}}
    result = Measured(rows, "length_controlled_win_rate", (), found, {"opponent": opponent})
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(report_of(result, kind="judge", policy="d")))
    write_suite_rows(folder / "rows.jsonl", rows)
    return store.external(ReportRef, folder)


def test_win_rates_differ_only_against_the_same_opponent(store, tmp_path):
    results = {
        "j/sft": win_rates(store, tmp_path / "1", [1.0, 1.0, 0.5, 0.0], "digest-base"),
        "j/dpo": win_rates(store, tmp_path / "2", [0.0, 1.0, 1.0, 0.0], "digest-base"),
        "j/ppo": win_rates(store, tmp_path / "3", [0.0, 0.0, 0.0, 0.0], "digest-sft"),
    }
    config = ReportSuitesConfig(opponents={"j/sft": "base", "j/dpo": "base", "j/ppo": "sft"})
    ref, _ = Workshop(store).run("report_suites", config, {"results": results})
    report = json.loads((store.path(ref) / "report.json").read_text())
    policies = report["suites"]["j"]["policies"]
    assert policies["dpo"]["difference"]["win_rate"]["mean"] == -0.125
    assert policies["ppo"]["difference"] == {} and policies["ppo"]["opponent"] == "sft"
    assert [(row["policy"], row["measure"], row["prompt"]) for row in report["regressions"]] == [
        ("dpo", "win_rate", "question 0")
    ]
    page = (store.path(ref) / "report.html").read_text()
    assert "j: win_rate by slice" in page and ">against<" in page.replace("\n", "") and "<span>base</span>" in page


def test_without_the_reference_there_are_no_differences(store, tmp_path):
    results = {"math/ppo": result(store, tmp_path / "1", [1.0, 0.0], measure="gold")}
    ref, _ = Workshop(store).run("report_suites", ReportSuitesConfig(), {"results": results})
    report = json.loads((store.path(ref) / "report.json").read_text())
    assert report["suites"]["math"]["policies"]["ppo"]["difference"] == {} and report["regressions"] == []
    assert "Difference to" not in (store.path(ref) / "report.html").read_text().replace("Differences to", "")
