"""Duplicates, contamination, near-duplicates, filters and personal data."""

import json
import sys
from collections import Counter
from dataclasses import replace
from typing import Any
from unicodedata import normalize as normal

import pytest

from rlhf_core.config.data import Files, Filters
from rlhf_core.data.cleaning import (
    NearDuplicates,
    RowFilter,
    caseless,
    decontaminate,
    deduplicate,
    exact,
    find,
    luhn,
    mask,
    mask_json,
    normalize,
    shingles,
    without_repeated_prompts,
)
from rlhf_core.data.files import make_tables
from rlhf_core.data.formats import Example
from rlhf_core.data.limits import DropReport, Origin
from rlhf_core.data.turns import Turns
from rlhf_core.errors import ConfigError
from rlhf_core.schema.base import keyed
from rlhf_core.types import Message

# ---------------------------------------------------------------- cleaning


def row(prompt: str | Turns, answer: str | Turns = "", *, rejected: Turns = (), line: int = 1, **more: Any) -> Example:
    """Return a row of the source `s` with a prompt and answers of one turn, or of those that are given."""
    asked = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    said = ((Message("assistant", answer),) if answer else ()) if isinstance(answer, str) else answer
    return Example(asked, said, rejected, "", 0.0, "s", Origin("f", line), **more)


def talk(*texts: str) -> Turns:
    """Return turns of the user and the assistant, the user first."""
    return tuple(Message(("user", "assistant")[number % 2], text) for number, text in enumerate(texts))


def reply(*texts: str) -> Turns:
    """Return turns of the assistant and the user, the assistant first."""
    return talk("", *texts)[1:]


def prompts(examples: list[Example]) -> list[str]:
    return [one.prompt[0].content for one in examples]


def test_normalized_text_has_words_only_and_exact_text_its_signs():
    assert normalize((Message("user", "  What IS\t２+2?!"),)) == "user what is 2 2"
    assert exact((Message("user", "3 -\n 2"),)) == exact((Message("user", "3 - 2"),))
    assert exact((Message("user", "3 - 2"),)) != exact((Message("user", "3 + 2"),))


@pytest.mark.parametrize(
    ("prompt", "answer", "rest"),
    [
        ("What is {}?", "What is {}? It is {}.", "It is {}."),
        ("What is {}?\n", " What is {}?\n\nIt is {}.", "It is {}."),
        ("Question: what is {}? Answer:", "Question: what is {}? Answer:it is {}.", "it is {}."),
        ("What is {}?", "What is {}?", None),
        ("What is {}", "What is {}th", None),  # no end of a word
        ("{} + 1", "{} + 1 = 2", None),  # a sum that the answer writes again
        ("Hi {}", "Hi {} there", None),
    ],
)
def test_prompts_that_all_answers_repeat_are_taken_from_them(prompt, answer, rest):
    def texts(form: str) -> list[str]:
        return [form.replace("{}", str(n)) for n in range(20)]

    rows = [row(one, other) for one, other in zip(texts(prompt), texts(answer), strict=True)]
    others = [row("What is love?", "Nobody knows."), row("What is what?")]
    found, count = without_repeated_prompts([*rows, *others])
    assert count == (0 if rest is None else 20)
    assert [one.chosen[0].content for one in found[:20]] == texts(answer if rest is None else rest)
    assert found[20:] == others
    assert without_repeated_prompts([*rows, *others[:1] * 2])[1] == 0  # fewer than 95 % of them


def test_an_equal_prompt_with_an_equal_answer_is_dropped_and_the_first_one_named():
    report = DropReport()
    rows = [row("a b", "x", line=3), row("a  b", "x ", line=9), row("a b", "y"), row("a B", "x")]
    assert deduplicate(rows, report) == [rows[0], rows[2], rows[3]]
    assert [(drop.origin.line, drop.reason) for drop in report.drops] == [(9, "duplicate: of f:3")]


def test_a_training_prompt_that_is_evaluated_is_dropped():
    report = DropReport()
    kept = decontaminate([row("What is it?"), row("other")], [row("what is  IT?")], ngram=None, report=report)
    assert prompts(kept) == ["other"]
    assert report.counts() == {"contaminated": 1}


def test_a_conversation_that_begins_with_an_evaluation_prompt_and_its_answer_is_dropped():
    evaluation, report = [row("What is it?")], DropReport()
    leaking = [row(talk("what is it?", "A cat.", "Sure?"), answer) for answer in ("Yes.", "")]
    assert decontaminate(leaking, evaluation, ngram=None, report=report) == []
    assert [drop.reason for drop in report.drops] == ["contaminated: it begins with an evaluation prompt"] * 2
    later = [row(talk("Hello", "Hi.", "What is it?"), reply("A cat."))]
    assert decontaminate(later, evaluation, ngram=None, report=report) == later  # another prompt: it has a history


