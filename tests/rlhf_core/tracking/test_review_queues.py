"""MLflow's review queues on a database: made once, whatever is killed, and read with their answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.tracking import review_queues
from rlhf_core.tracking.mlflow_client import create_database, open_client
from rlhf_core.tracking.review_queues import (
    QueueState,
    ReviewAnswer,
    ReviewError,
    ReviewItem,
    ReviewQuestion,
    review_queue,
)
from tests.support.reviewers import answer, queues

QUESTION = ReviewQuestion("preferred", "Which is better?", ("A", "B", "tie"))


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    create_database(path)
    yield f"sqlite:///{path}"


def items(count: int) -> list[ReviewItem]:
    return [ReviewItem(f"c{n}", f"Request {n}", f"### A\n\n> good {n}\n\n### B\n\n> bad {n}") for n in range(count)]


def state(database: str, experiment: str, rows: list[ReviewItem], *, question: ReviewQuestion = QUESTION) -> QueueState:
    return review_queue(database, experiment=experiment, name="ada x1", user="ada", question=question, items=rows)


def traces(database: str, experiment: str) -> list[Any]:
    client = open_client(database)
    found = client.get_experiment_by_name(experiment)
    return list(client.search_traces(locations=[found.experiment_id], include_spans=False))


def test_a_queue_is_made_once_and_shows_the_whole_texts(database):
    long = [ReviewItem("long", "why? " * 500, "because " * 800), *items(2)]
    first, again = (state(database, "once", long) for _ in range(2))
    assert first == again and (first.items, first.done, first.answers, first.url) == (3, 0, (), "")
    found = traces(database, "once")
    assert {one.info.request_preview for one in found} == {one.request for one in long} and len(found) == 3
    assert {one.info.response_preview for one in found} == {one.response for one in long}
    [queue] = queues(database, "once").values()
    assert queue.users == ["ada"] and len(queue.schema_ids) == 1
    folder = Path(database.removeprefix("sqlite:///")).parent
    assert open_client(database).get_experiment_by_name("once").artifact_location == (folder / "mlartifacts").as_uri()


def test_what_a_killed_process_made_is_not_made_again(database, monkeypatch):
    make, made = review_queues.ReviewQueues._make_trace, []

    def killed(self: Any, queue: str, item: ReviewItem) -> None:
        if len(made) == 2:
            self._mlflow.flush_trace_async_logging()
            raise KeyboardInterrupt
        made.append(item.id)
        make(self, queue, item)

    with monkeypatch.context() as patch:
        patch.setattr(review_queues.ReviewQueues, "_make_trace", killed)
        with pytest.raises(KeyboardInterrupt):
            state(database, "killed", items(4))
    assert state(database, "killed", items(4)).items == 4
    assert len(traces(database, "killed")) == 4


def test_answers_come_back_with_their_reason_and_source(database):
    state(database, "answered", items(4))
    choices = {"c0": "A", "c1": "tie", "c2": ""}
    assert answer(database, "answered", "ada x1", lambda item, text: choices.get(item, "B"), who="default") == 4
    found = state(database, "answered", items(4))
    assert (found.items, found.done) == (4, 4)
    assert found.answers == tuple(
        ReviewAnswer(n, v, "because", "default") for n, v in (("c0", "A"), ("c1", "tie"), ("c3", "B"))
    )


def test_an_answer_that_was_changed_counts_as_it_is_now(database):
    state(database, "changed", items(1))
    answer(database, "changed", "ada x1", lambda item, text: "A")
    [trace] = traces(database, "changed")
    import mlflow

    source = mlflow.entities.AssessmentSource("HUMAN", "default")
    mlflow.log_feedback(trace_id=trace.info.trace_id, name="preferred", value="B", source=source)
    mlflow.log_feedback(trace_id=trace.info.trace_id, name="other question", value="A", source=source)
    assert [one.value for one in state(database, "changed", items(1)).answers] == ["B"]


def test_another_instruction_is_another_queue_and_no_answer_is_lost(database):
    kinder = ReviewQuestion("preferred", "Which is kinder?", QUESTION.options)
    state(database, "instructed", items(2))
    assert answer(database, "instructed", "ada x1", lambda item, text: "A", at_most=1) == 1
    # An answer to another question is none to this one.
    assert state(database, "instructed", items(2), question=kinder).done == 0
    name = f"ada x1 {kinder.digest}"
    assert answer(database, "instructed", name, lambda item, text: "B", question=f"preferred {kinder.digest}") == 2
    from mlflow.genai import label_schemas

    shown = {
        queue.name: label_schemas.get_label_schema(schema_id=queue.schema_ids[0]).instruction
        for queue in queues(database, "instructed").values()
    }
    assert shown == {"ada x1": "Which is better?", name: "Which is kinder?"}
    for _ in range(2):  # each run finds its own, in whatever order they look
        assert [one.value for one in state(database, "instructed", items(2), question=kinder).answers] == ["B", "B"]
        assert [one.value for one in state(database, "instructed", items(2)).answers] == ["A"]


def test_a_server_that_cuts_texts_is_refused(database, monkeypatch):
    make = review_queues.ReviewQueues._make_trace

    def cut(self: Any, queue: str, item: ReviewItem) -> None:
        make(self, queue, ReviewItem(item.id, item.request, item.response[:5]))

    monkeypatch.setattr(review_queues.ReviewQueues, "_make_trace", cut)
    with pytest.raises(ReviewError, match=r"did not store the text of item c0 whole"):
        state(database, "cut", items(1))


def test_a_run_without_mlflow_and_a_server_that_is_away_are_errors_that_say_so():
    with pytest.raises(ConfigError, match="this run is not tracked there"):
        state("", "x", items(1))
    with pytest.raises(ReviewError, match=r"http://127\.0\.0\.1:9.*could not keep the review queue"):
        state("http://127.0.0.1:9", "x", items(1))
