"""A page of somebody else in a real browser, beside our Prefect server: it tries everything and gets nothing."""

import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.parse import urlsplit

import pytest

from pipelines.services.home import sign_in_link

pytestmark = pytest.mark.slow
BROWSER = next((found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), "")
if not BROWSER:
    pytest.skip("no Chromium is installed", allow_module_level=True)

PAGE = (Path(__file__).parent / "foreign_page.html").read_text()
DASHBOARD = "Flow Runs|Run a task or flow to get started"
REBOUND = "rebound.example"
"""A name that the page's owner lets resolve to 127.0.0.1 (DNS rebinding)."""


@contextmanager
def page_of_somebody_else(text: str) -> Iterator[tuple[int, Queue[dict[str, str]]]]:
    """Serve the page on a port of its own; give the port, and what the page tells its maker."""
    told: Queue[dict[str, str]] = Queue()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self) -> None:
            told.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1], told
    finally:
        server.shutdown()


@contextmanager
def browser_at(url: str, folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Show a page in a new browser, which ends with the block."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    command += [f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1", *options, url]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def shown(url: str, folder: Path) -> str:
    """Return the page as it is after its scripts ran."""
    with browser_at(url, folder, "--virtual-time-budget=30000", "--dump-dom") as process:
        return process.communicate(timeout=120)[0]


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", REBOUND])
@pytest.mark.parametrize("aimed_at", ["127.0.0.1", REBOUND])
def test_a_foreign_page_tries_everything_and_gets_nothing(tmp_path, client, name, aimed_at):
    from prefect import flow

    flow_id = client.create_flow(flow(name="wanted by a foreign page")(lambda: None))
    api = f"http://{aimed_at}:{urlsplit(str(client.api_url)).port}/api"
    run = {"flow_id": str(flow_id), "name": "made by a foreign page", "state": {"type": "SCHEDULED"}}
    with (
        page_of_somebody_else(PAGE.replace("API_URL", api).replace("RUN_BODY", json.dumps(run))) as (port, told),
        browser_at(f"http://{name}:{port}/", tmp_path / "browser", "--remote-debugging-port=0"),
    ):
        answers = told.get(timeout=60)
    assert len(answers) == 10
    # A request that asks no leave is sent, and its answer is closed to the page: "opaque", without a status or a text.
    closed = {"silent": "opaque 0 ", "cookies": "opaque 0 ", "beacon": "sent", "form": "sent"}
    assert answers == {attempt: closed.get(attempt, "refused") for attempt in answers}
    assert [one.name for one in client.read_flow_runs() if one.name == run["name"]] == []


def test_a_name_that_was_bound_to_this_machine_shows_a_refusal(tmp_path, client):
    page = shown(f"http://{REBOUND}:{urlsplit(str(client.api_url)).port}/dashboard", tmp_path / "browser")
    assert "this server answers only requests to 127.0.0.1 and localhost" in page


def test_the_pages_ask_for_the_auth_string_and_a_link_brings_it(tmp_path, prefect_home, client):
    url = f"http://127.0.0.1:{urlsplit(str(client.api_url)).port}"
    stranger = shown(f"{url}/dashboard", tmp_path / "stranger")
    assert "Login" in stranger and not re.search(DASHBOARD, stranger)
    owner = shown(sign_in_link(url, prefect_home.prefect_auth_string), tmp_path / "owner")
    assert "Login" not in owner and re.search(DASHBOARD, owner)
