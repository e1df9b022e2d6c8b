"""Queues of MLflow's Review page, where people answer one question about each of a list of texts.

Everything is found again by its name or tags before it is made, so a process that was killed half-way leaves nothing
twice. A question is never changed under people who answer it: a question with another instruction is another label
schema with separate queues, and answers to the first are found again with its instruction. MLflow's queues are
experimental since 3.14; tried with 3.17.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlhf_core.errors import ConfigError, DataError, RlhfError
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.tracking.mlflow_client import database_file, experiment_id, import_mlflow, in_one_line, open_client
from rlhf_core.types import chunks

KIND = {"mlflow.experimentKind": "genai_development"}
"""Tag of an experiment whose pages include Review."""
QUEUE_TAG, ITEM_TAG = "rlhf.queue", "rlhf.item"
PAGE = 100


class ReviewError(RlhfError, RuntimeError):
    """Raised if MLflow could not keep or return reviews; names the server."""


@dataclass(frozen=True, slots=True)
class ReviewItem:
    """A text to answer the question about, in Markdown, below the request that it responds to."""

    id: str
    request: str
    response: str


@dataclass(frozen=True, slots=True)
class ReviewQuestion:
    """The question about every item: a choice, with a reason in free text.

    >>> ReviewQuestion("preferred", "Which is better?", ("A", "B")).options
    ('A', 'B')
    """

    name: str
    instruction: str
    options: tuple[str, ...]

    @property
    def digest(self) -> str:
        """A short digest of its displayed content."""
        return sha256_text("\n".join((self.instruction, *self.options)))[:8]


@dataclass(frozen=True, slots=True)
class ReviewAnswer:
    """A person's answer about an item; `source` is the person's name in MLflow, `default` without sign-in."""

    item: str
    value: str
    reason: str
    source: str


@dataclass(frozen=True, slots=True)
class QueueState:
    """A queue: its page, how many items are done (answered or declined), and the answers."""

    url: str
    created_s: float
    """Time of its creation, in seconds of the wall clock."""
    items: int
    done: int
    answers: tuple[ReviewAnswer, ...]


@dataclass(frozen=True, slots=True)
class ReviewedQueue:
    """A queue of an experiment, with the number of its items and of the finished ones."""

    name: str
    user: str
    created_s: float
    items: int
    done: int


@dataclass(frozen=True, slots=True)
class JudgedItem:
    """An item with its answer, "" without one."""

    id: str
    request: str
    response: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReviewPage:
    """The content of a page for a queue."""

    instruction: str
    options: tuple[str, ...]
    items: tuple[JudgedItem, ...]


def review_queue(
    uri: str, *, experiment: str, name: str, user: str, question: ReviewQuestion, items: Sequence[ReviewItem]
) -> QueueState:
    """Open the queue `name` of `user` behind `uri` and read its state; missing parts are created.

    Raises ReviewError if MLflow does not answer, or cannot hold the whole texts.
    """
    with review_errors(uri):
        return ReviewQueues(uri, experiment).state(name, user, question, items)


@contextmanager
def review_errors(uri: str) -> Iterator[None]:
    """Raise ReviewError in place of any error of the server or the database: the user must fix it."""
    try:
        yield
    except RlhfError:
        raise
    except Exception as error:
        rule = f"could not keep the review queue ({in_one_line(error)})"
        raise ReviewError("MLflow", without_secrets(uri), rule, "run again") from error


class ReviewQueues:
    """The review queues of an experiment, which is created if it does not exist."""

    def __init__(self, uri: str, experiment: str) -> None:
        if not uri:
            rule = "needs MLflow, and this run is not tracked there"
            raise ConfigError("annotator.type", "mlflow", rule, "run it with a tracking server or database")
        self._client = open_client(uri)
        self._mlflow = import_mlflow()
        # Taken from the same import: they talk to the address that `open_client` has set.
        from mlflow.genai import label_schemas, review_queues

        self._schemas, self._queues = label_schemas, review_queues
        self._uri = uri
        database = database_file(uri)
        # Without a server, MLflow would put the files into the working folder.
        files = None if database is None else database.parent / "mlartifacts"
        self._experiment = experiment_id(self._client, experiment, files, tags=KIND)

    def state(self, name: str, user: str, question: ReviewQuestion, items: Sequence[ReviewItem]) -> QueueState:
        schema = self._ensure_schema(question)
        name += schema.name.removeprefix(question.name)
        traces = self._ensure_traces(name, items)
        queue = self._ensure_queue(name, user, str(schema.schema_id))
        attached = {one.item_id: one.status.value for one in self._attached(queue.queue_id)}
        missing = [traces[one.id].trace_id for one in items if traces[one.id].trace_id not in attached]
        for page in chunks(missing, PAGE):
            self._queues.add_items_to_review_queue(queue.queue_id, item_ids=page)
        answers = []
        for one in items:
            if attached.get(traces[one.id].trace_id) == "complete":
                answers += [answer] if (answer := _answer(one.id, traces[one.id], schema.name)) else []
        done = sum(attached.get(traces[one.id].trace_id, "pending") != "pending" for one in items)
        url = self._url(queue.queue_id)
        return QueueState(url, queue.creation_time_ms / 1000, len(items), done, tuple(answers))

    def queues(self) -> list[ReviewedQueue]:
        """The queues of the experiment, oldest first."""
        found = []
        for one in _pages(
            lambda token: self._queues.list_review_queues(experiment_id=self._experiment, page_token=token)
        ):
            states = [item.status.value for item in self._attached(one.queue_id)]
            done = len(states) - states.count("pending")
            user = one.users[0] if one.users else ""
            found.append(ReviewedQueue(one.name, user, one.creation_time_ms / 1000, len(states), done))
        return sorted(found, key=lambda one: one.created_s)

    def read(self, name: str) -> ReviewPage:
        """Read the question and the items of a queue, with the answers that count now."""
        queue, schema = self._parts(name)
        traces = {info.trace_id: info for info in self._traces(name).values()}
        items = []
        for attached in self._attached(queue.queue_id):
            info = traces[attached.item_id]
            answer = _answer(info.tags[ITEM_TAG], info, schema.name) if attached.status.value == "complete" else None
            value, reason = ("", "") if answer is None else (answer.value, answer.reason)
            items.append(JudgedItem(info.tags[ITEM_TAG], info.request_preview, info.response_preview, value, reason))
        return ReviewPage(schema.instruction, tuple(schema.input.options), tuple(items))

    def answer(self, name: str, item: str, value: str, reason: str) -> None:
        """Add an answer of the queue's user about an item; it takes the place of an earlier one.

        Raises DataError for an item that the queue does not have, or an answer that is no option.
        """
        queue, schema = self._parts(name)
        traces = self._traces(name)
        for key, given, known in (("item", item, list(traces)), ("value", value, list(schema.input.options))):
            if given not in known:
                raise DataError(key, given, "is none of this queue", "load the page again")
        trace, user = traces[item].trace_id, queue.users[0]
        source = self._mlflow.entities.AssessmentSource("HUMAN", user)
        self._mlflow.log_feedback(trace_id=trace, name=schema.name, value=value, rationale=reason, source=source)
        self._queues.set_review_queue_item_status(queue.queue_id, item_id=trace, status="complete", completed_by=user)

    def _parts(self, name: str) -> tuple[Any, Any]:
        """Find the queue of a name and the label schema of its question."""
        queue = self._queues.get_review_queue(name=name, experiment_id=self._experiment)
        return queue, self._schemas.get_label_schema(schema_id=queue.schema_ids[0])

    # ---------------------------------------------------------------- found, or made

    def _ensure_traces(self, queue: str, items: Sequence[ReviewItem]) -> dict[str, Any]:
        """Map item -> its trace, created if missing. The page shows the previews, so they must be stored whole."""
        found = self._traces(queue)
        missing = [one for one in items if one.id not in found]
        if not missing:
            return found
        for one in missing:
            self._make_trace(queue, one)
        self._mlflow.flush_trace_async_logging()  # a queue refuses traces that are not stored yet
        found = self._traces(queue)
        for one in missing:
            shown = found.get(one.id)
            if shown is None or (shown.request_preview, shown.response_preview) != (one.request, one.response):
                rule = (
                    f"did not store the text of item {one.id} whole ({len(one.request) + len(one.response)} characters)"
                )
                remedy = "use MLflow on SQLite, whose texts have no limit, or shorter answers"
                raise ReviewError("MLflow", without_secrets(self._uri), rule, remedy)
        return found

    def _make_trace(self, queue: str, item: ReviewItem) -> None:
        from mlflow.entities.trace_location import MlflowExperimentLocation

        tags = {QUEUE_TAG: queue, ITEM_TAG: item.id}
        with self._mlflow.start_span(
            "comparison", trace_destination=MlflowExperimentLocation(self._experiment)
        ) as span:
            span.set_inputs({"messages": [{"role": "user", "content": item.request}]})
            span.set_outputs(item.response)
            self._mlflow.update_current_trace(tags=tags, request_preview=item.request, response_preview=item.response)

    def _traces(self, queue: str) -> dict[str, Any]:
        def page(token: str | None) -> Any:
            return self._client.search_traces(
                locations=[self._experiment],
                filter_string=f"tags.`{QUEUE_TAG}` = '{queue}'",
                include_spans=False,
                max_results=PAGE,
                page_token=token,
            )

        infos = [trace.info for trace in _pages(page)]
        return {info.tags[ITEM_TAG]: info for info in sorted(infos, key=lambda info: -info.request_time)}

    def _ensure_schema(self, question: ReviewQuestion) -> Any:
        """Find or create the question's label schema: named as the question, plus a digest if it differs."""
        first = self._schema(question.name)
        name = question.name if first is None or self._shows(first, question) else f"{question.name} {question.digest}"
        return (first if name == question.name else self._schema(name)) or self._schemas.create_label_schema(
            name,
            type="feedback",
            input=self._schemas.InputCategorical(options=list(question.options)),
            instruction=question.instruction,
            enable_comment=True,
            experiment_id=self._experiment,
        )

    def _shows(self, schema: Any, question: ReviewQuestion) -> bool:
        choice = schema.input if isinstance(schema.input, self._schemas.InputCategorical) else None
        shown = None if choice is None else tuple(choice.options)
        return bool((schema.instruction, shown) == (question.instruction, question.options))

    def _schema(self, name: str) -> Any:
        return self._found(lambda: self._schemas.get_label_schema(name, experiment_id=self._experiment))

    def _ensure_queue(self, name: str, user: str, schema: str) -> Any:
        return self._found(
            lambda: self._queues.get_review_queue(name=name, experiment_id=self._experiment)
        ) or self._queues.create_review_queue(
            name, queue_type="custom", users=[user], schema_ids=[schema], experiment_id=self._experiment
        )

    def _attached(self, queue_id: str) -> Iterator[Any]:
        return _pages(lambda token: self._queues.list_review_queue_items(queue_id, max_results=PAGE, page_token=token))

    def _found(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except self._mlflow.exceptions.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def _url(self, queue_id: str) -> str:
        """Address of the queue's page, "" without a server."""
        if not self._uri.startswith(("http://", "https://")):
            return ""
        page = f"#/experiments/{self._experiment}/review-queue?selectedQueueId={queue_id}"
        return without_secrets(f"{self._uri.rstrip('/')}/{page}")


def _pages(read: Callable[[str | None], Any]) -> Iterator[Any]:
    token: str | None = None
    while True:
        page = read(token)
        yield from page
        token = page.token
        if not token:
            return


def _answer(item: str, trace: Any, question: str) -> ReviewAnswer | None:
    """The newest answer to the question on a trace; None if it was completed without one."""
    given: list[Any] = [
        one for one in trace.assessments if one.name == question and one.valid is not False and one.feedback is not None
    ]
    if not given:
        return None
    newest: Any = max(given, key=lambda one: one.last_update_time_ms)
    return ReviewAnswer(item, str(newest.feedback.value), newest.rationale or "", newest.source.source_id)
