"""A listener that writes down what it is told."""

from collections.abc import Mapping

from rlhf_core.stage.decision import Decision


class Notes:
    """Every event as a tuple, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def planned(self, label: str, decision: Decision) -> None:
        self.events.append(("planned", label, decision.action))

    def started(self, label: str, decision: Decision) -> None:
        self.events.append(("started", label, decision.action))

    def progress(self, label: str, done: int, total: int, message: str) -> None:
        self.events.append(("progress", label, done, total))

    def metrics(self, label: str, step: int, values: Mapping[str, float]) -> None:
        self.events.append(("metrics", label, step))

    def finished(self, label: str, decision: Decision, metrics: Mapping[str, float], seconds: float) -> None:
        self.events.append(("finished", label, decision.action, dict(metrics)))

    def failed(self, label: str, error: BaseException) -> None:
        self.events.append(("failed", label, type(error).__name__))

    def of(self, kind: str) -> list[tuple[object, ...]]:
        return [event[1:] for event in self.events if event[0] == kind]
