"""From files to tables: the whole way, on rows of our own."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, interleave_datasets

from rlhf_core.config.data import Files
from rlhf_core.data.files import make_tables
from rlhf_core.data.limits import DropReport, Origin
from rlhf_core.data.tables import Tables
from rlhf_core.errors import DataError
from rlhf_core.types import derive_seed


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def tables_of(seed: int = 3, **config: Any) -> tuple[Tables, dict[str, Origin], DropReport]:
    report = DropReport()
    tables, origins = make_tables(Files(**config), seed=seed, report=report)
    return Tables(**{name: tuple(rows) for name, rows in tables.named().items()}), origins, report


def source(folder: Path, rows: list[Any], table: str, *, name: str = "s", **options: Any) -> dict[str, Any]:
    return {"name": name, "path": write(folder / f"{name}.jsonl", rows), "use": {table: 1.0}} | options


def both(tables: Tables, name: str) -> tuple[Any, ...]:
    """Return the rows of a table for training and for evaluation."""
    return (*tables.named()[name], *tables.named()[f"eval_{name}"])


def questions(count: int, prefix: str = "q") -> list[dict[str, str]]:
    return [{"question": f"{prefix} {number}", "answer": f"so\n#### {number}"} for number in range(count)]


def test_one_source_serves_several_tables_and_no_prompt_is_in_two(tmp_path):
    use = {"demonstrations": 0.5, "prompts": 0.3, "eval_prompts": 0.2}
    path = write(tmp_path / "q.jsonl", questions(200))
    tables, origins, report = tables_of(sources=[{"name": "q", "path": path, "use": use}])
    names = {name: len(rows) for name, rows in tables.named().items()}
    assert sum(names.values()) == 200
    assert names["preferences"] == names["eval_preferences"] == 0
    assert min(names[name] for name in ("demonstrations", "eval_demonstrations", "prompts", "eval_prompts")) > 0
    asked = [
        *(row.messages[0].content for row in both(tables, "demonstrations")),
        *(row.messages[0].content for row in both(tables, "prompts")),
    ]
    assert len(set(asked)) == 200
    assert report.drops == []
    prompt = tables.prompts[0]
    assert prompt.messages[0].content == f"q {prompt.label}"  # the label is the number after ####
    assert origins[prompt.id] == Origin(path, int(prompt.label) + 1)


PAIR_OF_TURNS = {
    side: [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")
}


@pytest.mark.parametrize(
    ("row", "conversational"),
    [
        ({"prompt": "Hi"}, False),
        ({"prompt": "Hi", "system": "Be brief."}, False),
        ({"prompt": "Hi", "completion": [{"role": "assistant", "content": "Hello."}]}, False),
        ({"question": "Hi", "answer": "Hello."}, False),
        ({"prompt": [{"role": "user", "content": "Hi"}]}, True),
        ({"prompt": [{"from": "human", "value": "Hi"}], "completion": "Hello."}, True),
        ({"messages": [{"role": "user", "content": "Hi"}]}, True),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}, True),
        ({"conversations": [{"from": "human", "value": "Hi"}], "chosen": "Hello.", "rejected": "Go."}, True),
        ({"question": "Hi", "chosen": "Hello.", "rejected": "Go."}, False),
        (PAIR_OF_TURNS, True),
    ],
)
def test_a_prompt_is_conversational_where_the_row_has_it_as_turns(tmp_path, row, conversational):
    one = source(tmp_path, [row], "prompts")
    tables = tables_of(sources=[one])[0]
    assert [prompt.conversational for prompt in tables.prompts] == [conversational]


def test_splits_do_not_depend_on_the_seed_and_the_order_does(tmp_path):
    use = {"demonstrations": 0.5, "prompts": 0.5}
    config = {"sources": [{"name": "q", "path": write(tmp_path / "q.jsonl", questions(100)), "use": use}]}
    first, second = tables_of(seed=1, **config)[0], tables_of(seed=2, **config)[0]
    assert first.prompts != second.prompts
    assert set(first.prompts) == set(second.prompts)
    assert tables_of(seed=1, **config)[0] == first


def test_malformed_rows_are_reported_with_file_line_and_reason(tmp_path):
    rows: list[Any] = [*questions(30), "{oops", {"question": "x", "answer": None}]
    path = write(tmp_path / "q.jsonl", rows)
    one = {"name": "q", "path": path, "use": {"demonstrations": 1.0}}
    *_, report = tables_of(sources=[one], max_bad_fraction=0.1)
    assert [(drop.origin.file, drop.origin.line) for drop in report.drops] == [(path, 31), (path, 32)]
    first, second = (drop.reason for drop in report.drops)
    assert first.startswith("malformed: not JSON") and second == "malformed: not text: answer is NoneType"
    with pytest.raises(DataError, match=r"q\.jsonl:31.*2 of 32 rows are malformed.*max_bad_fraction"):
        tables_of(sources=[one], max_bad_fraction=0.05)


def test_duplicates_and_contaminated_rows_are_reported(tmp_path):
    shown = [{"prompt": f"what is {n}", "completion": "x"} for n in range(20)]
    sources = [
        source(tmp_path, [*shown, shown[4]], "demonstrations", name="train"),
        source(tmp_path, [{"prompt": "WHAT is 7"}], "eval_prompts", name="test"),
    ]
    tables, _, report = tables_of(sources=sources)
    told = {(drop.origin.line, drop.kind) for drop in report.drops}
    assert (21, "duplicate") in told
    assert "what is 7" not in [row.messages[0].content for row in tables.demonstrations]
    kept, _, off = tables_of(sources=sources, decontaminate="off", deduplicate=False)
    assert off.drops == []
    assert len(both(kept, "demonstrations")) == len({row.id for row in both(kept, "demonstrations")}) == 21


def test_what_is_in_two_sources_is_taken_from_the_first(tmp_path):
    sources = [source(tmp_path, [{"prompt": "p"}], "prompts", name=name) for name in ("one", "two")]
    tables, _, report = tables_of(sources=sources)
    assert [row.source for row in tables.prompts] == ["one"]
    assert [(drop.source, drop.kind) for drop in report.drops] == [("two", "duplicate")]


def test_weights_set_the_shares_of_a_table(tmp_path):
    sources = [
        source(tmp_path, [{"prompt": f"{name} {n}"} for n in range(count)], "prompts", name=name, weight=weight)
        for name, count, weight in (("small", 10, 1.0), ("large", 90, 2.0))
    ]
    tables, _, report = tables_of(sources=sources, mixture="weights")
    assert sorted(row.source for row in tables.prompts) == ["large"] * 20 + ["small"] * 10
    assert report.unused == {"large": 70}
    assert len(tables_of(sources=sources)[0].prompts) == 100
    assert len(tables_of(sources=sources, max_rows=7)[0].prompts) == 7


@pytest.mark.parametrize(("stopping_strategy", "repeats"), [("first_exhausted", False), ("all_exhausted", True)])
def test_a_stopping_strategy_draws_training_rows_as_datasets_does(tmp_path, stopping_strategy, repeats):
    counts, weights = {"small": 10, "large": 90}, {"small": 1.0, "large": 2.0}
    sources = [
        source(tmp_path, [{"prompt": f"{name} {n}"} for n in range(count)], "prompts", name=name, weight=weights[name])
        for name, count in counts.items()
    ]
    tables, _, report = tables_of(sources=sources, mixture="weights", stopping_strategy=stopping_strategy)
    theirs = interleave_datasets(
        [Dataset.from_dict({"source": [name] * count}) for name, count in counts.items()],
        [1 / 3, 2 / 3],
        seed=derive_seed(3, "prompts"),
        stopping_strategy=stopping_strategy,
    )["source"]
    assert [row.source for row in tables.prompts] == list(theirs)
    different = {row.messages for row in tables.prompts}
    assert (len(different) < len(tables.prompts)) == repeats and len({row.id for row in tables.prompts}) == len(theirs)
    assert sum(report.unused.values()) == 100 - len(different)
    assert (len(different) == 100) == repeats


def test_held_out_rows_are_never_repeated(tmp_path):
    sources = [
        source(
            tmp_path,
            [{"prompt": f"{name} {n}", "completion": "yes"} for n in range(count)],
            "demonstrations",
            name=name,
            weight=weight,
        )
        for name, count, weight in (("small", 20, 9.0), ("large", 80, 1.0))
    ]
    tables, _, _ = tables_of(sources=sources, mixture="weights", stopping_strategy="all_exhausted", eval_fraction=0.2)
    held_out = [row.messages for row in tables.eval_demonstrations]
    assert held_out and len(set(held_out)) == len(held_out)
    assert len({row.messages for row in tables.demonstrations}) < len(tables.demonstrations)


def test_a_stopping_strategy_needs_weights(tmp_path):
    with pytest.raises(ValueError, match=r"stopping_strategy = 'all_exhausted': only sources with shares"):
        tables_of(sources=[source(tmp_path, [{"prompt": "p"}], "prompts")], stopping_strategy="all_exhausted")


def kto(prompt: str, answer: str, label: bool | None) -> dict[str, Any]:
    return {"prompt": prompt, "completion": answer, "label": label}


@pytest.mark.parametrize(
    ("rows", "pairs", "feedback"),
    [
        ([kto("p", "good", True), kto("p", "bad", False)], [("good", "bad")], []),
        ([kto("lonely", "bad", False)], [], [("bad", False)]),
        ([kto(f"p {n}", f"a {n}", n < 4) for n in range(6)], [], [(f"a {n}", n < 4) for n in range(6)]),
        # An answer that two people disagree about is no pair with itself.
        ([kto("p", "a", True), kto("p", "a", False)], [], [("a", False), ("a", True)]),
    ],
)
def test_judged_answers_to_one_prompt_become_pairs_and_the_others_feedback(tmp_path, rows, pairs, feedback):
    tables, origins, report = tables_of(sources=[source(tmp_path, rows, "preferences")])
    assert [(row.chosen[0].content, row.rejected[0].content) for row in both(tables, "preferences")] == pairs
    made = both(tables, "feedback")
    assert sorted((row.answer[0].content, row.desirable) for row in made) == feedback
    assert all(rows[origins[row.id].line - 1]["completion"] == row.answer[0].content for row in made)
    assert report.drops == []


def test_an_answer_that_nobody_judged_is_no_feedback(tmp_path):
    tables, _, report = tables_of(sources=[source(tmp_path, questions(2), "preferences")])
    assert not any(tables.named().values()) and report.counts() == {"no pair of answers": 2}


def test_answers_beside_a_bare_prompt_are_refused_wherever_they_are(tmp_path):
    rows: list[Any] = [{"prompt": f"p {n}", "response": None} for n in range(30)] + [{"prompt": "q", "response": "a"}]
    one = source(tmp_path, rows, "prompts")
    tables, _, report = tables_of(sources=[one])
    assert len(tables.prompts) == 30
    ((line, reason),) = [(drop.origin.line, drop.reason) for drop in report.drops]
    assert line == 31 and reason.startswith("malformed: answers beside a bare prompt: ['response'] would be left out")
    assert len(tables_of(sources=[one | {"format": "prompt"}])[0].prompts) == 31


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"prompt": "p", "completion": "c"}, {"prompt": "q", "completion": "c", "reward": -1}], "an answer with a thumb or a reward"),
        ([{"prompt": "p", "completion": "c"}, {"prompt": "q", "completion": "c", "thumbs": "down"}], "an answer with a thumb or a reward"),
        ([{"question": "p", "answer": "c"}, {"prompt": "q", "chosen": "c", "rejected": "d"}], "mixed formats: .*'preference'"),
        ([{"prompt": "p", "completion": "c"}, {"prompt": "q", "completion": "c", "input": "i"}], "a part of the prompt: .'input'"),
        ([{"prompt": f"{n}?", "completion": "c", "label": label} for n, label in enumerate(("4", "5", False))], "mixed labels: False"),
        ([PAIR_OF_TURNS, {"chosen": "It is 4.", "rejected": "It is 5."}], "no prompt: chosen and rejected are answers alone"),
        ([PAIR_OF_TURNS, {"chosen": "\n\nHuman: 2+2?\n\nAssistant: 4", "rejected": "\n\nHuman: 2+2?\n\nAssistant: 5"}], "mixed formats: .*'hh'"),
        ([{"question": "p", "answer": "c", "context": "why"}], "a part of the prompt: .'context'"),
        ([{"prompt": "p", "completion": "c", "images": ["x.png"]}], "a part of the prompt: .'images'"),
    ],
)  # fmt: skip
def test_a_row_with_more_than_the_format_of_the_first_reads_is_refused(tmp_path, rows, reason):
    one = source(tmp_path, rows, "demonstrations")
    with pytest.raises(DataError, match=f"malformed: {reason}"):
        tables_of(sources=[one])


def test_what_is_not_read_is_counted(tmp_path):
    rows = [{"prompt": f"p {n}", "completion": "c", "score": n, "note": "x" if n % 2 else None} for n in range(10)]
    report = tables_of(sources=[source(tmp_path, rows, "demonstrations")])[2]
    assert report.to_json()["not_read"] == {"s": {"score": 10, "note": 5}}


def test_bad_conversations_are_not_imitated(tmp_path):
    def talk(n: int) -> dict[str, Any]:
        turns = [{"role": "user", "content": "p"}, {"role": "assistant", "content": f"{n}"}]
        return {"messages": turns, "label": n % 3 == 1}

    rows = [talk(n) for n in range(1, 9) if n % 3]
    tables = tables_of(sources=[source(tmp_path, rows, "demonstrations")])[0]
    assert {row.messages[-1].content for row in both(tables, "demonstrations")} == {"1", "4", "7"}
    tables = tables_of(sources=[source(tmp_path, rows, "preferences")])[0]
    assert {row.rejected[0].content for row in both(tables, "preferences")} == {"2", "5", "8"}


def test_shares_below_one_leave_rows_unused_and_counted(tmp_path):
    path = write(tmp_path / "q.jsonl", questions(100))
    tables, _, report = tables_of(sources=[{"name": "q", "path": path, "use": {"prompts": 0.25}}])
    assert len(tables.prompts) + report.unused["q"] == 100
    assert 10 <= len(tables.prompts) <= 42  # four standard deviations around 25


def stepwise(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"p {number // 2}", "completions": ["so", f"{number}"], "labels": [True, number % 2 == 0]}
        for number in range(count)
    ]


def test_stepwise_rows_become_judged_answers_each_by_itself(tmp_path):
    rows = [*stepwise(80), {"prompt": "q", "completions": ["a", " "], "labels": [1, 0.5]}]
    one = source(tmp_path, rows, "steps")
    tables, origins, report = tables_of(sources=[one], eval_fraction=0.2)
    rows = list(both(tables, "steps"))
    assert len(rows) == 80  # a good and a bad answer to one prompt are not made a pair here
    assert min(len(tables.steps), len(tables.eval_steps)) > 0
    assert not {row.prompt for row in tables.steps} & {row.prompt for row in tables.eval_steps}
    for row in rows:
        number = int(row.steps[1])
        assert (row.steps[0], row.labels) == ("so", (1.0, float(number % 2 == 0)))
        assert origins[row.id] == Origin(one["path"], number + 1)
    assert [drop.reason for drop in report.drops] == ["blank step"]


def test_stepwise_rows_still_serve_the_tables_of_answers_and_shares_keep_their_prompts(tmp_path):
    path = write(tmp_path / "s.jsonl", stepwise(200))
    use = {"preferences": 0.5}
    pairs = tables_of(sources=[{"name": "s", "path": path, "use": use}])[0]
    assert 0 < len((*pairs.preferences, *pairs.eval_preferences)) < 100
    both = tables_of(sources=[{"name": "s", "path": path, "use": use | {"steps": 0.5}}])[0]
    assert (both.preferences, both.eval_preferences) == (pairs.preferences, pairs.eval_preferences)
    asked = {row.prompt for row in (*both.steps, *both.eval_steps)}
    assert len(asked) + len((*both.preferences, *both.eval_preferences)) == 100


def test_rows_without_judged_steps_cannot_serve_them_and_held_out_prompts_are_kept_out(tmp_path):
    sources = [
        source(tmp_path, stepwise(20), "steps"),
        source(tmp_path, questions(1), "steps", name="q"),
        source(tmp_path, [{"prompt": "P 3"}], "eval_prompts", name="e"),
    ]
    tables, _, report = tables_of(sources=sources, eval_fraction=0.01)
    reasons = [drop.reason for drop in report.drops]
    assert reasons[0] == "no judged steps: a prompt, completions and their labels are needed"
    assert reasons[1:] == ["contaminated: it begins with an evaluation prompt"] * 2
    assert len(both(tables, "steps")) == 18


KTO = [{"prompt": f"k {number}", "completion": "yes", "label": number % 2 == 0} for number in range(6)]
TESTED = {
    "demonstrations": (questions(6), questions(40, "d")),
    "preferences": (stepwise(12), [row | {"prompt": f"t {row['prompt']}"} for row in stepwise(40)]),
    "steps": (stepwise(12), [row | {"prompt": f"t {row['prompt']}"} for row in stepwise(40)]),
    "feedback": (KTO, [row | {"prompt": f"t {row['prompt']}"} for row in KTO * 7]),
}


@pytest.mark.parametrize("name", TESTED)
def test_a_source_of_held_out_rows_takes_the_place_of_a_share_of_the_others(tmp_path, name):
    rows, training = TESTED[name]
    table = "preferences" if name == "feedback" else name
    own = source(tmp_path, rows, f"eval_{table}", name="own")
    given = source(tmp_path, training, table, name="given")
    split = tables_of(sources=[given], eval_fraction=0.4, deduplicate=False)[0].named()
    tables = tables_of(sources=[given, own], eval_fraction=0.4, deduplicate=False)[0].named()
    assert {row.source for row in tables[name]} == {"given"} and {row.source for row in tables[f"eval_{name}"]} == {
        "own"
    }
    assert len(tables[name]) == len(split[name]) + len(split[f"eval_{name}"]) > len(split[name])
    assert len(tables[f"eval_{name}"]) == 6 if name != "steps" else 12


def test_texts_that_are_held_out_are_not_trained_on(tmp_path):
    texts = [{"text": f"A document, number {number}."} for number in range(8)]
    sources = [source(tmp_path, texts, "demonstrations"), source(tmp_path, texts[:3], "eval_demonstrations", name="e")]
    tables, _, report = tables_of(sources=sources)
    assert (len(tables.demonstrations), len(tables.eval_demonstrations), len(report.drops)) == (5, 3, 3)


def test_rows_that_cannot_be_read_are_counted_and_the_others_stay(tmp_path):
    good = [{"prompt": f"what is {n}", "label": {"tests": [f"assert f({n}) == {n}"]}} for n in range(40)]
    bad = ['{"prompt": "\\ud83d"}', "[" * 100_000, '{"prompt": "x", "label": ' + "[" * 900 + "]" * 900 + "}"]
    path = tmp_path / "p.jsonl"
    write(path, [*good, *bad])
    path.write_bytes(path.read_bytes() + b'{"prompt": "caf\xe9"}\n')
    sources = [{"name": "p", "path": str(path), "use": {"prompts": 1.0}}]
    tables, _, report = tables_of(sources=sources, max_bad_fraction=0.1)
    assert [drop.origin.line for drop in report.drops][:2] == [41, 42]
    assert {drop.kind for drop in report.drops} == {"malformed"}
    assert len(tables.prompts) + len(report.drops) == report.rows_read["p"] == 44
    labels = {prompt.messages[0].content: prompt.label for prompt in tables.prompts}
    assert labels["what is 7"] == '{"tests": ["assert f(7) == 7"]}'


def test_a_reason_is_not_as_long_as_the_row(tmp_path):
    rows = [{"prompt": "x", "completion": "y", "label": label} for label in ("z" * 10_000, True, False)]
    *_, report = tables_of(sources=[source(tmp_path, rows, "demonstrations", name="p")], max_bad_fraction=0.5)
    assert report.drops[0].reason.startswith("malformed: not true or false: label is 'zzz")
    assert len(report.drops[0].reason) < 600


def test_pairs_of_equal_scores_are_ties_and_annotators_are_pseudonyms(tmp_path):
    rows = [
        {
            "prompt": f"p {n}",
            "chosen": "a",
            "rejected": "b",
            "score_chosen": 4,
            "score_rejected": n % 2 * 4,
            "annotator": "jo",
        }
        for n in range(10)
    ]
    tables, _, report = tables_of(sources=[source(tmp_path, rows, "preferences", name="u")])
    pairs = both(tables, "preferences")
    assert len(pairs) == 5 and {pair.margin for pair in pairs} == {4.0} and report.counts() == {"tie": 5}
    assert len({pair.annotator for pair in pairs}) == 1 and pairs[0].annotator.startswith("annotator-")


def test_a_pair_of_answers_that_two_people_judged_has_no_annotator(tmp_path):
    def thumbs(number: int, way: str, who: int) -> dict[str, Any]:
        return kto(f"q {number}", f"{way} {number}", way == "up") | {"annotator": who}

    rows = [thumbs(number, way, 1) for number in range(4) for way in ("up", "down")]
    rows += [thumbs(9, "up", 1), thumbs(9, "down", 2), thumbs(10, "up", 3)]
    one = source(tmp_path, rows, "preferences", name="t")
    tables, *_ = tables_of(sources=[one])
    pairs = both(tables, "preferences")
    assert sorted(bool(pair.annotator) for pair in pairs) == [False, True, True, True, True]
    assert [bool(row.annotator) for row in both(tables, "feedback")] == [True]


CONVERSATION = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


@pytest.mark.parametrize("place", [0, 30, 59])
@pytest.mark.parametrize(
    "odd", [{"prompt": "q"}, {"prompt": "q", "completion": None}, {"messages": CONVERSATION}, {"text": "q"}, {"x": 1}]
)
def test_most_rows_decide_on_the_format_wherever_an_odd_one_is(tmp_path, odd, place):
    rows: list[Any] = [{"prompt": f"q {number}", "completion": f"a {number}"} for number in range(59)]
    rows.insert(place, odd)
    tables, _, report = tables_of(sources=[source(tmp_path, rows, "demonstrations")])
    assert len(both(tables, "demonstrations")) == 59 and [drop.origin.line for drop in report.drops] == [place + 1]


def test_a_key_of_a_turn_with_documents_is_not_left_out(tmp_path):
    turns = [{"role": "user", "content": "Hi", "documents": [{"text": "a"}]}, CONVERSATION[1]]
    with pytest.raises(DataError, match=r"\['messages\[\].documents'\] would be left out"):
        tables_of(sources=[source(tmp_path, [{"messages": turns}], "demonstrations")])


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_integer_labels_with_a_gap_are_integers(tmp_path, kind):
    import pandas

    frame = pandas.DataFrame(
        {"prompt": [f"q {n}" for n in range(9)], "label": [None if n == 5 else n for n in range(9)]}
    )
    path = tmp_path / f"x.{kind}"
    if kind == "jsonl":
        path.write_text(
            "".join(json.dumps({"prompt": p, "label": n if n == n else None}) + "\n" for p, n in frame.values)
        )
    else:
        frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
    tables, _, _ = tables_of(sources=[{"name": "s", "path": str(path), "use": {"prompts": 1.0}}])
    assert sorted(row.label for row in tables.prompts) == ["", *(f"{n}" for n in range(9) if n != 5)]


def test_answers_and_mapped_labels_with_a_gap_are_integers(tmp_path):
    (tmp_path / "x.csv").write_text("prompt,gold\na,9.0\nb,\n")
    (tmp_path / "y.csv").write_text("question,answer\na,9.0\nb,4.0\nc,\n")
    mapped = {"path": str(tmp_path / "x.csv"), "columns": {"label": "gold"}, "use": {"prompts": 1.0}}
    answers = {"path": str(tmp_path / "y.csv"), "use": {"prompts": 1.0}}
    tables, _, report = tables_of(sources=[{"name": "x"} | mapped], max_bad_fraction=0.5)
    assert sorted(row.label for row in tables.prompts) == ["", "9"] and not report.not_read["x"]
    tables, _, _ = tables_of(sources=[{"name": "y"} | answers], max_bad_fraction=0.5)
    assert sorted(row.label for row in tables.prompts) == ["4", "9"]


def test_a_word_for_a_missing_number_is_no_label(tmp_path):
    (tmp_path / "x.csv").write_text("prompt,label\na,9.0\nb,nan\n")
    tables, _, _ = tables_of(sources=[{"name": "x", "path": str(tmp_path / "x.csv"), "use": {"prompts": 1.0}}])
    assert sorted(row.label for row in tables.prompts) == ["", "9"]


def test_decimal_labels_in_text_stay_as_they_are_written(tmp_path):
    (tmp_path / "x.csv").write_text("prompt,label\na,9.0\nb,1.5\nc,\n")
    (tmp_path / "y.csv").write_text("prompt,label\na,9.0\nb,1.0\n")
    for name, labels in (("x", ["", "1.5", "9.0"]), ("y", ["1.0", "9.0"])):
        tables, _, _ = tables_of(
            sources=[{"name": name, "path": str(tmp_path / f"{name}.csv"), "use": {"prompts": 1.0}}]
        )
        assert sorted(row.label for row in tables.prompts) == labels
