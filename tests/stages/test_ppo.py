"""Policy optimisation: the order of prompts, the first ratio, learning, and a killed run's bytes."""

import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rlhf_core.algorithms.policy.clip import ClipLoss
from rlhf_core.algorithms.token_math import CorrectionConfig
from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
from rlhf_core.config.reward_band import RewardBand
from rlhf_core.config.rewards import FunctionReward, RewardsConfig
from rlhf_core.config.teachers import PolicyDistillation
from rlhf_core.data.shards import write_rollouts
from rlhf_core.data.tables import write_prompts
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.interfaces import Metrics, ModelSpec, Role, Trainer
from rlhf_core.models.initialize import train_tokenizer
from rlhf_core.rollouts.answers import WholeAnswers
from rlhf_core.rollouts.prompts import BandOrder, ordered_prompts, sources_used, split_prompts
from rlhf_core.runtime.local_runtime import LocalRuntime
from rlhf_core.sequences import Sequences
from rlhf_core.training.objectives.base import PolicyObjective
from rlhf_core.types import Completion, Generation, Message, PolicyRef, Prompt, PromptsRef, RewardModelRef, Rollout
from stages.ppo import PPOConfig
from stages.ppo.models import Models
from stages.ppo.run import update
from tests.support.policies import RUNTIME, make_policy, make_reward_model
from tests.support.training import (
    demonstrations,
    killed_and_resumed,
    series,
    shop_and_inputs,
    stopped_and_resumed,
    untimed,
)
from tests.support.workshop import Workshop

TAUGHT = {"teachers": {"a": 1.0}}
PROMPTS = [Prompt(f"p{i}", (Message("user", str(i)),), "", "test") for i in range(5)]


def config(**changes: Any) -> PPOConfig:
    settings: dict[str, Any] = {
        "steps": 4,
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "sampling": SamplingConfig(max_tokens=6),
        "rewards": RewardsConfig(terms={"short": FunctionReward(function="tests.support.token_rewards:small_is_good")}),
        "optimizer": OptimizerConfig(learning_rate=5e-3, schedule="constant"),
        "value": {"optimizer": OptimizerConfig(learning_rate=5e-3, schedule="constant")},
        "kl": {"coef": 0.0},
        "checkpoint_every": 1,
    }
    return PPOConfig(**(settings | changes))


@pytest.mark.parametrize(
    "advantage", ["gae", "reinforce++", "reinforce++-baseline", "rloo", "grpo", "dr_grpo", "opo", "remax"]
)
def test_the_first_update_is_on_policy_and_the_reference_is_at_distance_zero(tmp_path, policy, advantage):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    held = {"kl": {"coef": 0.01, "in": "loss" if advantage == "grpo" else "reward"}}
    shop.run("ppo", config(advantage={"type": advantage}, steps=2, **held), inputs)
    assert series(shop, "policy/ratio_max")[0] == 1.0
    assert series(shop, "kl/per_sequence")[0] == 0.0
    assert series(shop, "kl/per_sequence")[1] != 0.0
    assert series(shop, "mismatch/exp_abs_log_q")[0] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("loss", ["clip", "gmpo", "clip_cov"])
def test_the_reward_rises(tmp_path, policy, loss):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    fast = OptimizerConfig(learning_rate=2e-2, schedule="constant")
    settings = {
        "loss": {"type": loss},
        "advantage": {"type": "grpo"},
        "steps": 16,
        "samples_per_prompt": 8,
        "checkpoint_every": 16,
        "optimizer": fast,
    }
    shop.run("ppo", config(**settings), inputs)
    rewards = series(shop, "reward/mean")
    # uniform over 320 tokens: -1.6 at first, standard error 0.07 over 32 rollouts of 6 tokens
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


FALLING = {"schedule": "linear", "warmup_fraction": 0.0, "min_lr_fraction": 0.0}


