"""Move over the text of a shell script: words, quotes, expansions, comments and here-documents."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from rlhf_core.errors import ConfigError

ENDS_WORD = " \t\n;&|()<>"
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_PARAMETER = re.compile(r"\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])")
_NO_WORDS = re.compile(r"(?:[ \t]|\\\n|\\[ \t]+(?=[#\n]))*(?:#[^\n]*)?")
"""Blanks, joined lines, a comment; also a backslash that was meant to join lines, but for what is behind it."""


@dataclass
class Body:
    """The text of a here-document or here-string; `literal` if nothing in it is expanded."""

    text: str
    literal: bool


class Scanner:
    """A cursor in a script. `commands` reads commands up to a closer, as inside `$( )`."""

    def __init__(self, text: str, line: int, commands: Callable[[str], object]) -> None:
        self.text = text + "\n"
        self.at = 0
        self.awaited: list[tuple[str, Body]] = []
        self._first_line = line
        self._counted = (0, line)
        self._commands = commands

    # ------------------------------------------------------------ words

    def word(self) -> str:
        """Return the word at the cursor as written; empty if there is none."""
        start = self.at
        while (char := self.peek()) and (char not in ENDS_WORD or self._goes_on(start)):
            if char in "(<>":
                self.at += char != "("
                self.parentheses()
            else:
                self.piece()
        return self.text[start : self.at]

    def _goes_on(self, start: int) -> bool:
        """Return whether the bracket at the cursor belongs to the word: an array, a pattern or `<(...)`."""
        if self.text[self.at] == "(":
            before = self.text[start : self.at]
            return bool(_ARRAY.fullmatch(before)) or before.endswith(("?", "*", "+", "@", "!"))
        return self.text[self.at] in "<>" and self.text[self.at + 1 : self.at + 2] == "("

    def array(self) -> list[str]:
        """Consume an array from its `(` to its `)`, comments and line ends included; return its words."""
        self.at += 1
        words = []
        self.space()
        while not self.text.startswith(")", self.at):
            if self.at >= len(self.text):
                raise self.open("(", ")")
            words.append(self.some_word())
            self.space()
        self.at += 1
        return words

    def some_word(self) -> str:
        """Return the next word, or the one character that no word begins with."""
        word = self.word()
        if not word:
            self.at += 1
        return word

    def piece(self) -> None:
        """Consume a quotation, an escape, an expansion or one character."""
        char = self.text[self.at]
        if char == "'":
            self._until("'")
        elif char == '"':
            self._double_quoted()
        elif char in "$`":
            self.dollar(quoted=False)
        else:
            self.at += 2 if char == "\\" else 1

    def _double_quoted(self) -> None:
        start, self.at = self.at, self.at + 1
        while (char := self.peek()) != '"':
            if self.at + 1 >= len(self.text):
                self.at = start
                raise self.open('"', "quote")
            if char in "$`":
                self.dollar(quoted=True)
            else:
                self.at += 2 if char == "\\" else 1
        self.at += 1

    def dollar(self, *, quoted: bool) -> None:
        """Consume an expansion: `$x`, `${x}`, `$(x)`, `$((x))`, backticks, `$'x'`, `$"x"`."""
        if self.text[self.at] == "`":
            self._until("`", escapes=True)
        elif self.text.startswith("$((", self.at):
            self.at += 1
            self.parentheses()
        elif self.text.startswith("$(", self.at):
            self._substitution()
        elif self.text.startswith("${", self.at):
            start, self.at = self.at, self.at + 2
            while not self.text.startswith("}", self.at):
                if self.at + 1 >= len(self.text):
                    self.at = start
                    raise self.open("{", "}")
                self.step() if quoted and self.text[self.at] == "'" else self.piece()
            self.at += 1
        elif self.text.startswith("$'", self.at) and not quoted:
            self.at += 1
            self._until("'", escapes=True)
        else:
            found = _PARAMETER.match(self.text, self.at)
            self.at = found.end() if found else self.at + 1

    def _substitution(self) -> None:
        start, self.at = self.at, self.at + 2
        awaited, self.awaited = self.awaited, []
        self._commands(")")
        self.awaited = awaited
        if not self.text.startswith(")", self.at):
            self.at = start
            raise self.open("(", ")")
        self.at += 1

    def parentheses(self) -> None:
        """Consume from the `(` at the cursor to the `)` that closes it; quotes inside count as in words."""
        start, depth = self.at, 0
        while self.at < len(self.text):
            char = self.text[self.at]
            depth += (char == "(") - (char == ")")
            if char == "#" and self.text[self.at - 1] in " \t\n":
                self.at = self.text.index("\n", self.at)
            elif char in "()":
                self.at += 1
            else:
                self.piece()
            if depth == 0:
                return
        self.at = start
        raise self.open("(", ")")

    # ------------------------------------------------------------ characters

    def _until(self, mark: str, *, escapes: bool = False) -> None:
        end = self.text.find(mark, self.at + 1)
        while escapes and end > 0 and self.text[end - 1] == "\\":
            end = self.text.find(mark, end + 1)
        if end < 0:
            raise self.open(mark, "quote")
        self.at = end + 1

    def blanks(self) -> None:
        """Consume blanks, joined lines, and a comment up to the end of its line."""
        found = _NO_WORDS.match(self.text, self.at)
        assert found
        self.at = found.end()

    def space(self) -> None:
        """Consume blanks, comments and line ends."""
        self.blanks()
        while self.text.startswith("\n", self.at):
            self.newline()
            self.blanks()

    def newline(self) -> None:
        """Consume a line end, and the here-documents that begin after it, up to their last line, indented or not."""
        self.at += 1
        for end, body in self.awaited:
            found = re.compile(rf"^[ \t]*{re.escape(end)}[ \t]*$", re.MULTILINE).search(self.text, self.at)
            body.text = self.text[self.at : found.start() if found else len(self.text)]
            self.at = min(found.end() + 1, len(self.text)) if found else len(self.text)
        self.awaited = []

    def peek(self) -> str:
        """Return the character at the cursor; empty at the end."""
        return self.text[self.at : self.at + 1]

    def step(self) -> None:
        self.at += 1

    def sees(self, token: str) -> bool:
        if not self.text.startswith(token, self.at):
            return False
        after = self.text[self.at + len(token) : self.at + len(token) + 1]
        return token in ("((", "(", ")", ";;", ";&") or after in (*ENDS_WORD, "")

    def takes(self, token: str) -> bool:
        taken = bool(token) and self.sees(token)
        self.at += len(token) * taken
        return taken

    def line(self) -> int:
        """Return the number of the line at the cursor."""
        before, number = self._counted if self._counted[0] <= self.at else (0, self._first_line)
        self._counted = (self.at, number + self.text.count("\n", before, self.at))
        return self._counted[1]

    def open(self, mark: str, missing: str) -> ConfigError:
        return ConfigError(f"script, line {self.line()}: a {mark} is not closed; add the missing {missing}")
