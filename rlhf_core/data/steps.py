"""Where the steps of an answer end, found on its tokens as they are: nothing is decoded and tokenised again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.pieces import encode, token_text
from rlhf_core.errors import ConfigError, explain


class StepSplitter:
    """Splits answers at `separator`, wherever the texts of their tokens, one after the other, spell it.

    ConfigError for a separator that they do not spell: a tokenizer may cut one character into several tokens.

    >>> StepSplitter(chat, "\\n").ends(chat.tokenizer("1+2=3\\n3+4=7")["input_ids"])    # doctest: +SKIP
    (5, 10)
    """

    def __init__(self, chat: ChatTemplate, separator: str) -> None:
        self._separator = separator
        self._tokenizer: Any = chat.tokenizer
        self._texts: dict[int, str] = {}
        probe = encode(self._tokenizer, f"a{separator}b")
        if not separator or len(self.ends(probe)) != 2:
            rule = f"the tokens of {self._tokenizer.name_or_path} do not spell it"
            raise ConfigError(explain("separator", separator, rule, "take another, such as a newline"))

    def ends(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the position of each step's last token: the one that completes its separator; for the last step, the
        answer's last. What has no text (a blank line, the end token) is no step and belongs to the one before it.

        An answer without the separator is one step, one without tokens has none.
        """
        ends: list[int] = []
        written = False  # whether the step that ends last has text
        for position, has_text in self._pieces(token_ids):
            if ends and (not (written and has_text) or position == ends[-1]):
                ends[-1] = position
            else:
                ends.append(position)
            written = written or has_text
        last = len(token_ids) - 1
        return (*ends[:-1], last) if token_ids else ()

    def _pieces(self, token_ids: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Yield for each piece of text up to and with a separator, or to the end: its last token, whether it has text."""
        texts = [self._text(token) for token in token_ids]
        text = "".join(texts)
        start = position = 0
        reached = len(texts[0]) if texts else 0
        while start < len(text):
            found = text.find(self._separator, start)
            stop = len(text) if found < 0 else found + len(self._separator)
            while reached < stop:
                position += 1
                reached += len(texts[position])
            yield position, bool(text[start:stop].strip())
            start = stop

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = token_text(self._tokenizer, token, skip_special_tokens=True)
        return self._texts[token]
