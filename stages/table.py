"""The stages by name. Each is declared in its package, from which its key, form, deployment and typed call are made.

A stage is a folder of `stages` with two files. `__init__.py` has the options and the declaration: a signature without a body.
`run.py` has the function `run`, which has the same inputs and does the work. Planning imports the declarations, never `run.py`,
which imports torch and more.

To add a stage see docs/add_a_stage.md.
"""

import warnings
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import stages
from rlhf_core.stage.key import StageSpec
from stages.declaration import Stage
from stages.measured import Numbers, Specs

STAGES: dict[str, Stage[..., Any]] = {
    found.name: getattr(import_module(f"stages.{found.name}"), found.name)
    for found in iter_modules(stages.__path__)
    if found.ispkg
}
"""The built-in stages, and the stages that a profile names by path."""


def __getattr__(name: str) -> Any:
    """Former names of this module from 0.2, with a warning. They work until 0.4."""
    place = name if name in STAGES else "declaration"
    found = getattr(import_module(f"stages.{place}"), name)
    text = f"stages.table.{name} is now stages.{place}.{name}; the former name works until 0.4"
    warnings.warn(text, FutureWarning, stacklevel=2)
    return found


def numbers_of(spec: StageSpec, specs: Specs) -> Numbers | None:
    """Names of the numbers of a stage in its pipeline; None for a stage that is not declared."""
    return STAGES[spec.name].metrics(spec, specs) if spec.name in STAGES else None
