"""Refuse at the plan what a stage would refuse later: reward functions without an argument, and missing packages."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from pydantic import BaseModel

from rlhf_core.config.data import Files
from rlhf_core.config.models import LoraConfig
from rlhf_core.config.rewards import FunctionReward
from rlhf_core.errors import ConfigError
from rlhf_core.stage.key import StageSpec
from rlhf_core.types import label_fields
from rlhf_core.user_code.signatures import parameters_of
from stages.prepare_data import PrepareDataConfig

FIRST_ROWS = 200
"""Rows of each source in which fields of labels are looked for first; all others are read before a function is refused."""
OTHER_PROMPTS = ("suite_prompts", "synthesize", "mix")
"""Stages that make prompts whose labels are not known before they have run."""


def check_stages(specs: Sequence[StageSpec], all_specs: Sequence[StageSpec]) -> None:
    """Raise ConfigError for a stage that will run and would fail for an argument or a package."""
    for spec in specs:
        for path, part in _parts(spec.config, spec.name):
            if isinstance(part, LoraConfig) and part.quantize:
                _check_quantizer(f"{path}.quantize", part.quantize)
            if isinstance(part, FunctionReward):
                _check_function(part, path, all_specs)


def _check_function(term: FunctionReward, path: str, specs: Sequence[StageSpec]) -> None:
    from rlhf_core.rewards.protocols import check_arguments  # imports numpy, which other plans do without

    parameters = parameters_of(term.function, key=f"{path}.function")
    if parameters is None:
        return
    try:
        check_arguments(parameters, term.arguments, term.protocol, fields=())
    except ConfigError:  # then only the rows can tell, which takes longer
        for rows in (FIRST_ROWS, None):
            try:
                check_arguments(parameters, term.arguments, term.protocol, fields=_fields(specs, rows))
                return
            except ConfigError as error:
                missing = error
        raise ConfigError(f"{path}.{missing}") from None


def _check_quantizer(key: str, value: str) -> None:
    """Raise ConfigError if this machine could run stages and lacks the package."""
    if find_spec("torch") is not None and find_spec("bitsandbytes") is None:
        rule = "needs bitsandbytes, which is not installed"
        raise ConfigError(key, value, rule, "pip install 'rlhf-lifecycle[kernels]', or remove it")


def _parts(value: Any, path: str) -> Iterator[tuple[str, BaseModel]]:
    if isinstance(value, BaseModel):
        yield path, value
        for name in type(value).model_fields:
            yield from _parts(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from _parts(one, f"{path}.{name}")
    elif isinstance(value, tuple):
        for one in value:
            yield from _parts(one, path)


def _fields(specs: Sequence[StageSpec], rows: int | None) -> Collection[str] | None:
    """Fields that labels may have, from the first `rows` of all sources, or all; None if they are not known."""
    from rlhf_core.data.sources import read  # imports pyarrow

    found = set[str]()
    data = [spec.config.data for spec in specs if isinstance(spec.config, PrepareDataConfig)]
    if not data or any(spec.name in OTHER_PROMPTS for spec in specs):
        return None
    for one in data:
        if not isinstance(one, Files):
            return None if one.type != "arithmetic" else found
        for source in one.sources:
            if source.revision:  # a dataset of the Hub
                return None
            for record in itertools.islice(read(source), rows):
                row = getattr(record, "row", None) or {}
                for cell in row.values():
                    found.update(_names_in(cell))
    return found


def _names_in(cell: Any) -> Iterator[str]:
    """Fields of a cell; a label may lie within another object, such as `reward_model.ground_truth`."""
    if isinstance(cell, str):
        yield from label_fields(cell)
    elif isinstance(cell, dict):
        yield from cell
        for one in cell.values():
            yield from _names_in(one)
