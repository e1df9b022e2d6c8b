"""The guard of policy optimization: held-out evaluation, early stop, rollbacks, and a killed run's bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config.monitors import HeldOutConfig
from rlhf_core.config.rewards import FunctionReward, RewardsConfig
from rlhf_core.data.tables import read_prompts, write_prompts
from rlhf_core.errors import ConfigError
from rlhf_core.rollouts.prompts import hold_out
from rlhf_core.types import ArtifactRef, PromptsRef
from stages.ppo import PPOConfig
from tests.stages.test_ppo import config
from tests.support.training import series, shop_and_inputs, stopped_and_resumed, untimed
from tests.support.workshop import Workshop


def rewards(name: str) -> RewardsConfig:
    return RewardsConfig(terms={"own": FunctionReward(function=f"tests.support.token_rewards:{name}")})


EVALUATE = HeldOutConfig(every=2, prompts=3, samples=2, independent=rewards("large_is_good"))
FAST = {"learning_rate": 2e-2, "schedule": "constant"}
ROLLBACK = {"type": "band", "name": "short_enough", "metric": "rollout/length", "high": 0.5, "action": "rollback"}
"""Never satisfied: every answer has a token."""


def watched(**changes: Any) -> PPOConfig:
    settings: dict[str, Any] = {"steps": 6, "samples_per_prompt": 4, "advantage": {"type": "rloo"}, "optimizer": FAST}
    settings["rewards"] = rewards("small_is_good")
    return config(**(settings | {"prompts_per_step": 2} | changes))


def independent(term: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return a section of evaluation whose independent rewards are changed so."""
    terms = {"own": {"type": "function", "function": "a.b:c"} | (term or {})}
    return {"evaluate": {"independent": {"terms": terms} | changes}}


def report(shop: Workshop, ref: ArtifactRef) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shop.store.path(ref) / "monitors.json").read_text())
    return found


