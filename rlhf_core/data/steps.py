"""Find where the steps of an answer end in its own tokens, without tokenizing the decoded text again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.pieces import encode, token_text
from rlhf_core.errors import ConfigError, explain


class StepSplitter:
    """A splitter of answers at `separator`, which is searched in the concatenated texts of their tokens.

    Raises ConfigError if the token texts do not spell the separator, as when a tokenizer splits one of its characters.

    >>> StepSplitter(chat, "\\n").ends(chat.tokenizer("1+2=3\\n3+4=7")["input_ids"])    # doctest: +SKIP
    (5, 10)
    """

    def __init__(self, chat: ChatTemplate, separator: str) -> None:
        self._separator = separator
        self._tokenizer: Any = chat.tokenizer
        self._shown = chat.decode.shown
        self._texts: dict[int, str] = {}
        probe = encode(self._tokenizer, f"a{separator}b")
        if not separator or len(self.ends(probe)) != 2:
            rule = f"the tokens of {self._tokenizer.name_or_path} cannot spell it"
            raise ConfigError(explain("separator", separator, rule, "use another one, such as a newline"))

    def ends(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the position of each step's last token: the token that completes its separator, or the answer's last.

        A piece without text (a blank line, the end token) belongs to the step before it. An answer without the
        separator is one step, and an answer without tokens has no step.
        """
        ends: list[int] = []
        written = False  # whether the latest step has text
        for position, has_text in self._pieces(token_ids):
            if ends and (not (written and has_text) or position == ends[-1]):
                ends[-1] = position
            else:
                ends.append(position)
            written = written or has_text
        last = len(token_ids) - 1
        return (*ends[:-1], last) if token_ids else ()

    def _pieces(self, token_ids: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Yield each piece's last token position and whether it has text. Pieces end with a separator or the answer."""
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
            hidden = token not in self._shown
            self._texts[token] = token_text(self._tokenizer, token, skip_special_tokens=hidden)
        return self._texts[token]
