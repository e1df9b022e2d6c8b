"""The policy section of a profile: choices by name, and combinations that would quietly do something else."""

import pytest
from pydantic import ValidationError

from rlhf_core.algorithms.advantage.group import CustomAdvantage, FlashReinforceAdvantage, GRPOAdvantage
from rlhf_core.algorithms.advantage.token import GAEAdvantage
from rlhf_core.algorithms.policy.clip import ClipLoss, GSPOLoss
from rlhf_core.algorithms.policy.weighted import CISPOLoss
from rlhf_core.config.former_names import renamed
from rlhf_core.config.policy import GROUP_ADVANTAGES, KLAsLoss, PPOConfig
from rlhf_core.schema.base import keyed

DYNAMIC, STALE, PARTIAL = {"type": "dynamic"}, {"type": "staleness"}, {"type": "partial", "tokens": 16}
GROUP_JUDGE = {
    "type": "judge",
    "url": "http://a/v1",
    "model": "m",
    "template": "{answers}",
    "compares": "group",
    "verdict": {"type": "json", "field": "scores"},
}
RELATIVE = {"type": "function", "function": "a.b:c", "compares": "group"}


def test_the_default_is_ppo():
    config = PPOConfig()
    assert (config.advantage, config.loss) == (GAEAdvantage(gae_lambda=0.95, whiten=True), ClipLoss(clip_low=0.2))


@pytest.mark.parametrize("name", ["clip", "gspo", "cispo"])
def test_a_bare_name_stands_for_its_defaults(name):
    assert PPOConfig(loss=name).loss == {"clip": ClipLoss(), "gspo": GSPOLoss(), "cispo": CISPOLoss()}[name]
    assert keyed(PPOConfig(loss=name))["loss"]["type"] == name


OF_GROUPS = [kind for kind in GROUP_ADVANTAGES if kind not in (CustomAdvantage, FlashReinforceAdvantage)]


def test_a_baseline_of_the_whole_step_needs_one_sample_of_a_prompt():
    assert PPOConfig(advantage="flash_reinforce", kl=KLAsLoss()).samples_per_prompt == 1


