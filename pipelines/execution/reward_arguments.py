"""When a run is planned, reject reward functions with an argument that nothing gives; their stage would fail later."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from pipelines.execution.packages import parts_of
from rlhf_core.config.data import Files
from rlhf_core.config.rewards import FunctionReward
from rlhf_core.errors import ConfigError
from rlhf_core.stage.key import StageSpec
from rlhf_core.types import label_fields
from rlhf_core.user_code.signatures import Parameters, loaded_parameters, parameters_of
from stages.evaluate_suite import FunctionSuite
from stages.prepare_data import PrepareDataConfig

FIRST_ROWS = 200
"""Rows of each source in which fields of labels are looked for first; all others are read before a function is refused."""
OTHER_PROMPTS = ("suite_prompts", "synthesize", "mix")
"""Stages that make prompts whose labels are not known before they have run."""


def check_rewards(specs: Sequence[StageSpec], all_specs: Sequence[StageSpec], *, load: bool = False) -> None:
    """Raise ConfigError for a reward function, of a stage that will run, with an argument that nothing gives.

    With `load`, functions whose files alone do not tell their arguments are loaded in a separate process.
    """
    for spec in specs:
        for path, part in parts_of(spec.config, spec.name):
            if isinstance(part, FunctionReward | FunctionSuite):
                path = f"evaluate.suites.{part.name}" if isinstance(part, FunctionSuite) else path
                parameters = parameters_of(part.function, key=f"{path}.function")
                if load:
                    parameters = (
                        loaded_parameters(part.function, key=f"{path}.function") if parameters is None else None
                    )
                if parameters is not None:
                    _check_function(part, parameters, path, all_specs)


def _check_function(
    term: FunctionReward | FunctionSuite, parameters: Parameters, path: str, specs: Sequence[StageSpec]
) -> None:
    from rlhf_core.rewards.protocols import check_arguments  # imports numpy, which other plans do without

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
