from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.cli import main
from tests.pipelines.mini import write_mini

HEAVY = ("torch", "transformers", "vllm", "ray", "deepspeed", "prefect", "mlflow")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    return tmp_path


def cli(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipelines.cli", *arguments],
        env=os.environ | {"RLHF_HOME": str(home), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["plan", "tiny/full", "--set", "ppo.kl_coeff=1"],
            "ppo.kl_coeff = 1: unknown key; did you mean ppo.kl_coef?\n",
        ),
        (["plan", "tiny/nothing_like_it_at_all"], "profile = 'tiny/nothing_like_it_at_all': no such file"),
        (["explain", "sfft"], "explain 'sfft': no such stage; this pipeline has prepare_data, sft"),
        (["chat", "ppo", "--once", "hello"], "input = 'ppo': no PolicyRef has this label"),
    ],
)
def test_what_is_refused_takes_one_line_and_status_2(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(line) and error.count("\n") == 1


def test_plan_prints_a_line_per_stage(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(write_mini(here)), "--until", "sft"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["prepare_data", "RUN"], ["sft", "RUN"]]


def test_explain_prints_the_whole_key(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "prepare_data", "--profile", str(write_mini(here))]) == 0
    out = capsys.readouterr().out
    assert out.startswith("prepare_data: RUN: first run\n")
    assert '"stage": "prepare_data"' in out and '"seed": 17' in out


def test_an_empty_store_is_listed_verified_and_collected(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [main(["store", "ls"]), main(["store", "verify"]), main(["store", "gc", "--dry-run"]), main(["runs"])] == [
        0
    ] * 4
    out = capsys.readouterr().out
    assert "all sound" in out and "would free 0.0 MiB in 0 items" in out


@pytest.mark.parametrize(
    "verb", ["import pipelines.cli", "import pipelines.full, pipelines.plan, pipelines.run, pipelines.verbs"]
)
def test_no_engine_is_imported_before_it_is_needed(verb: str) -> None:
    code = f"{verb}; import sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.engine
@pytest.mark.slow
def test_a_whole_run_its_repetition_and_a_changed_rate(tmp_path: Path) -> None:
    profile, home = str(write_mini(tmp_path)), tmp_path / "home"

    first = cli(home, "run", profile)
    assert first.returncode == 0, first.stderr
    assert decisions(first.stdout) == {
        "prepare_data": "RUN",
        "sft": "RUN",
        "ppo": "RUN",
        "evaluate/base/generate": "RUN",
        "evaluate/sft/generate": "RUN",
        "evaluate/ppo/generate": "RUN",
        "evaluate": "RUN",
    }
    assert re.search(r"^ppo +-?\d+\.\d\d \[-?\d+\.\d\d, -?\d+\.\d\d\]", first.stdout, re.M)
    assert "rlhf up" in first.stdout.splitlines()[-1]

    second = cli(home, "run", profile)
    assert set(decisions(second.stdout).values()) == {"HIT"}

    changed = cli(home, "run", profile, "--set", "ppo.optimizer.learning_rate=0.001")
    assert changed.returncode == 0, changed.stderr
    after = decisions(changed.stdout)
    assert [label for label, action in after.items() if action != "HIT"] == ["ppo", "evaluate/ppo/generate", "evaluate"]
    assert "ppo: RUN: ppo.optimizer.learning_rate:" in changed.stdout

    talk = cli(home, "chat", "ppo", "--once", "hello", "--max-tokens", "4")
    assert talk.returncode == 0, talk.stderr


def decisions(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(\S+): (HIT|RUN|RESUME|ATTACH): ", text, re.M))
