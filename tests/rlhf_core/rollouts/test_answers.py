"""Episodes through whole stages: rewards rise, the trainer sees what was sampled, and a killed run's bytes."""

from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
from rlhf_core.config.rewards import EpisodeReward, FunctionReward, RewardsConfig
from rlhf_core.data.shards import read_generations
from rlhf_core.data.tables import write_prompts
from rlhf_core.errors import ConfigError
from rlhf_core.rollouts.answers import episode_metrics
from rlhf_core.stage.decision import Decision
from rlhf_core.types import ActionSpan, Completion, Prompt, PromptsRef
from stages.generate import GenerateConfig
from stages.ppo import PPOConfig
from tests.rlhf_core.agents.scripted import WORLDS
from tests.support.training import question, series, shop_and_inputs
from tests.support.workshop import Workshop


def world(name: str, **settings: Any) -> dict[str, Any]:
    return {"type": "environment", "environment": f"{WORLDS}:{name}", "max_episode_tokens": 64} | settings


def config(agent: dict[str, Any] | None, **changes: Any) -> PPOConfig:
    settings: dict[str, Any] = {
        "steps": 3,
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "sampling": SamplingConfig(max_tokens=5),
        "agent": agent and agent | {"max_episode_tokens": 64},
        "rewards": RewardsConfig(terms={"won": EpisodeReward()}),
        "advantage": "grpo",
        "optimizer": OptimizerConfig(learning_rate=2e-2, schedule="constant"),
        "kl": {"in": "loss", "coef": 0.0},
        "checkpoint_every": 1,
    }
    return PPOConfig(**(settings | changes))


@pytest.mark.parametrize(("advantage", "credit"), [("grpo", "episode"), ("reinforce++", "turn")])
def test_the_reward_of_episodes_rises(tmp_path, policy, advantage, credit):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    settings = {"steps": 12, "samples_per_prompt": 8, "checkpoint_every": 12, "advantage": advantage}
    shop.run("ppo", config(world("Readable", credit=credit), **settings), inputs)
    rewards = series(shop, "reward/mean")
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3, rewards
    assert max(series(shop, "rollout/turns")) <= 2 and series(shop, "rollout/failed_episodes") == [0.0] * 12
    assert len(series(shop, "episode/letters")) == 12


