"""A person answers a gate by the form in Prefect's page, in a real browser: one run goes on to its end, one is blocked."""

import re
from typing import Any

import mlflow
import pytest

from pipelines.flows.profile import load_profile
from pipelines.services.home import sign_in_link
from pipelines.services.running import Services
from rlhf_core.store.artifacts import ArtifactStore
from tests.support.browser import CHROMIUM, DRIVER, Browser, browser, keep_picture
from tests.support.served import PrefectAPI
from tests.support.small_pipeline import write_mini

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]
if not CHROMIUM or not DRIVER:
    pytest.skip("no Chromium with chromedriver is installed", allow_module_level=True)

GATE = """
[publish]
name = "support"
policy = "sft"
[[gates]]
name = "long enough"
after = "sft"
metric = "steps"
op = ">="
value = 1000
otherwise = "approve"
"""
LEFT_THE_FORM = """if (!location.pathname.endsWith('/run')) return true;
if (document.body.innerText.includes('is a required property')) document.querySelector('button[type=submit]').click();
return false"""
"""The form takes a typed text a moment after it was typed: a click before that is refused, and made again."""


def answer(page: Browser, prefect: PrefectAPI, flow_run: str, *, decision: str, reason: str) -> None:
    """Follow the link on the card of a waiting run to the form, say who decides and why, and submit it."""
    card = prefect.artifact(flow_run, "waiting")
    [form] = re.findall(rf"\[{decision}\]\((.*?)\)", card)
    page.open(form)
    page.until("return [...document.querySelectorAll('textarea')].some(one => one.value === 'long enough')")
    for name, text in (("reason", reason), ("by", "ada")):
        page.write_labelled(name, text)
    keep_picture(page, f"gate_{decision}")
    page.click("button[type=submit]")
    page.until(LEFT_THE_FORM)


def gates_of_runs(services: Services) -> list[str]:
    """Return the tag of the gate on every run of the pipeline in MLflow, the oldest first."""
    client = mlflow.MlflowClient(services.mlflow_url)
    names = [one.experiment_id for one in client.search_experiments()]
    runs = client.search_runs(names, order_by=["attributes.start_time ASC"])
    tags = [dict(run.data.tags) for run in runs]
    return [str(one["gate.long enough"]) for one in tags if "gate.long enough" in one]


def test_a_gate_is_approved_and_rejected_in_the_page(tmp_path, home, services):
    prefect = PrefectAPI(home, services)
    config = load_profile(write_mini(tmp_path, GATE), ["ppo=none", "evaluate.evaluate.parents=none"])
    parameters: dict[str, Any] = {"config": config.model_dump(mode="json")}
    first = prefect.start("full", parameters)
    state = prefect.ended(first)
    assert state["name"] == "Waiting", state
    assert "WAITING at gate long enough: steps 3 < 1000" in state["message"]
    assert "publish" in state["message"].rpartition("not run: ")[2]

    with browser(tmp_path / "browser") as page:
        page.open(sign_in_link(services.prefect_url, home.prefect_auth_string))
        page.until("return location.pathname !== '/sign-in' && document.body.innerText.includes('Deployments')")
        page.open(f"{services.prefect_url}/runs/flow-run/{first}")
        page.until("return document.body.innerText.includes('WAITING at gate long enough: steps 3 < 1000')")
        keep_picture(page, "gate_waiting")
        answer(page, prefect, first, decision="approve", reason="good enough for a demonstration")
        state = prefect.completed(first)
        assert state["name"] == "Completed", state

        second = prefect.start("full", parameters | {"overrides": ["seed=5"]})
        assert prefect.ended(second)["name"] == "Waiting"
        answer(page, prefect, second, decision="reject", reason="fails on refunds")
        state = prefect.completed(second)
        page.open(f"{services.prefect_url}/runs/flow-run/{second}")
        page.until("return document.body.innerText.includes('BLOCKED by gate long enough')")
        keep_picture(page, "gate_blocked")
    assert state["name"] == "Blocked", state
    assert "fails on refunds" in state["message"]

    store = ArtifactStore(home.store)
    published = [record for record in store.records() if record.stage == "publish"]
    assert len(published) == 1
    card = (store.path(published[0].handle) / "README.md").read_text()
    assert "good enough for a demonstration" in card and "ada" in card
    tags = gates_of_runs(services)
    assert any("good enough for a demonstration" in tag for tag in tags)
    assert any("fails on refunds" in tag for tag in tags)