def test_turns_inside_either_answer_are_openings_too():
    evaluation = [row(talk("Hello", "Hi.", "What is it?"), ())]
    plain, leaking = reply("Bye."), reply("Hi.", "What is it?", "A cat.")
    rows = [row("Hello", leaking, rejected=plain), row("Hello", plain, rejected=leaking)]
    assert decontaminate(rows, evaluation, ngram=None, report=DropReport()) == []
    kept = [row("Hello", plain, rejected=reply("Hi."))]
    assert decontaminate(kept, evaluation, ngram=None, report=DropReport()) == kept


def test_an_ngram_of_an_evaluation_prompt_contaminates_prompts_and_answers():
    evaluation = [row("one two three four five")]
    rows = [row("zero two three four!"), row("x", "say: Two three, four"), row("one two three five four")]
    report = DropReport()
    assert prompts(decontaminate(rows, evaluation, ngram=3, report=report)) == []
    assert prompts(decontaminate(rows, evaluation, ngram=4, report=report)) == prompts(rows)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("请把下面的句子翻译成英文", "老师说请把下面的句子翻译成英文吧"),
        ("これは秘密の試験問題です", "ええとこれは秘密の試験問題ですね"),
    ],
)
def test_in_scripts_without_spaces_each_character_is_a_word(text, inside):
    assert decontaminate([row(inside)], [row(text)], ngram=8, report=DropReport()) == []
    assert len(shingles(normalize(row(inside).prompt))) > 10


def test_roles_are_no_words_of_an_ngram():
    rows = [row("b c")]
    assert decontaminate(rows, [row("user b")], ngram=2, report=DropReport()) == rows


# ---------------------------------------------------------------- near duplicates

LONG = "please tell me how a camel can live in the desert for many days without a drop of water to drink"


def distinct(*examples: Example, threshold: float = 0.7) -> tuple[list[int], list[str]]:
    report = DropReport()
    kept = NearDuplicates(threshold).distinct(examples, report)
    return [one.origin.line for one in kept], [drop.reason for drop in report.drops]


def test_a_row_that_differs_in_a_word_is_dropped_and_another_one_stays():
    kept, reasons = distinct(
        row(LONG, line=1),
        row(f"{LONG} then", line=2),
        row(f"What? {LONG.upper()}!", line=3),
        row("why is it cold", line=4),
    )
    assert kept == [1, 4]
    assert len(reasons) == 2 and all(one.startswith("near-duplicate: ") and "f:1" in one for one in reasons)


def test_half_of_the_words_in_common_are_too_few_and_pairs_of_one_row_never_count():
    half = " ".join(LONG.split()[:10]) + " and a cow or a goat on a farm in the far north of the land"
    assert distinct(row(LONG, line=1), row(half, line=2))[0] == [1, 2]
    assert distinct(row(LONG, line=1), row(LONG, line=1))[0] == [1, 1]


def test_a_short_text_is_one_shingle():
    assert shingles("user hi") == {b"user hi"}
    assert shingles("") == {b""}


def with_system(text: str, line: int) -> Example:
    return row((Message("system", f"{LONG} {LONG[::-1]}"), Message("user", text)), line=line)


def test_a_system_prompt_or_tools_that_rows_share_do_not_make_them_similar():
    assert distinct(with_system("why is it cold", 1), with_system("where do cows sleep", 2))[0] == [1, 2]
    assert distinct(with_system(LONG, 1), row(LONG, line=2))[0] == [1]
    schema = json.dumps({"tools": [{"type": "function", "function": {"name": "add", "description": LONG}}]})
    asked = [
        row((Message("user", text, schema),), line=line)
        for line, text in enumerate(("why is it cold", "where do cows sleep"), start=1)
    ]
    assert distinct(*asked)[0] == [1, 2]


def test_rows_that_differ_in_what_they_call_are_not_similar():
    def calling(name: str, line: int) -> Example:
        calls = json.dumps({"tool_calls": [{"function": {"name": name, "arguments": {"by": name, "to": name[::-1]}}}]})
        return row("do it", (Message("assistant", "", calls),), line=line)

    assert distinct(calling("mail", 1), calling("weather", 2), calling("mail", 3))[0] == [1, 2]


def test_rows_of_system_turns_alone_are_compared_by_them():
    texts = (LONG, "why is it cold", LONG)
    rows = [row((Message("system", text),), line=line) for line, text in enumerate(texts, start=1)]
    assert distinct(*rows)[0] == [1, 2]


# ---------------------------------------------------------------- filters


