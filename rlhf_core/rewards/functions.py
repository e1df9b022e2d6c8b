"""Reward functions by name, and the checks that every reward passes before it is used."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from rlhf_core.errors import ConfigError, RewardError, explain, nearest
from rlhf_core.interfaces import RewardFunction
from rlhf_core.types import Generation

LARGEST_REWARD = 1e6
"""Beyond it a reward is taken for a bug: it would swamp every other sample of its batch."""


def load_reward(spec: str) -> RewardFunction:
    """Return the function named `package.module:function` or `path/to/file.py:function`.

    Raises ConfigError when the module, file or function is not there (naming the nearest), or is not callable.

    >>> load_reward("rlhf_core.rewards.verifiable:exact_match").__name__
    'exact_match'
    """
    location, separator, name = spec.rpartition(":")
    if not separator:
        raise ConfigError(
            explain("function", spec, "must read module:function or file.py:function", "add the function")
        )
    module = _load_file(spec, Path(location)) if location.endswith(".py") else _load_module(spec, location)
    function = vars(module).get(name)
    if function is None:
        raise ConfigError(explain("function", spec, f"{location} has no {name}", nearest(name, _functions(module))))
    if not callable(function):
        raise ConfigError(explain("function", spec, f"{name} is a {type(function).__name__}", "name a function"))
    return cast(RewardFunction, function)


def score_functions(rewards: Mapping[str, RewardFunction], generations: Sequence[Generation]) -> dict[str, list[float]]:
    """Return reward name -> one checked float per generation; RewardError names the reward and the prompt."""
    return {name: checked(name, reward(generations), generations) for name, reward in rewards.items()}


def checked(name: str, values: Sequence[float], generations: Sequence[Generation]) -> list[float]:
    """Return `values` if there is one finite and not absurd number per generation; RewardError otherwise."""
    if len(values) != len(generations):
        raise RewardError(
            explain(f"rewards.{name}", len(values), f"values for {len(generations)} generations", "return one for each")
        )
    for value, generation in zip(values, generations, strict=True):
        if not math.isfinite(value) or abs(value) > LARGEST_REWARD:
            key = f"rewards.{name}[prompt {generation.prompt.id}]"
            rule = f"must be finite and within +-{LARGEST_REWARD:g}"
            raise RewardError(
                explain(key, value, rule, f"mend the reward; the answer was {generation.completion.text[:200]!r}")
            )
    return list(values)


def _load_module(spec: str, location: str) -> ModuleType:
    try:
        return importlib.import_module(location)
    except ModuleNotFoundError as error:
        # A module that exists but imports something missing is a different mistake.
        if error.name is None or not (location == error.name or location.startswith(f"{error.name}.")):
            raise ConfigError(
                explain("function", spec, f"importing {location} needs {error.name}", "install it")
            ) from error
        remedy = nearest(location.rpartition(".")[2], _siblings(location))
        raise ConfigError(explain("function", spec, f"there is no module {error.name}", remedy)) from None
    except Exception as error:
        raise ConfigError(
            explain("function", spec, f"importing {location} fails: {error!r}", "mend the module")
        ) from error


def _load_file(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        files = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(
            explain("function", spec, f"there is no file {path} (seen from {Path.cwd()})", nearest(path.name, files))
        )
    name = f"reward_file_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses in the file look themselves up there
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(explain("function", spec, f"importing {path} fails: {error!r}", "mend the file")) from error
    return module


def _functions(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]


def _siblings(location: str) -> list[str]:
    parent = location.rpartition(".")[0]
    try:
        found = importlib.util.find_spec(parent) if parent else None
    except ModuleNotFoundError:
        return []
    folders = found.submodule_search_locations if found is not None else None
    return [path.stem for folder in folders or () for path in Path(folder).glob("*.py")]


def as_floats(function: Callable[..., Any], generations: Sequence[Generation]) -> list[float]:
    """Return what `function` says of `generations` as plain floats (it may return an array or booleans)."""
    return [float(value) for value in function(generations)]