@pytest.mark.parametrize("kind", OF_GROUPS)
def test_estimators_that_compare_samples_need_two_of_them(kind):
    with pytest.raises(ValidationError, match=r"samples_per_prompt = 1: .* compares the samples of a prompt"):
        PPOConfig(advantage=kind(), kl=KLAsLoss())
    enough = kind().least_group
    assert PPOConfig(advantage=kind(), kl=KLAsLoss(), samples_per_prompt=enough).advantage == kind()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"advantage": "gea"}, "'gae', 'reinforce\\+\\+'"),
        ({"advantage": {"type": "rloo", "gamma": 0.9}, "samples_per_prompt": 2}, "Extra inputs"),
        ({"correction": {"pi_old": "sampler"}}, "level = 'token': with pi_old = 'sampler' the ratio q is 1 everywhere"),
        ({"ahead": "dynamic"}, r"samples_per_prompt = 1: ahead\.type = 'dynamic' compares"),
        ({"rewards": {"terms": {"j": GROUP_JUDGE}}}, r"samples_per_prompt = 1: rewards\.terms\.j\.compares"),
        ({"rewards": {"composition": {"type": "gdpo"}}}, 'samples_per_prompt = 1: rewards.composition.type = "gdpo"'),
        (
            {"rewards": {"terms": {"rm": {"type": "reward_model", "normalize": "group"}}}},
            'samples_per_prompt = 1: rewards.terms.rm.normalize = "group" compares',
        ),
        (
            {"ahead": DYNAMIC, "samples_per_prompt": 2, "order": "given"},
            r"order = 'given': ahead\.type = 'dynamic' draws",
        ),
        ({"ahead": DYNAMIC | {"max_rounds": 1}, "samples_per_prompt": 2}, "greater than or equal to 2"),
        ({"ptx": {"coef": 0}}, "greater than 0"),
        (
            {"value": {"optimizer": {"ema_decay": 0.9}}},
            r"optimizer\.ema_decay = 0\.9: the average of a value model is not used",
        ),
        (
            {
                "ahead": DYNAMIC | {"low": 0.1},
                "samples_per_prompt": 2,
                "rewards": {"normalize": "running"},
            },
            "rewards.normalize = 'running' changes it",
        ),
        (
            {
                "ahead": DYNAMIC | {"high": 0.9},
                "samples_per_prompt": 2,
                "rewards": {"composition": {"type": "gdpo"}},
            },
            "rewards.composition.type = 'gdpo' changes it",
        ),
        (
            {
                "ahead": DYNAMIC | {"low": 0.1},
                "samples_per_prompt": 2,
                "rewards": {"terms": {"rm": {"type": "reward_model", "normalize": "group"}}},
            },
            "rewards.terms.rm.normalize = 'group' changes it",
        ),
        (
            {"rewards": {"terms": {"won": {"type": "episode"}}}},
            "rewards.terms.won.type = 'episode': only agent episodes have this reward",
        ),
        ({"advantage": "grpo", "samples_per_prompt": 2}, r"kl\.in = 'reward': grpo divides"),
        ({"kl": {"credit": "answer"}}, r"kl\.credit = 'answer': .*advantage is gae; set kl\.credit = \"token\""),
        ({"kl": {"in": "loss", "credit": "answer"}}, r"kl\.loss\.credit\s+Extra inputs"),
        ({"kl": {"coef": 0.0, "target": 6.0}}, r"target = 6\.0: .* coef = 0 stays 0; raise coef"),
        ({"kl": {"target": 6.0, "horizon": 12}}, r"kl\.horizon = 12: must be > a fifth of the 64 rollouts of a step"),
        (
            {"advantage": "remax", "ahead": "staleness"},
            r"advantage = 'remax': .* and ahead\.type = 'staleness' is not made",
        ),
        (
            {"advantage": "remax", "rewards": {"normalize": "running"}},
            "rewards.normalize = 'running' scales rewards by the answers around them",
        ),
        (
            {"advantage": "remax", "rewards": {"terms": {"won": RELATIVE}}},
            "rewards.terms.won.compares = 'group' makes them relative to the answers around them",
        ),
        ({"kl": {"reference_sync": {"every": 2}, "coef": 0.0}}, "reference_sync: .* coef = 0 loads none"),
        (
            {"kl": {"reference_sync": {"every": 2}}, "optimizer": {"ema_decay": 0.9}},
            "reference_sync: .* the average of the policy",
        ),
        ({"kl": {"estimator": "k3"}}, r"kl\.reward\.estimator\s+Extra inputs"),
        ({"ahead": STALE | {"steps": 5}}, "less than or equal to 4"),
        ({"ahead": STALE | {"steps": 3}, "steps": 3}, r"ahead\.steps = 3: must be < steps = 3"),
        ({"ahead": PARTIAL | {"staleness": 3}, "steps": 3}, r"ahead\.staleness = 3: must be < steps = 3"),
        (
            {"ahead": STALE | {"steps": 2}, "correction": {"level": "off"}},
            r"ahead\.steps = 2: answers sampled by weights that old need the correction",
        ),
        (
            {"ahead": PARTIAL, "correction": {"level": "off", "pi_old": "sampler"}},
            r'ahead\.type = .partial.: .*; set correction.pi_old = "trainer"',
        ),
        ({"ahead": PARTIAL | {"tokens": 24}}, r"ahead\.tokens = 24: must divide sampling.max_tokens = 64"),
        ({"ahead": PARTIAL | {"tokens": 64}}, r"ahead\.tokens = 64: .* two rounds or more"),
        ({"ahead": PARTIAL | {"in_flight_groups": 63}}, r"in_flight_groups = 63: must be >= prompts_per_step = 64"),
        (
            {"ahead": PARTIAL, "agent": {"type": "environment", "environment": "my.module:Game"}},
            r"ahead\.type = 'partial': the episodes of an agent cannot be carried over",
        ),
        ({"kl_coef": 0.1, "kl": {"coef": 0.1}}, r"kl_coef = 0\.1: is the former name of kl\.coef, which is set, too"),
        ({"staleness": 1, "ahead": "dynamic"}, "staleness = 1: is the former name of ahead, which is set, too"),
        ({"staleness": 1, "dynamic_sampling": {}}, "staleness = 1: dynamic_sampling samples again"),
        ({"dynamic_sampling": True}, r"dynamic_sampling = True: must be a table, the options of `\[ppo.ahead\]"),
        ({"dynamic_sampling": {"type": "staleness"}}, "dynamic_sampling = {'type': 'staleness'}: must be a table"),
        ({"partial_tokens": 16, "dynamic_sampling": {}}, "partial_tokens = 16: dynamic_sampling samples again"),
        (
            {"rewards": {"normalise": "none", "normalize": "none"}},
            "normalise = 'none': is the former spelling of normalize",
        ),
        ({"sampling": {"min_p": 0.1}}, r"sampling\.min_p = 0\.1: the trainer's log-probs are those of the whole"),
        ({"sampling": {"presence_penalty": -1.0}}, r"sampling\.presence_penalty = -1\.0: the trainer's log-probs"),
        (
            {"ahead": PARTIAL, "sampling": {"stop": ["\n"], "max_tokens": 64}},
            r"sampling\.stop = .*: a text may lie in two rounds",
        ),
        (
            {"export_every": 2, "evaluate": {"prompts": 4, "patience": 2}},
            r"export_every = 2: evaluate\.patience = 2 may end the run",
        ),
        (
            {
                "export_every": 2,
                "evaluate": {"prompts": 4},
                "monitors": [{"type": "band", "metric": "kl/k3", "high": 1.0, "action": "stop"}],
            },
            "export_every = 2: a monitor may end the run",
        ),
        ({"band": {"low": 0.2}}, r"band = .*: is read with order = .band., and it is 'shuffled'"),
        (
            {"distill": {"teachers": {"t": 1.0}}, "kl": {"coef": 0.0}, "evaluate": {}},
            "evaluate.metric = 'eval/reward/mean': there is no term of rewards, so that each answer earns 0 and the first",
        ),
        (
            {"order": "band", "ahead": PARTIAL, "correction": {"level": "token"}},
            "order = 'band': .*, and ahead.type = 'partial' draws them in groups of no step",
        ),
        (
            {"ahead": PARTIAL, "schedule": [{"steps": 1}], "correction": {"level": "token"}},
            r"schedule = .*: answers of ahead.type = 'partial' are sampled over several steps",
        ),
        (
            {"steps": 4, "schedule": [{"steps": 4}, {"steps": 1}]},
            r"schedule = .*: its last part begins after 4 steps, and there are 4",
        ),
        ({"schedule": [{"steps": 2, "mixture": {"a": 0.0}}]}, r"schedule\[0\]\.mixture = .*: no source has a share"),
        ({"schedule": [{"steps": 2, "sampling": {"temperature": 0.0}}]}, "greater than 0"),
        ({"order": "band", "band": {"term": "rewrd_model"}}, "band.term = 'rewrd_model': .* did you mean reward_model"),
        (
            {"order": "band", "rewards": {"normalize": "running"}},
            "band.low = 0.1, high = 0.9: .*rewards.normalize = 'running' cha",
        ),
        ({"steps": 4, "export_every": 4}, r"export_every = 4: there is no such step before the end \(steps = 4\)"),
        ({"order": "band", "band": {"low": 0.9, "high": 0.1}}, "low = 0.9: must be at most high = 0.1"),
        (
            {"router_replay": True, "ahead": PARTIAL, "correction": {"level": "token"}},
            "router_replay = true: ahead.type = partial samples an answer in several calls, and the experts of one alone",
        ),
        (
            {"router_replay": True, "agent": {"type": "environment", "environment": "my.module:Game"}},
            "router_replay = true: agent samples an answer in several calls",
        ),
        ({"in_flight_groups": 64}, r"ahead\.partial\.tokens\s+Field required"),
    ],
)
def test_a_section_that_cannot_work_is_refused(section, message):
    with pytest.raises(ValidationError, match=message):
        PPOConfig.model_validate(section)


