"""Judge comparisons with keys on a page of this machine (`rlhf judge`); the answers go to MLflow's review queue."""

import argparse
import hmac
import json
import secrets
import webbrowser
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from pipelines.cli.common import print_line
from pipelines.services.home import Home
from pipelines.services.user_servers import tracking_uri
from rlhf_core.errors import ConfigError, RlhfError, nearest
from rlhf_core.http.door import Door
from rlhf_core.http.serving import BodyLimits, BodyRefused, limited, listening, read_body
from rlhf_core.tracking.mlflow_client import database_file
from rlhf_core.tracking.review_queues import ReviewedQueue, ReviewQueues, review_errors

PAGE = Path(__file__).with_name("judge.html")
LIMITS = BodyLimits(max_bytes=2**20)
NOTHING = "no run waits for judgments; start one whose annotator has type = 'mlflow'"


def judge(options: argparse.Namespace) -> None:
    """Serve the page of a queue until Ctrl-C, and open it in the browser if there is one."""
    uri = tracking_uri(Home.here())
    database = database_file(uri)
    if database is not None and not database.is_file():
        raise ConfigError(NOTHING)
    with review_errors(uri):
        reviews = ReviewQueues(uri, options.experiment)
        queue = choose_queue(options.annotator, reviews.queues())
    with listening("127.0.0.1", options.port) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        print_line(f"queue {queue.name}, {queue.done} of {queue.items} judged: {url}  (Ctrl-C ends it)")
        webbrowser.open(url)
        with suppress(KeyboardInterrupt):
            uvicorn.Server(limited(page_of(reviews, queue.name, uri))).run(sockets=[listener])
    print_line("judgments count as they are when the run goes on: `rlhf runs` has its command")


def choose_queue(annotator: str, queues: list[ReviewedQueue]) -> ReviewedQueue:
    """The newest queue of an annotator, unfinished ones first. Without a name there must be one unfinished queue."""
    found = [one for one in queues if annotator in ("", one.user, one.name)]
    if not queues:
        raise ConfigError(NOTHING)
    if not found:
        users = sorted({one.user for one in queues})
        raise ConfigError("annotator", annotator, "has no queue", nearest(annotator, users))
    users = sorted({one.user for one in found if one.done < one.items})
    if len(users) > 1:
        raise ConfigError("annotator", annotator, "several have a queue", f"choose from {', '.join(users)}")
    return max(found, key=lambda one: (one.done < one.items, one.created_s))


def page_of(reviews: ReviewQueues, name: str, uri: str) -> Door:
    """The application: the page, the queue as JSON, and answers; only the user who started it may enter."""

    ids: dict[str, str] = {}
    """Name of an item on the page -> its id, which may tell where an answer comes from."""
    key = secrets.token_bytes(16)

    def opaque(item: str) -> str:
        """An id that does not tell where an answer comes from. It is the same until the server ends."""
        name = hmac.new(key, item.encode(), "sha256").hexdigest()[:16]
        ids[name] = item
        return name

    def page(_: Request) -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    def queue(_: Request) -> Response:
        with review_errors(uri):
            found = asdict(reviews.read(name))
        return JSONResponse(found | {"items": [one | {"id": opaque(one["id"])} for one in found["items"]]})

    async def answer(request: Request) -> Response:
        given = json.loads(await read_body(request, LIMITS))
        if given["item"] not in ids:
            raise ConfigError("item", given["item"], "is none of this queue", "load the page again")
        with review_errors(uri):
            reviews.answer(name, ids[given["item"]], given["value"], given["reason"])
        return PlainTextResponse("saved")

    def refused(_: Request, error: Exception) -> Response:
        return PlainTextResponse(str(error), error.status if isinstance(error, BodyRefused) else 422)

    routes = [Route("/", page), Route("/queue", queue), Route("/answer", answer, methods=["POST"])]
    errors = dict.fromkeys((RlhfError, BodyRefused, ValueError, KeyError, TypeError), refused)
    return Door(Starlette(routes=routes, exception_handlers=errors), pages=True)
