"""Call a reward function once, as a run would (`rlhf try-reward`)."""

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipelines.cli.common import print_line, short
from rlhf_core.config.rewards import FunctionReward
from rlhf_core.errors import ConfigError, readable
from rlhf_core.rewards.batches import RewardOutcome
from rlhf_core.rewards.terms import open_elsewhere
from rlhf_core.schema.base import LONGEST_S
from rlhf_core.schema.secrets import refuse_plain
from rlhf_core.types import Generation, Message, Prompt, answered

LONGEST_ANSWER = 60
LABEL = "label"
"""The column that is the label of the prompt; any other column is a field of the label."""


def try_reward(options: argparse.Namespace) -> None:
    """Print the reward of each answer, the function's log, and the seconds; errors are the same as in a run."""
    check_timeout(options.timeout_s)
    term = _term(options.function, read_json_arguments(options.arguments), options.timeout_s)
    answers = [_generation(options.prompt, _label(options.columns), text) for text in options.answers]
    began = time.perf_counter()
    with ExitStack() as leases:
        reward = open_elsewhere(options.function.rpartition(":")[2], term, Path(), leases)
        started = time.perf_counter()
        outcome = reward(answers)
        ended = time.perf_counter()
    _print(outcome, options.answers)
    print_line(f"{ended - started:.3f} s; {started - began:.1f} s before it to start its process")


def check_timeout(timeout_s: float) -> None:
    """Raise ConfigError for a timeout that a clock cannot hold."""
    if not 0 < timeout_s <= LONGEST_S:
        raise ConfigError("--timeout-s", timeout_s, f"must be > 0 and <= {LONGEST_S}", "give the seconds of one batch")


def read_json_arguments(text: str) -> dict[str, Any]:
    """Parse the keyword arguments of the function. Raises ConfigError if the text is not a JSON object."""
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ConfigError("--arguments", text, "is not a JSON object", """write it like '{"pattern": "[0-9]+"}'""")
    refuse_plain("--arguments", arguments)
    return arguments


def _term(function: str, arguments: dict[str, Any], timeout_s: float) -> FunctionReward:
    """The term of a profile that calls the function."""
    compares = "batch"  # all answers are put to the function in one call
    try:
        return FunctionReward(function=function, arguments=arguments, timeout_s=timeout_s, compares=compares)
    except ValidationError as error:
        first = error.errors()[0]
        rule = first["msg"].removeprefix("Value error, ").replace("Input should", "must")
        raise ConfigError(f"{first['loc'][0]} = {first['input']!r}: {rule}" if first["loc"] else rule) from None


def _generation(prompt: str, label: str, answer: str) -> Generation:
    """An answer in the form that a policy returns, without token ids (no tokenizer is loaded here)."""
    return answered(Prompt("try-reward", (Message("user", prompt),), label, "try-reward"), answer)


def _label(columns: Sequence[str]) -> str:
    """The label with these columns: text if `label` is the only one, else a JSON object.

    >>> _label(["label=4"]), _label(["level=3", "answer=4 kg"])
    ('4', '{"level": 3, "answer": "4 kg"}')
    """
    fields = {}
    for column in columns:
        name, separator, text = column.partition("=")
        if not separator or not name:
            raise ConfigError("--column", column, "must read KEY=VALUE", "for example --column label=4")
        if name in fields:
            raise ConfigError("--column", column, f"{name} is given twice", "leave one of them")
        fields[name] = text
    if LABEL in fields and len(fields) > 1:
        rule, remedy = "label=TEXT is the whole label, and other names are its fields", "give one or the other"
        raise ConfigError("--column", list(columns), rule, remedy)
    if fields.keys() <= {LABEL}:
        return fields.get(LABEL, "")
    return json.dumps({name: _value(text) for name, text in fields.items()}, ensure_ascii=False)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _print(outcome: RewardOutcome, answers: Sequence[str]) -> None:
    scores = outcome.scores or (None,) * len(answers)
    for value, score, answer in zip(outcome.values, scores, answers, strict=True):
        beside = "" if score is None else f", score {readable(score, 6)}"
        note = ": does not apply; a run leaves out an answer without any reward" if value is None else ""
        shown = "None" if value is None else f"{readable(value, 6)}"
        print_line(f"reward {shown}{beside}  {short(answer, LONGEST_ANSWER)!r}{note}")
    for name, (total, count) in outcome.logs.items():
        print_line(f"{name} {readable(total / count, 6)}")
