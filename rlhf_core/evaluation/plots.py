"""Draw figures as PNG bytes in one style, with matplotlib's Agg canvas (no display)."""

import io
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from rlhf_core.evaluation.metrics import ReliabilityBin

PALETTE = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#65a30d", "#dc2626")
"""Colors that color-blind readers can distinguish on white. The text of a figure also names every series."""
INK, SOFT, GRID = "#1f2937", "#6b7280", "#e5e7eb"
DPI = 160  # sharp on a screen of twice the usual density
FAR = 3.0  # A point is not drawn if the root of its KL is more than this many times the root of the next smaller KL
BAR_HALF_WIDTH = 12  # pixels on either side of a point and its bar that names must not cover

Curve = list[tuple[int, float]]


def colors(names: Iterable[str]) -> dict[str, str]:
    """Assign a color to each name, by its place.

    >>> colors(["base", "sft"])
    {'base': '#2563eb', 'sft': '#d97706'}
    """
    return {name: PALETTE[place % len(PALETTE)] for place, name in enumerate(names)}


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A policy on the frontier, with its distance from the reference (nats) and its reward with interval."""

    name: str
    kl: float
    reward: float
    low: float
    high: float


def frontier(points: Sequence[FrontierPoint], *, reward_name: str, reference: str, colors: Mapping[str, str]) -> bytes:
    """Draw reward against KL(policy || reference) with intervals. The axis is the root of KL (arXiv 2210.10760).

    A policy so far away that the others would shrink to a spot, such as an untrained one, is listed below the axes
    instead.
    """
    figure, axes = _figure(6.4, 4.2)
    points, far = _without_far_ones(points)
    if far:
        named = ", ".join(f"{point.name} (KL {point.kl:.0f}, reward {point.reward:.2f})" for point in far)
        axes.set_title(f"too far out to be shown: {named}", fontsize=9, color=SOFT, loc="right")
    places = [math.sqrt(max(point.kl, 0.0)) for point in points]
    for point, x in zip(points, places):
        color = colors[point.name]
        error = [[point.reward - point.low], [point.high - point.reward]]
        axes.errorbar(
            x, point.reward, _clipped(error), fmt="o", color=color, markersize=8, capsize=4, elinewidth=1.6,
            markeredgecolor="white", markeredgewidth=1.0, zorder=3, label=point.name,
        )  # fmt: skip
    width = max([*places, 0.5])
    axes.set_xlim(-0.06 * width, 1.12 * width)
    axes.margins(y=0.15)
    axes.set_xlabel(f"√KL(policy ‖ {reference})   [√nats per answer]")
    axes.set_ylabel(reward_name)
    _write_names(figure, axes, points, places)
    return _png(figure)


def _without_far_ones(points: Sequence[FrontierPoint]) -> tuple[list[FrontierPoint], list[FrontierPoint]]:
    shown, far = sorted(points, key=lambda point: point.kl), []
    while len(shown) > 2 and math.sqrt(max(shown[-1].kl, 0)) > FAR * math.sqrt(max(shown[-2].kl, 0)) > 0:
        far.append(shown.pop())
    return [point for point in points if point in shown], far


def _write_names(figure: Any, axes: Any, points: Sequence[FrontierPoint], places: Sequence[float]) -> None:
    """Write each point's name where it overlaps no bar, no other name and no edge, with a line if it is far away."""
    figure.draw_without_rendering()  # the positions of the points are known only after this
    taken = []
    for point, x in zip(points, places):
        (left, low), (right, high) = axes.transData.transform([(x, point.low), (x, point.high)])
        taken.append(Bbox.from_extents(left - BAR_HALF_WIDTH, low, right + BAR_HALF_WIDTH, high))
    for point, x in zip(points, places):
        for distance, right, up in itertools.product((9, 22, 40, 60), (True, False), (1, -1)):
            name = axes.annotate(
                point.name, (x, point.reward), xytext=(distance if right else -distance, up * (distance - 2)),
                textcoords="offset points", ha="left" if right else "right", va="center", fontsize=9, color=INK,
                arrowprops={"arrowstyle": "-", "color": SOFT, "linewidth": 0.7} if distance > 9 else None,
            )  # fmt: skip
            name.get_window_extent()  # moves it to its place
            box = Text.get_window_extent(name)  # excludes the line to the name
            inside = axes.bbox.contains(box.x0, box.y0) and axes.bbox.contains(box.x1, box.y1)
            if inside and not any(box.overlaps(other) for other in taken):
                break
            name.remove()
        else:  # no free place: overlap others instead of leaving the name out
            name = axes.annotate(point.name, (x, point.reward), fontsize=9, color=INK)
            box = name.get_window_extent()
        taken.append(box)