def test_the_best_checkpoint_by_the_independent_reward_is_the_result(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    ref, decision = shop.run("ppo", watched(evaluate=EVALUATE, steps=8), inputs)
    independent, proxy = series(shop, "eval/independent/mean"), series(shop, "eval/reward/mean")
    # what trains is the opposite of what judges: both are of the same answers, at steps 0, 2, 4, 6 and 8
    assert independent == pytest.approx([-value for value in proxy])
    assert len(independent) == 5
    assert independent[-1] < independent[0] - 0.1
    best = 2 * independent.index(max(independent))
    assert shop.metrics(decision)["exported_step"] == best == report(shop, ref)["exported_step"]
    last, _ = shop.run("ppo", watched(evaluate=EVALUATE.model_copy(update={"export": "last"}), steps=8), inputs)
    assert best < 8
    exported, trained = (shop.store.path(one) / "model.safetensors" for one in (ref, last))
    assert exported.read_bytes() != trained.read_bytes()


def test_a_run_without_a_better_evaluation_ends_early(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    patient = EVALUATE.model_copy(update={"patience": 2, "every": 1})
    ref, decision = shop.run("ppo", watched(evaluate=patient, steps=30), inputs)
    steps = shop.metrics(decision)["steps"]
    values = series(shop, "eval/independent/mean")
    assert len(values) == steps + 1 < 31
    assert max(values[-2:]) <= max(values[:-2])
    assert report(shop, ref)["ended"]["why"].startswith("no better eval/independent/mean since step ")


def test_a_rollback_returns_to_the_start_and_lowers_the_learning_rate(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    monitor = ROLLBACK | {"for_steps": 2, "max_rollbacks": 2, "kl_coef_factor": 3.0}
    settings = watched(evaluate=EVALUATE, monitors=[monitor], steps=9, kl={"coef": 0.01}, checkpoint_every=100)
    ref, decision = shop.run("ppo", settings, inputs)
    # two steps, back to 0; two steps, back to 0; two steps, and the rollbacks are used up
    assert series(shop, "policy/learning_rate") == pytest.approx([2e-2, 2e-2, 1e-2, 1e-2, 5e-3, 5e-3])
    assert series(shop, "kl/coef") == pytest.approx([0.01, 0.01, 0.03, 0.03, 0.09, 0.09])
    # the policy that sampled is the first one again, the reference, at whose distance it is
    distance = series(shop, "kl/per_sequence")
    assert [value == 0.0 for value in distance] == [True, False] * 3
    events = [event["message"] for event in report(shop, ref)["events"]]
    assert len(events) == 3
    assert events[0].startswith("monitor short_enough: ")
    assert events[0].endswith(
        "> 0.5 for 2 steps at step 2: rolled back to step 0, learning rate x0.5, KL coefficient x3"
    )
    assert events[2].endswith("for 2 steps, after 2 rollbacks at step 6: stopped, step 0 is the result")
    assert shop.tracker.tags == {"monitor.short_enough": events[2]}
    assert shop.metrics(decision)["steps"] == 6
    assert series(shop, "monitor/short_enough") == [1.0, 2.0] * 3
    exported, first = (shop.store.path(one) / "model.safetensors" for one in (ref, inputs["policy"]))
    assert _tensors(exported) == _tensors(first)


def test_how_often_checkpoints_are_written_and_a_stop_on_request_change_no_rollback(tmp_path, policy):
    monitor = ROLLBACK | {"for_steps": 2, "after": 4, "max_rollbacks": 1}
    results = []
    for every in (2, 100):
        settings = watched(evaluate=EVALUATE, monitors=[monitor], steps=7, checkpoint_every=every)
        shop, inputs = shop_and_inputs(tmp_path / str(every), policy)
        results.append(shop.run("ppo", settings, inputs)[0])
    assert "rolled back to step" in report(shop, results[-1])["events"][0]["message"]
    stopped, inputs = shop_and_inputs(tmp_path / "stopped", policy)
    ref, resumed_at = stopped_and_resumed(stopped, "ppo", settings, inputs, at=3)
    assert resumed_at == 3
    assert [one.digest for one in results] == [ref.digest] * 2


@pytest.mark.full
def test_a_run_that_was_stopped_and_killed_before_its_result_does_not_go_on(tmp_path, policy):
    settings = watched(evaluate=EVALUATE, monitors=[ROLLBACK | {"action": "stop", "for_steps": 2}])
    whole, inputs = shop_and_inputs(tmp_path / "whole", policy)
    expected, decision = whole.run("ppo", settings, inputs)
    assert whole.metrics(decision)["steps"] == 2
    killed, inputs = shop_and_inputs(tmp_path / "killed", policy)
    original, calls = killed.store.commit, []

    def dying(*args: Any, **rest: Any) -> Any:
        if not calls:
            calls.append(1)
            raise KeyboardInterrupt
        return original(*args, **rest)

    killed.store.commit = dying
    with pytest.raises(KeyboardInterrupt):
        killed.run("ppo", settings, inputs)
    ref, decision = killed.run("ppo", settings, inputs)
    assert decision.action == "RESUME"
    assert killed.metrics(decision)["steps"] == 2
    assert ref.digest == expected.digest


def test_evaluation_and_warnings_change_no_update(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    evaluate = EVALUATE.model_copy(update={"export": "last"})
    monitors = [ROLLBACK | {"action": "warn"}]
    ref, _ = shop.run("ppo", watched(evaluate=evaluate, monitors=monitors, ahead="staleness"), inputs)
    assert len(series(shop, "eval/reward/mean")) == 4
    # the same prompts without those that are held out, which is all that evaluation may change
    plain, inputs = shop_and_inputs(tmp_path / "plain", policy)
    trained_on, held_out = hold_out(read_prompts(plain.store.path(inputs["prompts"])), evaluate)
    assert len(trained_on) == len(held_out) == 3
    write_prompts(tmp_path / "trained_on", trained_on)
    inputs["prompts"] = plain.store.external(PromptsRef, tmp_path / "trained_on")
    expected, _ = plain.run("ppo", watched(ahead="staleness"), inputs)
    assert _of_training(shop) == _of_training(plain)
    exported, trained = (store.path(one) for store, one in ((shop.store, ref), (plain.store, expected)))
    assert _tensors(exported / "model.safetensors") == _tensors(trained / "model.safetensors")
    assert not (trained / "monitors.json").exists()


def test_a_metric_that_was_never_logged_is_named_at_the_end(tmp_path, policy, caplog):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    monitor = {"type": "band", "metric": "reward_extra/own/mine", "low": 1.0}
    shop.run("ppo", watched(monitors=[monitor], steps=1), inputs)
    assert "no step had the metric reward_extra/own/mine" in caplog.text


def test_a_monitor_of_a_metric_that_no_step_has_ends_the_run(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    with pytest.raises(ConfigError, match=r"ppo\.monitors\[0\]\.metric = 'rollout/turns': no step of this run"):
        shop.run("ppo", watched(monitors=[{"type": "band", "metric": "rollout/turns", "low": 1.0}]), inputs)


@pytest.mark.parametrize("advantage", ["rloo", "gae"])
def test_a_first_step_whose_answers_are_all_cut_off_and_masked_does_not_end_the_run(
    tmp_path, policy, advantage, caplog
):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    # one token of 320 ends an answer, so that all 8 answers of the first step have two tokens, the limit
    cut_off: dict[str, Any] = {"sampling": {"max_tokens": 2}, "truncated_answers": "mask", "steps": 1}
    monitor = {"type": "band", "metric": "policy/entropy", "high": 9.0}
    shop.run("ppo", watched(monitors=[monitor], advantage={"type": advantage}, **cut_off), inputs)
    assert series(shop, "rollout/masked") == [1.0]
    assert series(shop, "policy/entropy") == []
    assert "no step had the metric policy/entropy" in caplog.text
    of_agents = {"type": "band", "metric": "rollout/turns", "high": 9.0}
    with pytest.raises(ConfigError, match="no step of this run"):
        shop.run("ppo", watched(monitors=[of_agents], advantage={"type": advantage}, **cut_off), inputs)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"monitors": [{"type": "band", "metric": "rollout/length"}]}, "needs at least one bound"),
        ({"monitors": [{"type": "band", "metric": "time/train", "high": 1.0}]}, "differs from run to run"),
        ({"monitors": [{"type": "mismatch"}, {"type": "mismatch"}]}, "another monitor has this name"),
        ({"monitors": [{"type": "kl_estimate"}]}, "there is no reference"),
        ({"monitors": [{"type": "explained_variance"}]}, "there is no value model"),
        ({"monitors": [{"type": "over_optimization"}]}, "add .ppo.evaluate."),
        ({"monitors": [{"type": "over_optimization"}], "evaluate": {}}, "add .ppo.evaluate.independent."),
        ({"monitors": [ROLLBACK], "ahead": "staleness"}, "ahead.type = 'staleness' has answers of the rejected policy"),
        ({"monitors": [ROLLBACK]}, r"monitors\[0\]\.action = 'rollback': .* add .ppo\.evaluate."),
        ({"monitors": [ROLLBACK | {"action": "pause"}]}, r"monitors\[0\]\.action = 'pause': .* add .ppo\.evaluate."),
        ({"monitors": [ROLLBACK | {"action": "stop"}]}, r"monitors\[0\]\.action = 'stop': .* add .ppo\.evaluate."),
        ({"evaluate": {"metric": "eval/independent/mean"}}, "there is no independent reward"),
        (
            {"evaluate": {}, "optimizer": FAST | {"ema_decay": 0.9}},
            r"optimizer\.ema_decay = 0\.9: the average is exported",
        ),
        (
            {"evaluate": {"export": "last"}, "monitors": [ROLLBACK], "optimizer": FAST | {"ema_decay": 0.9}},
            r"optimizer\.ema_decay = 0\.9: the average is exported",
        ),
        (independent(normalize="running"), "evaluate.independent.normalize = 'running': .* cannot be compared"),
        (independent({"normalize": "group"}), "evaluate.independent.terms.own.normalize = 'group': "),
        (independent(composition={"type": "gdpo"}), "evaluate.independent.composition.type = 'gdpo': "),
    ],
)
def test_what_could_never_find_anything_or_act_is_refused(changes, rule):
    with pytest.raises(ValidationError, match=rule):
        watched(**changes)


def _of_training(shop: Workshop) -> list[tuple[int, dict[str, float]]]:
    """Return what was logged of the training: neither times nor what evaluations and monitors found."""
    points = [
        (step, {name: value for name, value in values.items() if "/monitor/" not in name and "/eval/" not in name})
        for step, values in untimed(shop.tracker.points)
    ]
    return [point for point in points if point[1]]


def _tensors(file: Path) -> dict[str, list[float]]:
    from safetensors.torch import load_file

    return {name: tensor.flatten().tolist() for name, tensor in load_file(file).items()}
