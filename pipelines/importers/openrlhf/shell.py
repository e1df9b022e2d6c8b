"""Read the OpenRLHF commands in a shell script. It handles the syntax that such scripts use, and runs nothing.

It handles quotes, escapes, continued lines, comments (also between continued lines, where a shell would stop), heredocs
that fill a variable, arrays, `NAME=value`, `$NAME`, `${NAME:-default}`, and scripts inside `bash -c "..."`. A variable
without a value in the script is left as written. An assignment inside `if` counts only for a name without a value.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from rlhf_core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_HEREDOC = re.compile(
    r"^(?P<head>[^\n#]*?)<<-?[ \t]*['\"]?(?P<end>\w+)['\"]?[^\n]*\n(?P<body>.*?)^[ \t]*(?P=end)[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
_MODULE = re.compile(r"openrlhf[./]cli[./](\w+?)(?:\.py)?$")
_INSIDE = re.compile(r"\sopenrlhf[./]cli[./]\w", re.DOTALL)
_KEYWORDS = {
    "if",
    "then",
    "else",
    "elif",
    "fi",
    "while",
    "until",
    "do",
    "done",
    "!",
    "time",
    "{",
    "}",
    "export",
    "local",
}
_PRINTERS = {"echo", "printf", "cat", "tee"}
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_BODY = "\0"
_ANSI = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


@dataclass(frozen=True, slots=True)
class Command:
    """One call of `openrlhf.cli.<module>`: the words before the module (the launcher's) and those after it."""

    module: str
    launcher: tuple[str, ...]
    words: tuple[str, ...]


def read_commands(text: str) -> tuple[list[Command], dict[str, str]]:
    """Return the OpenRLHF commands of a script in order, and the last value of each variable.

    >>> read_commands("M=base; deepspeed --module openrlhf.cli.train_sft --pretrain $M")[0][0].words
    ('--pretrain', 'base')
    """
    if _BODY in text:
        raise ConfigError("script: has a NUL character, which no shell can read; remove it")
    script = _Script({})
    script.read(text)
    return script.commands, {name: " ".join(words) for name, words in script.variables.items()}


class _Script:
    """A reader of a script, from left to right, with the variables so far and the commands found."""

    def __init__(self, variables: dict[str, list[str]]) -> None:
        self.variables = variables
        self.commands: list[Command] = []
        self._bodies: list[str] = []
        self._text = ""
        self._at = 0
        self._conditions = 0
        self._words: list[str] = []
        self._word: str | None = None
        self._drop_next = False

    def read(self, text: str) -> None:
        """Read all of `text`; raise ConfigError for an unterminated quote."""
        self._text = _HEREDOC.sub(self._keep_body, _joined(text)) + "\n"
        while self._at < len(self._text):
            self._step(self._text[self._at])

    def _keep_body(self, found: re.Match[str]) -> str:
        target = re.search(rf"\bread\b.*?({_NAME.pattern})\s*$", found["head"])
        if not target:
            return found["head"]
        self._bodies.append(found["body"])
        return f"{target[1]}={_BODY}{len(self._bodies) - 1}{_BODY}"

    # ------------------------------------------------------------ one character

    def _step(self, char: str) -> None:
        if self._text.startswith("((", self._at) and not self._words and self._word is None:
            self._at = self._closing(self._at, "(", ")")
        elif char in " \t":
            self._at += 1
            self._end_word()
        elif char in "<>" or self._text.startswith("&>", self._at):
            self._redirection()
        elif char in "\n;&|()":
            self._punctuation(char)
        elif char == "#" and self._word is None:
            self._at = self._text.index("\n", self._at)
        elif char == "'":
            self._add(self._until("'"))
        elif char == '"':
            self._double_quoted()
        elif char == "\\":
            self._add(self._text[self._at + 1])
            self._at += 2
        elif char == _BODY:
            self._add(_expanded(self._bodies[int(self._until(_BODY))], self.variables))
        elif char in "$`":
            self._expand_unquoted()
        else:
            self._add(char)
            self._at += 1

    def _punctuation(self, char: str) -> None:
        array = _ASSIGNMENT.fullmatch(self._word or "")
        self._at += 1
        if char == "(" and array and not array[2]:
            self._array(array[1])
        else:
            self._end_command()

    def _array(self, name: str) -> None:
        end = self._closing(self._at - 1, "(", ")")
        inner = _Script(self.variables)
        inner._bodies = self._bodies
        inner._text = re.sub(r"(?m)#.*$", "", self._text[self._at : end - 1]).replace("\n", " ") + " "
        while inner._at < len(inner._text):
            inner._step(inner._text[inner._at])
        self._word, self._at = None, end
        self._assign(name, inner._words)

    def _redirection(self) -> None:
        if self._word is not None and self._word.isdigit():
            self._word = None
        self._end_word()
        while self._text[self._at] in "<>&":
            self._at += 1
        self._drop_next = True

    def _double_quoted(self) -> None:
        self._at += 1
        self._add("")
        while (char := self._text[self._at : self._at + 1]) != '"':
            if not char or self._at + 1 >= len(self._text):
                raise ConfigError('script: a " is not closed; add the missing quote')
            if char == "\\" and self._text[self._at + 1] in '"\\$`':
                self._add(self._text[self._at + 1])
                self._at += 2
            elif char in "$`":
                words, splice = self._expansion()
                self._add(words[0] if words and splice else " ".join(words))
                for word in words[1:] if splice else ():
                    self._end_word()
                    self._add(word)
            else:
                self._add(char)
                self._at += 1
        self._at += 1

    def _expand_unquoted(self) -> None:
        if self._text.startswith("$'", self._at):
            self._at += 1
            self._add(re.sub(r"\\(.)", lambda found: _ANSI.get(found[1], found[0]), self._until("'", escapes=True)))
            return
        words, _ = self._expansion()
        pieces = [piece for word in words for piece in (word.split() if "$(" not in word else [word])]
        for number, piece in enumerate(pieces):
            if number:
                self._end_word()
            self._add(piece)

    # ------------------------------------------------------------ expansion

    def _expansion(self) -> tuple[list[str], bool]:
        """Return the words that the `$` at the cursor expands to, and whether they stay words inside quotes."""
        start = self._at
        if self._text[start] == "`":
            return [f"`{self._until('`')}`"], False
        if self._text.startswith("$(", start):
            self._at = self._closing(start + 1, "(", ")")
            return [self._computed(self._text[start : self._at])], False
        if self._text.startswith("${", start):
            self._at = self._closing(start + 1, "{", "}")
            inner = self._text[start + 2 : self._at - 1]
            name, _, default = inner.partition(":-")
            splice = name.endswith(("[@]", "[*]"))
            name = name.removesuffix("[@]").removesuffix("[*]")
            if name in self.variables:
                return self.variables[name], splice
            return [default] if ":-" in inner else [self._text[start : self._at]], splice
        found = _NAME.match(self._text, start + 1)
        self._at = found.end() if found else start + 2
        literal = self._text[start : self._at]
        return (self.variables[found[0]] if found and found[0] in self.variables else [literal]), False

    def _computed(self, text: str) -> str:
        """Return the value of `$((a * 2 + 1))` if all its names have one; anything else is left as written."""
        bare = _NAME.sub(lambda found: " ".join(self.variables.get(found[0], [found[0]])), text[3:-2].replace("$", ""))
        if not text.startswith("$((") or not re.fullmatch(r"[\d\s+*/%()-]+", bare):
            return text
        try:
            return str(_arithmetic(ast.parse(bare.strip(), mode="eval").body))
        except (SyntaxError, ZeroDivisionError):
            return text

    def _until(self, mark: str, *, escapes: bool = False) -> str:
        """Return the text between the mark at the cursor and the next one; move the cursor behind it."""
        start = self._at + 1
        end = self._text.find(mark, start)
        while escapes and end > 0 and self._text[end - 1] == "\\":
            end = self._text.find(mark, end + 1)
        if end < 0:
            raise ConfigError(f"script: a {mark} is not closed; add the missing quote")
        self._at = end + 1
        return self._text[start:end]

    def _closing(self, start: int, opened: str, closed: str) -> int:
        """Return the position after the bracket that closes the one at `start`."""
        depth = 0
        for at in range(start, len(self._text)):
            depth += (self._text[at] == opened) - (self._text[at] == closed)
            if depth == 0:
                return at + 1
        raise ConfigError(f"script: a {opened} is not closed; add the missing {closed}")

    # ------------------------------------------------------------ words and commands

    def _add(self, text: str) -> None:
        self._word = (self._word or "") + text

    def _end_word(self) -> None:
        if self._word is not None and not self._drop_next:
            self._words.append(self._word)
        self._drop_next = self._drop_next and self._word is None
        self._word = None

    def _end_command(self) -> None:
        self._end_word()
        words, self._words, self._drop_next = self._words, [], False
        while words and (words[0] in _KEYWORDS or _ASSIGNMENT.fullmatch(words[0])):
            first = words.pop(0)
            self._conditions += (first == "if") - (first == "fi")
            if assignment := _ASSIGNMENT.fullmatch(first):
                self._assign(assignment[1], [assignment[2]])
        if words and words[0] not in _PRINTERS:
            self._find_module(words)

    def _assign(self, name: str, words: list[str]) -> None:
        if self._conditions == 0 or name not in self.variables:
            self.variables[name] = words

    def _find_module(self, words: list[str]) -> None:
        for number, word in enumerate(words):
            if found := _MODULE.search(word):
                self.commands.append(Command(found[1], tuple(words[:number]), tuple(words[number + 1 :])))
                return
            if _INSIDE.search(word) and not word.startswith(("$", "`")):
                inner = _Script(self.variables)
                inner._bodies = self._bodies  # a heredoc inside quotes is not filled in yet
                inner.read(word)
                self.commands += inner.commands


def _arithmetic(node: ast.expr) -> int:
    """Return the value of whole numbers joined by + - * / %; a quotient is truncated to a whole number."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_arithmetic(left), _arithmetic(right))
        case _:
            raise SyntaxError("only + - * / % of whole numbers")


def _joined(text: str) -> str:
    """Return `text` with continued lines joined; comment lines are removed first, so that they do not interrupt any."""
    without = re.sub(r"(?m)^[ \t]*#.*\n?", "", text.replace("\r\n", "\n"))
    return re.sub(r"\\[ \t]*(\n|\Z)", " ", without)


def _expanded(body: str, variables: dict[str, list[str]]) -> str:
    """Return a heredoc's body with the known variables replaced."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        return " ".join(variables[name]) if name in variables else found[0]

    return re.sub(rf"\$(?:\{{({_NAME.pattern})\}}|({_NAME.pattern}))", value, body)
