"""The points of a sweep: grids, ranges, and what is refused."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from pipelines.execution.sweep import grid_points, random_points, span_of
from rlhf_core.errors import ConfigError


def test_a_grid_is_the_product_of_its_values_and_lists_stay_whole() -> None:
    points = grid_points(["a.b=1,2", 'c=[1, 2],{x = "u,v"}'])
    assert points == [
        ("a.b=1", "c=[1, 2]"),
        ("a.b=1", 'c={x = "u,v"}'),
        ("a.b=2", "c=[1, 2]"),
        ("a.b=2", 'c={x = "u,v"}'),
    ]


def test_an_escaped_quote_does_not_end_a_text() -> None:
    assert grid_points([r'a="say \"hi, you\"","\\",c']) == [(r'a="say \"hi, you\""',), (r'a="\\"',), ("a=c",)]


@pytest.mark.parametrize(
    ("grids", "error"),
    [
        (["a.b"], "--grid = 'a.b': must read KEY=VALUE,VALUE,..."),
        (["a=1,,2"], "must read"),
        (["=1"], "must read"),
        (["a=1,1"], "--grid = 'a=1,1': names a value twice; remove one of them"),
        (
            ["a=it's,b"],
            "--grid = \"a=it's,b\": has ' without its partner, so that its commas separate nothing; close it",
        ),
        (["a=[1,2"], "has a bracket without its partner"),
        (["a=1", "a=2"], "--grid = 'a': is swept twice; name each key once"),
    ],
)
def test_a_grid_that_cannot_be_read_is_refused(grids: list[str], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        grid_points(grids)
    assert error in str(caught.value)


def test_random_points_are_drawn_alike_for_the_same_seed_and_stay_in_their_range() -> None:
    ranges = ["lr=log:1e-5..1e-3", "steps=2..4", "kl=-0.5..0.5"]
    points = random_points(50, ranges, ["loss=dpo,ipo"], seed=3)
    assert (
        points
        == random_points(50, ranges, ["loss=dpo,ipo"], seed=3)
        != random_points(50, ranges, ["loss=dpo,ipo"], seed=4)
    )
    rows = [dict(part.split("=") for part in point) for point in points]
    assert all(1e-5 <= float(row["lr"]) <= 1e-3 and -0.5 <= float(row["kl"]) <= 0.5 for row in rows)
    assert {row["steps"] for row in rows} == {"2", "3", "4"} and {row["loss"] for row in rows} == {"dpo", "ipo"}
    # On a logarithmic scale half of the points lie below the geometric mean of the ends, 1e-4.
    assert 15 <= sum(float(row["lr"]) < 1e-4 for row in rows) <= 35


@pytest.mark.parametrize("text", ["lr", "lr=1", "lr=2..1", "lr=log:0..1", "lr=a..b", "=1..2", "lr=1..inf"])
def test_a_range_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--range = "):
        random_points(2, [text], [], seed=0)


@pytest.mark.parametrize("text", ["x=0.5..0.99999", "x=12345.6..12346.2", "x=log:0.00012345..0.00012355", "x=-1..0.5"])
def test_values_of_narrow_ranges_stay_apart_and_inside(text: str) -> None:
    span = span_of(text)
    drawn = {span.draw(random.Random(seed)) for seed in range(50)}
    assert len(drawn) > 40 and all(span.low <= float(value) <= span.high for value in drawn)
    assert [float(span.written(end)) for end in (span.low, span.high)] == [span.low, span.high]


def test_whole_numbers_are_drawn_alike_often_also_the_ends() -> None:
    drawn = Counter(span_of("steps=1..3").draw(random.Random(seed)) for seed in range(3000))
    assert set(drawn) == {"1", "2", "3"} and all(850 < count < 1150 for count in drawn.values())
    log = Counter(span_of("steps=log:1..3").draw(random.Random(seed)) for seed in range(3000))
    expected = {str(n): 3000 * math.log((n + 1) / n) / math.log(4) for n in (1, 2, 3)}
    assert all(abs(log[name] - count) < 150 for name, count in expected.items())
