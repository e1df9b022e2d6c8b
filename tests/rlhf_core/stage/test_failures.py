"""What failed while a stage ran, and for which settings its result counts."""

from rlhf_core.config.agents import EnvironmentAgent
from rlhf_core.config.policy import PPOConfig
from rlhf_core.config.rewards import EpisodeReward, FunctionReward, JudgeReward, RewardsConfig
from rlhf_core.schema.base import keyed
from rlhf_core.stage.failures import failure_misfit, failure_settings, note_failures, noted_failures
from rlhf_core.store.attempts import FAILURES
from rlhf_core.store.records import Failed

SETTINGS = {"agent": {"retries": 1}, "rewards.terms.mine": {"timeout_s": 5.0, "on_failure": "invalid"}}


def test_the_failures_of_all_steps_are_counted_and_a_step_that_is_made_again_once(tmp_path):
    note_failures(tmp_path, 1, {"agent": (0, 8), "rewards.terms.mine": (2, 8)}, SETTINGS)
    note_failures(tmp_path, 2, {"agent": (0, 8), "rewards.terms.mine": (7, 8)}, SETTINGS)
    note_failures(tmp_path, 2, {"agent": (0, 8), "rewards.terms.mine": (1, 8)}, SETTINGS)
    assert noted_failures(tmp_path, SETTINGS) == {
        "rewards.terms.mine": Failed(failed=3, answers=16, settings=SETTINGS["rewards.terms.mine"])
    }


def test_a_line_that_a_kill_cut_short_costs_no_other(tmp_path):
    note_failures(tmp_path, 1, {"agent": (1, 4)}, SETTINGS)
    with (tmp_path / FAILURES).open("a") as stream:
        stream.write('\n{"step": 2, "coun')
    note_failures(tmp_path, 3, {"agent": (1, 4)}, SETTINGS)
    assert noted_failures(tmp_path, SETTINGS)["agent"].share() == "2 of 8 answers failed"


def test_what_no_setting_could_have_prevented_is_not_noted(tmp_path):
    note_failures(tmp_path, 1, {"elsewhere": (4, 4)}, SETTINGS)
    assert noted_failures(tmp_path, SETTINGS) == {} and list(tmp_path.iterdir()) == []


def test_only_settings_of_what_failed_count():
    failures = {"rewards.terms.mine": Failed(failed=7, answers=12, settings=SETTINGS["rewards.terms.mine"])}
    assert failure_misfit(failures, SETTINGS, label="score") == ""
    assert failure_misfit(failures, SETTINGS | {"agent": {"retries": 5}}, label="score") == ""
    other = SETTINGS | {"rewards.terms.mine": {"timeout_s": 60.0, "on_failure": "fail"}}
    assert failure_misfit(failures, other, label="score") == (
        "score.rewards.terms.mine: 7 of 12 answers failed under timeout_s = 5.0, now 60.0 and "
        'on_failure = "invalid", now "fail"'
    )
    assert failure_misfit({}, other, label="score") == ""


def test_a_setting_that_came_with_a_later_version_is_another_setting():
    failures = {"agent": Failed(failed=1, answers=2, settings={"retries": 1})}
    said = failure_misfit(failures, {"agent": {"retries": 1, "patience_s": 3}}, label="ppo")
    assert said == "ppo.agent: 1 of 2 answers failed under patience_s = nothing, now 3"


def test_the_settings_are_those_of_every_term_and_of_the_agent_and_none_of_them_is_in_the_key():
    function = FunctionReward(function="m:f")
    judge = JudgeReward(url="http://a/v1", model="m", template="{completion}")
    terms = {"mine": function, "judge": judge, "won": EpisodeReward()}
    agent = EnvironmentAgent(environment="m:World", max_episode_tokens=64)
    config = PPOConfig(rewards=RewardsConfig(terms=terms), agent=agent)
    settings = failure_settings(config)
    assert settings == {
        "rewards.terms.mine": {
            "timeout_s": 60.0,
            "batch_size": 0,
            "workers": 1,
            "memory_mb": 0,
            "retries": 0,
            "on_failure": "fail",
        },
        "rewards.terms.judge": {
            "url": "http://a/v1",
            "concurrency": 16,
            "timeout_s": 120.0,
            "retries": 4,
            "token_env": "",
            "corrections": 2,
            "on_failure": "fail",
        },
        "agent": {"step_timeout_s": 60.0, "episode_timeout_s": 600.0, "retries": 1, "processes": 1},
    }
    in_key = keyed(config)
    for path, fields in settings.items():
        table = in_key
        for part in path.split("."):
            table = table[part]
        assert not set(fields) & set(table)
