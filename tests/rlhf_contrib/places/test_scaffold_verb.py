"""Files for other places: written once, and never over others."""

import shlex

import pytest

from pipelines.cli.main import main
from rlhf_contrib.places.verb import PINS, PLACES, TEMPLATES


@pytest.mark.parametrize("place", PLACES)
def test_the_files_of_a_place_are_written_and_no_others_are_replaced(place, tmp_path, capsys):
    out = tmp_path / "my files" / "here"
    names = sorted([path.name for path in (TEMPLATES / place).iterdir()] + list(PINS.get(place, ())))
    for _ in range(2):  # the same files again are no change
        assert main(["scaffold", place, "--out", str(out)]) == 0
        assert sorted(path.name for path in out.iterdir()) == names
    assert shlex.quote(str(out)) in capsys.readouterr().out.splitlines()[-1], "the next command names the folder"
    changed = out / names[-1]
    changed.write_text("mine")
    assert main(["scaffold", place, "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"--out = {str(out)!r}: has {changed.name} with other content; ")
    assert changed.read_text() == "mine"


def test_the_next_command_is_one_word_for_a_folder_that_a_shell_or_a_program_reads_otherwise(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for given, word in (("-x", "./-x"), ("~/y", f"{tmp_path}/home/y"), ("a b", "'a b'")):
        assert main(["scaffold", "slurm", f"--out={given}"]) == 0
        assert f" {word}/rlhf.sbatch " in capsys.readouterr().out
    assert not (tmp_path / "~").exists()


def test_nothing_is_written_through_a_link(tmp_path, capsys):
    (tmp_path / "rlhf.sbatch").symlink_to(tmp_path / "elsewhere")
    assert main(["scaffold", "slurm", "--out", str(tmp_path)]) == 2
    assert "has rlhf.sbatch with other content" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["scaffold", "slurm", "--out", str(tmp_path / "file")]) == 2
    assert ": cannot be written: " in capsys.readouterr().err