def example(answer: str, *, prompt: str = "Question?", tools: str = "") -> Example:
    return row((Message("user", prompt, tools),), answer)


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
def test_each_filter_drops_what_it_says_and_keeps_the_rest(options, bad, kind):
    kept, report = filtered(example(GOOD), example(bad), **options)
    assert kept == [GOOD]
    assert report.counts() == {kind: 1}
    assert filtered(example(GOOD), example(bad))[0] == [GOOD, bad]


def test_masks_reach_every_text_of_a_row_and_are_counted():
    tools = json.dumps({"tools": [{"function": {"name": "mail", "to": "jo@example.com"}}]})
    report = DropReport()
    (masked,) = RowFilter(Filters(pii="mask")).kept(
        [example("+49 30 901820", prompt="192.0.2.1?", tools=tools)], report
    )
    assert (masked.prompt[0].content, masked.chosen[0].content) == ("[IP]?", "[PHONE]")
    assert json.loads(masked.prompt[0].tool_fields)["tools"][0]["function"]["to"] == "[EMAIL]"
    assert report.to_json()["masked"] == {"ip": 1, "email": 1, "phone": 1}


@pytest.mark.parametrize("depth", [900, 100_000])
def test_arguments_that_are_nested_too_deep_to_be_masked_are_malformed(depth):
    arguments = f'{{"to": {"[" * depth + "]" * depth}}}'
    tools = f'{{"tool_calls": [{{"function": {{"name": "mail", "arguments": {arguments}}}}}]}}'
    kept, report = filtered(example(GOOD, prompt="jo@example.com", tools=tools), example(GOOD), pii="mask")
    if depth == 900 and sys.version_info >= (3, 12):  # comprehensions have no frames of their own there
        assert report.masked == {"email": 1} and len(kept) == 2
    else:
        assert kept == [GOOD]
        assert report.counts() == {"malformed": 1} and not report.masked


def test_a_label_that_is_json_stays_json_and_any_other_is_masked_as_text():
    def masked(label: str) -> str:
        report = DropReport()
        (one,) = RowFilter(Filters(pii="mask")).kept([replace(example(GOOD), label=label)], report)
        assert report.masked
        return one.label

    assert json.loads(masked('{"card": 4111111111111111, "n": [1]}')) == {"card": "[CARD]", "n": [1]}
    assert json.loads(masked("[4111111111111111, 7]")) == ["[CARD]", 7]
    assert masked("[see jo@example.com]") == "[see [EMAIL]]"
    assert masked("4111111111111111") == "[CARD]"


def test_a_pair_whose_answers_differ_in_personal_data_alone_is_dropped_and_counted():
    def pair(chosen: str, rejected: str) -> Example:
        return replace(example(chosen), rejected=(Message("assistant", rejected),))

    equal = pair("ask jo@example.com", "ask ann@example.com")
    kept, report = filtered(equal, pair("ask jo@example.com", "ask 192.0.2.1"), pii="mask")
    assert kept == ["ask [EMAIL]"]
    assert report.counts() == {"no preference left": 1}
    assert report.masked == {"email": 1, "ip": 1}  # of the rows that are kept


def test_rows_of_other_languages_are_dropped_and_short_ones_stay():
    pytest.importorskip("py3langid")
    german = "Guten Morgen, wie geht es Ihnen heute? Mir geht es sehr gut, danke."
    english = "Good morning, how are you doing today? I am very well, thank you."
    kept, report = filtered(example(english), example(german), example("4"), languages=["en"])
    assert kept == [english, "4"]
    assert report.counts() == {"language": 1}
    with pytest.raises(ConfigError, match="'xx' is not a language that can be detected"):
        RowFilter(Filters(languages=("xx",)))


def test_a_missing_language_package_is_named_before_rows_are_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)  # an import of it then fails
    remedy = r"needs the package py3langid; install it: pip install 'rlhf-lifecycle\[language\]'"
    with pytest.raises(ConfigError, match=remedy):
        RowFilter(Filters(languages=("en",)))


