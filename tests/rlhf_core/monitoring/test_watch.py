"""What is done when monitors find something: streaks, severity, rollbacks, the best evaluation, and a state that survives JSON."""

import json
import math
from typing import Any

import pytest

from rlhf_core.config.monitors import HeldOutConfig
from rlhf_core.errors import ConfigError
from rlhf_core.monitoring.bands import Band, Collapse, MonitorConfig
from rlhf_core.rollouts.best_checkpoint import Best, BestCheckpoint
from rlhf_core.rollouts.monitors import Monitors
from rlhf_core.stage.checkpoints import Checkpoints
from rlhf_core.tracking.memory import MemoryStageTracker


def band(**changes: Any) -> Band:
    return Band(**({"name": "length", "metric": "rollout/length", "low": 6.0, "for_steps": 2} | changes))


def watch_of(*configs: MonitorConfig) -> Monitors:
    return Monitors(configs, looks=0, label="ppo", tracker=MemoryStageTracker())


def fed(watch: Monitors, values: list[float], *, first: int = 1) -> list[list[str]]:
    """Return the actions at each step."""
    alarms = [watch.observe(step, {"rollout/length": value}) for step, value in enumerate(values, start=first)]
    return [[alarm.action for alarm in found] for found in alarms]


def test_an_alarm_needs_as_many_steps_in_a_row_as_it_says_and_comes_once():
    watch = watch_of(band())
    assert fed(watch, [3, 9, 3, 3, 3, 9, 3, 3]) == [[], [], [], ["warn"], [], [], [], ["warn"]]


def test_the_text_is_what_a_person_reads():
    watch = watch_of(band(for_steps=3, action="stop"))
    assert fed(watch, [3.1, 3.1]) == [[], []]
    (alarm,) = watch.observe(9, {"rollout/length": 3.1})
    assert (alarm.step, alarm.monitor, alarm.text) == (9, "length", "rollout/length 3.1 < 6 for 3 steps")


def test_a_monitor_ignores_the_first_steps_that_it_is_told_to():
    assert fed(watch_of(band(after=3)), [3] * 5) == [[], [], [], [], ["warn"]]


def test_a_run_is_not_quiet_while_a_monitor_that_acts_complains():
    watch = watch_of(band(action="stop", for_steps=3), band(name="other", low=8.0))
    for value, quiet in ((9.0, True), (7.0, True), (3.0, False), (7.0, True)):  # at 7 only the one that warns
        fed(watch, [value])
        assert watch.quiet is quiet


def test_the_most_severe_alarm_comes_first():
    monitors = [band(name=action, action=action, for_steps=1) for action in ("warn", "rollback", "stop")]
    assert fed(watch_of(*monitors), [3]) == [["stop", "rollback", "warn"]]


def test_a_complaint_that_was_accepted_is_none_until_it_ends():
    watch = watch_of(band(for_steps=1, action="pause"))
    fed(watch, [1.0])
    assert not watch.quiet
    watch.accept("length")
    again = watch_of(band(for_steps=1, action="pause"))
    again.restore(watch.state())
    for one in (watch, again):
        assert one.quiet and fed(one, [1.0], first=2) == [[]] and one.quiet
        fed(one, [9.0, 1.0], first=3)
        assert not one.quiet  # a new complaint


def test_after_its_rollbacks_a_monitor_stops_the_run():
    watch = watch_of(band(action="rollback", for_steps=1, max_rollbacks=2, learning_rate_factor=0.25))
    for step in (1, 2):
        (alarm,) = watch.observe(step, {"rollout/length": 3.0})
        assert (alarm.action, alarm.learning_rate_factor) == ("rollback", 0.25)
        watch.note_rollback(alarm, to=0)
    (alarm,) = watch.observe(3, {"rollout/length": 3.0})
    assert (alarm.action, alarm.text) == ("stop", "rollout/length 3 < 6 for 1 step, after 2 rollbacks")


def test_a_rollback_takes_values_out_of_windows_and_ends_streaks():
    watch = watch_of(band(action="rollback", window=2, for_steps=1))
    (alarm,) = [*watch.observe(1, {"rollout/length": 9.0}), *watch.observe(2, {"rollout/length": 1.0})]
    watch.note_rollback(alarm, to=1)
    assert watch.quiet
    assert watch.observe(3, {"rollout/length": 4.0}) == []  # with step 1: 6.5; with step 2 it were 2.5


def test_a_monitor_of_evaluations_keeps_its_streak_between_them():
    watch = watch_of(Band(metric="eval/length", low=6.0, for_steps=2))
    assert watch.observe(10, {"eval/length": 3.0, "rollout/length": 9.0}) == []
    assert watch.observe(11, {"rollout/length": 9.0}) == []
    assert len(watch.observe(20, {"eval/length": 3.0, "rollout/length": 9.0})) == 1


def test_a_watch_goes_on_from_its_state():
    monitors = [band(), Collapse()]
    whole, cut = watch_of(*monitors), watch_of(*monitors)
    assert fed(cut, [9, 3]) == [[], []]
    resumed = watch_of(*monitors)
    resumed.restore(json.loads(json.dumps(cut.state())))
    assert fed(resumed, [3], first=3) == [["warn"]]
    fed(whole, [9, 3, 3])
    assert resumed.state() == whole.state()
    assert resumed.complaints() == {"monitor/length": 2.0, "monitor/collapse": 0.0}


def test_a_metric_that_is_not_logged_is_named_with_those_that_are():
    watch = watch_of(band(metric="rollout/lenght"))
    with pytest.raises(
        ConfigError, match=r"ppo\.monitors\[0\]\.metric = 'rollout/lenght': .*choose one of rollout/length"
    ):
        watch.check_metrics({"rollout/length": 3.0})
    watch_of(band(metric="eval/mine")).check_metrics({})
    assert watch.missing() == ["rollout/lenght"]


def test_only_a_larger_value_is_better():
    best = Best().after(0, 1.0).after(10, 1.0).after(20, math.nan)
    assert (best.value, best.step, best.since) == (1.0, 0, 2)
    assert best.after(30, 1.1) == Best(1.1, 30, 0)


def test_the_best_survives_json_also_before_the_first_evaluation(tmp_path):
    for values in ([], [math.nan], [-2.5, -3.0]):
        own, resumed = (BestCheckpoint(HeldOutConfig(), Checkpoints(tmp_path), "ppo") for _ in range(2))
        for step, value in enumerate(values):
            own.judge(step, {"eval/reward/mean": value}, quiet=True)
        resumed.restore(json.loads(json.dumps(own.state(), allow_nan=False)))
        assert resumed.state() == own.state()
        assert resumed.judge(9, {"eval/reward/mean": -2.4}, quiet=True) == -2.4