def test_the_policys_schedule_begins_after_the_warm_up_of_the_value_model(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    settings = {
        "value": {"warmup_steps": 2, "optimizer": OptimizerConfig(learning_rate=1e-3, **FALLING)},
        "optimizer": OptimizerConfig(learning_rate=1e-3, **FALLING),
    }
    shop.run("ppo", config(**settings), inputs)
    # two of the four steps are the policy's: the first at the peak, the second half way to 0
    assert series(shop, "policy/learning_rate") == pytest.approx([1e-3, 5e-4])
    assert series(shop, "value/learning_rate") == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_without_a_value_model_the_policy_waits_for_nothing(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    shop.run("ppo", config(advantage={"type": "rloo"}, steps=2, value={"warmup_steps": 9}), inputs)
    assert len(series(shop, "policy/learning_rate")) == 2


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {"advantage": {"type": "gae"}, "kl": {"coef": 0.05, "target": 0.5}},
        {"advantage": {"type": "gae"}, "value": {"lora": {"rank": 4}}},
        {"advantage": {"type": "grpo"}, "kl": {"in": "loss", "coef": 0.05, "target": 0.5}},
        {"advantage": {"type": "grpo"}, "export_every": 3},
        {"kl": {"in": "loss", "coef": 0.05, "reference_sync": {"every": 2, "mix": 0.5}}, "truncated_answers": "mask"},
    ],
    ids=[
        "gae",
        "gae with adapters",
        "grpo",
        "grpo without a reference, with a policy on the way",
        "a moving reference",
    ],
)
def test_a_killed_run_ends_with_the_same_bytes(tmp_path, policy, changes):
    whole, inputs = shop_and_inputs(tmp_path / "whole", policy)
    expected, _ = whole.run("ppo", config(**changes), inputs)
    killed, inputs = shop_and_inputs(tmp_path / "killed", policy)
    ref = killed_and_resumed(killed, "ppo", config(**changes), inputs, at=3)
    assert ref.digest == expected.digest


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_a_policy_with_adapters_is_its_own_reference_to_the_bit(tmp_path, policy, variant, monkeypatch):
    settings = config(kl={"in": "loss", "coef": 0.05}, lora={"rank": 4, "variant": variant}, advantage={"type": "rloo"})
    made, distances, leased = [], [], []
    lease = LocalRuntime.trainer
    monkeypatch.setattr(
        LocalRuntime, "trainer", lambda own, role, *rest: leased.append(role) or lease(own, role, *rest)
    )
    for name in ("own", "apart"):
        if name == "apart":
            monkeypatch.setattr(PPOConfig, "lends_reference", lambda *_: False)
        shop, inputs = shop_and_inputs(tmp_path / name, policy)
        made.append(shop.run("ppo", settings, inputs)[0])
        distances.append(series(shop, "kl/per_sequence"))
    assert made[0].digest == made[1].digest
    assert distances[0] == distances[1] and distances[0][0] == 0.0 < abs(distances[0][-1])
    assert [leased.count(role) for role in ("policy", "reference")] == [2, 1]


def answered(prompt: Prompt, *rewards: float, invalid: str = "") -> list[Rollout]:
    made = Completion((1,), (-1.0,), "", "stop", 0, 1)
    return [Rollout(prompt, (1,), made, one, {"right": 1 - one}, invalid) for one in rewards]


def test_the_order_of_the_band_follows_the_last_means_and_takes_a_share_of_the_others():
    order = BandOrder(PROMPTS, RewardBand(low=0.2, high=0.8, again=0.3), seed=1)
    first = [one.id for one in order.drawn(99, {"": 5})]
    assert sorted(first) == ["p0", "p1", "p2", "p3", "p4"] and first != sorted(first)
    assert first == [one.id for one in BandOrder(PROMPTS[::-1], RewardBand(), seed=1).drawn(99, {"": 5})]
    means = {"p0": 0.5, "p1": 0.0, "p2": 1.0, "p3": 0.4}
    for step, (name, mean) in enumerate(means.items()):
        prompt = next(one for one in PROMPTS if one.id == name)
        order.after(step, [prompt] * 2, answered(prompt, mean - 0.1, mean + 0.1))
    # p4 is new, p0 and p3 are inside; of the others p1 has waited for longest, and has ceil(0.3 * 3) places
    assert [one.id for one in order.drawn(99, {"": 3})] == ["p4", "p0", "p1"]
    assert [one.id for one in order.drawn(99, {"": 7})] == ["p4", "p0", "p3", "p1", "p2", "p4", "p0"]
    assert order.metrics() == {"band/inside": 0.4, "band/answered": 0.8}
    order.after(9, [PROMPTS[1], PROMPTS[4]], [*answered(PROMPTS[1], 0.6), *answered(PROMPTS[4], 0.5, invalid="lost")])
    assert [one.id for one in order.drawn(99, {"": 4})] == [
        "p0",
        "p3",
        "p2",
        "p4",
    ]  # p1 is inside now; p4 has had no valid answer
    again = BandOrder(PROMPTS, RewardBand(low=0.2, high=0.8, again=0.3), seed=1)
    again.restore(json.loads(json.dumps(order.state())))
    assert again.drawn(99, {"": 4}) == order.drawn(99, {"": 4})
    by_term = BandOrder(PROMPTS, RewardBand(term="right", low=0.2, high=0.8), seed=1)
    by_term.after(0, PROMPTS[:1], answered(PROMPTS[0], 0.9))
    assert by_term.metrics()["band/inside"] == 0.0


