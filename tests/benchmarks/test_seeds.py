"""Options and results that benchmarks over seeds share."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import arms, methods, over_optimization
from benchmarks.seeds import add_first, keep, latest, read, seeds_parser
from pipelines.cli.main import main as command


@dataclass(frozen=True)
class Row:
    seed: int
    value: float


def test_the_latest_line_of_a_seed_counts_in_the_order_of_seeds(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert read(file, Row) == []
    lines = [keep(row, file) for row in (Row(18, 1.0), Row(17, 2.0), Row(18, 3.0))]
    assert file.read_text().splitlines() == lines
    assert latest(read(file, Row), lambda row: row.seed) == [Row(17, 2.0), Row(18, 3.0)]


def test_the_options_have_the_defaults_of_the_profiles() -> None:
    parser = seeds_parser("about")
    add_first(parser)
    options = parser.parse_args([])
    assert (options.seeds, options.first, options.overrides, options.print_only) == (3, 17, [], False)


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
