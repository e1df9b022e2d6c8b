"""Figures are drawn without a display, and read what training wrote."""

import io
import itertools
import json
import math
from typing import Any

import pytest
from matplotlib.text import Text

from rlhf_core.evaluation import plots
from rlhf_core.evaluation.metrics import reliability

COLORS = plots.colors(["base", "sft", "ppo"])


def image(png: bytes) -> tuple[tuple[int, int], int]:
    """Return the size in pixels and the number of different colours."""
    import numpy as np
    from matplotlib.image import imread

    pixels = imread(io.BytesIO(png))
    colours = np.unique((pixels[..., :3] * 255).astype(int).reshape(-1, 3), axis=0)
    return (pixels.shape[1], pixels.shape[0]), len(colours)


def test_a_frontier_shows_one_colour_more_per_policy():
    one = plots.FrontierPoint("sft", 0.0, 1.0, 0.9, 1.1)
    two = plots.FrontierPoint("ppo", 9.0, 2.0, 1.8, 2.1)
    below = plots.FrontierPoint("sft", -1e-3, 1.0, 1.0, 1.0)  # a negative estimate is drawn at zero
    assert plots.frontier([below], reward_name="gold", reference="sft", colors=COLORS).startswith(b"\x89PNG")
    size, few = image(plots.frontier([one], reward_name="gold", reference="sft", colors=COLORS))
    _, more = image(plots.frontier([one, two], reward_name="gold", reference="sft", colors=COLORS))
    assert size == (1024, 672)  # 6.4 by 4.2 inches at 160 per inch
    assert more > few


@pytest.fixture
def drawn(monkeypatch) -> list[Any]:
    """The figures that are drawn, in place of their bytes."""
    figures: list[Any] = []
    monkeypatch.setattr(plots, "_png", lambda figure: figures.append(figure) or b"")
    return figures


def test_names_meet_neither_each_other_nor_a_bar(drawn):
    crowd = [
        plots.FrontierPoint(f"policy number {i}", 0.5 * i, 1 + 0.05 * i, 0.95 + 0.04 * i, 1.1 + 0.06 * i)
        for i in range(6)
    ]
    plots.frontier(crowd, reward_name="gold", reference="sft", colors=plots.colors(point.name for point in crowd))
    (axes,) = drawn[0].axes
    boxes = [Text.get_window_extent(name) for name in axes.texts]
    assert [name.get_text() for name in axes.texts] == [point.name for point in crowd]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    places = [axes.transData.transform((math.sqrt(point.kl), point.reward)) for point in crowd]
    assert not any(box.contains(*place) for box in boxes for place in places)


def test_a_policy_far_out_does_not_squash_the_others(drawn):
    kls = {"base": 400.0, "sft": 0.0, "ppo": 4.0}
    points = [plots.FrontierPoint(name, kl, 1.0, 0.9, 1.1) for name, kl in kls.items()]
    plots.frontier(points, reward_name="gold", reference="sft", colors=COLORS)
    (axes,) = drawn[0].axes
    assert axes.get_xlim()[1] < 3  # the root of 4, and room for its name
    assert axes.get_title(loc="right") == "too far out to be shown: base (KL 400, reward 1.00)"
    drawn_in = [bars.lines[0].get_color() for bars in axes.containers]
    assert drawn_in == [COLORS["sft"], COLORS["ppo"]]  # as in figures that show the base


def test_the_same_numbers_give_the_same_bytes():
    margins = [0.1 * value for value in range(-10, 20)]
    assert plots.margin_histogram(margins, title="m") == plots.margin_histogram(margins, title="m")


def test_every_kind_of_figure_is_drawn():
    rows = reliability([0.6, 0.8, 0.9], [1.0, 0.0, 1.0], bins=10)
    for png in (
        plots.reliability_diagram(rows, ece=0.1),
        plots.curves(
            {"loss": [(step, 1 / step) for step in range(1, 60)], "eval": [(1, 1.0), (50, 0.1)]},
            title="sft",
            y_label="loss",
            color=plots.INK,
        ),
        plots.length_scatter(
            {"chosen": ([1, 2], [0.1, 0.2]), "rejected": ([1, 2], [0.0, 0.1])},
            x_label="tokens",
            y_label="score",
            colors=plots.colors(["chosen", "rejected"]),
        ),
    ):
        assert image(png)[1] > 20


def test_curves_are_read_per_metric_and_a_broken_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "values": {"loss": 2.0}}, {"step": 2, "values": {"loss": 1.0, "kl": float("nan")}}]
    path.write_text("\n".join(json.dumps(line) for line in lines) + '\n{"step": 3, "val')
    assert plots.read_curves(path) == {"loss": [(1, 2.0), (2, 1.0)]}


def test_smoothing_starts_at_the_first_value_and_follows_a_jump():
    assert plots.smoothed([4.0, 4.0], span=3) == [4.0, 4.0]
    # weight 1/2: averages 0, then (0/2 + 1/2) / (3/4)
    assert plots.smoothed([0.0, 1.0], span=3) == pytest.approx([0.0, 2 / 3])


def test_a_sweep_shows_a_colour_per_series_over_numbers_or_words():
    def points(*values: str) -> list[plots.SweptPoint]:
        return [plots.SweptPoint(value, number, number - 0.5, number + 0.5) for number, value in enumerate(values)]

    _, one = image(plots.swept({"": points("0.01", "0.1", "1")}, option="ppo.kl_coef", y_label="gold"))
    _, two = image(plots.swept({"seed=1": points("a", "b"), "seed=2": points("b", "a")}, option="loss", y_label="gold"))
    assert 1 < one < two
    assert plots._numbers(["0.01", "1e-3"]) == {"0.01": 0.01, "1e-3": 0.001}
    assert plots._numbers(["0.01", "dpo"]) == plots._numbers(["nan"]) == {}
