"""Files for other places: written once, and never over others."""

import shlex

import pytest

from pipelines.cli.main import main
from pipelines.cli.scaffold_verb import PLACES, TEMPLATES


@pytest.mark.parametrize("place", [path.name for path in TEMPLATES.iterdir()])
def test_the_files_of_a_place_are_written_and_no_others_are_replaced(place, tmp_path, capsys):
    out = tmp_path / "my files" / "here"
    for _ in range(2):  # the same files again are no change
        assert main(["scaffold", place, "--out", str(out)]) == 0
        assert {path.name for path in out.iterdir()} == {*PLACES[place].files, *PLACES[place].pins}
    assert shlex.quote(str(out)) in capsys.readouterr().out.splitlines()[-1], "the next command names the folder"
    changed = out / PLACES[place].files[-1]
    changed.write_text("mine")
    assert main(["scaffold", place, "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"--out = {str(out)!r}: has {changed.name} with other content; ")
    assert changed.read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["scaffold", "slurm", "--out", str(tmp_path / "file")]) == 2
    assert ": cannot be written: " in capsys.readouterr().err