def test_the_trainer_reads_episodes_exactly_as_they_were_sampled(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    shop.run("ppo", config(world("Readable"), steps=1, sampling=SamplingConfig(max_tokens=12)), inputs)
    # the same log-probabilities to rounding: any shifted, missing or other token between the turns would show
    assert series(shop, "mismatch/exp_abs_log_q")[0] == pytest.approx(1.0, abs=1e-3)
    assert series(shop, "policy/ratio_max")[0] == pytest.approx(1.0, abs=1e-6)


def mixed_inputs(root: Path, policy: Path) -> tuple[Workshop, dict[str, Any]]:
    """Return a store with prompts of three sources, two of each."""
    shop, inputs = shop_and_inputs(root, policy)
    rows = [Prompt(f"q{i}", question(i), str(i), ("game", "moody", "plain")[i % 3]) for i in range(6)]
    write_prompts(root / "mixed", rows)
    return shop, inputs | {"prompts": shop.store.external(PromptsRef, root / "mixed")}


def of_sources(**changes: Any) -> PPOConfig:
    agents = {"a": world("Readable", sources=["game"]), "b": world("Moody", retries=0, sources=["moody"])}
    terms = {
        "won": EpisodeReward(sources=("game", "moody")),
        "own": FunctionReward(function="tests.support.token_rewards:small_is_good", sources=("plain",)),
    }
    settings = {"steps": 4, "prompts_per_step": 6, "samples_per_prompt": 2}
    settings |= {"agents": agents, "rewards": RewardsConfig(terms=terms)}
    return config(None, **settings | changes)


def test_sources_have_their_own_environments_beside_answers_of_one_turn(tmp_path, policy):
    whole, inputs = mixed_inputs(tmp_path, policy)
    _, decision = whole.run("ppo", of_sources(), inputs)
    failed, of = failed_of(whole, decision)["agents.b"]
    assert set(failed_of(whole, decision)) == {"agents.b"} and 0 < failed < of == 16
    assert max(series(whole, "source/plain/length")) <= 5 and max(series(whole, "rollout/turns")) > 1


def test_generated_answers_have_the_agent_of_their_source_and_its_tokens(tmp_path, policy):
    shop, inputs = mixed_inputs(tmp_path, policy)
    settings = GenerateConfig(samples_per_prompt=2, sampling=SamplingConfig(max_tokens=12), agents=of_sources().agents)
    made = {"policy": inputs["policy"], "prompts": inputs["prompts"]}
    ref, _ = shop.run("generate", settings, made)
    rows = read_generations(shop.store.path(ref))
    assert [one.prompt.id for one in rows] == [f"q{i}" for i in range(6) for _ in range(2)]
    turns = {(one.prompt.source, len(one.completion.spans)) for one in rows if not one.completion.failure}
    assert {("game", 2), ("moody", 1), ("plain", 0)} <= turns <= {("game", 1), ("game", 2), ("moody", 1), ("plain", 0)}
    alone, _ = shop.run("generate", settings.model_copy(update={"agents": {}}), made)
    plain = [
        [one for one in read_generations(shop.store.path(each)) if one.prompt.source == "plain"]
        for each in (ref, alone)
    ]
    assert [one.completion.token_ids for one in plain[0]] == [one.completion.token_ids for one in plain[1]]
    misspelt = settings.model_copy(
        update={"agents": {"a": settings.agents["a"].model_copy(update={"sources": ("gam",)})}}
    )
    with pytest.raises(ConfigError, match=r"generate\.agents\.a\.sources = \['gam'\]: no prompt has the source 'gam'"):
        shop.run("generate", misspelt, made)


def failed_of(shop: Workshop, decision: Decision) -> dict[str, tuple[int, int]]:
    """Return by place in the configuration how many answers failed, of how many, as the record says."""
    record = shop.store.record(decision.key)
    return {path: (one.failed, one.answers) for path, one in record.failures.items()}


def test_failed_episodes_are_left_out_with_their_group_and_counted(tmp_path, policy, caplog):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    agent = world("Moody", retries=0)
    settings = config(agent, prompts_per_step=6, samples_per_prompt=2, steps=1)
    _, decision = shop.run("ppo", settings, inputs)
    failed, valid = series(shop, "rollout/failed_episodes")[0], series(shop, "rollout/valid")[0]
    assert 0 < failed < 1 and 0 < valid < 1 - failed / 2
    assert failed_of(shop, decision) == {"agent": (round(failed * 12), 12)}
    assert f"{round(failed * 12)} of 12 rollouts are invalid" in caplog.text and "not today" in caplog.text
    assert shop.run("ppo", settings, inputs)[1].action == "HIT"
    patient = config(agent | {"retries": 1}, prompts_per_step=6, samples_per_prompt=2, steps=1)
    assert shop.run("ppo", patient, inputs)[1].action == "RUN"


def test_generated_episodes_are_stored_with_their_turns(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    settings = GenerateConfig(
        samples_per_prompt=2, sampling=SamplingConfig(max_tokens=12), agent=config(world("Moody", retries=0)).agent
    )
    made = {"policy": inputs["policy"], "prompts": inputs["prompts"]}
    ref, decision = shop.run("generate", settings, made)
    kept = [one.completion for one in read_generations(shop.store.path(ref))]
    failures = [bool(one.failure) for one in kept]
    assert shop.metrics(decision)["rollout/failed_episodes"] == sum(failures) / 12
    assert failed_of(shop, decision) == {"agent": (sum(failures), 12)}
    assert 0 < sum(failures) < 12 and all("not today" in one.failure for one in kept if one.failure)
    assert all(one.spans[0].reward == len(one.text) / 10 for one in kept if not one.failure)


def test_metrics_of_episodes_are_means_and_plain_answers_have_none():
    spans = (ActionSpan(0, 1, 0), ActionSpan(2, 3, 0))
    first = Completion((5, 6, 7), (-0.1, 0.0, -0.2), "", "stop", 0, 1, spans, extras={"tool_calls": 3.0})
    second = Completion((5,), (-0.1,), "", "stop", 0, 1, spans[:1], failure="it hung", extras={"tool_calls": 0.0})
    assert episode_metrics([first, second]) == {
        "rollout/turns": 1.5,
        "rollout/failed_episodes": 0.5,
        "episode/tool_calls": 1.5,
    }
    assert episode_metrics([Completion((5,), (-0.1,), "", "stop", 0, 1)]) == {}
