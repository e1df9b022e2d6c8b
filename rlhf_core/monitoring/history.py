"""The history of a run's metrics, as monitors read it; it is a part of every checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Points = list[tuple[int, float]]
Samples = list[tuple[int, tuple[float, ...]]]

FIRST, LAST, EVALUATIONS = 64, 512, 64
"""The numbers of first and last values of a metric that are kept, and of evaluations with the score of each prompt."""


class History:
    """The values of the metrics that monitors read, and the scores of each held-out prompt, by step.

    >>> history = History(["kl/k3"])
    >>> history.add(1, {"kl/k3": 0.5, "reward/mean": 2.0})
    >>> history.last("kl/k3", 2)
    [(1, 0.5)]
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._points: dict[str, Points] = {name: [] for name in names}
        self._samples: defaultdict[str, Samples] = defaultdict(list)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step; those that no monitor reads, or that the step does not have, are left out."""
        for name, points in self._points.items():
            if name in metrics:
                points.append((step, float(metrics[name])))
                del points[FIRST : max(FIRST, len(points) - LAST)]

    def add_samples(self, step: int, samples: Mapping[str, Sequence[float]]) -> None:
        """Add the scores of the held-out prompts, in the order of the prompts, by the name of their mean."""
        for name, values in samples.items():
            self._samples[name].append((step, tuple(float(value) for value in values)))
            del self._samples[name][:-EVALUATIONS]

    def first(self, name: str, count: int) -> Points:
        """Return the first `count` values of a metric, or fewer."""
        return self._points[name][: min(count, FIRST)]

    def last(self, name: str, count: int) -> Points:
        """Return the last `count` values of a metric, or fewer."""
        return self._points[name][-count:]

    def samples(self, name: str, count: int) -> Samples:
        """Return the scores of each held-out prompt at the last `count` evaluations, or fewer."""
        return self._samples[name][-count:]

    def missing(self) -> list[str]:
        """Return the metrics that no step had so far."""
        return [name for name, points in self._points.items() if not points]

    def forget_after(self, step: int) -> None:
        """Remove what came after `step`: the run goes back to it."""
        for points in self._points.values():
            points[:] = [point for point in points if point[0] <= step]
        for samples in self._samples.values():
            samples[:] = [sample for sample in samples if sample[0] <= step]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must keep (JSON)."""
        return {"points": self._points, "samples": dict(self._samples)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        for name, points in state["points"].items():
            self._points[name] = [(int(step), float(value)) for step, value in points]
        for name, samples in state["samples"].items():
            self._samples[name] = [(int(step), tuple(values)) for step, values in samples]
