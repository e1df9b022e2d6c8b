"""Filters are off by default; each drops or masks what it says, and counts it."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.data import Files, Filters
from rlhf_core.data.cleaning import RowFilter
from rlhf_core.data.files import make_tables
from rlhf_core.data.formats import Example
from rlhf_core.data.limits import DropReport, Origin
from rlhf_core.errors import ConfigError
from rlhf_core.schema.base import keyed
from rlhf_core.types import Message


def example(answer: str, *, prompt: str = "Question?", tools: str = "") -> Example:
    turns = (Message("user", prompt, tools),), (Message("assistant", answer),)
    return Example(*turns, (), "", 0.0, "s", Origin("f", 1))


def filtered(*examples: Example, **options: Any) -> tuple[list[str], DropReport]:
    report = DropReport()
    kept = RowFilter(Filters(**options)).kept(examples, report)
    return [one.chosen[0].content for one in kept], report


GOOD = "a fine answer with some words"


@pytest.mark.parametrize(
    ("options", "bad", "kind"),
    [
        ({"min_answer_words": 3}, "too short", "answer has too few words"),
        ({"max_answer_words": 6}, "one two three four five six seven", "answer has too many words"),
        ({"max_repetition": 0.3}, "so it is so it is so it is so it is", "answer repeats itself"),
        ({"min_alphabetic": 0.8}, "12 34 -- == word", "answer has few letters"),
        ({"pii": "drop"}, "ask jo@example.com for more words", "personal data"),
    ],
)
def test_each_filter_drops_what_it_says_and_keeps_the_rest(options: dict[str, Any], bad: str, kind: str) -> None:
    kept, report = filtered(example(GOOD), example(bad), **options)
    assert kept == [GOOD]
    assert report.counts() == {kind: 1}
    assert filtered(example(GOOD), example(bad))[0] == [GOOD, bad]


def test_masks_reach_every_text_of_a_row_and_are_counted() -> None:
    tools = json.dumps({"tools": [{"function": {"name": "mail", "to": "jo@example.com"}}]})
    report = DropReport()
    (masked,) = RowFilter(Filters(pii="mask")).kept(
        [example("+49 30 901820", prompt="192.0.2.1?", tools=tools)], report
    )
    assert (masked.prompt[0].content, masked.chosen[0].content) == ("[IP]?", "[PHONE]")
    assert json.loads(masked.prompt[0].tool_fields)["tools"][0]["function"]["to"] == "[EMAIL]"
    assert report.to_json()["masked"] == {"ip": 1, "email": 1, "phone": 1}


def test_arguments_that_are_nested_too_deep_to_be_masked_are_malformed() -> None:
    arguments = json.loads("[" * 900 + "]" * 900)
    tools = json.dumps({"tool_calls": [{"function": {"name": "mail", "arguments": {"to": arguments}}}]})
    kept, report = filtered(example(GOOD, prompt="jo@example.com", tools=tools), example(GOOD), pii="mask")
    assert kept == [GOOD]
    assert report.counts() == {"malformed": 1} and not report.masked


def test_a_label_that_is_json_stays_json_and_any_other_is_masked_as_text() -> None:
    def masked(label: str) -> str:
        report = DropReport()
        (one,) = RowFilter(Filters(pii="mask")).kept([replace(example(GOOD), label=label)], report)
        assert report.masked
        return one.label

    assert json.loads(masked('{"card": 4111111111111111, "n": [1]}')) == {"card": "[CARD]", "n": [1]}
    assert json.loads(masked("[4111111111111111, 7]")) == ["[CARD]", 7]
    assert masked("[see jo@example.com]") == "[see [EMAIL]]"
    assert masked("4111111111111111") == "[CARD]"


def test_a_pair_whose_answers_differ_in_personal_data_alone_is_dropped_and_counted() -> None:
    def pair(chosen: str, rejected: str) -> Example:
        return replace(example(chosen), rejected=(Message("assistant", rejected),))

    equal = pair("ask jo@example.com", "ask ann@example.com")
    kept, report = filtered(equal, pair("ask jo@example.com", "ask 192.0.2.1"), pii="mask")
    assert kept == ["ask [EMAIL]"]
    assert report.counts() == {"no preference left": 1}
    assert report.masked == {"email": 1, "ip": 1}  # of the rows that are kept


def test_rows_of_other_languages_are_dropped_and_short_ones_stay() -> None:
    pytest.importorskip("py3langid")
    german = "Guten Morgen, wie geht es Ihnen heute? Mir geht es sehr gut, danke."
    english = "Good morning, how are you doing today? I am very well, thank you."
    kept, report = filtered(example(english), example(german), example("4"), languages=["en"])
    assert kept == [english, "4"]
    assert report.counts() == {"language": 1}
    with pytest.raises(ConfigError, match="'xx' is not a language that can be detected"):
        RowFilter(Filters(languages=("xx",)))


def test_a_missing_language_package_is_named_before_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("py3langid"):
            raise ModuleNotFoundError(name=name)
        return found(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ConfigError, match=r"needs the package py3langid; install it: pip install 'rlhf-lifecycle\[language\]'"
    ):
        RowFilter(Filters(languages=("en",)))


def test_masked_rows_are_deduplicated_and_near_duplicates_of_held_out_rows_are_not_trained_on(tmp_path: Path) -> None:
    pytest.importorskip("datasketch")
    words = "tell me how a camel can live in the hot desert for many long days without water"
    rows = [{"prompt": f"{words} {'please ' * number}", "completion": "x"} for number in range(1, 12)]
    rows += [{"prompt": f"mail {number}@example.com", "completion": "x"} for number in range(4)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "s", "path": str(path), "use": {"demonstrations": 1.0}}
    filters = {"pii": "mask", "near_duplicates": 0.6}
    report = DropReport()
    config = Files.model_validate({"type": "files", "sources": [source], "eval_fraction": 0.5, "filters": filters})
    tables, _ = make_tables(config, seed=1, report=report)
    texts = [row.messages[0].content for row in (*tables.demonstrations, *tables.eval_demonstrations)]
    assert sorted(text.split()[0] for text in texts) == ["mail", "tell"]
    assert report.counts() == {"near-duplicate": 10, "duplicate": 3}
    assert report.masked == {"email": 4}


def test_options_that_are_not_set_are_not_in_the_key() -> None:
    source = {"name": "s", "path": "x.jsonl", "use": {"demonstrations": 1.0}}
    plain = Files.model_validate({"sources": [source]})
    assert "filters" not in keyed(plain) and "min_margin" not in keyed(plain)["sources"][0]
    assert Files.model_validate({"sources": [source], "filters": {}}) == plain
    assert keyed(Files.model_validate({"sources": [source], "filters": {"pii": "mask"}}))["filters"]["pii"] == "mask"
