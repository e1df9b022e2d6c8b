"""Flows, deployments and the command line: the only package that imports Prefect. `from pipelines import run` runs a profile."""

import importlib
from typing import TYPE_CHECKING, Any

import rlhf_core  # noqa: F401  # finds former names

if TYPE_CHECKING:
    from pipelines.cli.python import StageResult, run

__all__ = ["StageResult", "run"]


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` on first use: its module takes a second to import, which few modules here need."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("pipelines.cli.python"), name)
