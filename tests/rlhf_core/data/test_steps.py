"""Steps are found on the tokens of an answer; digits are single tokens here, so that positions can be counted."""

from __future__ import annotations

import pytest

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.tables import StepSplitter
from rlhf_core.errors import ConfigError


def ids(chat: ChatTemplate, text: str, *, end: bool = False) -> tuple[int, ...]:
    return (*chat.tokenizer(text, add_special_tokens=False)["input_ids"], *([chat.eos_id] if end else []))


@pytest.mark.parametrize(
    ("text", "end", "ends"),
    [
        ("1\n23\n4", False, (1, 4, 5)),
        ("1\n23\n4", True, (1, 4, 6)),  # the end token belongs to the last step
        ("12", False, (1,)),  # without the separator: one step
        ("12", True, (2,)),
        ("1\n2\n", False, (1, 3)),  # cut off after a separator, or ended there: no empty step
        ("1\n2\n", True, (1, 4)),
        ("1\n\n2", False, (2, 3)),  # a blank line belongs to the step before it
        ("\n1\n2", False, (2, 3)),  # or to the first
        ("", True, (0,)),
        ("\n", True, (1,)),
        ("", False, ()),
    ],
)
def test_a_step_ends_with_its_separator_and_the_last_with_the_answer(
    chat: ChatTemplate, text: str, end: bool, ends: tuple[int, ...]
) -> None:
    splitter = StepSplitter(chat, "\n")
    assert splitter.ends(ids(chat, text, end=end)) == ends


def test_a_separator_of_several_tokens_and_one_inside_a_token_are_found(chat: ChatTemplate) -> None:
    assert StepSplitter(chat, "9#9").ends(ids(chat, "1" + "9#9" + "23")) == (3, 5)
    (how_are,) = [token for token in ids(chat, "Hello Maria") if chat.tokenizer.decode([token]).strip() == "Maria"]
    assert StepSplitter(chat, "ri").ends([how_are, *ids(chat, "12")]) == (0, 2)


def test_steps_do_not_move_when_the_answer_is_not_what_the_tokenizer_would_write(chat: ChatTemplate) -> None:
    whole = ids(chat, "Hello")
    spelt = [token for letter in "Hello" for token in ids(chat, letter)]
    assert len(spelt) == 5 > len(whole)
    newline = ids(chat, "\n")
    assert StepSplitter(chat, "\n").ends([*spelt, *newline, *whole]) == (5, 5 + len(whole))


@pytest.mark.parametrize("separator", ["", "ки"])
def test_a_separator_that_the_tokens_do_not_spell_is_refused(chat: ChatTemplate, separator: str) -> None:
    with pytest.raises(ConfigError, match=r"separator = .* cannot spell it"):
        StepSplitter(chat, separator)
