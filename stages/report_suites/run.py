"""One report over all suites: policies by suites with intervals, differences to the reference, slices, regressions."""

import json
from collections.abc import Mapping
from typing import Any

from rlhf_core.stage.context import StageContext
from rlhf_core.suites.report import Suites, headline_metrics_of, overview, render_suites, worst
from rlhf_core.suites.results import REPORT, ROWS, read_suite_rows
from rlhf_core.types import ReportRef
from stages.report_suites import ReportSuitesConfig


def run(config: ReportSuitesConfig, *, results: dict[str, ReportRef], context: StageContext) -> ReportRef:
    """Write the report (report.json, report.html); `results` maps `<suite>/<policy>` to its report."""
    suites = read(results, context)
    report = overview(suites, reference=config.reference, opponents=config.opponents) | {"key": context.key}
    regressions = worst(suites, reference=config.reference, count=config.regressions_shown)
    (context.out / "report.json").write_text(
        json.dumps(report | {"regressions": regressions}, indent=2, allow_nan=False), encoding="utf-8"
    )
    (context.out / "report.html").write_text(render_suites(report, regressions), encoding="utf-8")
    for name in ("report.json", "report.html"):
        context.tracker.file(context.out / name, "")
    columns = ["suite", "policy", "prompt", "value", "reference", "answer", "answer of the reference"]
    context.tracker.table(
        "regressions", columns, [[row[name.replace(" ", "_")] for name in columns] for row in regressions]
    )
    metrics = headline_metrics_of(report)
    context.metrics(0, metrics)
    return context.commit(ReportRef, metrics=metrics)


def read(results: Mapping[str, ReportRef], context: StageContext) -> Suites:
    """Read the results: suite -> policy -> its report and its rows."""
    suites: dict[str, dict[str, tuple[dict[str, Any], Any]]] = {}
    for name, ref in results.items():
        suite, _, policy = name.partition("/")
        folder = context.path(ref)
        found = json.loads((folder / REPORT).read_text(encoding="utf-8")), read_suite_rows(folder / ROWS)
        suites.setdefault(suite, {})[policy] = found
    return suites