def test_bounds_go_with_a_term_that_is_normalised_and_only_watched():
    watched = {"type": "reward_model", "weight": 0.0, "normalize": "running"}
    rewards = {"terms": {"rm": {"type": "reward_model"}, "watched": watched}}
    section = {"ahead": DYNAMIC | {"low": 0.1}, "samples_per_prompt": 2, "rewards": rewards}
    assert PPOConfig.model_validate(section).rewards.terms["watched"].weight == 0.0


def test_grpo_is_chosen_with_its_own_option():
    section = {"advantage": {"type": "grpo", "eps": 1e-4}, "samples_per_prompt": 8, "kl": {"in": "loss"}}
    assert PPOConfig.model_validate(section).advantage == GRPOAdvantage(eps=1e-4)


@pytest.mark.parametrize(
    ("former", "current"),
    [
        ({"kl_coef": 0.1, "kl_target": 3.0, "kl_horizon": 50}, {"kl": {"coef": 0.1, "target": 3.0, "horizon": 50}}),
        ({"kl_in": "loss", "kl_credit": "token", "kl_estimator": "k3"}, {"kl": {"in": "loss", "estimator": "k3"}}),
        ({"kl_credit": "token", "kl_estimator": "k2"}, {"kl": {"in": "reward"}}),
        ({"reference_sync": {"every": 2}, "kl": {"coef": 0.1}}, {"kl": {"coef": 0.1, "reference_sync": {"every": 2}}}),
        ({"staleness": 1, "correction": {"level": "off"}}, {"ahead": "staleness", "correction": {"level": "off"}}),
        ({"staleness": 0, "partial_tokens": 0, "in_flight_groups": 0, "dynamic_sampling": None}, {}),
        ({"partial_tokens": 16, "staleness": 2, "in_flight_groups": 70},
         {"ahead": PARTIAL | {"staleness": 2, "in_flight_groups": 70}}),
        ({"dynamic_sampling": {}, "staleness": 0, "samples_per_prompt": 2}, {"ahead": DYNAMIC, "samples_per_prompt": 2}),
        ({"value_clip": 0.0, "value_warmup_steps": 3, "value_optimizer": {"eps": 1e-6}},
         {"value": {"clip": 0.0, "warmup_steps": 3, "optimizer": {"eps": 1e-6}}}),
        ({"lora": {"quantise": "nf4"}, "rewards": {"normalise": "running"}},
         {"lora": {"quantize": "nf4"}, "rewards": {"normalize": "running"}}),
    ],
)  # fmt: skip
def test_former_names_are_read_and_results_are_recorded_under_them(former, current):
    expected = PPOConfig.model_validate(current)
    assert PPOConfig.model_validate(former) == expected
    written = expected.model_dump()
    assert PPOConfig.model_validate(written) == expected, "a record is read as what it was"
    assert (
        {"kl_coef", "kl_in", "staleness", "value_clip", "value_optimizer"} <= written.keys() >= keyed(expected).keys()
    )
    assert not {"kl", "ahead", "value"} & written.keys()
    assert "normalise" in keyed(expected)["rewards"]


