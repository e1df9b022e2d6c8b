"""The figures count what they say, by source, and the tables are made of stored lines."""

import json
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.instructions import PROFILES, Result, figures_of, read, side_by_side, tables
from pipelines.flows.profile import load_profile
from rlhf_contrib.worlds.instructions import make_tables
from rlhf_core.config.data import HELD_OUT_INSTRUCTIONS
from rlhf_core.types import Completion, Generation, Message, Prompt

LABEL = json.dumps({"instructions": [{"kind": "no_commas"}], "topic": ["rain"], "min_words": 3})


def answer(number: int, source: str, text: str) -> Generation:
    prompt = Prompt(f"p{number}", (Message("user", f"Question {number}"),), LABEL, f"instructions/{source}")
    return Generation(prompt, (1,), Completion((2,), (-1.0,), text, "stop", 0, 0))


ANSWERS = [
    answer(0, "new_topics", "rain falls down"),
    answer(1, "new_topics", "rain, down"),
    answer(2, "new_combinations", "rain"),
    answer(3, "new_kinds", "sun, moon and stars"),
]


def test_answers_are_counted_by_source_and_one_word_is_no_answer() -> None:
    figures = figures_of(ANSWERS)
    assert [figures[f"followed/{source}"][0] for source in HELD_OUT_INSTRUCTIONS] == [0.5, 1.0, 0.0]
    assert figures["answer"][0] == 0.25
    assert figures["words"] == (3 + 2 + 1 + 4) / 4


def test_the_table_has_the_base_policy_once_for_each_seed(tmp_path: Path) -> None:
    file = tmp_path / "instructions.jsonl"
    figures = {"base": figures_of(ANSWERS), "ppo": figures_of(ANSWERS[:1] * 3 + ANSWERS)}
    samples = side_by_side({"base": ANSWERS, "ppo": ANSWERS})
    honest = Result(17, "instructions", [], figures | {"sft": figures["base"]}, samples, 30.4)
    lines = [
        replace(honest, minutes=99.0),
        replace(honest, arm="hacked", figures=figures),
        honest,
        replace(honest, overrides=["a=1"]),
    ]
    file.write_text("".join(json.dumps(asdict(one)) + "\n" for one in lines))
    text = tables(read(file, []))
    assert [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| 17")] == [
        "base",
        "instructions: sft",
        "instructions",
        "hacked",
    ]
    assert "| 30 |" in text and "| 99 |" not in text
    assert "> Question 0\n\n- base: rain falls down\n- instructions: rain falls down\n- hacked: rain falls down" in text
    assert tables([]).count("\n") == 1


def test_the_hacked_profiles_pay_for_following_alone_and_answer_the_same_held_out_prompts() -> None:
    honest, hacked, one_word = (load_profile(PROFILES[name]) for name in ("instructions", "hacked", "one_word"))
    assert honest.ppo is not None and hacked.ppo is not None and one_word.ppo is not None
    assert one_word.ppo.rewards == hacked.ppo.rewards
    assert {monitor.action for monitor in one_word.ppo.monitors} == {"rollback", "stop"}
    assert honest.ppo.kl.coef > hacked.ppo.kl.coef == 0.0
    assert honest.sft is not None and hacked.sft is one_word.sft is None and hacked.ppo.start_from == "base"
    held_out = [make_tables(one.prepare_data.data, seed=one.seed)[0].eval_prompts for one in (honest, hacked)]
    assert held_out[0] == held_out[1] and honest.evaluate == hacked.evaluate
    assert set(hacked.ppo.rewards.terms) == {"followed"}
