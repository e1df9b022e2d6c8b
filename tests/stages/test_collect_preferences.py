"""From judgments to pairs: majorities, ties, inattentive annotators, and the wait for people."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_core.annotation.annotators import EXPORT, IMPORT
from rlhf_core.annotation.judge import read_verdicts
from rlhf_core.annotation.proposing import (
    JUDGMENTS_FILE,
    JUDGMENTS_SCHEMA,
    Choice,
    Comparison,
    Judgment,
    write_comparisons,
)
from rlhf_core.config.annotators import FileAnnotator, JudgeAnnotator, ProgramAnnotator
from rlhf_core.data.shards import read_rows
from rlhf_core.data.tables import read_preferences
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.stage.stopping import StageWaiting
from rlhf_core.store import attempts, roots
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ComparisonsRef, Generation, Message
from stages.collect_preferences import CollectPreferencesConfig, content_digests
from stages.collect_preferences.run import always_held_out, attentive, settled
from tests.support.chat_server import ChatServer
from tests.support.workshop import Workshop


def length(generations: list[Generation]) -> list[float]:
    return [float(len(one.completion.text)) for one in generations]


HERE = f"{__name__}:length"
BY_LENGTH = ProgramAnnotator(function=HERE, temperature=1e-3)


def comparison(number: int, *, repeats: str = "", expected: str = "", name: str = "") -> Comparison:
    prompt = (Message("user", f"question {number}"),)
    return Comparison(
        name or f"c{number}", prompt, "", "test", f"long answer {number}", "short", "sft", "ppo", repeats, expected
    )


def asked(tmp_path: Path, store: ArtifactStore, rows: list[Comparison]) -> ComparisonsRef:
    write_comparisons(tmp_path / "asked", rows)
    return store.external(ComparisonsRef, tmp_path / "asked")


def verdicts(rows: list[Comparison], *said: tuple[str, str, Choice], several: str = "most"):
    config = CollectPreferencesConfig(annotator=BY_LENGTH, several=several)
    return settled(config, rows, [Judgment(name, who, choice) for name, who, choice in said])


def test_the_stage_writes_pairs_judgments_and_the_report(tmp_path, store):
    rows = [comparison(n) for n in range(10)]
    rows += [comparison(0, repeats="c0", name="c0-again"), comparison(1, expected="first", name="check")]
    shop = Workshop(store)
    config = CollectPreferencesConfig(annotator=BY_LENGTH, eval_fraction=0.2)
    inputs = {"comparisons": asked(tmp_path, store, rows)}
    ref, decision = shop.run("collect_preferences", config, inputs, callables=(HERE,))
    folder = store.path(ref)
    train, held_out = (read_preferences(folder / f"{split}.parquet") for split in ("train", "eval"))
    assert len(train) + len(held_out) == 10 and held_out
    assert not {row.prompt for row in train} & {row.prompt for row in held_out}
    for row in train + held_out:
        assert row.chosen[0].content.startswith("long answer") and row.rejected[0].content == "short"
        assert row.margin == 1.0
    assert len(read_rows(folder / JUDGMENTS_FILE, JUDGMENTS_SCHEMA, Judgment)) == 12
    report = json.loads((folder / "report.json").read_text())
    assert report["attention"]["mean"] == 1.0 and report["judgments"] == 12
    metrics = shop.metrics(decision)
    assert (metrics["train"], metrics["eval"]) == (len(train), len(held_out))
    assert (metrics["ties"], metrics["attention"], metrics["judgments/all"]) == (0, 1.0, 12)


def test_a_prompt_is_held_out_in_every_round_or_in_none():
    prompts = [f"question {number}" for number in range(400)]
    everywhere = always_held_out(prompts, fraction=0.1, seed=17)
    assert 20 < len(everywhere) < 60  # binomial, n = 400, p = 1/10: 3.3 standard deviations are 20
    for part in (prompts[:150], prompts[100:350], prompts[7:]):
        assert always_held_out(part, fraction=0.1, seed=17) == everywhere & set(part)
    assert len(always_held_out(prompts[:2], fraction=0.001, seed=17)) == 1
    assert always_held_out(prompts, fraction=0.0, seed=17) == set()


def test_the_side_that_more_chose_wins_and_its_lead_is_the_margin():
    rows = [comparison(n) for n in range(4)]
    found = verdicts(
        rows,
        *[("c0", who, choice) for who, choice in (("a", "first"), ("b", "first"), ("c", "second"))],
        *[("c1", who, choice) for who, choice in (("a", "first"), ("b", "second"))],
        *[("c2", who, choice) for who, choice in (("a", "tie"), ("b", "both_bad"))],
    )
    [(name, pair)] = found.pairs
    assert name == "c0" and pair.chosen[0].content == "long answer 0" and pair.margin == pytest.approx(1 / 3)
    assert found.dropped == {"ties": 1, "disagreed": 1, "unjudged": 1}


def test_a_tie_of_one_annotator_weakens_a_pair_and_ends_unanimity():
    said: list[tuple[str, str, Choice]] = [("c0", "a", "second"), ("c0", "b", "tie")]
    [(_, pair)] = verdicts([comparison(0)], *said).pairs
    assert pair.chosen[0].content == "short" and pair.margin == 0.5
    assert verdicts([comparison(0)], *said, several="unanimous").dropped["disagreed"] == 1


def test_checks_and_repetitions_never_train():
    rows = [comparison(0, repeats="x", name="again"), comparison(1, expected="first", name="check")]
    assert verdicts(rows, ("again", "a", "first"), ("check", "a", "first")).pairs == []


def test_the_judgments_of_an_inattentive_annotator_do_not_count():
    judgments = [Judgment("c0", "ada", "first"), Judgment("c0", "bob", "second"), Judgment("c0", "eve", "second")]
    config = CollectPreferencesConfig(annotator=BY_LENGTH, min_attention=0.8)
    report = {"annotators": {"ada": {"attention": 1.0}, "bob": {"attention": 0.5}, "eve": {"attention": None}}}
    assert [one.annotator for one in attentive(config, judgments, report)] == ["ada", "eve"]


def test_judgments_without_a_preference_are_an_error_that_says_so(tmp_path, store):
    config = CollectPreferencesConfig(annotator=BY_LENGTH.model_copy(update={"tie_below": 1e6}))
    inputs = {"comparisons": asked(tmp_path, store, [comparison(0)])}
    with pytest.raises(DataError, match="the 1 judgments that count prefer no answer; propose more pairs"):
        Workshop(store).run("collect_preferences", config, inputs, callables=(HERE,))


def test_it_waits_for_people_and_the_same_command_goes_on(tmp_path, store):
    folder = tmp_path / "exchange"
    config = CollectPreferencesConfig(annotator=FileAnnotator(folder=str(folder)), eval_fraction=0.0)
    inputs = {"comparisons": asked(tmp_path, store, [comparison(0), comparison(1)])}
    shop = Workshop(store)
    for _ in range(2):
        with pytest.raises(StageWaiting, match="collect_preferences is waiting: 0 of 2 comparisons are judged"):
            shop.run("collect_preferences", config, inputs)
    [own] = folder.iterdir()
    shown = [json.loads(line) for line in (own / EXPORT).read_text().splitlines()]
    rows = [{"id": row["id"], "choice": "second", "annotator": "ada"} for row in shown]
    (own / IMPORT).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ref, decision = shop.run("collect_preferences", config, inputs)
    assert {row.chosen[0].content for row in read_preferences(store.path(ref) / "train.parquet")} == {"short"}
    history = attempts.history(store.attempts(decision.key))
    assert [one.status for one in history] == ["interrupted", "interrupted", "committed"]
    assert roots.pins(store.shared) == {ref.digest: "judgments of people"}
    assert shop.run("collect_preferences", config, inputs)[1].action == "HIT"


@pytest.fixture
def judge() -> Iterator[ChatServer]:
    server = ChatServer()
    server.says = lambda asked: f"Better: {'A' if asked.index('long answer') < asked.index('short') else 'B'}"
    yield server
    server.close()


def test_a_language_model_judges_in_both_orders_and_is_compared_with_the_known_reward(tmp_path, store, judge):
    (tmp_path / "rubric.txt").write_text("Say much.")
    annotator = JudgeAnnotator(url=judge.url, model="m", rubric_file=str(tmp_path / "rubric.txt"))
    config = CollectPreferencesConfig(annotator=annotator, eval_fraction=0.0, gold=HERE)
    inputs = {"comparisons": asked(tmp_path, store, [comparison(n) for n in range(4)])}
    shop = Workshop(store)
    files = content_digests(config)
    ref, decision = shop.run("collect_preferences", config, inputs, callables=(HERE,), files=files)
    folder = store.path(ref)
    assert all(row.chosen[0].content.startswith("long") for row in read_preferences(folder / "train.parquet"))
    assert "Say much." in judge.requests[0]["messages"][0]["content"]
    report = json.loads((folder / "report.json").read_text())
    assert report["judge"]["questions"] == 8 and report["judge"]["changed"]["mean"] == 0.0
    assert report["gold"] == {"mean": 1.0, "prompts": 4, "count": 4} | {"low": report["gold"]["low"], "high": 1.0}
    assert report["gold"]["low"] < 0.5  # four of four
    assert len(read_verdicts(folder / "verdicts.jsonl")) == 8
    metrics = shop.metrics(decision)
    assert (metrics["gold"], metrics["judge/changed"], metrics["judge/malformed"]) == (1.0, 0.0, 0.0)


def test_a_rubric_that_changed_after_the_plan_is_refused(tmp_path, store, judge):
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("Say much.")
    config = CollectPreferencesConfig(annotator=JudgeAnnotator(url=judge.url, model="m", rubric_file=str(rubric)))
    planned = content_digests(config)
    rubric.write_text("Say little.")
    assert content_digests(config) != planned
    inputs = {"comparisons": asked(tmp_path, store, [comparison(0)])}
    with pytest.raises(DataError, match=r"rubric_file.*has changed since the run was planned"):
        Workshop(store).run("collect_preferences", config, inputs, files=planned)
    rubric.unlink()
    with pytest.raises(ConfigError, match="there is no such file"):
        content_digests(config)


def test_judgments_without_a_verdict_count_only_for_the_settings_of_the_judge(tmp_path, store, judge):
    honest = judge.says
    judge.says = lambda asked: "I refuse." if "question 0" in asked or "verdict" in asked[:40] else honest(asked)
    annotator = JudgeAnnotator(url=judge.url, model="m", on_failure="invalid", corrections=0)
    config = CollectPreferencesConfig(annotator=annotator, eval_fraction=0.0)
    inputs = {"comparisons": asked(tmp_path, store, [comparison(n) for n in range(3)])}
    shop = Workshop(store)
    ref, decision = shop.run("collect_preferences", config, inputs)
    assert len(read_preferences(store.path(ref) / "train.parquet")) == 2
    assert (shop.metrics(decision)["unjudged"], shop.metrics(decision)["judge/failed"]) == (1.0, 2.0)
    judge.says = honest
    patient = config.model_copy(update={"annotator": annotator.model_copy(update={"corrections": 1})})
    again, decision = shop.run("collect_preferences", patient, inputs)
    assert decision.action != "HIT" and len(read_preferences(store.path(again) / "train.parquet")) == 3
