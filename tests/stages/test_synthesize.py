"""Synthesis: what is asked, what is kept, and what a killed stage asks again."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.rewards import ChatServer as Server
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.shards import read_generations
from rlhf_core.data.tables import read_demonstrations, read_preferences, read_prompts, write_prompts
from rlhf_core.errors import ConfigError, DataError, RewardError
from rlhf_core.types import DemonstrationsRef, Message, PolicyRef, PreferencesRef, Prompt, PromptsRef
from stages.score import ScoreConfig
from stages.select import BestOfN
from stages.synthesize import SynthesizeConfig
from stages.synthesize.run import Reply, filtered, request
from tests.support.chat_server import ChatServer
from tests.support.training import killed_and_resumed
from tests.support.workshop import Workshop, workshop

ROWS = [Prompt(f"p{i}", (Message("user", f"What is {i}?"),), f"{i}", "sums") for i in range(6)]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    running = ChatServer()
    yield running
    running.close()


def shop_and_inputs(root: Path, rows: list[Prompt] = ROWS) -> tuple[Workshop, dict[str, Any]]:
    shop = workshop(root)
    write_prompts(root / "prompts", rows)
    return shop, {"prompts": shop.store.external(PromptsRef, root / "prompts")}


def asking(server: ChatServer, **changes: Any) -> SynthesizeConfig:
    return SynthesizeConfig(server=Server(url=server.url, model="m", retries=0, concurrency=1), **changes)


def test_replies_of_a_server_become_demonstrations_and_only_missing_ones_are_asked_again(tmp_path, server):
    shop, inputs = shop_and_inputs(tmp_path)
    config = asking(server, samples_per_prompt=2, eval_fraction=0.2, turns=("Shorter.",))
    server.says = lambda asked: "It is long." if asked != "Shorter." else f"It\u2028is {len(server.requests)}."
    said = server.says
    server.says = lambda asked: 400 if len(server.requests) > 6 else said(asked)
    with pytest.raises(
        RewardError, match=r"synthesize\.server = .*answered 400.*: gave no reply, and the others are kept"
    ):
        shop.run("synthesize", config, inputs)
    before = len(server.requests)
    (journal,) = tmp_path.glob("store/**/replies.jsonl")
    journal.write_text(journal.read_text() + '\n{"prompt": "p5", "num')  # what a kill in the middle of a line leaves
    server.says = said
    ref, decision = shop.run("synthesize", config, inputs)
    # two requests in each of 12 conversations, of which three were over when the seventh request failed
    assert isinstance(ref, DemonstrationsRef) and len(server.requests) == before + 2 * 9
    train, held = (read_demonstrations(shop.store.path(ref) / f"{split}.parquet") for split in ("train", "eval"))
    assert [one.messages[-1].content for one in (*train, *held) if one.messages[0].content == "What is 0?"] == [
        "It\u2028is 2.",
        "It\u2028is 4.",
    ]
    assert (len(train), len(held), train[0].source) == (10, 2, "sums")
    replies = [
        json.loads(line) for line in (shop.store.path(ref) / "replies.jsonl").read_text().rstrip("\n").split("\n")
    ]
    assert [(one["prompt"], one["number"]) for one in replies] == [(f"p{i}", n) for i in range(6) for n in range(2)]
    last = server.requests[-1]
    assert [one["role"] for one in last["messages"]] == ["user", "assistant", "user"]
    assert len({one["seed"] for one in server.requests[before:]}) == 18
    assert shop.metrics(decision)["kept"] == 12


def test_replies_become_new_prompts(tmp_path, server):
    shop, inputs = shop_and_inputs(tmp_path, [*ROWS, Prompt("p6", (Message("user", "What is 6?"),), "6", "sums")])
    config = asking(server, make="prompts", template="Like {prompt} ({label}):", pattern="Q: (.*)", max_characters=12)
    answers = {
        "0": "Q: Why?",
        "1": "no",
        "2": "Q: Why?",
        "3": "Q: What is 0?",
        "4": "Q: Much too long?",
        "5": "Q: no\nQ: How?",
        "6": "Q: Cut off",
    }
    server.says = lambda asked: answers[asked[-3]]
    server.ends = lambda asked: "length" if asked.endswith("(6):") else "stop"
    ref, decision = shop.run("synthesize", config, inputs)
    made = read_prompts(shop.store.path(ref))
    assert [(one.messages[0].content, one.source, one.label) for one in made] == [
        ("Why?", "sums", ""),
        ("How?", "sums", ""),
    ]
    metrics = shop.metrics(decision)
    assert (metrics["repeated"], metrics["too_long"], metrics["without_match"], metrics["replies"]) == (2, 1, 1, 7)
    assert metrics["truncated"] == 1
    assert server.requests[0]["messages"] == [{"role": "user", "content": "Like What is 0? (0):"}]


def test_a_policy_is_asked_in_shards_and_a_killed_run_ends_with_the_same_bytes(tmp_path, policy):
    config = SynthesizeConfig(
        samples_per_prompt=2,
        sampling=SamplingConfig(max_tokens=6),
        shard_size=2,
        turns=("Again.",),
        drop_truncated=False,
    )

    def opened(name: str) -> tuple[Workshop, dict[str, Any]]:
        shop, inputs = shop_and_inputs(tmp_path / name)
        return shop, inputs | {"policy": shop.store.external(PolicyRef, policy)}

    shop, inputs = opened("whole")
    expected, _ = shop.run("synthesize", config, inputs)
    killed, inputs = opened("killed")
    assert killed_and_resumed(killed, "synthesize", config, inputs, at=2).digest == expected.digest


def test_a_revised_reply_is_preferred_to_the_first(tmp_path, server):
    shop, inputs = shop_and_inputs(tmp_path)
    server.says = lambda asked: "First." if asked != "Revise." else f"Better {len(server.requests)}."
    ref, _ = shop.run("synthesize", asking(server, make="pairs", turns=("Revise.",), eval_fraction=0.2), inputs)
    assert isinstance(ref, PreferencesRef)
    train, held = (read_preferences(shop.store.path(ref) / f"{split}.parquet") for split in ("train", "eval"))
    assert {one.prompt[0].content for one in (*train, *held)} == {f"What is {i}?" for i in range(6)} and held
    assert {(one.rejected[0].content, one.chosen[0].content[:6]) for one in (*train, *held)} == {("First.", "Better")}
    server.says = lambda asked: "The same."
    with pytest.raises(DataError, match=r"none of the 6 replies is kept \(repeated 6\)"):
        shop.run("synthesize", asking(server, make="pairs", turns=("Again.",)), inputs)


def test_replies_are_scored_and_selected_as_answers_of_a_policy(tmp_path, server, policy):
    shop, inputs = shop_and_inputs(tmp_path)
    server.says = lambda asked: "No." if len(server.requests) % 2 else "It is so."
    inputs |= {"policy": shop.store.external(PolicyRef, policy)}
    made, _ = shop.run("synthesize", asking(server, make="generations", samples_per_prompt=2), inputs)
    chat = ChatTemplate.load(policy)
    for one in read_generations(shop.store.path(made)):
        assert one.prompt_ids == chat.prompt_ids(one.prompt.messages)
        assert (
            one.completion.token_ids[-1] == chat.eos_id and chat.decode(one.completion.token_ids) == one.completion.text
        )
    near_three = {"target": 3, "width": 9, "unit": "words"}
    length = {"type": "function", "function": "rlhf_core.rewards.library.text:length_target", "arguments": near_three}
    rewards = {"terms": {"length": length}}
    scored, _ = shop.run("score", ScoreConfig(rewards=rewards), {"generations": made, "reward_models": {}})
    best, _ = shop.run("select", BestOfN(eval_fraction=0.0), {"rollouts": scored})
    rows = read_demonstrations(shop.store.path(best) / "train.parquet")
    assert [one.messages[-1].content for one in rows] == ["It is so."] * 6


def test_what_is_asked_keeps_placeholders_of_the_prompt_and_every_turn():
    tricky = Prompt("p", (Message("user", "{label} {x}"),), "L", "s")
    assert request("Ask {prompt} {label} {y}", tricky)[0].content == "Ask {label} {x} L {y}"
    assert request("", tricky) == tricky.messages
    kept, counts = filtered(SynthesizeConfig(), [tricky], {("p", 0): Reply("  ", False)})
    assert not kept and counts["too_short"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turns": ("Shorter.", "")}, "at least 1 character"),
        ({"make": "prompts"}, r'template = "": replies to a prompt are no prompts'),
        ({"make": "pairs"}, r'turns = \[\]: make = "pairs" prefers the last reply to the first'),
        ({"template": "Ask"}, r"template: must hold \{prompt\}"),
        ({"pattern": "("}, r"pattern = '\(': is no regular expression"),
        ({"pattern": "(a)(b)"}, r"has 2 groups; write one"),
        (
            {"server": {"url": "http://h/v1", "model": "m"}, "sampling": {"temperature": 0.5}},
            r"sampling = \{\.\.\.\}: is not read beside server, which has max_tokens and temperature of its own; remove it",
        ),
        ({"min_characters": 5, "max_characters": 3}, r"max_characters = 3: must be >= min_characters"),
    ],
)
def test_settings_that_would_keep_nothing_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        SynthesizeConfig(**changes)


def test_a_policy_or_a_server_is_needed(tmp_path):
    shop, inputs = shop_and_inputs(tmp_path)
    with pytest.raises(ConfigError, match=r"synthesize\.policy = None: there is neither a policy nor a server"):
        shop.run("synthesize", SynthesizeConfig(), inputs)