@pytest.mark.parametrize(
    ("below", "table", "laid_over"),
    [
        ({"kl": {"in": "loss", "coef": 0.2}}, {"kl_coef": 0.1, "kl_credit": "token"}, {"kl": {"coef": 0.1}}),
        ({"kl": {"credit": "answer"}}, {"kl_credit": "token"}, {"kl": {"credit": "token"}}),
        ({"ahead": "staleness"}, {"staleness": 0}, {"ahead": "none"}),
        ({"ahead": DYNAMIC}, {"staleness": 0}, {"ahead": DYNAMIC}),
        ({"ahead": STALE | {"steps": 2}}, {"partial_tokens": 8}, {"ahead": PARTIAL | {"tokens": 8, "staleness": 2}}),
        ({"ahead": PARTIAL | {"staleness": 1}}, {"dynamic_sampling": "none", "partial_tokens": 0}, {"ahead": STALE | {"steps": 1}}),
        ({}, {"dynamic_sampling": "none"}, {}),
    ],
)  # fmt: skip
def test_a_former_name_changes_what_lies_below(below, table, laid_over):
    assert renamed(table, below) == laid_over


def test_later_options_are_not_in_the_keys_of_profiles_without_them():
    found = keyed(PPOConfig(advantage="grpo", samples_per_prompt=2, kl=KLAsLoss()))
    assert not {"kl_estimator", "truncated_answers", "router_replay"} & set(found)
    assert found["advantage"] == {"type": "grpo", "eps": 1e-6}
    assert "truncated" not in found["rewards"] and "token_cap" not in found["correction"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"monitors": [{"type": "band", "metric": "rolout/length", "low": 1}]}, "no step has such a metric; did you mean rollout/length"),
        ({"monitors": [{"type": "drift", "metric": "kl/k4", "low": 1}]}, "did you mean kl/k3"),
        ({"monitors": [{"type": "band", "metric": "reward_component/rewardmodel", "low": 1}]}, "mean reward_component/reward_model"),
        ({"monitors": [{"type": "band", "metric": "eval/reward/men", "low": 1}], "evaluate": {}}, "did you mean eval/reward/mean"),
        ({"evaluate": {"metric": "eval/reward/men"}}, "evaluate.metric = 'eval/reward/men': .* did you mean eval/reward/mean"),
        ({"evaluate": {"metric": "reward/mean"}}, "evaluations have no such metric; did you mean eval/reward/mean"),
    ],
)  # fmt: skip
def test_a_metric_that_no_step_or_evaluation_has_is_refused(section, message):
    with pytest.raises(ValidationError, match=message):
        PPOConfig.model_validate(section)


@pytest.mark.parametrize(
    "metric",
    ["reward_extra/any/thing", "reward_constant/reward_model", "reward_failed/reward_model", "policy/clip_fraction"],
)
def test_a_metric_that_a_step_may_have_is_watched(metric):
    section = {"monitors": [{"type": "band", "metric": metric, "low": 1}]}
    assert PPOConfig.model_validate(section).monitors[0].reads() == (metric,)
