"""What is installed: the pins that `requirements/install.sh` chooses and their source, and the extras that messages name."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from rlhf_core.models.loading import LIGER
from rlhf_core.models.lora import QUANTIZER

SCRIPT = Path(__file__).parents[2] / "requirements/install.sh"


@pytest.mark.parametrize(
    ("gpu", "links", "expected"),
    [
        (False, "/wheels https://example.com/w", "--find-links /wheels --find-links https://example.com/w"),
        (False, "", "--torch-backend cpu"),
        (True, "/wheels", ""),
        (True, "", ""),
    ],
)
def test_a_folder_with_builds_for_cpus_is_for_cpus_alone(gpu, links, expected, tmp_path):
    """2.13.0+cpu satisfies the pin torch==2.13.0, so that such a folder replaced torch on a machine with a GPU."""
    clone, programs = tmp_path / "clone", tmp_path / "bin"
    (clone / "requirements").mkdir(parents=True)
    programs.mkdir()
    for path in [*SCRIPT.parent.glob("*.txt"), SCRIPT, SCRIPT.parents[1] / "pyproject.toml"]:
        shutil.copy(path, clone / path.relative_to(SCRIPT.parents[1]))
    bodies = {
        "nvidia-smi": f"exit {0 if gpu else 9}",
        "uv": f'echo "$*" >> {tmp_path}/words; if [ $1 = venv ]; then mkdir -p $4/bin; fi',
        "python3.11": "exit 1",  # pip has no settings
    }
    for name, body in bodies.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "VENV": str(tmp_path / "venv")}
    variables |= {"PIP_FIND_LINKS": links} if links else {}
    (tmp_path / "venv").mkdir()
    subprocess.run([clone / "requirements/install.sh"], env=variables, check=True, stdout=subprocess.DEVNULL)
    [installed] = [line for line in (tmp_path / "words").read_text().splitlines() if " -r requirements/" in line]
    options = installed.partition("--no-deps")[2].partition(" -r ")
    assert options[0].strip() == expected
    assert options[2].startswith(f"requirements/{'gpu' if gpu else 'cpu'}.txt ")


ROOT = SCRIPT.parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_every_extra_that_a_message_or_a_page_names_exists_and_has_the_packages_of_options():
    files = [path for folder in ("rlhf_core", "stages", "pipelines", "docs") for path in (ROOT / folder).rglob("*.*")]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".md", ".yaml", ".env", ".service")]
    named = {
        extra
        for text in texts
        for found in re.findall(r"rlhf-lifecycle\[([\w,-]+)\]", text)
        for extra in found.split(",")
    }
    assert {"kernels", "flash-attn", "trackers"} <= named <= set(EXTRAS)
    packages = {re.split(r"[>=<]", one)[0]: extra for extra, ones in EXTRAS.items() for one in ones}
    assert {LIGER.replace("_", "-"), QUANTIZER} <= {name for name, extra in packages.items() if extra == "kernels"}
    assert packages["flash-attn"] == "flash-attn"
