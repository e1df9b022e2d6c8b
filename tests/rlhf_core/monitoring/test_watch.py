"""What is done when monitors find something: streaks, severity, rollbacks, the best evaluation, and a state that survives JSON."""

import json
import math
from typing import Any

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.monitoring.bands import Band, Collapse
from rlhf_core.rollouts.guard import Best, Watch


def band(**changes: Any) -> Band:
    return Band(**({"name": "length", "metric": "rollout/length", "low": 6.0, "for_steps": 2} | changes))


def fed(watch: Watch, values: list[float], *, first: int = 1) -> list[list[str]]:
    """Return the actions at each step."""
    alarms = [watch.observe(step, {"rollout/length": value}) for step, value in enumerate(values, start=first)]
    return [[alarm.action for alarm in found] for found in alarms]


def test_an_alarm_needs_as_many_steps_in_a_row_as_it_says_and_comes_once():
    watch = Watch([band()], looks=0)
    assert fed(watch, [3, 9, 3, 3, 3, 9, 3, 3]) == [[], [], [], ["warn"], [], [], [], ["warn"]]


def test_the_text_is_what_a_person_reads():
    watch = Watch([band(for_steps=3, action="stop")], looks=0)
    assert fed(watch, [3.1, 3.1]) == [[], []]
    (alarm,) = watch.observe(9, {"rollout/length": 3.1})
    assert (alarm.step, alarm.monitor, alarm.text) == (9, "length", "rollout/length 3.1 < 6 for 3 steps")


def test_a_monitor_ignores_the_first_steps_that_it_is_told_to():
    assert fed(Watch([band(after=3)], looks=0), [3] * 5) == [[], [], [], [], ["warn"]]


def test_a_run_is_not_quiet_while_a_monitor_that_acts_complains():
    watch = Watch([band(action="stop", for_steps=3), band(name="other", low=8.0)], looks=0)
    for value, quiet in ((9.0, True), (7.0, True), (3.0, False), (7.0, True)):  # at 7 only the one that warns
        fed(watch, [value])
        assert watch.quiet is quiet


def test_the_most_severe_alarm_comes_first():
    monitors = [band(name=action, action=action, for_steps=1) for action in ("warn", "rollback", "stop")]
    assert fed(Watch(monitors, looks=0), [3]) == [["stop", "rollback", "warn"]]


def test_a_complaint_that_was_accepted_is_none_until_it_ends():
    watch = Watch([band(for_steps=1, action="pause")], looks=0)
    fed(watch, [1.0])
    assert not watch.quiet
    watch.accept("length")
    again = Watch([band(for_steps=1, action="pause")], looks=0)
    again.restore(watch.state())
    for one in (watch, again):
        assert one.quiet and fed(one, [1.0], first=2) == [[]] and one.quiet
        fed(one, [9.0, 1.0], first=3)
        assert not one.quiet  # a new complaint


def test_after_its_rollbacks_a_monitor_stops_the_run():
    watch = Watch([band(action="rollback", for_steps=1, max_rollbacks=2, learning_rate_factor=0.25)], looks=0)
    for step in (1, 2):
        (alarm,) = watch.observe(step, {"rollout/length": 3.0})
        assert (alarm.action, alarm.learning_rate_factor) == ("rollback", 0.25)
        watch.rolled_back(alarm, to=0)
    (alarm,) = watch.observe(3, {"rollout/length": 3.0})
    assert (alarm.action, alarm.text) == ("stop", "rollout/length 3 < 6 for 1 step, after 2 rollbacks")


def test_a_rollback_takes_values_out_of_windows_and_ends_streaks():
    watch = Watch([band(action="rollback", window=2, for_steps=1)], looks=0)
    (alarm,) = [*watch.observe(1, {"rollout/length": 9.0}), *watch.observe(2, {"rollout/length": 1.0})]
    watch.rolled_back(alarm, to=1)
    assert watch.quiet
    assert watch.observe(3, {"rollout/length": 4.0}) == []  # with step 1: 6.5; with step 2 it were 2.5


def test_a_monitor_of_evaluations_keeps_its_streak_between_them():
    watch = Watch([Band(metric="eval/length", low=6.0, for_steps=2)], looks=0)
    assert watch.observe(10, {"eval/length": 3.0, "rollout/length": 9.0}) == []
    assert watch.observe(11, {"rollout/length": 9.0}) == []
    assert len(watch.observe(20, {"eval/length": 3.0, "rollout/length": 9.0})) == 1


def test_a_watch_goes_on_from_its_state():
    monitors = [band(), Collapse()]
    whole, cut = Watch(monitors, looks=0), Watch(monitors, looks=0)
    assert fed(cut, [9, 3]) == [[], []]
    resumed = Watch(monitors, looks=0)
    resumed.restore(json.loads(json.dumps(cut.state())))
    assert fed(resumed, [3], first=3) == [["warn"]]
    fed(whole, [9, 3, 3])
    assert resumed.state() == whole.state()
    assert resumed.complaints() == {"monitor/length": 2.0, "monitor/collapse": 0.0}


def test_a_metric_that_is_not_logged_is_named_with_those_that_are():
    watch = Watch([band(metric="rollout/lenght")], looks=0)
    with pytest.raises(
        ConfigError, match=r"ppo\.monitors\[0\]\.metric = 'rollout/lenght': .*choose one of rollout/length"
    ):
        watch.check_metrics({"rollout/length": 3.0}, later=("eval/",))
    Watch([band(metric="eval/mine")], looks=0).check_metrics({}, later=("eval/",))
    watch.check_metrics({}, only="eval/")
    assert watch.missing() == ["rollout/lenght"]


def test_only_a_larger_value_is_better():
    best = Best().after(0, 1.0).after(10, 1.0).after(20, math.nan)
    assert (best.value, best.step, best.since) == (1.0, 0, 2)
    assert best.after(30, 1.1) == Best(1.1, 30, 0)


def test_the_best_survives_json_also_before_the_first_evaluation():
    for best in (Best(), Best().after(0, math.nan), Best().after(0, -2.5).after(1, -3.0)):
        restored = Best.restored(json.loads(json.dumps(best.state(), allow_nan=False)))
        assert (restored.value, restored.step) == (best.value, best.step)
        assert restored.since == best.since