def test_the_band_that_is_sampled_ahead_depends_on_the_steps_before_alone():
    def order() -> BandOrder:
        return BandOrder(PROMPTS, RewardBand(low=0.2, high=0.8, again=0.0), seed=1, lag=1)

    early, late = order(), order()
    drawn = [early.drawn(0, {"": 2}), early.drawn(1, {"": 2})]
    assert not {one.id for one in drawn[0]} & {one.id for one in drawn[1]}, "step 0 is not answered yet, but drawn"
    for step in (0, 1):
        early.after(step, drawn[step], [one for prompt in drawn[step] for one in answered(prompt, 0.0)])
        late.drawn(step, {"": 2})
    late.after(0, drawn[0], [one for prompt in drawn[0] for one in answered(prompt, 0.0)])
    # Step 2 is sampled when step 0 is known: whether step 1 has come in by then makes no difference.
    third = late.drawn(2, {"": 3})
    assert early.drawn(2, {"": 3}) == third
    resumed = order()
    resumed.restore(json.loads(json.dumps(early.state())))
    assert resumed.drawn(2, {"": 3}) == third


def test_a_reference_that_takes_over_the_policy_at_every_step_is_at_distance_zero(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)

    def held(every: int) -> PPOConfig:
        kl = {"in": "loss", "coef": 0.05, "reference_sync": {"every": every}}
        return config(steps=3, advantage={"type": "rloo"}, kl=kl)

    shop.run("ppo", held(1), inputs)
    assert series(shop, "kl/k3") == pytest.approx([0.0, 0.0, 0.0], abs=1e-9)
    shop, inputs = shop_and_inputs(tmp_path / "later", policy)
    shop.run("ppo", held(2), inputs)
    first, second, third = series(shop, "kl/k3")
    assert second > 1e-7 > max(first, third)


class Recording(LocalRuntime):
    """Keeps the roles and models that were leased."""

    def __init__(self) -> None:
        super().__init__(RUNTIME)
        self.roles: list[str] = []
        self.models: dict[str, str] = {}

    def trainer(
        self, role: Role, model: ModelSpec, optimizer: OptimizerConfig | None
    ) -> AbstractContextManager[Trainer]:
        self.roles.append(role)
        self.models[role] = model.path
        return super().trainer(role, model, optimizer)


@pytest.mark.parametrize("advantage", ["gae", "rloo"])
def test_without_a_coefficient_no_reference_is_loaded_and_the_weights_are_the_same(tmp_path, policy, advantage):
    made = {}
    # 1e-30 of any log-ratio (at most 20) is absorbed where it is added to a reward or a value of 1e-6 or more in float32.
    for name, coef in (("without", 0.0), ("with", 1e-30)):
        shop, inputs = shop_and_inputs(tmp_path / name, policy)
        shop.runtime = runtime = Recording()
        ref, _ = shop.run("ppo", config(advantage={"type": advantage}, kl={"coef": coef}, epochs=2), inputs)
        made[name] = (ref.digest, runtime.roles, shop)
    assert "reference" not in made["without"][1]
    assert sorted(made["with"][1]) == sorted([*made["without"][1], "reference"])
    assert made["without"][0] == made["with"][0]
    logged = [{metric for _, values in shop.tracker.points for metric in values} for _, _, shop in made.values()]
    of_reference = {"ppo/kl/per_token", "ppo/kl/per_sequence", "ppo/kl/k3", "ppo/policy/ref_kl"}
    assert logged[1] - logged[0] == of_reference


