"""A headless Chromium that tests drive over WebDriver (https://www.w3.org/TR/webdriver2), without Selenium."""

import base64
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

CHROMIUM = next((found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), "")
DRIVER = shutil.which("chromedriver") or ""
PATIENCE_S = 180.0
PICTURES = os.environ.get("RLHF_TEST_PICTURES", "")
"""Folder to which tests write pictures of pages, for docs/images."""


class Browser:
    """A session with a browser. `until` waits for a script to return something, so that no test sleeps and hopes."""

    def __init__(self, client: httpx.Client, session: str) -> None:
        self._client = client
        self._session = f"/session/{session}"

    def open(self, url: str) -> None:
        """Show a page."""
        self._ask("POST", "url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what a script returns in the page."""
        return self._ask("POST", "execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, *arguments: Any) -> Any:
        """Return the first value of the script that is not empty."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = self.run(script, *arguments)
            if found:
                return found
            time.sleep(0.2)
        text = self.run("return document.body.innerText")
        raise AssertionError(f"{script!r} of {arguments} stayed empty on the page:\n{text[:2000]}")

    def click(self, selector: str, text: str = "") -> None:
        """Click the first element that a CSS selector finds, with this text if one is given, when it can be clicked."""
        script = """const found = [...document.querySelectorAll(arguments[0])].find(
            one => !one.disabled && (!arguments[1] || one.innerText.trim() === arguments[1]));
            if (found) found.click();
            return Boolean(found)"""
        self.until(script, selector, text)

    def write(self, selector: str, text: str) -> None:
        """Type a text into the element that a CSS selector finds."""
        element = self._ask("POST", "element", {"using": "css selector", "value": selector})
        [name] = element.values()
        self._ask("POST", f"element/{name}/value", {"text": text})

    def write_labelled(self, label: str, text: str) -> None:
        """Type a text into the field under a label."""
        script = """const found = [...document.querySelectorAll('label')].find(one => one.innerText.trim() === arguments[0]);
            const field = found && (found.control || found.parentElement.querySelector('textarea,input')
                || found.parentElement.parentElement.querySelector('textarea,input'));
            if (field) field.setAttribute('data-wanted', arguments[0]);
            return Boolean(field)"""
        self.until(script, label)
        self.write(f"[data-wanted='{label}']", text)

    def picture(self) -> bytes:
        """Return the page as PNG."""
        return base64.b64decode(self._ask("GET", "screenshot"))

    def _ask(self, method: str, command: str, body: dict[str, Any] | None = None) -> Any:
        response = self._client.request(method, f"{self._session}/{command}", json=body)
        assert response.is_success, response.text[:1000]
        return response.json()["value"]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser with its profile in `folder`; it ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, trust_env=False)
    session = ""
    try:
        _await_driver(client)
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,800"]
        chrome = {"binary": CHROMIUM, "args": [*arguments, f"--user-data-dir={folder}"]}
        wanted = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": chrome}}}
        answer = client.post("/session", json=wanted)
        assert answer.is_success, answer.text[:1000]
        session = answer.json()["value"]["sessionId"]
        yield Browser(client, session)
    finally:
        with suppress(httpx.HTTPError):
            if session:
                client.delete(f"/session/{session}")
        client.close()
        driver.kill()
        driver.wait()


def _await_driver(client: httpx.Client) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if client.get("/status").json()["value"]["ready"]:
                return
        time.sleep(0.1)
    raise AssertionError("chromedriver did not start")


def keep_picture(page: Browser, name: str) -> None:
    """Write a picture of the page, if pictures are wanted."""
    if PICTURES:
        (Path(PICTURES) / f"{name}.png").write_bytes(page.picture())
