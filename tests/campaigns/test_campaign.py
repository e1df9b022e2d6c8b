"""A short campaign of kills over the whole pipeline, in a process of its own: it forks, and a test process has threads."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from campaigns.durability import checks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
KILLS = 5


@dataclass(frozen=True)
class Seen:
    """What a campaign left: its folder, the lives of its pipelines, its exit status and its output."""

    folder: Path
    lives: list[dict[str, Any]]
    status: int
    output: str


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Seen:
    folder = tmp_path_factory.mktemp("campaign")
    options = [
        "--kills",
        str(KILLS),
        "--seed",
        "5",
        "--pairs",
        "1",
        "--others",
        "0.6",
        "--mlflow-every",
        "0",
        "--keep",
        str(folder),
    ]
    command = [sys.executable, "-m", "campaigns.durability", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    files = sorted(folder.glob("lives-*.jsonl"))
    lives = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return Seen(folder, lives, done.returncode, done.stdout + done.stderr)


def test_pipelines_that_were_killed_end_with_the_digests_and_curves_of_their_twin(seen):
    kills = Counter(kill["kind"] for life in seen.lives for kill in life["kills"])
    assert sum(kills.values()) >= KILLS, seen.output
    assert len(kills) >= 3, "the seed should give several kinds of instants"
    assert [life["problems"] for life in seen.lives] == [[]] * len(seen.lives)


def test_nothing_is_left_of_pipelines_that_were_killed(seen):
    assert [life["leftovers"] for life in seen.lives] == [[]] * len(seen.lives), seen.output
    assert seen.status == 0, seen.output


def test_runs_that_are_stopped_or_edited_are_among_them(seen):
    done = Counter(other["kind"] for life in seen.lives for other in life["others"])
    assert len(done) >= 2 and sum(done.values()) >= 2, "the seed should give several kinds"
    assert all(kind in seen.output for kind in done), "each is in the table"


def test_two_runs_at_once_compute_each_stage_once(seen):
    pair, twin = checks.results(seen.folder / "two-of-two-0000"), checks.results(seen.folder / "memory")
    assert len(twin) == 28
    assert list(checks.differences(pair, twin)) == []
    assert {label: one.attempts for label, one in pair.items()} == dict.fromkeys(twin, 1)
