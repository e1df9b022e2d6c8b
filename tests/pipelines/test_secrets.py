"""A run with a secret in every kind of place, servers that repeat what they are sent, and all that the run wrote."""

import base64
import hashlib
import http.server
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow.parquet as pq
import pytest
from prefect.runtime import flow_run

from pipelines.execution.executor import RunOptions
from pipelines.execution.opening import open_run, store_of
from pipelines.execution.plan import plan_stages
from pipelines.execution.run import run_stages
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import PipelineConfig, load_profile
from pipelines.prefect_flows import pipeline_flows
from pipelines.services.home import Home
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards import remote
from rlhf_core.tracking.memory import MemoryTracker
from tests.pipelines.prefect_flows.test_tasks import api
from tests.support.listener import Notes
from tests.support.small_pipeline import MINI

SECRETS = {
    "FUNCTION_SECRET": "of-the-function/7c1f",
    "ENVIRONMENT_SECRET": "of the environment 2b9e",
    "PROGRAM_SECRET": "of-the-program-55d0",
    "REMOTE_PASSWORD": "of-the-remote@url/8e3a",
    "REMOTE_TOKEN": "of-the-remote-token-b06c",
    "JUDGE_HOOK": "of-the-judge-hook-91aa",
    "JUDGE_TOKEN": "of-the-judge-token-f4d2",
}

FUNCTION = """
def reward(prompts, completions, api_key, headers, **_):
    assert headers == {"Authorization": f"Bearer {api_key}"} and not api_key.startswith("env:")
    if sum(map(ord, str(completions[0]))) % 2:
        raise RuntimeError(f"the service refuses {api_key!r}")
    return [1.0]
"""
ENVIRONMENT = """
from rlhf_core.agents.environment import StepResult

class World:
    def __init__(self, options):
        self.password = options["password"]
        assert not self.password.startswith("env:")

    def step(self, action, turn, **_):
        if sum(map(ord, action)) % 2:
            raise RuntimeError(f"{self.password} is refused")
        return StepResult("", reward=1.0, done=True)
"""
PROGRAM = """
import hashlib, json, os, sys, urllib.request

print("I was given", os.environ["SERVICE_KEY"], file=sys.stderr)
body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
sys.exit(hashlib.sha256(os.environ["SERVICE_KEY"].encode()).hexdigest() != sys.argv[1])
"""
SECTIONS = """
[rejection_sampling.generate]
samples_per_prompt = 2
sampling = {{max_tokens = 6}}
[rejection_sampling.generate.agent]
type = "program"
command = ["python", "{folder}/program.py", "{digest}"]
variables = {{SERVICE_KEY = "env:PROGRAM_SECRET"}}
needs_reward = false
[rejection_sampling.score.rewards.terms.mine]
type = "function"
function = "{folder}/mine.py:reward"
batch_size = 1
on_failure = "invalid"
weight = 0.0
arguments = {{api_key = "env:FUNCTION_SECRET", headers = {{Authorization = "Bearer ${{env:FUNCTION_SECRET}}"}}}}
[rejection_sampling.score.rewards.terms.far]
type = "remote"
urls = ["http://me:${{env:REMOTE_PASSWORD}}@{host}/get_reward"]
retries = 1
on_failure = "invalid"
weight = 0.0
[rejection_sampling.score.rewards.terms.near]
type = "remote"
urls = ["http://{host}/get_reward"]
token_env = "REMOTE_TOKEN"
retries = 0
on_failure = "invalid"
weight = 0.0
[rejection_sampling.score.rewards.terms.judge]
type = "judge"
url = "http://{host}/${{env:JUDGE_HOOK}}/v1"
token_env = "JUDGE_TOKEN"
model = "m"
template = "Rate {{completion}}"
retries = 0
on_failure = "invalid"
weight = 0.0
[rejection_sampling.score.rewards.terms.finished]
type = "function"
function = "rlhf_core.rewards.verifiable:finished"
[rejection_sampling.select]
type = "best_of_n"
drop_truncated = false
[rejection_sampling.sft]
loop = {{batch_size = 8, epochs = 1}}
[publish]
policy = "rejection_sampling"
[evaluate.evaluate]
gold = "rlhf_contrib.worlds.support:gold_reward"
reference = "base"
[evaluate.generate]
samples_per_prompt = 1
sampling = {{max_tokens = 6}}
agent = {{type = "environment", environment = "{folder}/world.py:World", retries = 0, \
arguments = {{options = {{password = "env:ENVIRONMENT_SECRET"}}}}}}
"""


