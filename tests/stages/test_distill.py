"""Distillation: the student comes nearer to its teacher, on and off policy, and a killed run ends with the same bytes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
from rlhf_core.config.policy import LoopConfig
from rlhf_core.data.chat import CHATML_LIKE
from rlhf_core.errors import ConfigError
from rlhf_core.models.initialize import initialize_llama, train_tokenizer
from rlhf_core.training.objectives.distillation import RoutedSample, RoutedTeachers
from rlhf_core.types import PolicyRef, TokenSample, TopLogprobs
from stages.distill import DistillConfig, DivergenceConfig
from stages.sft import SFTConfig
from tests.support.policies import SHAPE
from tests.support.training import demonstrations, killed_and_resumed, prompts, stopped_and_resumed
from tests.support.workshop import Workshop, workshop

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
def teacher(tmp_path_factory, policy: Path) -> Path:
    """The policy after three epochs of imitation."""
    root = tmp_path_factory.mktemp("teacher")
    shop = workshop(root)
    inputs = {
        "policy": shop.store.external(PolicyRef, policy),
        "demonstrations": demonstrations(shop.store, root),
    }
    ref, _ = shop.run("sft", SFTConfig(max_length=48, loop=LoopConfig(batch_size=4, epochs=3), optimizer=FAST), inputs)
    return shop.store.path(ref)


def shop_and_inputs(root: Path, policy: Path, teacher: Path, config: DistillConfig) -> tuple[Workshop, dict[str, Any]]:
    shop = workshop(root)
    inputs: dict[str, Any] = {
        "policy": shop.store.external(PolicyRef, policy),
        "teacher": shop.store.external(PolicyRef, teacher),
    }
    data = {"prompts": prompts(shop.store, root)} if config.on_policy else {}
    return shop, inputs | (data or {"demonstrations": demonstrations(shop.store, root)})


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_the_divergence_from_the_teacher_falls(tmp_path, policy, teacher, kind):
    config = CONFIG.model_copy(update={"divergence": DivergenceConfig(kind=kind, top_k=16)})
    shop, inputs = shop_and_inputs(tmp_path, policy, teacher, config)
    ref, decision = shop.run("distill", config, inputs)
    metrics = shop.metrics(decision)
    # 24 conversations in batches of 4, twice
    assert (metrics["steps"], metrics["train_samples"]) == (12, 24)
    assert metrics["eval/divergence"] < metrics["before/eval/divergence"] / 2
    assert metrics["eval/loss"] == metrics["eval/divergence"]
    assert ref.digest != inputs["policy"].digest


def test_a_teacher_that_is_the_student_is_at_distance_zero(tmp_path, policy):
    config = CONFIG.model_copy(update={"kl_weight": 0.75, "loop": CONFIG.loop.model_copy(update={"max_steps": 1})})
    shop, inputs = shop_and_inputs(tmp_path, policy, policy, config)
    _, decision = shop.run("distill", config, inputs)
    metrics = shop.metrics(decision)
    assert metrics["before/eval/divergence"] == pytest.approx(0.0, abs=1e-6)
    # a = 0.75: a quarter of the demonstrations' loss is what is left
    assert metrics["before/eval/loss"] == pytest.approx(0.25 * metrics["before/eval/nll"], rel=1e-4)


@pytest.mark.parametrize("top_k", [0, 16])
def test_the_student_learns_on_its_own_answers(tmp_path, policy, teacher, top_k):
    loop, reverse = LoopConfig(batch_size=8, epochs=32, eval_every=20), DivergenceConfig(kind="reverse", top_k=top_k)
    config = ON_POLICY.model_copy(update={"loop": loop, "divergence": reverse})
    shop, inputs = shop_and_inputs(tmp_path, policy, teacher, config)
    _, decision = shop.run("distill", config, inputs)
    metrics = shop.metrics(decision)
    # one of the 6 prompts is held out; 32 answers to each of the others, in batches of 8
    assert (metrics["steps"], metrics["train_samples"]) == (20, 160)
    assert metrics["eval/divergence"] < metrics["before/eval/divergence"] / 2


@pytest.mark.full
@pytest.mark.parametrize("config", [CONFIG, ON_POLICY], ids=["demonstrations", "on_policy"])
def test_a_killed_or_stopped_run_ends_with_the_same_bytes(tmp_path, policy, teacher, config):
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


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """A policy with a tokenizer and a chat template of its own, after three epochs of imitation."""
    root = tmp_path_factory.mktemp("other")
    folder = other_policy(root / "policy")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHATML_LIKE
    tokenizer.save_pretrained(folder)
    shop = workshop(root)
    inputs = {"policy": shop.store.external(PolicyRef, folder), "demonstrations": demonstrations(shop.store, root)}
    ref, _ = shop.run("sft", SFTConfig(max_length=48, loop=LoopConfig(batch_size=4, epochs=3), optimizer=FAST), inputs)
    return shop.store.path(ref)


def other_policy(folder: Path) -> Path:
    train_tokenizer(["It is what it is: 0 to 9, 12, 30 and so on; is it?"] * 5, vocab_size=400, folder=folder)
    initialize_llama(SHAPE.model_copy(update={"vocab_size": 400}), folder, seed=7)
    return folder


def several(shop: Workshop, inputs: dict[str, Any], teachers: dict[str, Path]) -> dict[str, Any]:
    """The inputs with several teachers in the place of one."""
    refs = {name: shop.store.external(PolicyRef, folder) for name, folder in teachers.items()}
    return {name: ref for name, ref in inputs.items() if name != "teacher"} | {"teachers": refs}


ACROSS = CONFIG.model_copy(update={"divergence": DivergenceConfig(kind="uld_text", top_k=16)})


@pytest.mark.parametrize(("kind", "kl_weight"), [("uld_text", 1.0), ("uld", 0.6)])
def test_a_student_comes_nearer_to_a_teacher_with_another_tokenizer(tmp_path, policy, other, kind, kl_weight):
    divergence = DivergenceConfig(kind=kind, top_k=16)
    config = ACROSS.model_copy(update={"divergence": divergence, "kl_weight": kl_weight})
    shop, inputs = shop_and_inputs(tmp_path, policy, other, config)
    _, decision = shop.run("distill", config, inputs)
    metrics = shop.metrics(decision)
    assert (metrics["steps"], metrics["train_samples"]) == (12, 24)
    assert metrics["eval/divergence"] < metrics["before/eval/divergence"] / 2
    assert metrics["eval/logprob_gap"] < 0.8 * metrics["before/eval/logprob_gap"]
    assert metrics["eval/nll"] < 0.8 * metrics["before/eval/nll"]  # the teacher has learnt the demonstrations, too
    assert metrics["eval/aligned"] == 1.0


@pytest.mark.parametrize("on_policy", [False, True])
def test_a_student_comes_nearer_to_the_mixture_of_two_teachers(tmp_path, policy, teacher, on_policy):
    weights = {"taught": 3.0, "untaught": 1.0}
    base = (
        ON_POLICY.model_copy(update={"loop": LoopConfig(batch_size=8, epochs=16, eval_every=20)})
        if on_policy
        else CONFIG
    )
    config = base.model_copy(update={"teachers": weights})
    shop, inputs = shop_and_inputs(tmp_path, policy, teacher, config)
    inputs = several(shop, inputs, {"untaught": policy, "taught": teacher})
    _, decision = shop.run("distill", config, inputs)
    metrics = shop.metrics(decision)
    for when in ("before/eval", "eval"):
        parts = 0.75 * metrics[f"{when}/divergence/taught"] + 0.25 * metrics[f"{when}/divergence/untaught"]
        assert metrics[f"{when}/divergence"] == pytest.approx(parts, rel=1e-5)
    # The student begins as the untaught teacher, and ends between the two.
    assert metrics["before/eval/divergence/untaught"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["eval/divergence"] < metrics["before/eval/divergence"]
    assert metrics["eval/divergence/taught"] < metrics["before/eval/divergence/taught"] / 2
    assert metrics["eval/divergence/untaught"] > 0.01


def test_each_sample_is_taught_by_the_teacher_of_its_source():
    shown: list[list[tuple[int, ...]]] = []

    class Fake:
        def __init__(self, value: float) -> None:
            self.value = value

        def top_logprobs(self, samples: list[TokenSample], *, k: int, temperature: float) -> list[TopLogprobs]:
            shown.append([one.token_ids for one in samples])
            own = np.zeros(1, np.float32)
            return [
                TopLogprobs(np.full((1, k), self.value, np.float32), np.zeros((1, k), np.int32), own) for _ in samples
            ]

    teachers = RoutedTeachers((Fake(-1.0), Fake(-2.0), Fake(-3.0)), 2, 1.0, 9)  # type: ignore[arg-type]
    samples = [RoutedSample((1, token), (0, 1), number) for token, number in ((5, 1), (6, 0), (7, 1))]
    taught = teachers.taught(samples)
    assert shown == [[(1, 6)], [(1, 5), (1, 7)]], "a teacher without samples is not asked"
    assert [one.token_ids for one in taught] == [one.token_ids for one in samples]
    assert [float(one.teachers[0].logprobs[0, 0]) for one in taught] == [-2.0, -1.0, -2.0]
    assert teachers.elements(samples[0]) == 2


@pytest.mark.parametrize("config", [CONFIG, ON_POLICY], ids=["demonstrations", "on_policy"])
def test_a_route_to_one_teacher_is_a_distillation_from_it(tmp_path, policy, teacher, config):
    shop, inputs = shop_and_inputs(tmp_path, policy, teacher, config)
    alone = shop.run("distill", config, inputs)[0].digest
    one = several(shop, inputs, {"good": teacher})
    routed = config.model_copy(update={"teachers": {"good": 1.0}, "route": {"good": ("test",)}})
    assert shop.run("distill", routed, one)[0].digest == alone
    for route, message in (
        ({"good": ("y",)}, r"distill\.route = 'test': no teacher teaches prompts of this source; add it"),
        ({"good": ("test", "x")}, r"distill\.route\.good = \['test', 'x'\]: no prompt has the source 'x'"),
    ):
        with pytest.raises(ConfigError, match=message):
            shop.run("distill", routed.model_copy(update={"route": route}), one)


def test_weights_and_teachers_have_the_same_names(tmp_path, policy):
    config = CONFIG.model_copy(update={"teachers": {"one": 1.0, "two": 1.0}})
    shop, inputs = shop_and_inputs(tmp_path, policy, policy, config)
    with pytest.raises(
        ConfigError, match=r"distill\.teachers\.two = 1\.0: the teachers are one, and each needs a weight"
    ):
        shop.run("distill", config, several(shop, inputs, {"one": policy}))
    with pytest.raises(ConfigError, match=r"distill\.teachers\.more = None: the teachers are more, one, two"):
        shop.run("distill", config, several(shop, inputs, {"one": policy, "two": policy, "more": policy}))
    del inputs["teacher"]
    with pytest.raises(ConfigError, match=r"distill\.teacher = None: distillation needs a teacher"):
        shop.run("distill", CONFIG, inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teachers": {"one": 0.0, "two": 0.0}}, r"teachers = \{one = 0\.0, two = 0\.0\}: the weights add up to 0"),
        ({"teachers": {"one": -1.0}}, "greater than or equal to 0"),
        ({"teachers": {"one": float("inf")}}, "finite"),
        ({"teachers": {"a/b": 1.0}}, "pattern"),
        ({"teachers": {"one": 1e308, "two": 1e308}}, "the sum of the weights is too large; give smaller ones"),
        ({"teachers": {"one": 1.0}, "route": {"two": ["s"]}}, r"route\.one: has no sources; add route\.one"),
        (
            {"teachers": {"one": 1.0}, "route": {"one": ["s"], "two": ["t"]}},
            r"route\.two: is no teacher; add teachers\.two",
        ),
        (
            {"teachers": {"one": 1.0, "two": 2.0}, "route": {"one": ["s"], "two": ["t"]}},
            r"with route a prompt has one teacher; give equal",
        ),
        (
            {"teachers": {"one": 1.0, "two": 1.0}, "route": {"one": ["s"], "two": ["s"]}},
            r"route = \{\.\.\.\}: 's' has 2 teachers",
        ),
        (
            {"teachers": {"one": 1.0}, "route": {"one": ["s"]}, "divergence": {"kind": "uld_text"}},
            r"route = \{\.\.\.\}: uld_text compares with all teachers; choose another",
        ),
        ({"divergence": {"kind": "ULD"}}, r"'forward', 'reverse', 'jsd', 'uld' or 'uld_text'"),
        ({"divergence": {"kind": "uld"}}, r"kl_weight = 1\.0: .* not tokens; lower kl_weight, or set"),
        (
            {"divergence": {"kind": "uld"}, "on_policy": True},
            r'kl_weight = 1\.0: .*; set divergence\.kind = "uld_text"',
        ),
    ],
)
def test_senseless_options_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        DistillConfig.model_validate(options)


def test_a_teacher_with_another_vocabulary_is_refused_with_the_way_across(tmp_path, policy):
    folder = tmp_path / "other"
    train_tokenizer(["Words that the student never saw, many of them."] * 5, vocab_size=320, folder=folder)
    initialize_llama(SHAPE, folder, seed=7)
    shop, inputs = shop_and_inputs(tmp_path, policy, folder, CONFIG)
    message = (
        r"teacher = .*tokens have other ids than in the student's tokenizer.*divergence\.kind = \"uld_text\" or \"uld\""
    )
    weights = CONFIG.model_copy(update={"teachers": {"own": 1.0, "other": 1.0}})
    with pytest.raises(ConfigError, match=rf"^distill\.teachers\.other = .*{message.partition('= ')[2]}"):
        shop.run("distill", weights, several(shop, inputs, {"own": policy, "other": folder}))
    with pytest.raises(ConfigError, match=message):
        shop.run("distill", CONFIG, inputs)


def test_more_outcomes_than_the_smaller_vocabulary_has_are_refused(tmp_path, policy):
    config = ACROSS.model_copy(update={"divergence": DivergenceConfig(kind="uld_text", top_k=320)})
    shop, inputs = shop_and_inputs(tmp_path, policy, other_policy(tmp_path / "other"), config)
    with pytest.raises(ConfigError, match=r"distill\.divergence\.top_k = 320: must be < 320, the size of the vocabul"):
        shop.run("distill", config, inputs)


def test_more_likeliest_tokens_than_there_are_is_refused(tmp_path, policy):
    config = CONFIG.model_copy(update={"divergence": DivergenceConfig(top_k=320)})
    shop, inputs = shop_and_inputs(tmp_path, policy, policy, config)
    with pytest.raises(ConfigError, match=r"distill\.divergence\.top_k = 320: must be < 320, the size of the vocabul"):
        shop.run("distill", config, inputs)


def test_prompts_are_needed_on_policy_and_demonstrations_off_it(tmp_path, policy):
    for config, missing in ((ON_POLICY, "prompts"), (CONFIG, "demonstrations")):
        shop, inputs = shop_and_inputs(tmp_path / missing, policy, policy, config)
        del inputs[missing]
        with pytest.raises(ConfigError, match=rf"distill\.{missing} = None: on_policy = \w+ trains on {missing}"):
            shop.run("distill", config, inputs)


def test_own_answers_are_not_imitated():
    with pytest.raises(ValidationError, match=r"kl_weight = 0\.5: with on_policy the answers are the student's own"):
        DistillConfig(on_policy=True, kl_weight=0.5)
