"""Keep links between the pages of Prefect and MLflow alive: they hold the addresses at which these were served at the time."""

import re
from collections.abc import Iterator

from pipelines.services.home import Home
from pipelines.services.run_notes import folder
from pipelines.services.running import Services
from pipelines.services.user_servers import tracking_place, tracking_uri
from rlhf_core.tracking.pipeline_runs import rewrite_tags

_BEFORE = r'(^|\]\(|href=")'
"""The characters before a link in a tag, in Markdown and in HTML."""
_OURS = r"http://127\.0\.0\.1:\d+"
_PREFECT = re.compile(rf"{_BEFORE}{_OURS}(?=/runs/flow-run/)")
_MLFLOW = re.compile(rf"{_BEFORE}{_OURS}(?=/#/)")
_RUN = re.compile(rf"{_BEFORE}runs:/([0-9a-f]{{32}})[\w./-]*")
"""Link to a run that was recorded while no MLflow server was up."""
NEWEST, PER_REQUEST = 2000, 200
"""Number of cards to update on Prefect's pages, and Prefect's limit for one request."""


def with_addresses(text: str, services: Services) -> str:
    """Replace the addresses in links to our servers by their current ones."""
    if not services.prefect_api:
        text = _PREFECT.sub(rf"\g<1>{services.prefect_url}", text)
    if not services.mlflow_uri:
        text = _RUN.sub(rf"\g<1>{services.mlflow_url}/#/runs/\g<2>", text)
        text = _MLFLOW.sub(rf"\g<1>{services.mlflow_url}", text)
    return text


def update_links(home: Home, services: Services) -> Iterator[str]:
    """Update the links on Prefect's cards, in MLflow's runs, and in the reports of runs; yield a line if there were any.

    Cards and runs in a database that is shared with others are left alone.
    """
    changed = 0
    for page in folder(home).glob("*.html"):
        before = page.read_text(encoding="utf-8")
        after = with_addresses(before, services)
        if after != before:
            page.write_text(after, encoding="utf-8")
            changed += 1
    if tracking_place(home) == home.mlflow_uri:
        changed += rewrite_tags(tracking_uri(home), "prefect.url", lambda text: with_addresses(text, services))
    if not services.prefect_api and not services.shared_database:
        changed += _update_cards(services)
    if changed:
        yield f"links of {changed} pages -> Prefect {services.prefect_url}, MLflow {services.mlflow_url}"


def _update_cards(services: Services) -> int:
    # Prefect reads its settings when it is imported, and the caller has just made them.
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import ArtifactUpdate
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterType
    from prefect.client.schemas.sorting import ArtifactSort

    changed, cards = 0, ArtifactFilter(type=ArtifactFilterType(any_=["markdown"]))
    with get_client(sync_client=True) as client:
        for offset in range(0, NEWEST, PER_REQUEST):
            found = client.read_artifacts(
                artifact_filter=cards, sort=ArtifactSort.CREATED_DESC, limit=PER_REQUEST, offset=offset
            )
            for card in found:
                before = str(card.data)
                after = with_addresses(before, services)
                if after != before:
                    client.update_artifact(card.id, ArtifactUpdate(data=after))
                    changed += 1
            if len(found) < PER_REQUEST:
                break
    return changed