@contextmanager
def repeating() -> Iterator[tuple[str, list[str]]]:
    """Serve 500 with all that was asked, headers too; yield the host, and what was asked."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(f"{self.path} {dict(self.headers)}")
            content = asked[-1].encode()
            self.send_response(500)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def write_profile(folder: Path, host: str) -> Path:
    folder.mkdir()
    for name, text in (("mine", FUNCTION), ("world", ENVIRONMENT), ("program", PROGRAM)):
        (folder / f"{name}.py").write_text(text)
    digest = hashlib.sha256(SECRETS["PROGRAM_SECRET"].encode()).hexdigest()
    kept = MINI[: MINI.index("[sft]")]
    path = folder / "mine.toml"
    path.write_text(kept + SECTIONS.format(folder=folder, host=host, digest=digest))
    return path


@contextmanager
def everything_logged(path: Path) -> Iterator[None]:
    """Write all log records of this process to a file, those of libraries too."""
    root, handler = logging.getLogger(), logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()


def run(profile: Path, home: Home, *overrides: str, until: str = "") -> MemoryTracker:
    config, tracker = load_profile(profile, overrides), MemoryTracker()
    options = RunOptions(until=until)
    with open_run(config, lifecycle, options, home=home, tracker=tracker, listener=Notes()) as opened:
        try:
            run_stages(opened, lifecycle, opened.directly, tags={})
        finally:
            kept = [vars(tracker), *(vars(stage) for stage in tracker.stages.values())]
            with (home.root / "tracked.txt").open("a") as file:
                file.write("\n".join(map(repr, kept)))
    return tracker


def spellings(secret: str) -> set[bytes]:
    """Return the ways in which a secret may stand in a file."""
    said = [secret, quote(secret, safe=""), quote(secret)]
    encoded = [base64.b64encode(text.encode()).decode() for text in (secret, f"me:{secret}")]
    return {text.encode() for text in (*said, *encoded)}


def content(path: Path) -> bytes:
    """Return what a file holds; tables are compressed."""
    return str(pq.read_table(path).to_pylist()).encode() if path.suffix == ".parquet" else path.read_bytes()


def written(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): content(path) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_no_secret_is_in_anything_that_a_run_wrote_and_the_references_are(tmp_path, home, monkeypatch):
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    with repeating() as (host, asked), everything_logged(home.logs / "all.log"):
        profile = write_profile(tmp_path / "mine", host)
        tracker = run(profile, home)
        terms = "rejection_sampling.score.rewards.terms"
        for name in ("mine", "far", "near", "judge"):
            with pytest.raises(RewardError, match=r"\*\*\*|\$\{env:JUDGE_HOOK\}"):
                run(profile, home, f"{terms}.{name}.on_failure=fail", f"{terms}.{name}.weight=1.0")
        # And kept with the answers, as why they have no reward.
        run(profile, home, f"{terms}.mine.weight=1.0", until="rejection_sampling/score")

    store = store_of(load_profile(profile), home)
    sent = "".join(asked)
    for name in ("REMOTE_TOKEN", "JUDGE_TOKEN", "JUDGE_HOOK"):
        assert SECRETS[name] in sent
    assert base64.b64encode(f"me:{SECRETS['REMOTE_PASSWORD']}".encode()).decode() in sent
    files = written(home.root)
    places = [
        f"{name} in {path}"
        for path, said in files.items()
        for name, secret in SECRETS.items()
        if any(spelling in said for spelling in spellings(secret))
    ]
    assert places == [] and len(files) > 50
    for place, text in {
        "all.log": b"returned status 500: /get_reward",
        ".parquet": b"mine: raised RuntimeError: the service refuses '***'",
        "/tables/keys/": b"BatchFailed: rewards.near = ",
    }.items():
        assert any(text in said for path, said in files.items() if place in path)

    stages = {one.label: one for one in store.records() if one.label in ("rejection_sampling/score", "publish")}
    arguments = stages["rejection_sampling/score"].payload["config"]["rewards"]["terms"]["mine"]["arguments"]
    assert arguments["api_key"] == "env:FUNCTION_SECRET"
    assert arguments["headers"] == {"Authorization": "Bearer ${env:FUNCTION_SECRET}"}
    card = (store.path(stages["publish"].handle) / "README.md").read_text()
    for name in ("FUNCTION_SECRET", "ENVIRONMENT_SECRET", "PROGRAM_SECRET"):
        assert f"env:{name}" in card
    params = json.dumps([stage.params for stage in tracker.stages.values()])
    for reference in ("env:FUNCTION_SECRET", "me:${env:REMOTE_PASSWORD}@", "${env:JUDGE_HOOK}"):
        assert reference in params
    # A result is that of the reference, whatever its variable holds.
    monkeypatch.setenv("FUNCTION_SECRET", "another one 4411")
    again = load_profile(profile)
    assert {stage.decision.action for stage in plan_stages(again, store)} == {"HIT"}


@pytest.mark.slow
def test_prefect_keeps_the_references_of_a_flow_runs_parameters(tmp_path, prefect_home, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    given: list[tuple[str, PipelineConfig]] = []
    monkeypatch.setattr(pipeline_flows, "run_served", lambda config, *rest: given.append((str(flow_run.id), config)))
    profile = load_profile(write_profile(tmp_path / "mine", "127.0.0.1:1"))
    pipeline_flows.full(config=profile.model_dump(mode="json", exclude_none=True))
    ((run_of_flow, read),) = given
    # By its identity: a list of the server's runs has a limit, and the other tests' runs are in it.
    stored = api(f"/flow_runs/{run_of_flow}")["parameters"]["config"]["rejection_sampling"]
    assert stored["score"]["rewards"]["terms"]["mine"]["arguments"]["api_key"] == "env:FUNCTION_SECRET"
    assert stored["generate"]["agent"]["variables"] == {"SERVICE_KEY": "env:PROGRAM_SECRET"}
    assert read == profile
    in_database = b"".join(path.read_bytes() for path in prefect_home.root.rglob("*.db*"))
    assert b"env:FUNCTION_SECRET" in in_database
    assert not [name for name, secret in SECRETS.items() if secret.encode() in in_database]


def test_a_missing_variable_ends_the_run_before_its_first_stage(tmp_path, home, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("FUNCTION_SECRET")
    profile = write_profile(tmp_path / "mine", "127.0.0.1:1")
    key = r"rejection_sampling\.score\.rewards\.terms\.mine\.arguments\.api_key"
    with pytest.raises(ConfigError, match=rf"{key} = 'env:FUNCTION_SECRET': FUNCTION_SECRET is not set; export it"):
        run(profile, home)
    assert store_of(load_profile(profile), home).records() == []
