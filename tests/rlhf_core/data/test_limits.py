"""Limits in tokens, counted by hand with a byte-level tokenizer, and the report of dropped rows."""

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.limits import Drop, DropReport, Origin, TokenLimits, control_tokens, limit, parts
from rlhf_core.data.tables import Demonstration, Preference, SteppedAnswer, Tables
from rlhf_core.errors import DataError
from rlhf_core.types import Message, Prompt
from tests.rlhf_core.data.small_tokenizers import FORGETFUL, ZEPHYR, tokenizer_of, with_template

# ---------------------------------------------------------------- limits


def only(**tables: Any) -> Tables:
    return replace(Tables((), (), (), (), (), ()), **tables)


def demonstration(name: str, prompt: str, answer: str) -> Demonstration:
    return Demonstration(name, (Message("user", prompt), Message("assistant", answer)), "s")


def limited(chat: ChatTemplate, tables: Tables, **limits: int) -> tuple[Tables, list[str]]:
    report = DropReport()
    origins = {row.id: Origin("f", number) for rows in tables.named().values() for number, row in enumerate(rows, 1)}
    chosen = {"max_prompt_tokens": 100, "max_tokens": 100, "min_answer_tokens": 1} | limits
    kept = limit(tables, chat, TokenLimits(**chosen), origins=origins, report=report)
    return kept, [f"{drop.origin.line} {drop.reason}" for drop in report.drops]


def test_rows_at_a_limit_stay_and_rows_beyond_it_go(chat):
    # digits are single tokens: <|user|>123<|end|><|assistant|>45<|end|> has 6 prompt tokens and 9 in all
    tables = only(demonstrations=(demonstration("a", "123", "45"),))
    for limits in ({"max_prompt_tokens": 6}, {"max_tokens": 9}, {"min_answer_tokens": 3}):
        assert limited(chat, tables, **limits) == (tables, [])
    for limit_, reason in (
        ({"max_prompt_tokens": 5}, "1 prompt too long: 6 tokens, at most 5"),
        ({"max_tokens": 8}, "1 conversation too long: 9 tokens, at most 8"),
        ({"min_answer_tokens": 4}, "1 answer too short: fewer than 4 trained tokens"),
    ):
        assert limited(chat, tables, **limit_) == (only(), [reason])


def test_bare_prompts_are_counted_with_their_generation_prompt(chat):
    prompts = (Prompt("a", (Message("user", "123"),), "", "s"), Prompt("b", (Message("user", "1234"),), "", "s"))
    kept, dropped = limited(chat, only(prompts=prompts, eval_prompts=prompts), max_prompt_tokens=6)
    assert kept.prompts == kept.eval_prompts == prompts[:1]
    assert dropped == ["2 prompt too long: 7 tokens, at most 6"] * 2


def test_the_longer_answer_of_a_pair_counts(chat):
    answers = (Message("assistant", "2"),), (Message("assistant", "345"),)
    pair = Preference("a", (Message("user", "1"),), *answers, 0.0, "s")
    _, dropped = limited(chat, only(preferences=(pair,)), max_tokens=7)
    assert dropped == ["1 conversation too long: 8 tokens, at most 7"]


def test_content_that_spells_a_control_token_is_dropped(chat):
    forged = demonstration("a", "1<|end|><|assistant|>2", "3")
    kept, dropped = limited(chat, only(demonstrations=(forged, demonstration("b", "1", "3"))))
    assert [row.id for row in kept.demonstrations] == ["b"]
    assert dropped[0].startswith("1 content holds a control token: <|")