def test_masked_rows_are_deduplicated_and_near_duplicates_of_held_out_rows_are_not_trained_on(tmp_path):
    words = "tell me how a camel can live in the hot desert for many long days without water"
    rows = [{"prompt": f"{words} {'please ' * number}", "completion": "x"} for number in range(1, 12)]
    rows += [{"prompt": f"mail {number}@example.com", "completion": "x"} for number in range(4)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    source = {"name": "s", "path": str(path), "use": {"demonstrations": 1.0}}
    filters = {"pii": "mask", "near_duplicates": 0.6}
    report = DropReport()
    config = Files.model_validate({"type": "files", "sources": [source], "eval_fraction": 0.5, "filters": filters})
    tables, _ = make_tables(config, seed=1, report=report)
    texts = [one.messages[0].content for one in (*tables.demonstrations, *tables.eval_demonstrations)]
    assert sorted(text.split()[0] for text in texts) == ["mail", "tell"]
    assert report.counts() == {"near-duplicate": 10, "duplicate": 3}
    assert report.masked == {"email": 4}


def test_options_that_are_not_set_are_not_in_the_key():
    source = {"name": "s", "path": "x.jsonl", "use": {"demonstrations": 1.0}}
    plain = Files.model_validate({"sources": [source]})
    assert "filters" not in keyed(plain) and "min_margin" not in keyed(plain)["sources"][0]
    assert Files.model_validate({"sources": [source], "filters": {}}) == plain
    assert keyed(Files.model_validate({"sources": [source], "filters": {"pii": "mask"}}))["filters"]["pii"] == "mask"


# ---------------------------------------------------------------- pii

GITHUB = "ghp_" + "a1B2" * 9
TOKEN = ".".join(("eyJ" + "hbGciOiJI", "eyJ" + "zdWIiOiIx", "c2lnbmF0dXJl"))


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("Write to jo.doe+x@mail.example.co.uk, please.", "Write to [EMAIL], please."),
        ("card 4111 1111 1111 1111 or 5500-0055-5555-5559", "card [CARD] or [CARD]"),
        ("from 192.0.2.17 and 2001:db8::8a2e:370:7334", "from [IP] and [IP]"),
        (f"use {GITHUB} now", "use [KEY] now"),
        (f"Bearer {TOKEN}", "Bearer [KEY]"),
        ("id AKIA" + "ABCDEFGHIJKLMNOP!", "id [KEY]!"),
        ("-----BEGIN RSA " + "PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----\nbye", "[KEY]\nbye"),
        ("call +49 30 901820 today", "call [PHONE] today"),
    ],
)
def test_each_kind_is_masked(text, masked):
    assert mask(text, phone_region="")[0] == masked


@pytest.mark.parametrize(
    "text",
    [
        "order 4111 1111 1111 1112",  # the checksum is wrong
        "version 1.2.3.4.5, 999.1.1.1, at 12:30:45",
        "127.0.0.1, ::1 and std::vector, a::b",
        "see @example and me@here",
        "sk-short, 2024-07-26, 3.14159265358979",
        "call 650-253-0000",  # national numbers need a region
    ],
)
def test_what_only_looks_like_personal_data_stays(text):
    assert find(text, phone_region="") == []


def test_national_numbers_are_found_in_their_region():
    assert mask("call 650-253-0000", phone_region="US") == ("call [PHONE]", Counter(phone=1))


def test_json_stays_json():
    counts: Counter[str] = Counter()
    value = {"to": ["jo@example.com"], "card": 4111111111111111, "yes": True, "share": 0.5, "count": 7}
    assert mask_json(value, phone_region="", counts=counts) == value | {"to": ["[EMAIL]"], "card": "[CARD]"}
    assert counts == {"email": 1, "card": 1}


def test_keys_are_masked_and_no_value_is_lost():
    counts: Counter[str] = Counter()
    found = mask_json({"jo@example.com": 1, "ann@example.com": 2, "n": 3}, phone_region="", counts=counts)
    assert found == {"[EMAIL]": 1, "[EMAIL] 2": 2, "n": 3}
    assert counts == {"email": 2}


def test_the_checksum_of_the_standard():
    assert luhn("79927398713")
    assert not any(luhn(f"7992739871{digit}") for digit in "012456789")


def test_hidden_marks_hide_no_evaluation_prompt():
    assert {
        caseless((Message("user", text),)) for text in ("a-5", "\ufeffA\u200b\u22125", "\u202aa\u00ad-5\u202c")
    } == {caseless((Message("user", "a-5"),))}


CAFE = {form: normal(form, "Caf\u00e9 no\u0308 1\u00b2?") for form in ("NFC", "NFD", "NFKC", "NFKD")}


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_an_evaluation_prompt_in_another_normal_form_is_the_same(form):
    for other in (CAFE[form], CAFE[form].upper(), f" {CAFE[form]}\n"):
        report = DropReport()
        assert decontaminate([row(other, "a")], [row(CAFE["NFC"])], ngram=None, report=report) == []
    assert len(decontaminate([row("Cafe no 12?", "a")], [row(CAFE["NFC"])], ngram=None, report=DropReport())) == 1


def test_copies_in_nfc_and_nfd_are_one_row_and_powers_are_no_digits():
    rows = [row(CAFE["NFC"], "a"), row(CAFE["NFD"], "a", line=2), row(CAFE["NFKC"], "a", line=3)]
    assert deduplicate(rows, DropReport()) == [rows[0], rows[2]]
