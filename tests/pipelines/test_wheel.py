"""The wheel, in an environment without the clone, from an empty folder."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from rlhf_contrib.places.verb import PINS, PLACES, TEMPLATES

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
OVERRIDES = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]


NOT_IN_BASE = ("torch", "transformers", "vllm", "deepspeed", "ray", "prefect", "mlflow")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling", reason="builds the wheel; it is in requirements/dev.txt")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def environment(wheel) -> Path:
    """Return an environment with the wheel, which finds the other packages in this one."""
    made = install(wheel, "environment", "--offline", "--no-deps")
    [site] = made.glob("lib/python*/site-packages")
    # Read after this folder; files *.pth in it, such as that of the clone, are not.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return made


@pytest.fixture(scope="module")
def base(wheel) -> Path:
    """Return an environment with the wheel and what it requires without an extra."""
    return install(wheel, "base", "-c", str(ROOT / "requirements/cpu.txt"))


def install(wheel: Path, name: str, *options: str) -> Path:
    made = wheel.parent / name
    venv.create(made)
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert uv, "uv installs the wheel, as requirements/install.sh installs the rest"
    subprocess.run([uv, "pip", "install", "-q", *options, "--python", str(made / "bin/python"), str(wheel)], check=True)
    return made


@pytest.fixture(scope="module")
def run(environment, tmp_path_factory) -> tuple[Path, str]:
    """Return the folder of a run of the first two stages, and what it printed."""
    folder = tmp_path_factory.mktemp("run")
    return folder, rlhf(environment, folder, "run", "tiny/full", "--until", "sft", *OVERRIDES)


def rlhf(environment: Path, folder: Path, *words: str, status: int = 0) -> str:
    """Return what a command prints in an empty folder; raise if it ends with another status."""
    own = {"PYTHONPATH", "RLHF_HOME", "VIRTUAL_ENV"}
    variables = {name: value for name, value in os.environ.items() if name not in own}
    command = [str(environment / "bin/rlhf"), *words]
    done = subprocess.run(
        command, cwd=folder, env=variables, text=True, stdout=-1, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == status, done.stdout
    return done.stdout


@pytest.mark.parametrize("profile", ["tiny/full", "one_gpu/full"])
def test_shipped_profiles_plan_without_the_clone(environment, tmp_path, profile):
    assert "publish " in rlhf(environment, tmp_path, "plan", profile)


@pytest.mark.parametrize("place", PLACES)
def test_the_files_of_a_place_are_written_without_the_clone(environment, tmp_path, place):
    rlhf(environment, tmp_path, "scaffold", place, "--out", "files")
    found = {path.name for path in (tmp_path / "files").iterdir()}
    assert found == {*(path.name for path in (TEMPLATES / place).iterdir()), *PINS.get(place, ())}
    if "Containerfile" in found:
        lines = (tmp_path / "files/Containerfile").read_text().splitlines()
        copied = {name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]}
        assert copied - found == {"*.whl"}, "the build finds the rest in the folder"


@pytest.mark.engine
@pytest.mark.slow
def test_a_shipped_profile_runs_without_the_clone(run):
    assert "sft: done" in run[1]


@pytest.mark.engine
@pytest.mark.slow
def test_a_sweep_of_a_shipped_profile_runs_without_the_clone(environment, run):
    words = ["sweep", "tiny/full", "--until", "sft", *OVERRIDES[:-2], "--grid", f"{OVERRIDES[-1]},2"]
    words += ["--metric", "sft:eval/loss", "--direction", "min"]
    said = rlhf(environment, run[0], *words)
    assert "best: sft.loop.max_steps=" in said and "computed 1 stages (sft 1)" in said, said


@pytest.mark.slow
def test_the_base_install_has_no_engine_and_plans_explains_and_reads_the_store_of_a_run(base, run):
    [site] = base.glob("lib/python*/site-packages")
    assert [name for name in NOT_IN_BASE if (site / name).exists()] == []
    (run[0] / "train.sh").write_text("deepspeed --module openrlhf.cli.train_sft --pretrain m --dataset d.jsonl")
    for printed, *words in (
        ("HIT      sft ", "plan", "tiny/full", *OVERRIDES),
        ("sft: HIT: made ", "explain", "sft", "--profile", "tiny/full", *OVERRIDES),
        ("sft: sft.loop.max_steps: 0 -> 1", "diff", "tiny/full", "tiny/full", *OVERRIDES[-2:]),
        ("sft eval/loss", "runs"),
        ("Policy       sft ", "store", "ls"),
        ("no damage found", "store", "verify"),
        ("train_samples = 200", "show", "sft"),
        ("GPU hours", "usage", "--by", "project"),
        ("profile.toml", "init", "desk"),
        ("RUN      evaluate ", "plan", "desk/profile.toml"),
        ("wrote sft.toml", "import-openrlhf", "train.sh", "--out", "sft.toml"),
        ("nothing of this was measured", "plan", "one_node/full", "--estimate", "--on", "h200"),
    ):
        said = rlhf(base, run[0], *words)
        assert printed in said and "other versions" not in said, words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        (("run", "tiny/full"), "torch", "cpu"),
        (("chat", "sft", "--once", "Hi"), "transformers", "cpu"),
        (("up",), "prefect", "server"),
        (("deploy", "tiny/full"), "prefect", "server"),
    ],
)
def test_a_command_that_needs_an_engine_names_the_extra_in_one_line(words, module, extra, base, run):
    said = rlhf(base, run[0], *words, status=2)
    assert re.search(rf"^rlhf {words[0]}: needs {module}, which is not installed; .*\[{extra}\].*\n\Z", said, re.M)