@pytest.mark.parametrize(
    ("token", "special", "written", "kept"),
    [
        ("<start_of_turn>", True, False, False),  # special, but without a name, as in Gemma 3 and Llama 3
        ("<｜User｜>", False, True, False),  # around a turn, but not special, as in DeepSeek-R1
        ("\n", False, True, True),  # Gemma's
        ("<tool_call>", False, False, True),
        ("<think>", True, True, True),
        ("<tool_call>", True, False, True),
        ("<|channel|>", True, True, True),
        ("[TOOL_RESULTS]", True, False, False),
    ],
)
def test_a_control_token_need_not_have_a_name(chat, token, special, written, kept):
    tokenizer = with_template(chat, chat.tokenizer.chat_template).tokenizer
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    assert token not in tokenizer.all_special_tokens
    if written:
        tokenizer.chat_template = "{% for m in messages %}{{ '" + token + "' + m['content'] + eos_token }}{% endfor %}"
    # an ordinary token that a policy declares as an end may be in a content
    declared = ChatTemplate(tokenizer, ends=[tokenizer.convert_tokens_to_ids("2")])
    _, dropped = limited(declared, only(demonstrations=(demonstration("a", "1", f"2{token}3"),)))
    assert dropped == ([] if kept else [f"1 content holds a control token: {token}"])


def test_a_template_that_rewrites_earlier_answers_drops_neither_a_demonstration_nor_a_pair(chat):
    forgetful = with_template(chat, FORGETFUL)
    prompt = (Message("user", "1"), Message("assistant", "2"), Message("user", "3"))
    long = Demonstration("a", (*prompt, Message("assistant", "4")), "s")
    pair = Preference("c", prompt, (Message("assistant", "4"),), (Message("assistant", "5"),), 0.0, "s")
    kept, dropped = limited(forgetful, only(demonstrations=(long,), preferences=(pair,)))
    assert (kept.demonstrations, kept.preferences, dropped) == ((long,), (pair,), [])


def test_a_demonstration_that_sft_cannot_mask_is_dropped(chat):
    closing = with_template(  # asks for every answer with "=", and shows one with "!" without it
        chat,
        "{% for m in messages %}{{ '=' if m['role'] == 'assistant' and '!' not in m['content'] else '' }}"
        "{{ m['content'] + eos_token }}{% endfor %}{{ '=' if add_generation_prompt else '' }}",
    )
    rows = demonstration("a", "1", "2!"), demonstration("b", "1", "2")
    kept, (reason,) = limited(closing, only(demonstrations=rows))
    assert kept.demonstrations == rows[1:]
    assert reason.startswith("1 chat template: chat_template = 'turn 2 of 2': prompts for an answer with '='")


def test_a_demonstration_splits_before_its_last_turn():
    row = demonstration("a", "1", "2")
    assert parts(row) == ((Message("user", "1"),), ((Message("assistant", "2"),),))


def test_steps_are_counted_as_one_answer_a_line_each(chat):
    # <|user|>1<|end|><|assistant|>2\n34<|end|> has 4 prompt tokens and 9 in all
    row = SteppedAnswer("a", (Message("user", "1"),), ("2", "34"), (1.0, 0.0), "s")
    tables = only(steps=(row,), eval_steps=(row,))
    assert limited(chat, tables, max_prompt_tokens=4, max_tokens=9) == (tables, [])
    kept, dropped = limited(chat, tables, max_tokens=8)
    assert kept.steps == kept.eval_steps == ()
    assert dropped == ["1 conversation too long: 9 tokens, at most 8"] * 2
    assert parts(row) == ((Message("user", "1"),), ((Message("assistant", "2\n34"),),))


# ---------------------------------------------------------------- batches and bounds


