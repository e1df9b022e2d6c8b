"""The points of a sweep: the product of values, or draws from ranges."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pipelines.execution.summary import shown_overrides
from rlhf_core.errors import ConfigError, explain

Point: TypeAlias = tuple[str, ...]
"""The overrides of one run, such as `("ppo.kl_coef=0.05",)`."""
_RANGE = re.compile(r"(?P<log>log:)?(?P<low>[^.:].*?)\.\.(?P<high>.+)")


def keys_of(points: Sequence[Point]) -> list[str]:
    """Return the keys that the points set, in their order."""
    return list(dict.fromkeys(part.partition("=")[0].strip() for point in points for part in point))


def named(point: Point) -> str:
    """Return a point as people read it, without secrets."""
    return " ".join(shown_overrides(point)) or "the profile as it is"


def grid_points(grids: Sequence[str]) -> list[Point]:
    """Return the product of the values in `key=value,value`, the last key the fastest.

    >>> grid_points(["ppo.kl_coef=0.05,0.1", "seed=1,2"])[1]
    ('ppo.kl_coef=0.05', 'seed=2')
    """
    choices = [choices_of(grid) for grid in grids]
    check_keys([key for key, _ in choices])
    return list(itertools.product(*([f"{key}={value}" for value in values] for key, values in choices)))


def random_points(count: int, ranges: Sequence[str], grids: Sequence[str], *, seed: int) -> list[Point]:
    """Return `count` points drawn from ranges and from the values of grids; the same `seed` draws the same points.

    >>> random_points(1, ["ppo.kl_coef=log:0.01..0.1"], ["seed=1,2"], seed=0)
    [('ppo.kl_coef=0.06989', 'seed=2')]
    """
    if count < 1:
        raise ConfigError(explain("--random", count, "must be >= 1", "say how many points to draw"))
    spans, choices = [span_of(text) for text in ranges], [choices_of(grid) for grid in grids]
    check_keys([span.key for span in spans] + [key for key, _ in choices])
    chance = random.Random(seed)
    drawn: list[Point] = []
    for _ in range(count):
        values = [f"{span.key}={span.draw(chance)}" for span in spans]
        drawn.append((*values, *(f"{key}={chance.choice(options)}" for key, options in choices)))
    return list(dict.fromkeys(drawn))


@dataclass(frozen=True)
class Span:
    """A range of values from `low` to `high`, evenly or on a logarithmic scale, whole numbers if `whole`."""

    key: str
    low: float
    high: float
    log: bool
    whole: bool

    def draw(self, chance: random.Random) -> str:
        if self.whole and not self.log:
            return str(chance.randint(int(self.low), int(self.high)))
        # Rounding would draw the two ends half as often as they are due: whole numbers are cut off below high + 1.
        high = self.high + 1 if self.whole else self.high
        found = (
            math.exp(chance.uniform(math.log(self.low), math.log(high))) if self.log else chance.uniform(self.low, high)
        )
        return self.written(found)

    def written(self, value: float) -> str:
        """Return a value of this range as it is written in an override: with four digits, more where the range is narrow."""
        value = min(max(value, self.low), self.high)
        if self.whole:
            return str(int(value))
        digits = 4 + max(0, math.floor(math.log10(max(abs(self.low), abs(self.high)) / (self.high - self.low))))
        text = f"{value:.{digits}g}"
        return text if self.low <= float(text) <= self.high else repr(value)


def span_of(text: str) -> Span:
    key, _, written = text.partition("=")
    matched = _RANGE.fullmatch(written.strip())
    remedy = "write KEY=LOW..HIGH or KEY=log:LOW..HIGH, such as ppo.kl_coef=log:0.01..0.2"
    if not key.strip() or matched is None:
        raise ConfigError(explain("--range", text, "must read KEY=LOW..HIGH", remedy))
    ends = (matched["low"].strip(), matched["high"].strip())
    try:
        low, high = (float(end) for end in ends)
    except ValueError:
        raise ConfigError(explain("--range", text, "its ends must be numbers", remedy)) from None
    log = matched["log"] is not None
    if not low < high or not math.isfinite(high - low) or (log and low <= 0):
        rule = "must begin above 0" if log and low <= 0 else "must have its lower end first"
        raise ConfigError(explain("--range", text, rule, remedy))
    whole = all(re.fullmatch(r"[+-]?\d+", end) for end in ends)
    return Span(key.strip(), low, high, log, whole)


def choices_of(grid: str) -> tuple[str, list[str]]:
    key, _, written = grid.partition("=")
    values = _split(grid, written)
    if not key.strip() or not all(values):
        remedy = "for example --grid ppo.kl_coef=0.02,0.05,0.1"
        raise ConfigError(explain("--grid", grid, "must read KEY=VALUE,VALUE,...", remedy))
    if len(set(values)) < len(values):
        raise ConfigError(explain("--grid", grid, "names a value twice", "remove one of them"))
    return key.strip(), values


def _split(grid: str, text: str) -> list[str]:
    """Return the values of a list; commas inside brackets, braces and quotes separate nothing."""
    parts, depth, quote, escaped = [""], 0, "", False
    for letter in text:
        if escaped or (quote == '"' and letter == "\\"):  # \" does not end a text
            escaped = not escaped
        elif quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    if quote or depth:
        rule = f"has {quote or 'a bracket'} without its partner, so that its commas separate nothing"
        raise ConfigError(explain("--grid", grid, rule, "close it, or put the value in quotes"))
    return [part.strip() for part in parts]


def check_keys(keys: Sequence[str]) -> None:
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(explain("--grid", key, "is swept twice", "name each key once"))
