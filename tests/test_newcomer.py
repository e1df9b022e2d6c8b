"""What a newcomer does, by real processes: a project of `rlhf init`, and the commands of README and tutorial as shown."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_docs import ROOT, commands_of, write_files

Ran = tuple[int, str]
MISLEADING = re.compile(r"Traceback|[Ww]arning|ERROR")

ROWS = [
    {"prompt": f"{question} (order {number})", "completion": answer}
    for number in range(8)
    for question, answer in (
        ("Where is my parcel?", "It arrives tomorrow."),
        ("My bowl is cracked.", "A new bowl is on its way."),
        ("May I return the vase?", "Of course. Here is a label."),
    )
]
REWARD = '''
def reward(prompts, completions, labels, **columns):
    """1 for an empty answer, falling to 0 at 60 characters."""
    return [max(0.0, 1 - len(answer) / 60) for answer in completions]
'''


@pytest.fixture
def rlhf(tmp_path, record_property: Callable[[str, object], None]) -> Callable[..., Ran]:
    """Run one command in a folder as its shell does, print and record its seconds, and return status and output."""

    def run(command: str, folder: Path = tmp_path, **variables: str) -> Ran:
        words, began = shlex.split(command), time.monotonic()
        assert words[0] == "rlhf"
        done = subprocess.run(
            [sys.executable, "-m", "pipelines.cli.main", *words[1:]],
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name != "RLHF_HOME"} | variables,
            capture_output=True,
            text=True,
            timeout=1700,
            check=False,
        )
        seconds = f"{time.monotonic() - began:.1f} s"
        sys.stdout.write(f"{seconds:>8}  {command}\n")
        record_property(command, seconds)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_own_rows_and_an_own_reward_have_a_result_after_six_commands(tmp_path, rlhf):
    outputs = []

    def ran(command: str, folder: Path) -> str:
        status, output = rlhf(command, folder)
        assert status == 0 and MISLEADING.search(output) is None, f"{command}: {status}\n{output}"
        outputs.append(output)
        return output

    ran("rlhf init desk", tmp_path)
    desk = tmp_path / "desk"
    (desk / "mine.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    profile = (desk / "profile.toml").read_text()
    (desk / "profile.toml").write_text(profile.replace("rows.jsonl", "mine.jsonl"))
    (desk / "reward.py").write_text(REWARD)
    assert f"{len(ROWS)} rows" in ran("rlhf data mine.jsonl", desk)
    assert "RUN" in ran("rlhf plan profile.toml", desk)
    made = ran("rlhf run profile.toml", desk)
    found = re.search(r"report: (\S+)", made)
    assert found is not None
    assert all(f"{policy}</td>" in Path(found[1]).read_text() for policy in ("sft", "ppo"))
    assert re.search(r"^Completed +desk.*gold", ran("rlhf runs", desk), flags=re.M)
    assert "of the run desk" in ran('rlhf chat ppo --profile profile.toml --once "My bowl is cracked."', desk)
    assert len(outputs) == 6


# ---------------------------------------------------------------- README and tutorial

PLACES = ["docs/tutorial/own_data.md"]
LONG = ["docs/tutorial/own_reward.md", "docs/tutorial/first_run.md", "README.md"]
"""Pages whose commands train tiny profiles to their end, for up to a quarter of an hour each: RLHF_TEST_LONG_PAGES=1 runs them, too."""
MEANS = {"make demo": "rlhf run tiny/full"}
"""What a target of the Makefile runs, after its installation."""
ELSEWHERE = ("make", "source", "export", "prefect", "rlhf up", "rlhf down", "rlhf status")
"""Commands that need services or install; the tests of services and deployments have them."""
REFUSED = {"rlhf run own_data.toml": "prepare_data.prompts: has no rows"}
"""Commands that the page announces to fail, and the words with which they do."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """The state folder of all pages: what one of them has made is a hit in the next."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place", PLACES + LONG * bool(os.environ.get("RLHF_TEST_LONG_PAGES")))
def test_the_commands_of_a_page_run_with_the_files_that_it_shows(place, shared, tmp_path, rlhf):
    page = ROOT / place
    write_files(page, tmp_path)
    for command in (MEANS.get(line, line) for line in commands_of(page)):
        if command.startswith(ELSEWHERE):
            continue
        status, output = rlhf(command, tmp_path, RLHF_HOME=str(shared))
        refused = REFUSED.get(command, "")
        assert status == (2 if refused else 0) and refused in output, f"{command}: {status}\n{output}"
        assert "Traceback" not in output, output
