"""People judge in MLflow's Review page, in a real browser: the waiting run goes on by itself, and the pairs are there."""

import json

import pytest

from rlhf_core.annotation.proposing import JUDGMENTS_FILE, JUDGMENTS_SCHEMA, Comparison, Judgment, write_comparisons
from rlhf_core.data.shards import read_rows
from rlhf_core.data.tables import read_preferences
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import Message
from tests.support.browser import CHROMIUM, DRIVER, Browser, browser, keep_picture
from tests.support.served import PrefectAPI

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]
if not CHROMIUM or not DRIVER:
    pytest.skip("no Chromium with chromedriver is installed", allow_module_level=True)

FAKE = "That happens.\n\n### B\n\nB\n---\n\n<h3>B</h3>\n\nRead the manual."
"""An answer that would pass for two, if its headings were shown as such."""
ROWS = [
    Comparison(
        f"c{number}",
        (Message("user", f"Maria writes: my {item} does not turn on. Reply to her."),),
        "",
        "test",
        *(kind, rude) if number % 2 else (rude, kind),
        "sft",
        "ppo",
    )
    for number, item in enumerate(("blue kettle", "red toaster", "green lamp"))
    for kind, rude in [
        (
            f"Hello Maria, I am sorry that your {item} does not turn on. We send you a **new one** today.",
            "That happens. Read the manual." if number else FAKE,
        )
    ]
]


def review(page: Browser, url: str) -> None:
    """Judge a queue to its end: the polite answer wins, wherever it stands."""
    button = '[data-component-id="mlflow.experiment-review-queue.{}"]'
    page.open(url)
    page.until("return document.body.innerText.includes('Needs review')")
    if page.run("return Boolean(document.querySelector(arguments[0]))", "[data-component-id$='chat_panel.close']"):
        page.click("[data-component-id$='chat_panel.close']")
    keep_picture(page, "review_queue")
    page.click(button.format("list.start-review"))
    for number in range(len(ROWS)):
        page.until("return document.body.innerText.includes(arguments[0])", f"{number} of {len(ROWS)} reviewed")
        page.until("return Boolean(document.querySelector('[aria-label=\"preferred, no option selected\"]'))")
        page.until("return document.body.innerText.includes('Hello Maria')")  # the answers come later than the form
        text = page.run("return document.body.innerText")
        assert headings(page) == ["A", "B"]
        polite = "A" if text.index("Hello Maria") < text.index("That happens") else "B"
        page.click('[aria-label^="preferred"]')
        page.click("[role=option]", polite)
        page.write(f"textarea{button.format('focused-review.rationale')}", "It apologizes and helps.")
        if number == 0:
            keep_picture(page, "review_page")
        page.click(button.format("focused-review.complete"))


def headings(page: Browser) -> list[str]:
    """Return the headings of the page that are the name of a side."""
    script = "return [...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].map(one => one.innerText.trim())"
    return [text for text in page.run(script) if text in ("A", "B")]


def test_a_waiting_run_goes_on_when_a_person_has_judged_in_the_page(tmp_path, home, services):
    write_comparisons(tmp_path / "asked", ROWS)
    prefect = PrefectAPI(home, services)
    annotator = {"type": "mlflow", "annotators": ["ada"], "instruction": "Which reply is better for the customer?"}
    flow_run = prefect.start(
        "collect-preferences",
        {
            "config": {"annotator": annotator, "eval_fraction": 0.0},
            "settings": {"name": "people"},
            "comparisons": str(tmp_path / "asked"),
        },
    )
    state = prefect.ended(flow_run)
    assert state["name"] == "Waiting", state
    said, _, url = state["message"].rpartition(" at ")
    assert said == "collect_preferences is waiting: 0 of 3 comparisons are judged (with keys: rlhf judge); ada (0 of 3)"
    assert url.startswith(f"{services.mlflow_url}/#/experiments/")
    with browser(tmp_path / "browser") as page:
        review(page, url)
        state = prefect.completed(flow_run)  # the page is left open until its last answer has arrived
    assert state["name"] == "Completed", state
    record = ArtifactStore(home.store).latest("collect_preferences")
    folder = ArtifactStore(home.store).path(record.handle)
    pairs = read_preferences(folder / "train.parquet")
    assert len(pairs) == 3 and all(pair.chosen[0].content.startswith("Hello Maria") for pair in pairs)
    judgments = read_rows(folder / JUDGMENTS_FILE, JUDGMENTS_SCHEMA, Judgment)
    assert {(one.annotator, one.reason) for one in judgments} == {("ada", "It apologizes and helps.")}
    assert json.loads((folder / "report.json").read_text())["review"]["sources"] == ["default"]
