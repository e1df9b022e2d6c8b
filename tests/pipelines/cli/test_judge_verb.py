"""A page with keys for a review queue: what it shows, what it keeps, and who may enter."""

import threading

import pytest
import uvicorn
from starlette.testclient import TestClient

from pipelines.cli import judge_verb
from pipelines.cli.judge_verb import choose_queue, page_of
from pipelines.cli.main import main
from rlhf_contrib.serve.reward_verb import listening
from rlhf_core.errors import ConfigError
from rlhf_core.http.serving import limited
from rlhf_core.tracking.mlflow_client import create_database
from rlhf_core.tracking.review_queues import ReviewedQueue, ReviewItem, ReviewQuestion, ReviewQueues, review_queue
from tests.support.browser import CHROMIUM, DRIVER, browser, keep_picture

QUESTION = ReviewQuestion("preferred", "Which is better?", ("A", "B", "tie", "both bad"))
ITEMS = [ReviewItem(f"c{n}", f"Request {n}", f"### A\n\ngood {n}\n\n---\n\n### B\n\nbad {n}") for n in range(3)]


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    create_database(path)
    return f"sqlite:///{path}"


@pytest.fixture
def client(uri, monkeypatch, request):
    """Return a client of the page for a queue of its own; the door knows no user of a connection in memory."""
    monkeypatch.setattr("rlhf_core.http.door.is_own", lambda client, server: True)
    name = request.node.name
    review_queue(uri, experiment=name, name="ada x1", user="ada", question=QUESTION, items=ITEMS)
    return TestClient(page_of(ReviewQueues(uri, name), "ada x1", uri), base_url="http://127.0.0.1")


def ids(client) -> dict[str, str]:
    """The id of each item -> what the page calls it; the page shows them by their requests."""
    shown = {one["request"]: one["id"] for one in client.get("/queue").json()["items"]}
    return {one.id: shown[one.request] for one in ITEMS}


def test_an_answer_can_be_changed_until_the_queue_is_read(client, uri, request):
    assert "both answers" in client.get("/").text
    shown = client.get("/queue").json()
    assert (shown["instruction"], shown["options"]) == ("Which is better?", ["A", "B", "tie", "both bad"])
    names = ids(client)
    assert sorted((one["request"], one["id"], one["response"], one["value"]) for one in shown["items"]) == [
        (one.request, names[one.id], one.response, "") for one in ITEMS
    ]
    assert len(set(names.values())) == 3 and not names.keys() & set(names.values())
    for item, value, reason in (("c0", "A", ""), ("c1", "tie", "alike"), ("c0", "B", "on second thought")):
        given = {"item": names[item], "value": value, "reason": reason}
        assert client.post("/answer", json=given).text == "saved"
    items = {name: item for item, name in names.items()}
    found = {items[one["id"]]: (one["value"], one["reason"]) for one in client.get("/queue").json()["items"]}
    assert found == {"c0": ("B", "on second thought"), "c1": ("tie", "alike"), "c2": ("", "")}
    experiment = request.node.name
    state = review_queue(uri, experiment=experiment, name="ada x1", user="ada", question=QUESTION, items=ITEMS)
    assert state.done == 2
    assert [(one.item, one.value, one.source) for one in state.answers] == [("c0", "B", "ada"), ("c1", "tie", "ada")]
    (queue,) = ReviewQueues(uri, experiment).queues()
    assert (queue.name, queue.user, queue.items, queue.done) == ("ada x1", "ada", 3, 2)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"item": "c1", "value": "A", "reason": ""}', "item = 'c1': is none of this queue"),
        ('{"item": "c0", "value": "C", "reason": ""}', "value = 'C': is none of this queue"),
        ('{"item": "c0"}', "'value'"),
        ("no JSON", "Expecting value"),
    ],
)
def test_what_is_no_answer_is_refused_and_other_pages_are_kept_out(client, body, said):
    refused = client.post("/answer", content=body.replace("c0", ids(client)["c0"]))
    assert refused.status_code == 422 and said in refused.text
    assert client.post("/answer", content=body, headers={"Origin": "https://evil.example"}).status_code == 403
    assert client.get("/queue", headers={"Host": "evil.example"}).status_code == 403


def queue(name, user, done, created=0.0):
    return ReviewedQueue(name, user, created, 3, done)


def test_the_queue_of_an_annotator_is_the_newest_that_is_not_finished():
    queues = [queue("ada x1", "ada", 3, 1), queue("ada x2", "ada", 1, 2), queue("ada x3", "ada", 3, 3)]
    assert choose_queue("ada", queues).name == choose_queue("", queues).name == "ada x2"
    assert choose_queue("ada x1", queues).name == "ada x1"
    assert choose_queue("", queues[::2]).name == "ada x3"  # finished, and may be changed
    with pytest.raises(ConfigError, match="annotator = '': several have a queue; choose from ada, bob"):
        choose_queue("", [*queues, queue("bob x2", "bob", 0)])
    with pytest.raises(ConfigError, match=r"annotator = 'adda': has no queue; did you mean ada\?"):
        choose_queue("adda", queues)


def test_without_judgments_to_make_nothing_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    assert main(["judge"]) == 2
    assert "no run waits for judgments; start one whose annotator" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()
    assert judge_verb.PAGE.is_file()


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="no Chromium with chromedriver is installed")
def test_keys_choose_go_back_and_change_in_a_browser(uri, tmp_path):
    arguments = {"experiment": "keys", "name": "ada x1", "user": "ada", "question": QUESTION, "items": ITEMS}
    review_queue(uri, **arguments)
    server = uvicorn.Server(limited(page_of(ReviewQueues(uri, "keys"), "ada x1", uri)))
    with listening("127.0.0.1", 0) as listener, browser(tmp_path) as page:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        page.open(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        press = "document.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], bubbles: true}))"
        shows = "return document.getElementById('progress').textContent === arguments[0]"
        page.until(shows, "comparison 1 of 3, 0 judged")
        assert page.run("return [...document.querySelectorAll('kbd')].map(one => one.textContent)") == list("ABTO")
        page.run("document.getElementById('reason').value = 'more helpful'")
        for key, progress in (("b", "2 of 3, 1"), ("t", "3 of 3, 2"), ("ArrowLeft", "2 of 3, 2"), ("o", "2 of 3, 2")):
            page.run(press, key)
            page.until(shows, f"comparison {progress} judged")
        page.until("return document.querySelector('[aria-pressed=true]').dataset.option === 'both bad'")
        keep_picture(page, "judge_page")
        write = "const box = document.getElementById('reason'); box.value = arguments[0]; box.dispatchEvent(new Event(arguments[1]))"
        page.run(write, "too short", "change")  # after the choice
        page.run(press, "ArrowLeft")
        page.until("return document.getElementById('reason').value === 'more helpful'")
        page.run(press, "ArrowLeft")
        page.run(write, "draft", "input")
        page.run(press, "ArrowRight")
        page.run(press, "ArrowLeft")
        page.until("return document.getElementById('reason').value === 'draft'")
        page.run(press, "ArrowRight")
        assert page.run("return document.querySelectorAll('#answers .text')[1].textContent").startswith("bad")
        server.should_exit = True
        thread.join()
    found = {one.item: (one.value, one.reason) for one in review_queue(uri, **arguments).answers}
    assert sorted(found.values()) == [("B", "more helpful"), ("both bad", "too short")]
