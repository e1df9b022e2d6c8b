"""The versions of Python and of the packages that a stage runs with."""

import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

_COMPUTING = [
    "torch",
    "transformers",
    "tokenizers",
    "jinja2",
    "vllm",
    "deepspeed",
    "ray",
    "peft",
    "datasets",
    "numpy",
    "pyarrow",
    "pydantic",
]
"""Packages whose version may change a result."""
_ONLY_SHOWN = ("prefect", "mlflow")
"""Packages whose version is recorded, but never changes a result."""


@lru_cache(maxsize=1)
def environment() -> dict[str, str]:
    """Versions of Python and of the libraries, the platform and the git commit."""
    return versions() | _installed(_ONLY_SHOWN) | {"platform": platform.platform()} | _git()


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that compute; only `--strict-env` puts them into the key."""
    return {"python": platform.python_version()} | _installed(_COMPUTING)


def other_versions(then: Mapping[str, str], now: Mapping[str, str] | None = None) -> list[str]:
    """Describe in a phrase each version in `then` that is different now.

    Packages missing on either side are ignored: a base install, which only plans, has none.

    >>> other_versions({"torch": "2.8", "peft": "0.17", "platform": "Linux"}, {"torch": "2.9", "numpy": "2.0"})
    ['torch: 2.8 -> 2.9']
    """
    found = versions() if now is None else now
    both = (name for name in then if name in ("python", *_COMPUTING) and name in found)
    return [f"{name}: {then[name]} -> {found[name]}" for name in both if found[name] != then[name]]


def _installed(packages: Iterable[str]) -> dict[str, str]:
    """Versions of the given packages that are installed."""
    found = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _git() -> dict[str, str]:
    here = Path(__file__).resolve().parent
    try:
        sha = _git_output(here, "rev-parse", "HEAD")
        dirty = bool(_git_output(here, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"git_sha": sha, "git_dirty": "yes" if dirty else "no"}


def _git_output(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
