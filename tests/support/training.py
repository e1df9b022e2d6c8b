"""What the tests of training stages share: data, a policy, and a run that is killed and resumed."""

import logging
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.agents import AgentConfig
from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
from rlhf_core.config.rewards import EpisodeReward, RewardsConfig, RewardSpec
from rlhf_core.data.tables import (
    Demonstration,
    Feedback,
    Preference,
    SteppedAnswer,
    write_demonstrations,
    write_feedback,
    write_preferences,
    write_prompts,
    write_steps,
)
from rlhf_core.runtime.local_runtime import LocalRuntime
from rlhf_core.schema.base import Config
from rlhf_core.stage import stopping
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import (
    ArtifactRef,
    DemonstrationsRef,
    Message,
    PolicyRef,
    PreferencesRef,
    Prompt,
    PromptsRef,
    StepsRef,
)
from stages.ppo import PPOConfig
from tests.support.policies import make_policy
from tests.support.workshop import Workshop, workshop

logger = logging.getLogger(__name__)


def question(number: int) -> tuple[Message, ...]:
    return (Message("user", f"What is {number}?"),)


def answer(text: str) -> tuple[Message, ...]:
    return (Message("assistant", text),)


def demonstrations(store: ArtifactStore, root: Path, count: int = 24) -> DemonstrationsRef:
    rows = [Demonstration(f"d{i}", question(i % 9) + answer(f"It is {i % 9}."), "test") for i in range(count)]
    write_demonstrations(root / "demonstrations" / "train.parquet", rows)
    write_demonstrations(root / "demonstrations" / "eval.parquet", rows[:4])
    return store.external(DemonstrationsRef, root / "demonstrations")


def preferences(
    store: ArtifactStore,
    root: Path,
    count: int = 32,
    *,
    held_out: int = 6,
    sources: tuple[str, ...] = ("test",),
    prompts: int = 9,
) -> PreferencesRef:
    rows = [
        Preference(
            f"p{i}",
            question(i % prompts),
            answer(f"It is {i % prompts}."),
            answer("What? 12 + 30?"),
            0.0,
            sources[i % len(sources)],
        )
        for i in range(count)
    ]
    write_preferences(root / "preferences" / "train.parquet", rows)
    write_preferences(root / "preferences" / "eval.parquet", rows[:held_out])
    return store.external(PreferencesRef, root / "preferences")


def thumbs(
    store: ArtifactStore, root: Path, up: int = 4, down: int = 2, *, held_out: int = 1, pairs: int = 0
) -> PreferencesRef:
    """Return answers that were judged on their own, each to a prompt of its own, beside so many pairs."""
    rows = [Feedback(f"u{i}", question(i), answer(f"It is {i}."), True, "test") for i in range(up)]
    rows += [Feedback(f"d{i}", question(40 + i), answer("What? 12 + 30?"), False, "test") for i in range(down)]
    preferences(store, root, pairs, held_out=0)
    write_feedback(root / "preferences", "train", rows)
    write_feedback(root / "preferences", "eval", rows[:held_out])
    return store.external(PreferencesRef, root / "preferences")


def steps(store: ArtifactStore, root: Path, count: int = 36) -> StepsRef:
    """Answers of two steps; `It is` is right, `What?` is not, and nothing after it is."""
    right, wrong = "It is {}.", "What? {} + 30?"
    kinds = [((right, right), (1.0, 1.0)), ((right, wrong), (1.0, 0.0)), ((wrong, right), (0.0, 0.0))]
    rows = []
    for number in range(count):
        texts, labels = kinds[number % 3]
        said = tuple(text.format(number % 9) for text in texts)
        rows.append(SteppedAnswer(f"s{number}", question(number % 9), said, labels, "test"))
    write_steps(root / "steps" / "train.parquet", rows)
    write_steps(root / "steps" / "eval.parquet", rows[:6])
    return store.external(StepsRef, root / "steps")


def prompts(store: ArtifactStore, root: Path, count: int = 6) -> PromptsRef:
    rows = [Prompt(f"q{i}", question(i), str(i), "test") for i in range(count)]
    write_prompts(root / "prompts", rows)
    return store.external(PromptsRef, root / "prompts")


def shop_and_inputs(root: Path, policy: Path) -> tuple[Workshop, dict[str, Any]]:
    """Return a store with what stage `ppo` needs where no reward model judges."""
    shop = workshop(root)
    base = shop.store.external(PolicyRef, policy)
    inputs = {"policy": base, "reference": base, "prompts": prompts(shop.store, root), "reward_models": {}}
    return shop, inputs


def series(shop: Workshop, name: str) -> list[float]:
    """Return what stage `ppo` logged as `name`, step by step."""
    return [values[f"ppo/{name}"] for _, values in shop.tracker.points if f"ppo/{name}" in values]


def rewards_of_grpo(
    root: Path,
    *,
    steps: int,
    prompts: int = 6,
    samples: int = 4,
    agent: AgentConfig | None = None,
    reward: RewardSpec | None = None,
    seed: int = 17,
) -> list[float]:
    """Return the mean reward of each step of GRPO from an untrained policy; no episode and no reward may have failed.

    The reward is what the agent earned, if no other is given.
    """
    shop, inputs = shop_and_inputs(root, make_policy(root / "policy"))
    settings = PPOConfig(
        steps=steps,
        prompts_per_step=prompts,
        samples_per_prompt=samples,
        sampling=SamplingConfig(max_tokens=8),
        advantage={"type": "grpo"},
        agent=agent,
        rewards=RewardsConfig(terms={"digits": reward or EpisodeReward()}),
        optimizer=OptimizerConfig(learning_rate=2e-2, schedule="constant"),
        kl={"coef": 0.0},
    )
    shop.run("ppo", settings, inputs, seed=seed)
    assert set(series(shop, "rollout/failed_episodes")) <= {0.0}
    assert set(series(shop, "rollout/invalid")) <= {0.0}
    rewards = series(shop, "reward/mean")
    logger.info("reward of each step: %s", " ".join(f"{reward:.2f}" for reward in rewards))
    return rewards


def untimed(points: list[tuple[int, dict[str, float]]]) -> list[tuple[int, dict[str, float]]]:
    """Return what a tracker was told without how long things took, which no two runs have in common."""
    return [(step, {name: value for name, value in values.items() if "/time/" not in name}) for step, values in points]


def stopped_and_resumed(
    shop: Workshop, name: str, config: Config, inputs: dict[str, Any], *, at: int
) -> tuple[ArtifactRef, int | None]:
    """Ask the stage to stop when it reports `at` steps, run it again; return its artifact and where it went on from."""

    def ask(done: int, total: int, message: str) -> None:
        if done == at:
            stopping.ask("the test says so")

    with stopping.on_signals(), pytest.raises(stopping.StageStopped, match="the test says so"):
        shop.run(name, config, inputs, progress=ask)
    ref, decision = shop.run(name, config, inputs)
    return ref, decision.step


def killed_and_resumed(
    shop: Workshop, name: str, config: Config, inputs: dict[str, Any], *, at: int, resume_on: LocalRuntime | None = None
) -> ArtifactRef:
    """Interrupt the stage when it reports `at` steps, run it again, and return what the second attempt made.

    `resume_on` is the runtime of the second attempt if it is another one.
    """

    def interrupt(done: int, total: int, message: str) -> None:
        if done == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shop.run(name, config, inputs, progress=interrupt)
    shop.runtime = resume_on or shop.runtime
    ref, decision = shop.run(name, config, inputs)
    assert decision.action == "RESUME"
    return ref
