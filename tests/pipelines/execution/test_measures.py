"""Headline numbers of stages, with their intervals."""

import json

from pipelines.execution.summary import Measure, of_metrics, of_report, read_report

REPORT = {
    "settings": {"level": 0.95},
    "policies": {
        "ppo": {
            "gold": {"mean": 2.0, "low": 1.0, "high": 3.0},
            "kl": {"mean": 0.5, "low": 0.4, "high": 0.6, "kind": "estimate"},
            "samples": 8,
        }
    },
    "order": ["ppo"],
}


def test_metrics_called_low_and_high_are_the_interval_of_the_one_without():
    found = of_metrics({"accuracy": 0.7, "accuracy_low": 0.6, "accuracy_high": 0.8, "ece": 0.1, "step_low": 1.0})
    assert found == {
        "accuracy": Measure(0.7, 0.6, 0.8),
        "ece": Measure(0.1, 0.1, 0.1),
        "step_low": Measure(1.0, 1.0, 1.0),
    }


def test_a_report_gives_the_measures_of_every_policy(tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    assert of_report(read_report(tmp_path)) == {"ppo/gold": Measure(2.0, 1.0, 3.0), "ppo/kl": Measure(0.5, 0.4, 0.6)}
    row = {"gold": {"mean": 1.0}, "entropy": 0.5}
    by_source = {"policies": {"ppo": {"gold": {"mean": 2.0}, "sources": {"a/b": row, "c": {"kl": {"mean": 0.5}}}}}}
    assert [(name, one.mean) for name, one in of_report(by_source).items()] == [
        ("ppo/gold", 2.0),
        ("ppo/source/a/b/gold", 1.0),
        ("ppo/source/c/kl", 0.5),
    ]
    assert of_report({"accuracy": 0.7}) == of_report(read_report(tmp_path / "none")) == {}
