"""Programs that a SandboxFusion server runs; the stand-in answers as sandbox/server/sandbox_api.py of that project does."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rlhf_contrib.sandbox import fusion
from rlhf_contrib.sandbox.code import code_reward
from rlhf_contrib.sandbox.fusion import KEPT_BYTES, SandboxFusion
from rlhf_contrib.sandbox.local import Limits
from rlhf_core.errors import ConfigError, RewardError
from tests.support.reward_servers import scripted

DOUBLES = json.dumps({"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10\n"]})
Answer = tuple[int, bytes]


def run_code(body: dict[str, Any]) -> Answer:
    """Run the program without any sandbox, and answer as the server does (its own limit on output, too)."""
    assert body["language"] == "python"
    command = [sys.executable, "-I", "-c", body["code"]]
    try:
        done = subprocess.run(command, input=body["stdin"].encode(), capture_output=True, timeout=body["run_timeout"])
    except subprocess.TimeoutExpired:
        return said("Failed", run_result=ran("TimeLimitExceeded", return_code=None))
    streams = {name: getattr(done, name)[:KEPT_BYTES].decode() for name in ("stdout", "stderr")}
    status = "Failed" if done.returncode else "Success"
    return said(status, run_result=ran("Finished", return_code=done.returncode, **streams))


def said(status: str, **parts: Any) -> Answer:
    answer = {"status": status, "message": "", "compile_result": None, "run_result": None, "files": {}}
    return 200, json.dumps(answer | {"executor_pod_name": None} | parts).encode()


def ran(status: str, **parts: Any) -> dict[str, Any]:
    return {"status": status, "execution_time": 0.1, "stdout": None, "stderr": None} | parts


def test_programs_are_judged_as_in_the_sandbox_of_this_machine():
    answers = [
        "```python\nprint(int(input()) * 2)\n```",
        "print(4)",
        "def f(x): return x + 1",
        "class A:\n    def __eq__(self, other): return True\ndef f(x): return A()",
        "import sys\nsys.exit(0)",
        "x",
    ]
    labels = [DOUBLES, DOUBLES, *["assert f(1) == 2"] * 3, None]
    with scripted(run_code) as server:
        url = server.url.removesuffix("/get_reward")
        assert code_reward([""] * 6, answers, labels, sandbox_url=url) == [1.0, 0.0, 1.0, 0.0, 0.0, None]
        half = code_reward([""], answers[1:2], [DOUBLES], score="share", sandbox_url=f"{url}/run_code", memory_mb=128)
    assert half == [0.5]
    asked = [body for body in server.asked if body["memory_limit_MB"] == 128]
    assert [body["stdin"] for body in asked] == ["2\n", "5\n"]
    assert {body["run_timeout"] for body in asked} == {5.0}


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("print(input())", "finished"),
        ("1 / 0", "error"),
        ("while True: pass", "timeout"),
        ("raise MemoryError", "memory"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "memory"),
        ("print('x' * 300_000)", "output"),
        ("print('\ud800')", "error"),
    ],
)
def test_how_a_program_ended_is_told_apart(program, outcome):
    with scripted(run_code) as server, SandboxFusion(server.url, {}) as run:
        assert run(program, "4", limits=Limits(timeout_s=1.0)).outcome == outcome


def test_output_that_the_server_cut_is_no_wrong_answer():
    room = Limits(output_kb=8192)
    with scripted(run_code) as server, SandboxFusion(server.url, {}) as run:
        assert run(f"print('x' * {KEPT_BYTES - 2})", "", limits=room).outcome == "finished"
        assert run(f"print('x' * {KEPT_BYTES})", "", limits=room).outcome == "output"


def answers(*given: Answer) -> Callable[[dict[str, Any]], Answer]:
    left = list(given)
    return lambda body: left.pop(0) if left[1:] else left[0]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (said("SandboxError", message="no room"), "reported an internal error: no room"),
        (said("Failed", run_result=ran("Error", stderr="lost")), "returned no result of a run"),
        (said("Success"), "returned no result of a run"),
        (said("Success", run_result=ran("Finished", return_code=None)), "returned no result of a run"),
        ((200, b"[]"), "returned no result of a run"),
        ((200, b"<html>"), "returned invalid JSON"),
        ((503, b"busy"), "returned status 503: busy"),
    ],
)
def test_what_is_no_result_is_an_error_and_never_a_zero(monkeypatch, answer, problem):
    monkeypatch.setattr(fusion, "FIRST_PAUSE_S", 0.0)
    good = said("Success", run_result=ran("Finished", return_code=0, stdout="4"))
    with scripted(answers(answer)) as server:
        with pytest.raises(RewardError, match=rf"^sandbox_url = '.*/run_code': {problem}"):
            code_reward([""], ["print(4)"], [DOUBLES], sandbox_url=server.url)
        assert len(server.asked) == 3
    with scripted(answers(answer, answer, good)) as server, SandboxFusion(server.url, {}) as run:
        assert run("print(4)", "", limits=Limits()).stdout == "4"


def test_a_server_that_is_not_there_or_hangs_is_an_error_too(monkeypatch):
    monkeypatch.setattr(fusion, "FIRST_PAUSE_S", 0.0)
    with pytest.raises(
        RewardError, match=r"^sandbox_url = 'http://\*\*\*@127.0.0.1:1/run_code': cannot be reached: Conn"
    ):
        code_reward([""], ["x"], ["assert x"], sandbox_url="http://me:hunter2@127.0.0.1:1")
    monkeypatch.setattr(fusion, "QUEUE_S", 0.0)
    with (
        scripted(run_code) as server,
        SandboxFusion(server.url, {}) as run,
        pytest.raises(RewardError, match=r"took longer than 0.3 s|is too slow"),
    ):
        server.answer = lambda body: run_code(body | {"run_timeout": 2.0})
        run("while True: pass", "", limits=Limits(timeout_s=0.3))
    assert len(server.asked) == 1  # what took so long would take so long again


def test_a_server_that_refuses_ends_the_run_and_headers_hold_its_key():
    with scripted(lambda body: (401, b"who are you?")) as server:
        with pytest.raises(ConfigError, match=r"returned status 401: who are you\?; .* sandbox_headers if it requires"):
            code_reward([""], ["x"], ["assert x"], sandbox_url=server.url, sandbox_headers={"X-Api-Key": "hunter2"})
        assert [headers["X-Api-Key"] for headers in server.headers] == ["hunter2"]


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"sandbox_url": "sandbox:8080"}, "must begin with http://"),
        ({"sandbox_headers": {"X-Api-Key": "hunter2"}}, r"sandbox_headers = \['X-Api-Key'\]: goes to no server"),
        (
            {"sandbox_url": "http://127.0.0.1:1", "allow_network": True},
            "the server of sandbox_url has rules of its own",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, refusal):
    with pytest.raises(ConfigError, match=refusal):
        code_reward([""], ["x"], ["assert x"], **options)
