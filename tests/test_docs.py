"""Every command in the README and the docs exists and is accepted.

Commands that only read (`plan`, `runs`, `store ls`) are run on an empty store; of those that take minutes or start
services, the verb, the profile, the options and the deployment are checked.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pipelines.cli import _parser, main
from pipelines.profile import load_profile
from rlhf_core.errors import RlhfError

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
READ_ONLY = ("plan", "runs", "store")


def commands() -> list[str]:
    found = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL):
            found += [line.strip() for line in block.splitlines() if line.strip() and not line.startswith("#")]
    return sorted(set(found))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def test_the_documents_have_commands() -> None:
    assert len(commands()) >= 12


@pytest.mark.parametrize("command", commands())
def test_a_documented_command_is_accepted(command: str) -> None:
    words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=.*", word)]
    match words[0]:
        case "make":
            targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
            assert words[1] in targets
        case "prefect":
            from pipelines.deployments import stage_parameters

            served = {"full", "rlvr", *stage_parameters(load_profile("tiny/full"))}
            assert words[:3] == ["prefect", "deployment", "run"]
            assert words[3].removeprefix("rlhf-pipeline/") in served
        case "rlhf":
            options = _parser().parse_args(words[1:])
            if getattr(options, "profile", ""):
                assert load_profile(options.profile, getattr(options, "overrides", [])).name
            if options.verb in READ_ONLY:
                assert main(words[1:]) == 0
        case "python":
            assert words[1] == "-m"
            module = ROOT / words[2].replace(".", "/")
            assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()
        case "source" | "export":
            assert command.partition(" ")[2] in (".venv/bin/activate", "PREFECT_API_URL=http://127.0.0.1:4200/api")
        case other:
            pytest.fail(f"{other}: a command that no test knows: {command}")


def test_a_misspelt_profile_in_a_command_would_be_noticed() -> None:
    with pytest.raises(RlhfError, match="did you mean tiny/full"):
        load_profile("tiny/ful")


def test_the_tree_in_the_readme_names_every_file_once() -> None:
    listed = re.findall(r"^ +(\w+\.py) +\S", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    modules = [path for package in ("pipelines", "stages", "rlhf_core") for path in (ROOT / package).rglob("*.py")]
    assert sorted(listed) == sorted(path.name for path in modules if path.name != "__init__.py")