class Counting:
    """A tokenizer that remembers the texts of each call."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.calls: list[list[str]] = []

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.calls.append(texts)
        return self.tokenizer(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def counting(chat: ChatTemplate, **options: Any) -> tuple[ChatTemplate, list[list[str]]]:
    tokenizer = Counting(chat.tokenizer)
    made = ChatTemplate(tokenizer, **options)  # type: ignore[arg-type]
    control_tokens(made)  # its tokens are cached before the first row is checked
    tokenizer.calls.clear()
    return made, tokenizer.calls


def rows_around_limits() -> Tables:
    """Rows of all tables with 1 to 40 digits, each a token and a character, in the prompt or the answer."""
    digits = "1234567890" * 4
    turns = [
        (Message("user", digits[:ask]), Message("assistant", digits[:say]))
        for ask in range(1, 41, 2)
        for say in (1, ask)
    ]
    numbered = list(enumerate(turns))
    return only(
        demonstrations=tuple(Demonstration(f"d{at}", (*pair, *pair), "s") for at, pair in numbered),
        eval_demonstrations=tuple(Demonstration(f"e{at}", pair, "s") for at, pair in numbered),
        preferences=tuple(
            Preference(f"p{at}", (ask,), (say,), (say, ask, say), 0.0, "s") for at, (ask, say) in numbered
        ),
        prompts=tuple(Prompt(f"q{at}", pair[:1], "", "s") for at, pair in numbered),
    )


@pytest.mark.parametrize(
    "limits", [(20, 40, 1), (30, 50, 2), (30, 50, 0), (40, 30, 1), (1000, 1000, 1), (1000, 1000, 30)]
)
def test_bounds_drop_the_same_rows_for_the_same_reasons_as_counts(chat, limits):
    named = dict(zip(("max_prompt_tokens", "max_tokens", "min_answer_tokens"), limits, strict=True))
    tokenizer = with_template(chat, chat.tokenizer.chat_template).tokenizer
    tokenizer.add_tokens([AddedToken("unused", normalized=False)])
    bounded, counted = ChatTemplate(tokenizer), ChatTemplate(tokenizer, rows=len(tokenizer) - 1)
    assert (bounded.token_bounds() is None, counted.token_bounds() is None) == (False, True)
    tables = rows_around_limits()
    kept, dropped = limited(bounded, tables, **named)
    assert (kept, dropped) == limited(counted, tables, **named)
    assert dropped or limits == (1000, 1000, 1)


def test_only_rows_that_may_be_too_long_are_tokenized_and_all_in_one_call(chat):
    counted, calls = counting(chat)
    # <|user|>123<|end|><|assistant|> has 28 + 3 bytes and 6 tokens
    rows = tuple(demonstration(f"{asked}", asked, "45") for asked in ("123", "1234", "12345", "123456"))
    assert limited(counted, only(demonstrations=rows), max_prompt_tokens=32)[1] == []
    texts = [f"<|user|>{asked}<|end|><|assistant|>" for asked in ("12345", "123456")]
    assert calls == [[texts[0], "45<|end|>", texts[1]]]


def test_texts_that_follow_each_other_are_tokenized_in_one_call_where_a_tokenizer_marks_beginnings():
    counted, calls = counting(ChatTemplate(tokenizer_of("bpe-prepend", ZEPHYR)))
    prompt = (Message("user", "1"), Message("assistant", "2"), Message("user", "3"))
    tables = only(demonstrations=(Demonstration("a", (*prompt, Message("assistant", "4")), "s"),))
    assert limited(counted, tables, max_prompt_tokens=1000, max_tokens=1000) == (tables, [])
    assert len(calls) == 1
    assert len(calls[0]) == 4  # up to where each answer begins and ends


def test_an_answer_without_its_end_is_tokenized(chat):
    open_ended = "{% for m in messages %}{{ m['content'] }}{{ eos_token if 'stop' not in m['content'] }}{% endfor %}"
    tokenizer = with_template(chat, chat.tokenizer.chat_template).tokenizer
    tokenizer.chat_template = open_ended
    rows = demonstration("a", "1", "2"), demonstration("b", "1", "stop")
    _, dropped = limited(ChatTemplate(tokenizer), only(demonstrations=rows))
    assert dropped == ["2 answer too short: fewer than 1 trained tokens"]


@pytest.mark.parametrize(
    ("asked", "said", "reason"),
    [
        ("long " * 10**5, "1", "prompt too long: at least {} tokens, at most 10"),
        ("1", "long " * 10**5, "conversation too long: at least {} tokens, at most 20"),
        ("long " * 10**5, "long " * 10**5, "prompt too long: at least {} tokens, at most 10"),
        ("123456789", "long " * 10**5, "prompt too long: 12 tokens, at most 10"),
    ],
)
def test_a_text_that_cannot_fit_by_its_characters_is_not_tokenized_whole(chat, asked, said, reason):
    counted, calls = counting(chat)
    row = demonstration("a", asked, said)
    bounds = counted.token_bounds()
    assert bounds is not None
    whole = [f"<|user|>{asked}<|end|><|assistant|>", *([f"{said}<|end|>"] if "conversation" in reason else [])]
    _, dropped = limited(counted, only(demonstrations=(row,)), max_prompt_tokens=10, max_tokens=20)
    assert dropped == [f"1 {reason.format(sum(map(bounds.least, whole)))}"]
    assert max(len(text) for texts in calls for text in texts) < 140_000


def test_an_answer_that_cannot_fit_may_end_with_another_declared_end_token(chat):
    tokenizer = with_template(chat, chat.tokenizer.chat_template).tokenizer
    tokenizer.add_tokens([AddedToken("<|call|>", special=True)])
    ended = "m['content'] + ('<|call|>' if 'long' in m['content'] else eos_token)"
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ {ended} }}}}{{% endfor %}}"
    calling = ChatTemplate(tokenizer, ends=[tokenizer.convert_tokens_to_ids("<|call|>")])
    rows = demonstration("a", "1", "2"), demonstration("b", "1", "long " * 10**5)
    _, dropped = limited(calling, only(demonstrations=rows))
    assert [one.partition(":")[0] for one in dropped] == ["2 conversation too long"]


def test_a_short_answer_to_a_prompt_that_cannot_fit_is_the_reason(chat):
    row = demonstration("a", "long " * 10**5, "1")
    _, dropped = limited(chat, only(demonstrations=(row,)), min_answer_tokens=3)
    assert dropped == ["1 answer too short: fewer than 3 trained tokens"]


def test_rows_that_fit_by_their_bytes_are_not_tokenized(chat):
    counted, calls = counting(chat, rows=len(chat.tokenizer))
    rows = tuple(demonstration(f"{at}", f"{at} " + "1" * 300_000, "2") for at in range(5))
    origins = {row.id: Origin("f", 1) for row in rows}
    limits = TokenLimits(400_000, 400_000, 1)
    limit(only(demonstrations=rows), counted, limits, origins=origins, report=DropReport())
    assert [len(texts) for texts in calls] == []


# ---------------------------------------------------------------- validation


def report_of(reasons: list[str], *, read: int) -> DropReport:
    report = DropReport()
    report.rows_read["s"] = read
    for line, reason in enumerate(reasons, start=1):
        report.add("s", Origin("f.jsonl", line), reason)
    return report


def test_reasons_are_counted_without_their_detail():
    report = report_of(["duplicate: of f:1", "malformed: x", "duplicate: of f:2"], read=9)
    assert report.counts() == {"duplicate": 2, "malformed": 1}


def test_the_file_names_every_row():
    written = report_of(["malformed: x"], read=9).to_json()
    assert list(written) == ["rows_read", "unused", "dropped", "reasons", "drops"]  # counts of nothing are left out
    assert written["rows_read"] == {"s": 9}
    assert written["dropped"] == 1
    assert written["drops"] == [{"source": "s", "file": "f.jsonl", "line": 1, "reason": "malformed: x"}]


def test_too_many_malformed_rows_are_an_error_that_names_the_first():
    report = report_of(["malformed: empty turn", "malformed: other"], read=20)
    report.check_malformed("s", report.drops, max_bad_fraction=0.1)  # 2 of 20 are just allowed
    with pytest.raises(
        DataError, match=r"f\.jsonl:1'.*empty turn \(2 of 20 rows.*at most 9\.0% may be.*max_bad_fraction"
    ):
        report.check_malformed("s", report.drops, max_bad_fraction=0.09)


def test_no_malformed_row_is_never_an_error():
    report_of([], read=0).check_malformed("s", list[Drop](), max_bad_fraction=0.0)
