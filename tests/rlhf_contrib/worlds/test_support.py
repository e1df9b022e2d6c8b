"""The gold reward by hand, the properties of the data that the pipeline relies on, and simulated readers."""

import json
from dataclasses import replace

import pytest

from rlhf_contrib.worlds.support import (
    Facts,
    gold_components,
    gold_reward,
    make_tables,
    sum_of,
)
from rlhf_contrib.worlds.support_readers import read_facts, reader_reward
from rlhf_core.config.data import SupportWorld
from rlhf_core.data.tables import Tables
from rlhf_core.errors import RewardError
from rlhf_core.types import Completion, Generation, Message, Prompt

# ---------------------------------------------------------------- support

FACTS = Facts("Maria", "blue kettle", "broken")
PERFECT = (
    "Hello Maria, I am sorry to hear that. This is about your blue kettle. We will send a replacement. "
    "Many thanks for telling us."
)


@pytest.fixture(scope="module")
def world() -> tuple[Tables, dict[str, float]]:
    return make_tables(SupportWorld(), seed=5)


def gold(text: str) -> float:
    return sum_of(gold_components(text, FACTS))


def generation(text: str, label: str) -> Generation:
    prompt = Prompt("p", (Message("user", "x"),), label, "support")
    return Generation(prompt, (1,), Completion((2,), (0.0,), text, "stop", 0, 0))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (PERFECT, 5.0),
        ("Hello Maria, We will send a replacement.", 2.5),
        ("Hello Peter, We will send a replacement.", 0.5),  # wrong name -1, remedy 1.5
        ("Hello, We will send a replacement.", 1.5),  # nobody is greeted: nothing earned, nothing lost
        ("We will send a replacement. Hello Maria,", 1.0),  # a greeting that is not first is unknown: 1.5 - 0.5
        ("This is about your red kettle.", -1.0),
        ("We will post the missing part.", -1.0),
        ("We will send a replacement. We will post the missing part.", 0.5),
        ("Many thanks for telling us. I am sorry to hear that.", 1.0),  # thanks close a reply or earn nothing
        ("You must have caused this yourself.", -1.5),
        ("We value every customer. Your opinion matters to us.", -1.0),
        ("I am sorry to hear that. I am sorry to hear that.", 0.0),  # 1 once, -1 for saying it again
        ("I am sorry to hear that. We are sorry for the trouble.", 1.0),  # a virtue counts once
        # Offering every remedy is worse than offering none: 1.5 - 2.0.
        ("We will send a replacement. We will refund the shipping fee. We will exchange it for free.", -0.5),
        ("kettle blue sorry Maria replacement", -0.5),
        ("Maria " * 9, -1.0),  # 9 unknown words: -0.5 for each 8 begun
        ("", -2.0),
        ("...", -2.0),
        ("no. " * 40, -5.0),  # -20 for unknown, -39 for repeats: the floor
    ],
)
def test_the_gold_reward_by_hand(text, value):
    assert gold(text) == pytest.approx(value)


def asked(tables: Tables, prefix: str = "") -> set[tuple[str, str]]:
    """Return the pairs of a name and a thing: words 0 and 4 of "Maria writes: my blue kettle arrived ..."."""
    rows = tables.named()
    texts = [row.messages[0].content for name in ("demonstrations", "prompts") for row in rows[f"{prefix}{name}"]]
    texts += [row.prompt[0].content for row in rows[f"{prefix}preferences"]]
    return {(text.split()[0], text.split()[4]) for text in texts}


def test_words_beyond_thirty_cost_a_twentieth_each():
    filler = " We value every customer. Your opinion matters to us."
    assert len(PERFECT.split()) == 24
    longer = PERFECT.replace(" Many", filler + " Many")
    assert len(longer.split()) == 33
    assert gold_components(longer, FACTS)["long"] == pytest.approx(-0.15)
    assert gold(longer) == pytest.approx(5.0 - 2 * 0.5 - 0.15)


def test_the_reward_function_reads_facts_from_the_label_and_refuses_prompts_without():
    assert gold_reward([generation(PERFECT, FACTS.label), generation("", FACTS.label)]) == [5.0, -2.0]
    with pytest.raises(RewardError, match="has no facts"):
        gold_reward([generation(PERFECT, "")])


def test_only_evaluation_prompts_carry_facts(world):
    tables, _ = world
    assert {prompt.label for prompt in tables.prompts} == {""}
    assert {pair.margin for pair in (*tables.preferences, *tables.eval_preferences)} == {0.0}
    for prompt in tables.eval_prompts:
        facts = json.loads(prompt.label)
        assert facts["name"] in prompt.messages[0].content
        assert facts["item"] in prompt.messages[0].content


def test_evaluation_pairs_names_with_things_that_training_does_not(world):
    held_out = asked(world[0], "eval_")
    assert asked(world[0]).isdisjoint(held_out) and len(held_out) > 50


def test_the_annotator_is_wrong_in_a_fifteenth_of_the_pairs(world):
    # four standard deviations of 3000 draws at 0.935
    assert world[1]["annotator/agreement"] == pytest.approx(0.935, abs=0.018)


def test_evaluation_pairs_are_labelled_by_gold(world):
    for pair in world[0].eval_preferences:
        facts = read_facts(pair.prompt[0].content)
        sides = (sum_of(gold_components(side[0].content, facts)) for side in (pair.chosen, pair.rejected))
        assert next(sides) > next(sides)


def test_the_world_belongs_to_its_seed():
    sizes = ("demonstrations", "preferences", "prompts", "eval_demonstrations", "eval_preferences", "eval_prompts")
    small = SupportWorld.model_validate(dict.fromkeys(sizes, 5))
    assert make_tables(small, seed=1) == make_tables(small, seed=1) != make_tables(small, seed=2)


# ---------------------------------------------------------------- support phrases


# ---------------------------------------------------------------- support readers


def test_a_reader_gives_every_reply_the_gold_reward_without_its_facts():
    tables, _ = make_tables(SupportWorld(demonstrations=64, preferences=8, prompts=8, eval_prompts=64), seed=3)
    replies = [row.messages[-1].content for row in tables.demonstrations]
    judged = [
        Generation(prompt, (), Completion((), (), reply, "stop", 0, 0))
        for prompt, reply in zip(tables.eval_prompts, replies, strict=True)
    ]
    blind = [replace(one, prompt=replace(one.prompt, label="")) for one in judged]
    assert reader_reward(blind) == gold_reward(judged)
    assert len(set(reader_reward(blind))) > 3


def test_another_message_is_refused():
    with pytest.raises(RewardError, match="is not a customer's message of the support world"):
        read_facts("What is 2 + 2?")
