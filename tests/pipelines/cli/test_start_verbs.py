import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pipelines.cli.main import VERBS, _parser, main
from pipelines.flows.profile import load_profile, profile_names
from pipelines.flows.profile_schema import profile_schema


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder as `rlhf init` makes it, which is also the current folder."""
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my_desk"]) == 0
    monkeypatch.chdir(tmp_path / "my_desk")
    return tmp_path / "my_desk"


def test_a_new_project_can_be_planned_and_its_readme_has_three_commands(project, capsys):
    files = ["README.md", "profile.schema.json", "profile.toml", "reward.py", "rows.jsonl"]
    assert sorted(path.name for path in project.iterdir()) == files
    assert load_profile("profile.toml").name == "my_desk"
    assert (project / "profile.toml").read_text().splitlines()[0] == "#:schema ./profile.schema.json"
    assert json.loads((project / "profile.schema.json").read_text()) == profile_schema()
    assert len((project / "rows.jsonl").read_text().splitlines()) == 20
    commands = re.search(r"```bash\n(.*?)```", (project / "README.md").read_text(), flags=re.S)
    assert commands is not None
    lines = commands[1].splitlines()
    assert [_parser().parse_args(line.split()[1:3]).verb for line in lines] == ["plan", "run", "chat"]
    capsys.readouterr()
    assert main(lines[0].split()[1:]) == 0
    assert re.findall(r"^RUN +(\S+)", capsys.readouterr().out, flags=re.M)[:3] == ["prepare_data", "sft", "ppo"]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("../my_desk", "exists and is not empty"),
        ("a desk", "the last part must begin with a letter"),
        ("reward.py/desk", "cannot be made"),
    ],
)
def test_a_folder_in_use_or_of_an_impossible_name_is_refused(name, rule, project, capsys):
    before = sorted(project.parent.rglob("*"))
    assert main(["init", name]) == 2
    assert capsys.readouterr().err.startswith(f"init = {name!r}: {rule}")
    assert sorted(project.parent.rglob("*")) == before


def test_the_shipped_profiles_are_listed_with_their_first_sentence(capsys):
    assert main(["profiles"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == profile_names()
    line = next(line for line in lines if line.startswith("tiny/conditional "))
    assert line.partition("  ")[2].strip().startswith("Conditional SFT in minutes: imitate")
    assert all(line.partition("  ")[2].strip() for line in lines)


def test_the_schema_is_printed_alone(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == profile_schema()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("rlhf re", ["reconcile", "rehearse", "reject", "reproduce", "resume"]),
        ("rlhf plan tiny/rl", ["tiny/rlvr"]),
        ("rlhf explain ppo --profile tiny/f", ["tiny/full"]),
        ("rlhf completion z", ["zsh"]),
        ("rlhf store v", ["verify"]),
        ("rlhf store gc --keep", ["--keep-days"]),
        ("rlhf plan my.to", []),
    ],
)
def test_bash_completes_commands_options_and_profiles(typed, offered, tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "rlhf.bash").write_text(capsys.readouterr().out)
    words = typed.split()
    script = f"source rlhf.bash; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _rlhf; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == offered and done.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_has_every_command_and_profile(shell, capsys):
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert [word for word in (*VERBS, *profile_names()) if f"{word}" not in out and " " not in word] == []
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=out, text=True).returncode == 0