def test_the_value_model_starts_from_the_critic_that_is_given(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    shop.runtime = runtime = Recording()
    critic = shop.store.external(PolicyRef, make_policy(tmp_path / "critic"))
    shop.run("ppo", config(steps=1), inputs | {"critic": critic})
    assert runtime.models["value_model"] == str(shop.store.path(critic)) != runtime.models["policy"]
    judge = shop.store.external(RewardModelRef, make_reward_model(tmp_path / "judge", policy))
    shop.run("ppo", config(steps=1), inputs | {"critic": judge})
    assert runtime.models["value_model"] == str(shop.store.path(judge))
    train_tokenizer(["Nothing in common."] * 5, vocab_size=290, folder=tmp_path / "judge")
    other = shop.store.external(RewardModelRef, tmp_path / "judge")
    with pytest.raises(ConfigError, match=r"ppo\.critic = .* of the policy's tokens are others there"):
        shop.run("ppo", config(steps=1), inputs | {"critic": other})


class Scripted:
    """A policy's trainer that measures what it is told to."""

    def __init__(self, *ratios: float) -> None:
        self.ratios = list(ratios)

    def forward_backward(self, samples: Sequence[Any], objective: Any) -> Metrics:
        return {"loss": self.ratios[0], "ratio_max": self.ratios.pop(0)}

    def optim_step(self, *, learning_rate: float) -> Metrics:
        return {"skipped": 0.0, "learning_rate": learning_rate}


def updated(config: PPOConfig, trainer: Any, rows: int) -> Metrics:
    models = Models(sampler=trainer, policy=trainer, reference=trainer, value_model=None, scorer=trainer, teachers={})
    runtime = SimpleNamespace(together=lambda *work: [one() for one in work])
    context: Any = SimpleNamespace(seed=17, label="ppo", runtime=runtime)
    objective = PolicyObjective(ClipLoss(), 6, 1.0, 0.0, 0.0, CorrectionConfig())
    batch = Sequences.from_token_ids([(7, 8)] * rows)
    return update(config, models, batch, np.arange(rows), objective, [], step=0, scale=1.0, context=context)


@pytest.mark.parametrize("rows", [0, 1, 3, 8])
def test_no_mini_batch_is_empty_where_few_rows_are_left(rows):
    sizes = []

    class Counting(Scripted):
        def forward_backward(self, samples: Sequence[Any], objective: Any) -> Metrics:
            sizes.append(len(samples))
            return {"loss": 0.0}

    trainer: Any = Counting()
    updated(config(advantage={"type": "rloo"}, minibatches=4), trainer, rows)
    assert len(sizes) == min(4, rows) and sum(sizes) == rows and 0 not in sizes


def test_the_largest_ratio_of_a_step_is_that_of_its_updates(tmp_path):
    trainer: Any = Scripted(1.0, 5.0, 1.5, 1.0)
    settings = config(advantage={"type": "rloo"}, epochs=2, minibatches=2)
    metrics = updated(settings, trainer, 8)
    assert metrics["policy/loss"] == pytest.approx((1.0 + 5.0 + 1.5 + 1.0) / 4)
    assert metrics["policy/ratio_max"] == 5.0


def test_a_stage_that_is_asked_to_stop_saves_between_its_checkpoints_and_loses_no_step(tmp_path, policy):
    rarely = config(checkpoint_every=4)
    whole, inputs = shop_and_inputs(tmp_path / "whole", policy)
    expected, _ = whole.run("ppo", rarely, inputs)
    stopped, inputs = shop_and_inputs(tmp_path / "stopped", policy)
    ref, step = stopped_and_resumed(stopped, "ppo", rarely, inputs, at=3)
    assert step == 3
    assert ref.digest == expected.digest


def test_rollouts_made_since_the_last_checkpoint_are_not_made_again(tmp_path, policy, monkeypatch):
    sampled: list[int] = []

    draw = WholeAnswers.sample_round

    def counted(self: WholeAnswers, step: int, number: int) -> list[Generation]:
        sampled.append(step)
        return draw(self, step, number)

    monkeypatch.setattr(WholeAnswers, "sample_round", counted)
    # the normaliser's running statistics are part of what a rollout step leaves behind
    terms = {"short": FunctionReward(function="tests.support.token_rewards:small_is_good")}
    settings = config(checkpoint_every=2, rewards=RewardsConfig(terms=terms, normalize="running"))
    whole, inputs = shop_and_inputs(tmp_path / "whole", policy)
    expected, _ = whole.run("ppo", settings, inputs)
    assert sampled == [0, 1, 2, 3]
    sampled.clear()
    killed, inputs = shop_and_inputs(tmp_path / "killed", policy)
    ref = killed_and_resumed(killed, "ppo", settings, inputs, at=3)
    assert sampled == [0, 1, 2, 3]  # killed after step 3, resumed from the checkpoint of step 2
    assert ref.digest == expected.digest


def test_a_run_that_fails_while_its_rollouts_are_written_ends_when_they_are(tmp_path, policy, monkeypatch):
    write = write_rollouts

    def slow(*arguments: Any, **options: Any) -> None:
        time.sleep(0.5)
        write(*arguments, **options)

    def fail(*_: Any, **__: Any) -> None:
        raise TrainingError("trainer", "policy", "the worker has died", "run it again")

    monkeypatch.setattr("rlhf_core.data.shards.write_rollouts", slow)
    monkeypatch.setattr("stages.ppo.run.measure", fail)
    shop, inputs = shop_and_inputs(tmp_path, policy)
    with pytest.raises(TrainingError, match="the worker has died"):
        shop.run("ppo", config(), inputs)
    (log,) = tmp_path.rglob("rollouts")
    assert [one.name for one in log.iterdir()] == ["step-000000"]


def test_a_group_estimator_needs_a_group_and_minibatches_need_rollouts():
    with pytest.raises(ValidationError, match="samples_per_prompt = 1: grpo compares"):
        config(advantage={"type": "grpo"}, samples_per_prompt=1)
    with pytest.raises(ValidationError, match="minibatches = 9: must be <= the 8 rollouts"):
        config(minibatches=9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": SamplingConfig(top_p=0.9)}, r"sampling\.top_p = 0\.9: the trainer's log-probs .*; remove it"),
        ({"sampling": SamplingConfig(top_k=5)}, r"sampling\.top_k = 5: the trainer's log-probs .*; remove it"),
        ({"sampling": SamplingConfig(temperature=0.0)}, r"sampling\.temperature = 0\.0: greedy .*; raise it"),
        (
            {"advantage": {"type": "grpo"}, "kl": {"coef": 0.1}},
            r"kl.in = 'reward': grpo divides by .*set kl.in = \"loss\"",
        ),
        ({"distill": TAUGHT, "kl": {"coef": 0.1}}, r"kl\.coef = 0\.1: a penalty in the reward is not learned from"),
        ({"distill": TAUGHT, "ahead": {"type": "dynamic"}}, r"ahead\.type = 'dynamic': leaves out prompts by rewards"),
        ({"rewards": {"terms": {}}}, r"rewards\.terms = \{\}: there is nothing to learn from"),
        ({"distill": {"teachers": {"a": 0.0}}}, r"teachers = \{a = 0\.0\}: the weights add up to 0"),
        (
            {"monitors": [{"type": "band", "metric": "teacher/kl", "high": 1.0}]},
            r"'teacher/kl': is never logged, because there are no teachers",
        ),
        ({"steps": 4, "value": {"warmup_steps": 4}}, r"value.warmup_steps = 4: must be < steps = 4.*; lower it"),
    ],
)
def test_settings_that_would_quietly_spoil_the_gradient_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        config(**changes)


