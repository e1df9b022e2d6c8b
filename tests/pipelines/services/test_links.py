"""Links between the pages of Prefect and MLflow, after a restart at other ports."""

from dataclasses import replace

import pytest

from pipelines.services.links import update_links, with_addresses
from pipelines.services.run_notes import folder
from pipelines.services.running import Services
from rlhf_core.tracking.mlflow import MlflowTracker
from rlhf_core.tracking.mlflow_client import open_client, owner_tags

RUN = "0" * 31 + "a"
SERVICES = Services(owner_tags(), 4205, 5005, ready=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("http://127.0.0.1:4200/runs/flow-run/1", "http://127.0.0.1:4205/runs/flow-run/1"),
        ("- [a](http://127.0.0.1:4201/runs/flow-run/1)", "- [a](http://127.0.0.1:4205/runs/flow-run/1)"),
        (f"[run](runs:/{RUN}) and", f"[run](http://127.0.0.1:5005/#/runs/{RUN}) and"),
        (f"[r](runs:/{RUN}/artifacts/report.html)", f"[r](http://127.0.0.1:5005/#/runs/{RUN})"),
        ('<a href="http://127.0.0.1:5000/#/x">', '<a href="http://127.0.0.1:5005/#/x">'),
        ("[p](https://prefect.example/runs/flow-run/1)", "[p](https://prefect.example/runs/flow-run/1)"),
        ("    prompt: http://127.0.0.1:4200/runs/flow-run/1", "    prompt: http://127.0.0.1:4200/runs/flow-run/1"),
    ],
)
def test_a_link_to_a_server_of_ours_gets_its_present_address(before, after):
    assert with_addresses(before, SERVICES) == with_addresses(after, SERVICES) == after
    theirs = replace(SERVICES, prefect_api="https://p/api", mlflow_uri="https://m")
    assert with_addresses(before, theirs) == before


def test_tags_and_descriptions_of_runs_and_their_reports_are_mended_once(home):
    home.make()
    tracker = MlflowTracker(home.mlflow_uri, experiment="mini", artifact_root=home.mlflow_artifacts)
    link = "http://127.0.0.1:4200/runs/flow-run/1"
    run_id = tracker.start("mini (3f2a)", run_id=None, params={}, tags={"prefect.url": link})
    tracker.finish("FINISHED", note="")
    folder(home).mkdir()
    page = folder(home) / "1-2.html"
    page.write_text(f'<a href="{link}">')

    services = replace(SERVICES, prefect_api="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelines.services.links._update_cards", lambda services: 0)
        assert list(update_links(home, services)) == [
            "links of 2 pages -> Prefect http://127.0.0.1:4205, MLflow http://127.0.0.1:5005"
        ]
        assert list(update_links(home, services)) == []
    found = open_client(home.mlflow_uri).get_run(run_id).data.tags
    now = "http://127.0.0.1:4205/runs/flow-run/1"
    assert found["prefect.url"] == now and f"({now})" in found["mlflow.note.content"] and now in page.read_text()
