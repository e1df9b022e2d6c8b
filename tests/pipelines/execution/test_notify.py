"""A run tells a receiver on this machine how it ended."""

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from pipelines.execution.gates import StageHeld
from pipelines.execution.run import event_of, notify
from pipelines.flows.profile import load_profile
from pipelines.flows.run_rules import NotifyConfig
from rlhf_core.errors import ConfigError
from rlhf_core.stage.stopping import RunBlocked, RunOverBudget, StageStopped, StageWaiting
from tests.pipelines.execution.test_gates import BLOCK, Trial
from tests.support.small_pipeline import write_mini


class Receiver:
    """A server that keeps the JSON objects that it gets."""

    def __init__(self) -> None:
        got = self.got = list[dict[str, Any]]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def test_a_run_that_is_blocked_and_one_that_finishes_are_told(tmp_path, home, receiver):
    trial, rules = Trial(tmp_path, home), f'[notify]\nwebhook = "{receiver.url}"\n'
    with pytest.raises(RunBlocked):
        trial.run(rules + BLOCK)
    trial.run(rules)
    blocked, finished = receiver.got
    assert (blocked["event"], blocked["run"]) == ("blocked", "mini")
    assert blocked["message"] == "BLOCKED by gate first: total 1.5 < 2 (not run: second, third)"
    assert blocked["links"] == {"prefect.flow_run_id": "f1"} and blocked["time"]
    assert (finished["event"], finished["message"]) == ("finished", "")
    assert not [name for name in trial.tracker.params if name.startswith("notify")]


def test_only_the_wanted_events_are_told_and_secrets_are_not(receiver, monkeypatch):
    monkeypatch.setenv("HOOK", receiver.url)
    config = NotifyConfig(webhook="env:HOOK", events=("failed",))
    notify(config, None, run="night", links={})
    notify(config, ValueError("wrong key sk-abcdefghijklmnop1234"), run="night", links={})
    (told,) = receiver.got
    assert told["event"] == "failed" and "sk-abc" not in told["message"] and told["message"].startswith("wrong key")


def test_slack_gets_one_text_with_links_in_which_nothing_of_a_run_is_markup(receiver):
    config = NotifyConfig(webhook=receiver.url, format="slack")
    links = {"prefect.url": "http://127.0.0.1:4200/runs/flow-run/f1", "prefect.flow_run_id": "f1"}
    notify(config, RunBlocked("BLOCKED: total 1.5 < 2 & <!channel>"), run="mini", links=links)
    notify(config, RunOverBudget("budget.hours = 1"), run="mini", links={})
    blocked = "*mini*: blocked\nBLOCKED: total 1.5 &lt; 2 &amp; &lt;!channel&gt;\n<http://127.0.0.1:4200/runs/flow-run/f1|prefect>"
    assert receiver.got == [{"text": blocked}, {"text": "*mini*: over budget\nbudget.hours = 1"}]


@pytest.mark.parametrize("webhook", ["http://127.0.0.1:9/hook", "env:RLHF_NO_SUCH_VARIABLE"])
def test_a_receiver_that_is_away_is_logged_and_fails_nothing(tmp_path, home, caplog, webhook):
    with caplog.at_level(logging.WARNING, logger="pipelines.execution.run"):
        assert len(Trial(tmp_path, home).run(f'[notify]\nwebhook = "{webhook}"\n')) == 4
    assert "notify.webhook: could not send that the run is finished" in caplog.text
    assert webhook not in caplog.text


def test_every_end_of_a_run_but_an_interruption_is_an_event():
    ends = [None, StageWaiting(""), RunBlocked(), RunOverBudget(), ValueError(), StageStopped(), KeyboardInterrupt()]
    assert [event_of(end) for end in ends] == ["finished", "waiting", "blocked", "over_budget", "failed", None, None]
    assert event_of(StageHeld("", "Blocked")) == "blocked"


@pytest.mark.parametrize(
    ("webhook", "said"),
    [
        ("ftp://host", "must be an http"),
        ("https://me:hunter2@host/hook", "secret in plain text"),
        ("https://host:x/hunter2", r"webhook = \.\.\.: must be an http\(s\) address; give one, or env:NAME"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(tmp_path, webhook, said):
    with pytest.raises(ConfigError, match=said) as error:
        load_profile(write_mini(tmp_path, f'[notify]\nwebhook = "{webhook}"\n'))
    assert "hunter2" not in str(error.value)