def test_with_the_samplers_own_probabilities_as_pi_old_nothing_is_computed_anew_or_corrected(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    shop.run("ppo", config(correction={"level": "off", "pi_old": "sampler"}, steps=1), inputs)
    assert series(shop, "mismatch/log_q_max") == [0.0]
    assert series(shop, "policy/ratio_max")[0] == pytest.approx(1.0, abs=1e-4)  # the samplers log-probs, not exactly
    with pytest.raises(ValidationError, match=r"level = 'token': with pi_old = 'sampler' the ratio q is 1 everywhere"):
        config(correction={"pi_old": "sampler"})


def test_demonstrations_are_mixed_into_every_update(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    inputs["demonstrations"] = demonstrations(shop.store, tmp_path)
    fast = OptimizerConfig(learning_rate=1e-2, schedule="constant")
    mixed = {"ptx": {"coef": 1.0, "batch_size": 4, "max_length": 48}, "optimizer": fast, "steps": 6}
    ref, _ = shop.run("ppo", config(**mixed), inputs)
    nll = series(shop, "ptx/nll")
    assert nll[-1] < nll[0] - 0.5
    plain, inputs = shop_and_inputs(tmp_path / "plain", policy)
    assert plain.run("ppo", config(optimizer=fast, steps=6), inputs)[0].digest != ref.digest


def test_a_mix_without_demonstrations_is_an_error(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    with pytest.raises(ConfigError, match=r"ppo\.ptx = 0\.1: there are no demonstrations to mix in"):
        shop.run("ppo", config(ptx={}), inputs)


FOURTH = RewardsConfig(terms={"fourth": FunctionReward(function="tests.support.token_rewards:every_fourth")})
DYNAMIC: dict[str, Any] = {
    "rewards": FOURTH,
    "advantage": {"type": "dr_grpo"},
    "ahead": {"type": "dynamic", "max_rounds": 4},
}


def test_dynamic_sampling_replaces_groups_without_a_gradient(tmp_path, policy):
    plain, inputs = shop_and_inputs(tmp_path / "plain", policy)
    plain.run("ppo", config(**(DYNAMIC | {"ahead": None})), inputs)
    whole, inputs = shop_and_inputs(tmp_path / "whole", policy)
    whole.run("ppo", config(**DYNAMIC), inputs)
    assert sum(series(plain, "reward/zero_variance_groups")) > sum(series(whole, "reward/zero_variance_groups"))
    assert series(whole, "rollout/undecided_groups") == series(whole, "reward/zero_variance_groups")
    assert not series(plain, "rollout/undecided_groups")
    with pytest.raises(ValidationError, match=r"samples_per_prompt = 1: ahead\.type = 'dynamic' compares"):
        config(samples_per_prompt=1, ahead="dynamic")


def test_grpo_may_have_the_penalty_in_the_loss():
    assert config(advantage={"type": "grpo"}, kl={"in": "loss", "coef": 0.1}).kl.coef == 0.1


OVERLAPS: dict[str, dict[str, Any]] = {
    "one step off": {"ahead": {"type": "staleness", "steps": 1}},
    "two steps off": {"ahead": {"type": "staleness", "steps": 2}},
    "partial": {"ahead": {"type": "partial", "tokens": 2}},
    "partial, one step off": {"ahead": {"type": "partial", "tokens": 3, "in_flight_groups": 5, "staleness": 1}},
}


@pytest.mark.full
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_with_overlap_a_run_killed_at_every_step_ends_with_the_same_bytes_and_metrics(tmp_path, policy, overlap):
    settings = config(**OVERLAPS[overlap], advantage={"type": "rloo"}, checkpoint_every=2)
    whole, inputs = shop_and_inputs(tmp_path / "whole", policy)
    expected, _ = whole.run("ppo", settings, inputs)
    killed, inputs = shop_and_inputs(tmp_path / "killed", policy)
    for at in range(1, 5):  # after the update and before the checkpoint of each step, in one attempt after the other

        def interrupt(done: int, total: int, message: str, at: int = at) -> None:
            if done == at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            killed.run("ppo", settings, inputs, progress=interrupt)
    ref, decision = killed.run("ppo", settings, inputs)
    assert decision.action == "RESUME"
    assert ref.digest == expected.digest
    assert untimed(killed.tracker.points) == untimed(whole.tracker.points)


def test_old_rollouts_are_corrected_and_their_age_and_what_they_cost_is_said(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    shop.run("ppo", config(ahead={"type": "staleness", "steps": 2}, advantage={"type": "rloo"}), inputs)
    assert series(shop, "rollout/staleness") == [0, 1, 2, 2]
    assert series(shop, "rollout/staleness_max") == [0, 1, 2, 2]
    assert series(shop, "rollout/in_flight") == [8, 8, 4, 0]
    on_policy, *older = series(shop, "mismatch/exp_abs_log_q")
    assert on_policy == pytest.approx(1.0, abs=1e-3)
    assert min(older) > 1.001, "pi_old is the trainer's now, mu that of the weights that sampled"
    assert series(shop, "policy/ratio_max") == [1.0] * 4, "the ratio of the update begins at 1 all the same"
    assert all(seconds > 0 for seconds in series(shop, "time/train"))
    assert len(series(shop, "time/wait_for_rollouts")) == 4


def test_an_answer_that_two_policies_wrote_has_the_log_probs_of_each(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    partial = {
        "ahead": {"type": "partial", "tokens": 2, "in_flight_groups": 8},
        "optimizer": OptimizerConfig(learning_rate=1e-9),
    }
    shop.run("ppo", config(**partial, advantage={"type": "rloo"}, steps=4), inputs)
    assert max(series(shop, "rollout/staleness_max")) >= 1
    # with weights that hardly move, sampler and trainer agree on every segment as they do on a whole answer
    assert series(shop, "mismatch/exp_abs_log_q") == pytest.approx([1.0] * 4, abs=1e-3)


def of_two_sources(root: Path, policy: Path) -> tuple[Workshop, dict[str, Any]]:
    """Return a workshop and inputs with four prompts from a desk and two sums."""
    shop, inputs = shop_and_inputs(root, policy)
    rows = [Prompt(f"p{i}", (Message("user", str(i)),), "", "sums" if i < 2 else "desk") for i in range(6)]
    write_prompts(root / "mixed", rows)
    return shop, inputs | {"prompts": shop.store.external(PromptsRef, root / "mixed")}


def of_sources() -> PPOConfig:
    short = FunctionReward(function="tests.support.token_rewards:small_is_good")
    terms = {
        "desk": short.model_copy(update={"sources": ("desk",)}),
        "sums": short.model_copy(update={"sources": ("sums",)}),
    }
    return config(mixture={"sums": 0.75, "desk": 0.25}, rewards=RewardsConfig(terms=terms))


def test_a_mixture_has_its_share_of_each_source_in_every_step(tmp_path, policy):
    shop, inputs = of_two_sources(tmp_path, policy)
    shop.run("ppo", of_sources(), inputs)
    lengths = [series(shop, f"source/{source}/length") for source in ("sums", "desk")]
    assert all(len(found) == 4 for found in lengths), "each step of four prompts has three sums and one of the desk"


SCHEDULE = [
    {"steps": 2, "mixture": {"sums": 1.0}, "sampling": {"max_tokens": 3}},
    {"steps": 1, "sampling": {"max_tokens": 6}},
    {"steps": 2, "mixture": {"desk": 0.75, "sums": 0.25}, "sampling": {"temperature": 0.5}},
]


def scheduled_run(**changes: Any) -> PPOConfig:
    return config(**({"steps": 5, "rewards": of_sources().rewards, "schedule": SCHEDULE} | changes))


@pytest.mark.parametrize("at", [1, 3, 4])
def test_a_schedule_changes_lengths_and_shares_and_resumes_in_every_part(tmp_path, policy, at):
    whole, inputs = of_two_sources(tmp_path / "whole", policy)
    expected, _ = whole.run("ppo", scheduled_run(), inputs)
    lengths = series(whole, "rollout/length")
    assert max(lengths[:2]) <= 3 < lengths[2]
    # one part has prompts of one source alone, of which there are no series
    assert len(series(whole, "source/desk/length")) == 2
    killed, inputs = of_two_sources(tmp_path / "killed", policy)
    assert killed_and_resumed(killed, "ppo", scheduled_run(), inputs, at=at).digest == expected.digest


def test_the_band_of_a_mixture_that_is_sampled_ahead_is_the_same_after_a_kill(tmp_path, policy):
    changes = {"order": "band", "band": {"low": -2.0, "high": -1.55}, "mixture": {"sums": 0.5, "desk": 0.5}}
    changes |= {"ahead": {"type": "staleness", "steps": 1}, "advantage": {"type": "rloo"}, "schedule": []}
    whole, inputs = of_two_sources(tmp_path / "whole", policy)
    expected, _ = whole.run("ppo", scheduled_run(**changes), inputs)
    assert len(series(whole, "source/sums/length")) == len(series(whole, "source/desk/length")) == 5
    killed, inputs = of_two_sources(tmp_path / "killed", policy)
    assert killed_and_resumed(killed, "ppo", scheduled_run(**changes), inputs, at=3).digest == expected.digest
    assert series(whole, "band/inside")[-1] == series(killed, "band/inside")[-1]


def test_the_policy_comes_nearer_to_its_teacher(tmp_path, policy):
    trained, inputs = of_two_sources(tmp_path / "teacher", policy)
    fast = OptimizerConfig(learning_rate=2e-2, schedule="constant")
    ref, _ = trained.run("ppo", config(steps=8, advantage="rloo", optimizer=fast, checkpoint_every=8), inputs)

    def opened(name: str) -> tuple[Workshop, dict[str, Any]]:
        shop, given = of_two_sources(tmp_path / name, policy)
        far = shop.store.external(PolicyRef, trained.store.path(ref))
        return shop, given | {"teachers": {"far": far, "own": given["policy"]}}

    alone = {
        "distill": {"teachers": {"far": 1.0, "own": 0.0}},
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
        "checkpoint_every": 8,
    }
    shop, inputs = opened("whole")
    shop.run(
        "ppo",
        PPOConfig(**(config().model_dump(exclude={"rewards"}) | alone | {"steps": 8, "samples_per_prompt": 32})),
        inputs,
    )
    far = series(shop, "teacher/kl/far")
    assert far == series(shop, "teacher/kl") and far[-1] < far[0] / 3  # over 768 tokens a step
    assert series(shop, "reward/mean") == [0.0] * 8 and not series(shop, "value/loss")

    shop, inputs = opened("by source")
    shop.run("ppo", BY_SOURCE, inputs)
    # The policy is its own teacher, up to the rounding of two batches: about 1e-7 of a log-prob.
    assert abs(series(shop, "teacher/kl/own")[0]) < 1e-6 < abs(series(shop, "teacher/kl/far")[0])
    with pytest.raises(ConfigError, match=r"distill\.route = 'sums': no teacher teaches prompts of this source"):
        sources_used(config(distill=ONE_SOURCE), [Prompt("a", (), "", "sums")], key="ppo")


ONE_SOURCE = PolicyDistillation(teachers={"own": 1.0}, route={"own": ("desk",)})
ROUTE = {"teachers": {"far": 1.0, "own": 1.0}, "route": {"far": ("sums",), "own": ("desk",)}, "reward_weight": 0.5}
BY_SOURCE = config(advantage="rloo", distill=ROUTE, mixture={"sums": 0.5, "desk": 0.5})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixture": {"sum": 1.0}}, r"ppo\.mixture\.sum = 1\.0: no prompt has this source; did you mean sums\?"),
        (
            {"rewards": RewardsConfig(terms={"one": FunctionReward(function="m:f", sources=("sums",))})},
            r"rewards\.terms = 'desk': no term",
        ),
        (
            {
                "order": "band",
                "band": RewardBand(term="one"),
                "rewards": RewardsConfig(
                    terms={
                        "one": FunctionReward(function="m:f", sources=("sums",)),
                        "two": FunctionReward(function="m:f", sources=("desk",)),
                    }
                ),
            },
            r"ppo\.band\.term = 'one': does not apply to prompts of the source desk, which would come first once",
        ),
        (
            {"distill": PolicyDistillation(teachers={"own": 1.0}, route={"own": ("desk", "sum", "sums")})},
            r"ppo\.distill\.route\.own = \['desk', 'sum', 'sums'\]: no prompt has the source 'sum'; did you mean sums\?",
        ),
    ],
)
def test_sources_that_do_not_fit_the_prompts_are_refused_before_a_model_is_loaded(changes, message):
    prompts = [Prompt("a", (), "", "sums"), Prompt("b", (), "", "desk")]
    with pytest.raises(ConfigError, match=message):
        sources_used(config(**changes), prompts, key="ppo")
    assert [one.id for one in sources_used(config(mixture={"sums": 1.0, "desk": 0.0}), prompts, key="ppo")] == ["a"]


def test_the_prompts_that_were_answered_best_come_first(tmp_path) -> None:
    write_prompts(tmp_path, [Prompt(name, (Message("user", name),), "", "sums") for name in "abcd"])
    first = config(order="easy_first")
    with pytest.raises(
        ConfigError, match=r"ppo\.order = 'easy_first': the prompts come without their difficulty; take"
    ):
        ordered_prompts(first, tmp_path, key="ppo")
    means = {"a": 0.25, "b": 0.5, "c": 0.25, "d": 1.0, "dropped": None}
    rows = [{"id": name, "mean": mean} for name, mean in means.items()]
    (tmp_path / "difficulty.json").write_text(json.dumps({"prompts": rows}))
    assert [one.id for one in ordered_prompts(first, tmp_path, key="ppo")] == ["d", "b", "a", "c"]
    assert [one.id for one in ordered_prompts(config(order="given"), tmp_path, key="ppo")] == ["a", "b", "c", "d"]


def test_a_source_of_which_all_prompts_are_held_out_is_refused() -> None:
    prompts = [Prompt(name, (Message("user", name),), "", "sums" if name == "a" else "desk") for name in "abcdefgh"]
    many = config(mixture={"sums": 0.5, "desk": 0.5}, evaluate={"prompts": 7})
    with pytest.raises(ConfigError, match=r"ppo\.evaluate\.prompts = 7: holds out all prompts of the source"):
        split_prompts(many, prompts, key="ppo")
