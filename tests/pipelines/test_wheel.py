"""The wheel, in an environment without the clone, from an empty folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "prepare_data.data.demonstrations": 200,
    "prepare_data.data.preferences": 50,
    "prepare_data.data.prompts": 16,
    "prepare_data.data.eval_demonstrations": 8,
    "prepare_data.data.eval_preferences": 8,
    "prepare_data.data.eval_prompts": 8,
    "sft.loop.max_steps": 1,
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """Return an environment with the wheel, which finds the other packages in this one."""
    pytest.importorskip("hatchling", reason="builds the wheel; it is in requirements/dev.txt")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    made = folder / "environment"
    venv.create(made)
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert uv, "uv installs the wheel, as requirements/install.sh installs the rest"
    install = [uv, "pip", "install", "-q", "--offline", "--no-deps", "--python", str(made / "bin/python"), str(wheel)]
    subprocess.run(install, check=True)
    [site] = made.glob("lib/python*/site-packages")
    # Read after this folder; files *.pth in it, such as that of the clone, are not.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return made


def rlhf(environment: Path, folder: Path, *words: str) -> str:
    """Return what a command prints in an empty folder; raise if it fails."""
    own = {"PYTHONPATH", "RLHF_HOME", "VIRTUAL_ENV"}
    variables = {name: value for name, value in os.environ.items() if name not in own}
    command = [str(environment / "bin/rlhf"), *words]
    done = subprocess.run(
        command, cwd=folder, env=variables, text=True, stdout=-1, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("profile", ["tiny/full", "one_gpu/full"])
def test_shipped_profiles_plan_without_the_clone(environment, tmp_path, profile):
    assert "publish " in rlhf(environment, tmp_path, "plan", profile)


@pytest.mark.engine
@pytest.mark.slow
def test_a_shipped_profile_runs_without_the_clone(environment, tmp_path):
    overrides = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    said = rlhf(environment, tmp_path, "run", "tiny/full", "--until", "sft", *overrides)
    assert "sft: done" in said
