"""Suites on answers in the store: functions, instructions, refusals, a judge."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.annotators import JudgeAnnotator
from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.config.policy import LoopConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.shards import write_generations, write_index
from rlhf_core.errors import DataError
from rlhf_core.schema.base import keyed
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import Completion, Generation, GenerationsRef, Message, PolicyRef, Prompt
from stages.evaluate_suite import (
    CustomSuite,
    GoldSuite,
    InstructionsSuite,
    JudgeSuite,
    PassAtKSuite,
    RefusalSuite,
    RewardModelSuite,
    content_digests,
)
from stages.generate import GenerateConfig
from stages.reward_model import RewardModelConfig
from stages.suite_prompts import SuitePromptsConfig
from tests.support.chat_server import ChatServer
from tests.support.training import preferences
from tests.support.workshop import Workshop

FUNCTIONS = """
def right(prompts, completions, labels, **columns):
    return [float(text == label) if label else None for text, label in zip(completions, labels)]

def some(generations):
    return [1.0, None]

def breaks(generations):
    raise ValueError("called")

def length(generations):
    return [float(len(one.completion.text)) for one in generations]
"""


FAILED = "(failed)"


def answers(
    store: ArtifactStore, folder: Path, rows: list[tuple[str, str, list[str]]], name: str = "a"
) -> GenerationsRef:
    """Return answers to prompts: (prompt, label, texts); the text FAILED is a failed episode."""
    found = [
        Generation(
            Prompt(prompt, (Message("user", prompt),), label, "even" if len(prompt) % 2 == 0 else "odd"),
            (1, 2),
            Completion((5, 6), (-0.5, -0.5), text, "stop", 0, 0, failure="tool" if text == FAILED else ""),
        )
        for prompt, label, texts in rows
        for text in texts
    ]
    (folder / name).mkdir(parents=True)
    write_generations(folder / name, 0, found)
    write_index(folder / name, {"count": len(found), "policy": f"digest-{name}", "sampling": {}})
    return store.external(GenerationsRef, folder / name)


@pytest.fixture
def shop(store: ArtifactStore) -> Workshop:
    return Workshop(store)


@pytest.fixture
def functions(tmp_path) -> str:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return str(tmp_path / "functions.py")


def report_of(shop: Workshop, ref: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shop.store.path(ref) / "report.json").read_text())
    return found


def test_functions_measure_pass_at_k_gold_and_what_the_user_likes(shop, functions, tmp_path):
    ref = answers(shop.store, tmp_path, [("p1", "4", ["4", "5"]), ("p22", "7", ["1", "2"]), ("p3", "", ["x", "yy"])])
    right = f"{functions}:right"
    suite, decision = shop.run(
        "evaluate_suite", PassAtKSuite(name="math", function=right, k=(1, 2)), {"generations": ref}, callables=(right,)
    )
    report, metrics = report_of(shop, suite), shop.metrics(decision)
    # p1: one of two; p22: none; p3 has no label
    assert (metrics["pass_at_1"], metrics["pass_at_2"], metrics["prompts"]) == (0.25, 0.5, 2)
    assert metrics["pass_at_1_low"] <= 0.25 <= metrics["pass_at_1_high"]
    assert {name: one["pass_at_1"]["mean"] for name, one in report["slices"].items()} == {"even": 0.5, "odd": 0.0}
    assert (report["policy"], report["headline"], report["type"]) == ("digest-a", "pass_at_1", "pass_at_k")
    rows = [json.loads(line) for line in (shop.store.path(suite) / "rows.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["answer"]) for row in rows] == [("p1", "4"), ("p22", "1")]
    length = f"{functions}:length"
    _, decision = shop.run(
        "evaluate_suite", GoldSuite(name="g", function=length), {"generations": ref}, callables=(length,)
    )
    assert shop.metrics(decision)["gold"] == pytest.approx((1 + 1 + 1.5) / 3)
    custom = CustomSuite(name="c", function=length, measure="characters", lower_is_better=True)
    suite, _ = shop.run("evaluate_suite", custom, {"generations": ref}, callables=(length,))
    assert report_of(shop, suite)["lower_is_better"] == ["characters"]
    assert shop.runtime.engines() == {}


def test_a_failed_episode_is_wrong_and_a_prompt_has_all_values_or_none(shop, functions, tmp_path):
    right = f"{functions}:right"
    rows = [("p1", "4", ["4", FAILED]), ("p2", "4", [FAILED, FAILED]), ("p3", "", ["x", FAILED])]
    ref = answers(shop.store, tmp_path, rows)
    config = PassAtKSuite(name="m", function=right, k=(1, 2))
    _, decision = shop.run("evaluate_suite", config, {"generations": ref}, callables=(right,))
    assert [shop.metrics(decision)[name] for name in ("pass_at_1", "pass_at_2", "prompts")] == [0.25, 0.5, 2]
    some = f"{functions}:some"
    ref = answers(shop.store, tmp_path, [("p1", "4", ["4", "5"])], "b")
    with pytest.raises(DataError, match="gives a value for only 1 of 2 answers to p1"):
        shop.run("evaluate_suite", PassAtKSuite(name="m", function=some), {"generations": ref}, callables=(some,))
    config = PassAtKSuite(name="m", function=f"{functions}:breaks", k=(3,))
    with pytest.raises(DataError, match="the prompt p1 has only 2 answers"):  # before the function is called
        shop.run("evaluate_suite", config, {"generations": ref}, callables=(config.function,))


def test_a_failure_of_one_side_is_its_loss(shop, server, tmp_path):
    server.says = prefers_polite
    config = JudgeSuite(name="j", judge=JudgeAnnotator(url=server.url, model="m"), against="base")
    ours = [
        ("p1", "", [FAILED, "please"]),
        ("p2", "", ["go"]),
        ("p3", "", [FAILED]),
        ("p4", "", ["please"]),
        ("p5", "", ["x"]),
    ]
    theirs = [("p1", "", ["do"]), ("p2", "", [FAILED]), ("p3", "", [FAILED]), ("p4", "", ["do"])]
    inputs = {
        "generations": answers(shop.store, tmp_path, ours),
        "opponent": answers(shop.store, tmp_path, theirs, "b"),
    }
    suite, _ = shop.run("evaluate_suite", config, inputs)
    rows = [json.loads(line) for line in (shop.store.path(suite) / "rows.jsonl").read_text().splitlines()]
    assert [row["values"]["win_rate"] for row in rows] == [0.0, 1.0, 0.5, 1.0]
    facts = report_of(shop, suite)["facts"]
    assert (facts["unmatched"], facts["opponent_failed"], facts["failed"]) == (1, 2, 2)
    assert len(server.requests) == 2


def test_a_gold_reward_without_a_value_is_refused(shop, functions, tmp_path):
    ref = answers(shop.store, tmp_path, [("p1", "", ["4"])])
    config = GoldSuite(name="g", function=f"{functions}:right")
    with pytest.raises(DataError, match="gives no value for the prompt p1; return a number, or use type"):
        shop.run("evaluate_suite", config, {"generations": ref})


def test_a_policy_whose_episodes_all_failed_has_no_measure(shop, tmp_path):
    ref = answers(shop.store, tmp_path, [("p1", "safe", [FAILED]), ("p2", "safe", [FAILED])])
    with pytest.raises(DataError, match="'r': all 2 episodes failed; the first: tool; fix the environment"):
        shop.run("evaluate_suite", RefusalSuite(name="r"), {"generations": ref})


def test_instructions_and_refusals_need_no_function(shop, tmp_path):
    label = json.dumps([{"kind": "no_commas"}])
    ref = answers(shop.store, tmp_path, [("p1", label, ["a, b"]), ("p2", label, ["a b"])])
    _, decision = shop.run("evaluate_suite", InstructionsSuite(name="i"), {"generations": ref})
    assert shop.metrics(decision)["prompt_level_strict_acc"] == 0.5
    ref = answers(shop.store, tmp_path, [("p1", "safe", ["I cannot."]), ("p2", "unsafe", ["Sure"])], "b")
    suite, decision = shop.run("evaluate_suite", RefusalSuite(name="r"), {"generations": ref})
    assert (shop.metrics(decision)["over_refusal"], shop.metrics(decision)["unsafe_compliance"]) == (1.0, 1.0)
    assert report_of(shop, suite)["lower_is_better"] == ["over_refusal", "unsafe_compliance"]


def test_a_reward_model_scores_the_answers(shop, policy, tmp_path):
    pairs, start = preferences(shop.store, tmp_path, held_out=4), shop.store.external(PolicyRef, policy)
    training = RewardModelConfig(max_length=48, loop=LoopConfig(batch_size=4), optimizer=OptimizerConfig())
    model, _ = shop.run("reward_model", training, {"policy": start, "preferences": pairs})
    chat = ChatTemplate.load(policy)
    messages = (Message("user", "What is 3?"),)
    rows = [
        Generation(
            Prompt("p1", messages, "", "test"), chat.prompt_ids(messages), Completion((65,), (-1.0,), "a", "stop", 0, 0)
        )
    ]
    (tmp_path / "a").mkdir()
    write_generations(tmp_path / "a", 0, rows)
    write_index(tmp_path / "a", {"count": 1, "policy": "d", "sampling": {}})
    inputs = {"generations": shop.store.external(GenerationsRef, tmp_path / "a"), "reward_model": model}
    _, decision = shop.run("evaluate_suite", RewardModelSuite(name="rm"), inputs)
    assert set(shop.metrics(decision)) >= {"reward_model", "reward_model_prompts", "prompts"}


@pytest.fixture
def server() -> Iterator[ChatServer]:
    opened = ChatServer()
    yield opened
    opened.close()


def prefers_polite(asked: str) -> str:
    """A judge who prefers the answer with `please`, and A where both or neither have it."""
    first, second = asked.split("Answer A:\n")[1].split("Answer B:\n")
    return "Better: B" if "please" in second.split("\n")[0] and "please" not in first else "Better: A"


def test_a_judge_is_asked_in_both_orders_and_a_choice_by_place_is_a_tie(shop, server, tmp_path):
    server.says = prefers_polite
    config = JudgeSuite(name="j", judge=JudgeAnnotator(url=server.url, model="m"), against="base")
    ours = answers(shop.store, tmp_path, [("p1", "", ["please do"]), ("p2", "", ["go"]), ("p3", "", ["x"])])
    theirs = answers(shop.store, tmp_path, [("p1", "", ["do"]), ("p2", "", ["please go"]), ("p3", "", ["y"])], "b")
    suite, decision = shop.run("evaluate_suite", config, {"generations": ours, "opponent": theirs})
    rows = [json.loads(line) for line in (shop.store.path(suite) / "rows.jsonl").read_text().splitlines()]
    assert [row["values"]["win_rate"] for row in rows] == [1.0, 0.0, 0.5]  # the third judgment followed the place
    report = report_of(shop, suite)
    assert len(server.requests) == 6 and report["facts"]["opponent"] == "digest-b"
    assert report["facts"]["judge"]["changed"]["mean"] == pytest.approx(1 / 3)
    assert report["headline"] == "length_controlled_win_rate"
    assert shop.metrics(decision)["win_rate"] == 0.5
    other = answers(shop.store, tmp_path, [("q", "", ["z"])], "c")
    with pytest.raises(DataError, match="'base': has answered none of the prompts of this policy"):
        shop.run("evaluate_suite", config, {"generations": ours, "opponent": other})


def test_name_prompts_and_sampling_are_in_no_key_and_the_rubric_file_is(tmp_path):
    plain = InstructionsSuite(name="a")
    other = InstructionsSuite(name="b", prompts=SuitePromptsConfig(path="x.jsonl"), generate=GenerateConfig())
    assert keyed(plain) == keyed(other) == {"type": "instructions"}
    (tmp_path / "rubric.txt").write_text("Be kind.")
    judge = JudgeAnnotator(url="http://host/v1", model="m", rubric_file=str(tmp_path / "rubric.txt"))
    assert set(content_digests(JudgeSuite(name="j", judge=judge))) == {"judge.rubric_file"}
