"""Distillation: the student comes nearer to its teacher, on and off policy, and a killed run ends with the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
from rlhf_core.config.loop import LoopConfig
from rlhf_core.errors import ConfigError
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import PolicyRef
from stages.config.distill import DistillConfig, DivergenceConfig
from stages.sft import SFTConfig
from tests.support.training import demonstrations, killed_and_resumed, prompts, stopped_and_resumed
from tests.support.workshop import SHAPE, Workshop

FAST = OptimizerConfig(learning_rate=2e-2)
CONFIG = DistillConfig(
    divergence=DivergenceConfig(top_k=16),
    max_length=48,
    loop=LoopConfig(batch_size=4, epochs=2, eval_every=4, checkpoint_every=2),
    optimizer=FAST,
)
ON_POLICY = CONFIG.model_copy(
    update={
        "divergence": DivergenceConfig(kind="reverse", top_k=0),
        "on_policy": True,
        "eval_fraction": 0.2,
        "sampling": SamplingConfig(max_tokens=6),
        "loop": LoopConfig(batch_size=4, epochs=4, eval_every=3, checkpoint_every=2),
    }
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, policy: Path) -> Path:
    """The policy after three epochs of imitation."""
    root = tmp_path_factory.mktemp("teacher")
    shop = Workshop(ArtifactStore(root / "store"))
    inputs = {
        "policy": shop.store.external(PolicyRef, policy),
        "demonstrations": demonstrations(shop.store, root),
    }
    ref, _ = shop.run("sft", SFTConfig(max_length=48, loop=LoopConfig(batch_size=4, epochs=3), optimizer=FAST), inputs)
    return shop.store.path(ref)


def shop_and_inputs(root: Path, policy: Path, teacher: Path, config: DistillConfig) -> tuple[Workshop, dict[str, Any]]:
    shop = Workshop(ArtifactStore(root / "store"))
    inputs: dict[str, Any] = {
        "policy": shop.store.external(PolicyRef, policy),
        "teacher": shop.store.external(PolicyRef, teacher),
    }
    data = {"prompts": prompts(shop.store, root)} if config.on_policy else {}
    return shop, inputs | (data or {"demonstrations": demonstrations(shop.store, root)})


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_the_divergence_from_the_teacher_falls(tmp_path: Path, policy: Path, teacher: Path, kind: str) -> None:
    config = CONFIG.model_copy(update={"divergence": DivergenceConfig(kind=kind, top_k=16)})
    shop, inputs = shop_and_inputs(tmp_path, policy, teacher, config)
    ref, decision = shop.run("distill", config, inputs)
    metrics = shop.metrics(decision)
    # 24 conversations in batches of 4, twice
    assert (metrics["steps"], metrics["train_samples"]) == (12, 24)
    assert metrics["eval/divergence"] < metrics["before/eval/divergence"] / 2
    assert metrics["eval/loss"] == metrics["eval/divergence"]
    assert ref.digest != inputs["policy"].digest


def test_a_teacher_that_is_the_student_is_at_distance_zero(tmp_path: Path, policy: Path) -> None:
    config = CONFIG.model_copy(update={"kl_weight": 0.75, "loop": CONFIG.loop.model_copy(update={"max_steps": 1})})
    shop, inputs = shop_and_inputs(tmp_path, policy, policy, config)
    _, decision = shop.run("distill", config, inputs)
    metrics = shop.metrics(decision)
    assert metrics["before/eval/divergence"] == pytest.approx(0.0, abs=1e-6)
    # a = 0.75: a quarter of the demonstrations' loss is what is left
    assert metrics["before/eval/loss"] == pytest.approx(0.25 * metrics["before/eval/nll"], rel=1e-4)


@pytest.mark.parametrize("top_k", [0, 16])
def test_the_student_learns_on_its_own_answers(tmp_path: Path, policy: Path, teacher: Path, top_k: int) -> None:
    loop, reverse = LoopConfig(batch_size=8, epochs=32, eval_every=20), DivergenceConfig(kind="reverse", top_k=top_k)
    config = ON_POLICY.model_copy(update={"loop": loop, "divergence": reverse})
    shop, inputs = shop_and_inputs(tmp_path, policy, teacher, config)
    _, decision = shop.run("distill", config, inputs)
    metrics = shop.metrics(decision)
    # one of the 6 prompts is held out; 32 answers to each of the others, in batches of 8
    assert (metrics["steps"], metrics["train_samples"]) == (20, 160)
    assert metrics["eval/divergence"] < metrics["before/eval/divergence"] / 2


@pytest.mark.parametrize("config", [CONFIG, ON_POLICY], ids=["demonstrations", "on_policy"])
def test_a_killed_or_stopped_run_ends_with_the_same_bytes(
    tmp_path: Path, policy: Path, teacher: Path, config: DistillConfig
) -> None:
    digests = []
    for name in ("whole", "killed", "stopped"):
        shop, inputs = shop_and_inputs(tmp_path / name, policy, teacher, config)
        if name == "whole":
            digests.append(shop.run("distill", config, inputs)[0].digest)
        elif name == "killed":  # after the checkpoint at 2: step 3 is made again
            digests.append(killed_and_resumed(shop, "distill", config, inputs, at=3).digest)
        else:
            ref, step = stopped_and_resumed(shop, "distill", config, inputs, at=3)
            assert step == 3
            digests.append(ref.digest)
    assert len(set(digests)) == 1


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path, policy: Path) -> None:
    from rlhf_core.models.initialise import initialise_llama, train_tokenizer

    other = tmp_path / "other"
    train_tokenizer(["Words that the student never saw, many of them."] * 5, vocab_size=320, folder=other)
    initialise_llama(SHAPE, other, seed=7)
    shop, inputs = shop_and_inputs(tmp_path, policy, other, CONFIG)
    with pytest.raises(ConfigError, match=r"teacher = .*tokens have other ids than in the student's tokenizer"):
        shop.run("distill", CONFIG, inputs)


def test_more_likeliest_tokens_than_there_are_is_refused(tmp_path: Path, policy: Path) -> None:
    config = CONFIG.model_copy(update={"divergence": DivergenceConfig(top_k=320)})
    shop, inputs = shop_and_inputs(tmp_path, policy, policy, config)
    with pytest.raises(ConfigError, match=r"distill\.divergence\.top_k = 320: must be < 320, the size of the vocabul"):
        shop.run("distill", config, inputs)


def test_prompts_are_needed_on_policy_and_demonstrations_off_it(tmp_path: Path, policy: Path) -> None:
    for config, missing in ((ON_POLICY, "prompts"), (CONFIG, "demonstrations")):
        shop, inputs = shop_and_inputs(tmp_path / missing, policy, policy, config)
        del inputs[missing]
        with pytest.raises(ConfigError, match=rf"distill\.{missing} = None: on_policy = \w+ trains on {missing}"):
            shop.run("distill", config, inputs)


def test_own_answers_are_not_imitated() -> None:
    with pytest.raises(ValidationError, match=r"kl_weight = 0\.5: with on_policy the answers are the student's own"):
        DistillConfig(on_policy=True, kl_weight=0.5)