def _clipped(error: list[list[float]]) -> list[list[float]]:
    """Clip negative rounding errors of the bars (the mean of equal values may be outside its interval)."""
    return [[max(0.0, value) for value in side] for side in error]


LINES = ("solid", "dashed", "dotted", "dashdot")
"""Styles of lines that have one color."""


def curves(series: Mapping[str, Curve], *, title: str, y_label: str, color: str) -> bytes:
    """Draw one line per series over steps, with a smoothed line over it if it has more than 30 points."""
    figure, axes = _figure(6.4, 3.6)
    for index, (name, points) in enumerate(series.items()):
        steps, values = [step for step, _ in points], [value for _, value in points]
        if len(points) > 30:
            axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
            values = smoothed(values, span=max(5, len(values) // 15))  # a fifteenth of the run
        marker = "o" if len(points) < 12 else None
        style = LINES[index % len(LINES)]
        axes.plot(steps, values, color=color, linestyle=style, linewidth=1.8, marker=marker, markersize=4, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(y_label)
    axes.set_title(title)
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=8)
    return _png(figure)


@dataclass(frozen=True, slots=True)
class SweptPoint:
    """A point of a sweep: the value of the swept option, and the number found there with its interval."""

    value: str
    mean: float
    low: float
    high: float


def swept(series: Mapping[str, Sequence[SweptPoint]], *, option: str, y_label: str) -> bytes:
    """Draw a number with its interval over the values of an option, one color per series; the series "" has no name.

    Numbers stand on an axis, which is logarithmic if they span a factor of 8; other values stand side by side.
    """
    figure, axes = _figure(6.4, 4.0)
    names = list(dict.fromkeys(point.value for points in series.values() for point in points))
    places = _numbers(names) or {name: float(index) for index, name in enumerate(names)}
    for index, (name, points) in enumerate(series.items()):
        ordered = sorted(points, key=lambda point: places[point.value])
        error = [[point.mean - point.low for point in ordered], [point.high - point.mean for point in ordered]]
        axes.errorbar(
            [places[point.value] for point in ordered], [point.mean for point in ordered], _clipped(error), fmt="o-",
            color=PALETTE[index % len(PALETTE)], markersize=7, capsize=4, elinewidth=1.6, linewidth=1.0, alpha=0.9,
            label=name,
        )  # fmt: skip
    positions = sorted(set(places.values()))
    if _numbers(names) and positions[0] > 0 and positions[-1] / positions[0] >= 8:
        axes.set_xscale("log")
    axes.set_xticks([places[name] for name in names], names)
    axes.minorticks_off()
    axes.set_xlabel(option)
    axes.set_ylabel(y_label)
    if any(series):
        axes.legend(frameon=False, fontsize=8)
    return _png(figure)


def _numbers(names: Sequence[str]) -> dict[str, float]:
    """The value of every name if all are finite numbers, else {}."""
    try:
        values = {name: float(name) for name in names}
    except ValueError:
        return {}
    return values if all(map(math.isfinite, values.values())) else {}


def reliability_diagram(rows: Sequence[ReliabilityBin], *, ece: float) -> bytes:
    """Draw accuracy against confidence per bin. A calibrated model is on the diagonal."""
    figure, axes = _figure(4.6, 4.2)
    axes.plot([0, 1], [0, 1], color=SOFT, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    largest = max((row.pairs for row in rows), default=1)
    for row in rows:
        share = row.pairs / largest
        axes.bar(
            row.low, row.accuracy, width=row.high - row.low, align="edge", color=PALETTE[0], alpha=0.25 + 0.55 * share,
            edgecolor="white", linewidth=1, zorder=2,
        )  # fmt: skip
        axes.plot([row.confidence], [row.accuracy], "o", color=INK, markersize=3.5, zorder=3)
    axes.set_xlim(min((row.low for row in rows), default=0.0), 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("how sure the model is of the answer that it scores higher")
    axes.set_ylabel("how often that is the chosen one")
    axes.set_title(f"expected calibration error {ece:.3f}")
    return _png(figure)


def margin_histogram(margins: Sequence[float], *, title: str) -> bytes:
    """Draw a histogram of the margins of chosen over rejected answers, with negative margins in another color."""
    figure, axes = _figure(5.6, 3.6)
    bins = min(40, max(8, int(math.sqrt(len(margins)) * 1.5)))  # about sqrt(n), as many as can be read
    _, _, patches = axes.hist(margins, bins=bins, color=PALETTE[0], alpha=0.85, edgecolor="white", linewidth=0.6)
    for patch in patches:
        if patch.get_x() + patch.get_width() / 2 < 0:
            patch.set_facecolor(PALETTE[7])
    axes.axvline(0, color=INK, linewidth=1)
    axes.set_xlabel("score of chosen − score of rejected")
    axes.set_ylabel("pairs")
    axes.set_title(title)
    return _png(figure)


def length_scatter(
    groups: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x_label: str,
    y_label: str,
    colors: Mapping[str, str],
) -> bytes:
    """Draw score against length, with the color of each group of (lengths, scores) and a large dot at its mean."""
    figure, axes = _figure(5.6, 3.8)
    for name, (lengths, scores) in groups.items():
        color = colors[name]
        alpha = max(0.15, min(0.7, 80 / max(1, len(lengths))))
        axes.scatter(lengths, scores, s=14, color=color, alpha=alpha, linewidths=0)
        if len(lengths):
            middle = (sum(lengths) / len(lengths), sum(scores) / len(scores))
            axes.plot(
                *middle, "o", color=color, markersize=10, markeredgecolor="white", markeredgewidth=1.5, label=name
            )
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if len(groups) > 1:
        axes.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, markerscale=0.7)
    return _png(figure)


def read_curves(metrics_jsonl: Path) -> dict[str, Curve]:
    """Read the (step, value) pairs of each metric, in order, from a `metrics.jsonl` file.

    A broken last line is left out.
    """
    series: dict[str, Curve] = {}
    for line in metrics_jsonl.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        for name, value in entry["values"].items():
            if math.isfinite(value):
                series.setdefault(name, []).append((entry["step"], value))
    return series


def smoothed(values: Sequence[float], *, span: int) -> list[float]:
    """The exponential moving average with weight 2 / (span + 1), corrected for the bias of its start.

    >>> smoothed([1.0, 1.0, 1.0], span=5)
    [1.0, 1.0, 1.0]
    """
    weight, average, total, result = 2 / (span + 1), 0.0, 0.0, []  # total = 1 - (1 - weight)^n is the bias
    for value in values:
        average = (1 - weight) * average + weight * value
        total = (1 - weight) * total + weight
        result.append(round(average / total, 12))
    return result


def _figure(width: float, height: float) -> tuple[Any, Any]:
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_facecolor("white")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(SOFT)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, labelsize=9)
    axes.xaxis.label.set(color=INK, fontsize=10)
    axes.yaxis.label.set(color=INK, fontsize=10)
    axes.title.set(color=INK, fontsize=11)
    return figure, axes


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
