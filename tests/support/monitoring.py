"""What a monitor finds in a history that is made by hand."""

from collections.abc import Sequence

from rlhf_core.monitoring.bands import History, MonitorConfig


def found(monitor: MonitorConfig, **series: Sequence[float]) -> str:
    """Return what the monitor finds after these values; `kl__k3` is the metric `kl/k3`."""
    history = History(monitor.reads())
    names = {name: name.replace("__", "/") for name in series}
    for step in range(max(map(len, series.values()))):
        row = {names[name]: values[step] for name, values in series.items() if step < len(values)}
        history.add(step + 1, row)
    return monitor.check(history, looks=0)
