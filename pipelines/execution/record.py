"""Hand the results of a run to the tracker: metrics, tables, the report, the profile, and the card of a published model."""

import html
import json
import shutil
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from pipelines.execution.executor import RunContext, StageOutcome
from pipelines.execution.summary import (
    GATE,
    PAGE,
    compares_policies,
    description,
    headline_metrics,
    read_report,
    results,
    run_headline,
)
from pipelines.flows.profile_text import as_toml
from rlhf_core.types import PublishedRef

PROFILE, SAMPLES, CARD = "profile.toml", "samples.json", "README.md"
LINKS = {"prefect.url": "Prefect", "mlflow.url": "MLflow"}
"""Link of a run -> its name for readers."""
_CARD_END = "\n## Configuration\n"
"""Heading of a model's card from which on it repeats the configuration, which the run has as parameters."""


def record_results(
    context: RunContext, outcomes: Mapping[str, StageOutcome], *, name: str, links: Mapping[str, str], page: Path | None
) -> str:
    """Hand the results to the tracking run, keep its report for readers at `page`, and return the run's description."""
    store, tracker, parent = context.store, context.tracker, context.tracker.parent
    parent.metrics(0, headline_metrics(outcomes, store))
    result = run_headline(outcomes, store)
    tracker.tag({"result": result} if result else {})
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / PROFILE
        profile.write_text(as_toml(context.config), encoding="utf-8")
        parent.file(profile, "")
        for label, outcome in outcomes.items():
            made = store.path(outcome.ref)
            report = read_report(made)
            compares = compares_policies(report)
            if report and (made / PAGE).is_file():
                copy = Path(folder) / (PAGE if compares else f"{label.replace('/', '-')}.html")
                copy.write_text(_with_head(made / PAGE, context, name, links), encoding="utf-8")
                parent.file(copy, "")
                if compares and page is not None:
                    shutil.copyfile(copy, page)
            if compares:
                for title, table in results(report).items():
                    parent.table(title, table.headings, table.rows)
                if (made / SAMPLES).is_file():
                    samples = json.loads((made / SAMPLES).read_text(encoding="utf-8"))
                    parent.table("samples", samples["columns"], samples["data"])
            if isinstance(outcome.ref, PublishedRef) and outcome.decision.action != "HIT":
                gate = json.loads((made / GATE).read_text(encoding="utf-8"))
                card = (made / CARD).read_text(encoding="utf-8").partition(_CARD_END)[0]
                tracker.describe(
                    gate["registry"]["name"], gate["digest"], f"Made by [{name}]({links['mlflow.url']})\n\n{card}"
                )
    return description(outcomes, store)


def _with_head(page: Path, context: RunContext, name: str, links: Mapping[str, str]) -> str:
    """A stage's report with the name, profile, date, seed and links of the run below its title."""
    facts = [name, context.options.profile, f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", f"seed {context.config.seed}"]
    shown = [html.escape(fact) for fact in facts if fact]
    shown += [
        f'<a href="{html.escape(links[link])}" target="_blank" rel="noopener">{title}</a>'
        for link, title in LINKS.items()
        if link in links
    ]
    return page.read_text(encoding="utf-8").replace("</h1>", f'</h1>\n<p class="small soft">{" · ".join(shown)}</p>', 1)
