"""`rlhf doctor` says what is there and what is missing, and how to get it."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from pipelines.cli import doctor


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(doctor, "LEAST_MEMORY_GIB", 0.0)
    monkeypatch.setattr(doctor, "LEAST_DISK_GIB", 0.0)


def examine() -> tuple[int, str]:
    printed = io.StringIO()
    return doctor.examine(Console(file=printed, width=200)), printed.getvalue()


def test_what_is_missing_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("pydantic", "no-such-package"))
    monkeypatch.setattr(doctor, "ENGINES", ("json", "no_such_engine"))
    code, said = examine()
    assert code == 1
    assert "bad no-such-package is not installed; make install\n" in said
    assert "bad import no_such_engine ModuleNotFoundError: No module named 'no_such_engine'; make clean-venv" in said
    assert "ok  import json\n" in said
    monkeypatch.setattr(doctor, "remedy", {"no-such-package": "pip install 'it[extra]'"}.get)
    assert "bad no-such-package is not installed; make install or pip install 'it[extra]'\n" in examine()[1]


def test_a_machine_that_lacks_nothing_is_fine(monkeypatch):
    monkeypatch.setattr(doctor, "ENGINES", ("json",))
    code, said = examine()
    assert code == 0 and "bad" not in said


def test_builds_that_need_cuda_beside_a_torch_that_does_not_are_named(monkeypatch):
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.0+cpu"}
    found = [SimpleNamespace(metadata={"Name": name}, version=version) for name, version in versions.items()]
    monkeypatch.setattr(doctor.importlib.metadata, "distributions", lambda: found)
    monkeypatch.setattr(doctor, "ENGINES", ())
    _, said = examine()
    assert "bad torchvision beside the CPU build of torch needs CUDA; pip uninstall torchvision\n" in said


def test_too_little_memory_is_said(monkeypatch):
    monkeypatch.setattr(doctor, "ENGINES", ())
    monkeypatch.setattr(doctor, "LEAST_MEMORY_GIB", 1e6)
    code, said = examine()
    assert code == 1 and "GiB memory free; the tiny profile needs 1000000 GiB" in said
