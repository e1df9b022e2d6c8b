"""A profile is deployed, run from Prefect with its four fields, and kept when its file is edited; in real processes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines.services.home import Home, sign_in_link
from tests.support.browser import CHROMIUM, DRIVER, browser, keep_picture
from tests.support.served import PrefectAPI
from tests.support.small_pipeline import write_mini

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """The folder in which the services start: a project with one profile."""
    folder = tmp_path / "project"
    folder.mkdir()
    write_mini(folder)
    monkeypatch.chdir(folder)
    return folder


def deploy(home: Home, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setenv("RLHF_HOME", str(home.root))
    command = [sys.executable, "-P", "-m", "pipelines.cli.main", "deploy", "mini.toml", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_profile_is_deployed_and_run_with_four_fields(project, home, services, tmp_path, monkeypatch):
    prefect = PrefectAPI(home, services)

    def ended(deployment: str, **fields: Any) -> tuple[str, str]:
        state = prefect.ended(prefect.start(deployment, fields))
        return state["name"], state["message"] or ""

    printed = deploy(home, monkeypatch)
    assert "rlhf-pipeline/mini: made of profile" in printed
    assert ended("mini", until="sft", seed=5, overrides=["sft.loop.epochs=1"])[0] == "Completed"

    path = project / "mini.toml"
    path.write_text(path.read_text().replace("batch_size = 16", "batch_size = 8"))
    kept = prefect.start("mini", {"until": "sft", "seed": 5})
    assert prefect.ended(kept)["name"] == "Completed"
    assert "| sft | HIT |" in prefect.artifact(kept, "plan")
    named = prefect.start("full", {"profile": "mini.toml", "until": "sft", "seed": 5})
    assert prefect.ended(named)["name"] == "Completed"
    assert "| sft | RUN |" in prefect.artifact(named, "plan")
    assert " replaces " in deploy(home, monkeypatch)

    for deployment, fields, rule in (
        ("mini", {"overrides": ["sed=5"]}, "sed = 5: unknown key; did you mean seed"),
        (
            "mini",
            {"until": "sfft"},
            "--until = 'sfft': no such stage; this pipeline has prepare_data, sft",
        ),
        ("mini", {"force": ["sfft"]}, "--force = 'sfft': no such stage"),
        ("mini", {"seed": -1}, "seed = -1: must be greater than or equal to 0"),
        ("full", {"profile": "../outside.toml"}, "profile = '../outside.toml': must be a shipped profile"),
        ("full", {"profile": "mini.toml", "config": {"name": "x"}}, "profile = 'mini.toml': config is given, too"),
    ):
        name, message = ended(deployment, **fields)
        assert name == "Failed" and rule in message, message

    if CHROMIUM and DRIVER:
        with browser(tmp_path / "browser") as page:
            page.open(sign_in_link(services.prefect_url, home.prefect_auth_string))
            page.until("return location.pathname !== '/sign-in' && document.body.innerText.includes('Deployments')")
            for name in ("mini", "full", "approve"):
                page.open(f"{services.prefect_url}/deployments/deployment/{prefect.deployment(name)}/run")
                page.until("return [...document.querySelectorAll('label')].length > 5")
                keep_picture(page, f"form_{name}")
            page.open(f"{services.prefect_url}/deployments")
            page.until("return document.body.innerText.includes('mini')")
            keep_picture(page, "deployments")
