"""Options and results that benchmarks over seeds share."""

from pathlib import Path

import pytest

from benchmarks import arms, methods, over_optimization
from pipelines.cli.main import main as command


@pytest.mark.parametrize("benchmark", [arms, methods, over_optimization])
def test_the_benchmarks_print_what_is_there_and_train_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], benchmark: object
) -> None:
    words = ["specialists"] if benchmark is arms else []
    monkeypatch.setattr("sys.argv", ["benchmark", *words, "--print", "--state", str(tmp_path), "--seeds", "1"])
    assert benchmark.main() == 0
    assert capsys.readouterr().out and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", arms.PROFILES)
def test_the_profiles_beside_the_benchmarks_plan(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    assert command(["plan", str(arms.FOLDER / f"{name}.toml")]) == 0
