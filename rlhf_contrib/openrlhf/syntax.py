"""Parse a shell script into commands. Their words stay as written, with quotes and `$`; `shell` expands them.

The grammar is POSIX plus bash's arrays, `[[ ]]`, `(( ))`, `<<<`, `$'...'` and `function`. Because people paste parts of
scripts, blocks that are never closed, or closed twice, are read as far as possible.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rlhf_core.errors import ConfigError

# ---------------------------------------------------------------- scanner

ENDS_WORD = " \t\n;&|()<>"
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_NO_ARGUMENTS = re.compile(r"\([ \t]*\)")
_PARAMETER = re.compile(r"\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])")
_PLAIN = re.compile(r"[\w./=:%+@*?^~-]+")
"""A run of characters that neither begin nor end a word, a pattern, a bracket or a part of one."""
_PLAIN_IN_QUOTES = re.compile(r'[^"$`\\]+')
_NO_WORDS = re.compile(r"(?:[ \t]|\\\n|\\[ \t]+(?=[#\n]))*(?:#[^\n]*)?")
"""Blanks, joined lines and a comment; also a backslash that was meant to join lines but is followed by blanks."""


@dataclass
class Body:
    """The text of a here-document or here-string; `literal` if it is not expanded."""

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
        """Read the word at the cursor as written; empty if the cursor is not at a word."""
        start = self.at
        while (char := self.peek()) and (char not in ENDS_WORD or self._goes_on(start)):
            if char in "(<>":
                self.at += char != "("
                self.parentheses()
            else:
                self.piece()
        return self.text[start : self.at]

    def _goes_on(self, start: int) -> bool:
        """Whether the bracket at the cursor belongs to the word: an array, a pattern or `<(...)`."""
        if self.text[self.at] == "(":
            before = self.text[max(start, self.at - 1) : self.at]
            return before in (*"?*+@!",) or bool(_ARRAY.fullmatch(self.text, start, self.at))
        return self.text[self.at] in "<>" and self.text[self.at + 1 : self.at + 2] == "("

    def array(self) -> list[str]:
        """Consume an array from `(` to `)`, including comments and line ends; returns its words."""
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
        """Read the next word, or a single character that cannot begin a word."""
        word = self.word()
        if not word:
            self.at += 1
        return word

    def piece(self) -> None:
        """Consume a quotation, an escape, an expansion, a run of plain characters or one other character."""
        char = self.text[self.at]
        if char == "'":
            self._until("'")
        elif char == '"':
            self._double_quoted()
        else:
            self._unquoted_piece(_PLAIN, quoted=False)

    def _double_quoted(self) -> None:
        start, self.at = self.at, self.at + 1
        while self.peek() != '"':
            if self.at + 1 >= len(self.text):
                self.at = start
                raise self.open('"', "quote")
            self.quoted_piece()
        self.at += 1

    def quoted_piece(self) -> None:
        """Consume an escape, an expansion, a run of plain characters or one other character inside double quotes."""
        self._unquoted_piece(_PLAIN_IN_QUOTES, quoted=True)

    def _unquoted_piece(self, plain: re.Pattern[str], *, quoted: bool) -> None:
        """Consume pieces with the same syntax inside and outside of double quotes; `plain` matches plain characters."""
        char = self.text[self.at]
        if char in "$`":
            self.dollar(quoted=quoted)
        elif found := plain.match(self.text, self.at):
            self.at = found.end()
        else:
            self.at += 2 if char == "\\" else 1

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
        elif self.text.startswith('$"', self.at) and not quoted:
            self.at += 1
            self._double_quoted()
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
        """Consume from the `(` at the cursor to its closing `)`; quotes inside count as in words."""
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
        """Consume a line end and the here-documents that begin after it, up to their last line, indented or not."""
        self.at += 1
        for end, body in self.awaited:
            found = re.compile(rf"^[ \t]*{re.escape(end)}[ \t]*$", re.MULTILINE).search(self.text, self.at)
            body.text = self.text[self.at : found.start() if found else len(self.text)]
            self.at = min(found.end() + 1, len(self.text)) if found else len(self.text)
        self.awaited = []

    def peek(self) -> str:
        """The character at the cursor; empty at the end."""
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
        """The line number at the cursor."""
        before, number = self._counted if self._counted[0] <= self.at else (0, self._first_line)
        self._counted = (self.at, number + self.text.count("\n", before, self.at))
        return self._counted[1]

    def open(self, mark: str, missing: str) -> ConfigError:
        return ConfigError(f"script, line {self.line()}: a {mark} is not closed; add the missing {missing}")


# ---------------------------------------------------------------- syntax

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=(.*)", re.DOTALL)
"""Name, subscript, `+` and value of an assignment."""
_REDIRECTION = re.compile(r"(\d*|\{\w+\})(&>>|&>|<<<|<<-|<<|<&|<>|<(?!\()|>>|>&|>\||>(?!\())")


_OPENER = re.compile(r"(?:if|while|until|for|select|case|function|\[\[|\{)(?![^ \t\n;&|()<>])|\(")
_OPERATOR = re.compile(r"(&&|\|\|)|;;&|;[;&]?|\|&?|&(?!>)|\)|(?:then|do|done|fi|esac|\})(?![^ \t\n;&|()<>])")


@dataclass(frozen=True)
class Simple:
    """A simple command: its words, the texts that it reads, and whether its output is redirected to a file.

    `[[ x ]]` has the words "[[" and "x", `((x))` the words "((" and "x".
    """

    line: int
    words: tuple[str, ...]
    bodies: list[Body] = field(default_factory=list)
    to_file: bool = False

    def texts(self) -> list[str]:
        """The command's words and the texts that it reads."""
        return [*self.words, *(body.text for body in self.bodies)]


class Item(NamedTuple):
    """A command in a list, with the operator before it: `;` (also for a line end, `&` and `|`), `&&` or `||`."""

    operator: str
    node: Simple | Block
    negated: bool


class Branch(NamedTuple):
    """A part of a block: its condition or patterns as written, the parsed condition, and the commands."""

    line: int
    text: str
    condition: tuple[Item, ...]
    body: tuple[Item, ...]
    patterns: tuple[str, ...] = ()


class Block(NamedTuple):
    """A compound command; `head` has the words of `for NAME in ...` or `case WORD`, or a function's name."""

    kind: str
    line: int
    head: tuple[str, ...]
    branches: tuple[Branch, ...]

    def shown(self, branch: Branch) -> str:
        """A branch as notes name it."""
        return branch.text if branch.text == "else" else f"{self.kind} {branch.text}"


def parse(text: str, line: int = 1) -> tuple[Item, ...]:
    """Parse the commands of `text`, which begins at `line`; raises ConfigError for an unclosed quote or bracket."""
    return _Parser(text, line).items()


def array_words(text: str) -> list[str]:
    """Split an array `(...)` into its words as written."""
    return _Parser(text, 1).scan.array()


def pieces(text: str, *, quoted: bool = False) -> list[str]:
    """Split a word as written into quotations, escapes, expansions, runs of plain characters and other characters."""
    scan = _Parser(text, 1).scan
    found = []
    while scan.at < len(text):
        start = scan.at
        scan.quoted_piece() if quoted else scan.piece()
        found.append(text[start : scan.at])
    return found


def leaves(items: Sequence[Item]) -> Iterator[Simple]:
    """Yield the simple commands of a list and of the blocks in it."""
    rest = [*reversed(items)]
    while rest:
        node = rest.pop().node
        if isinstance(node, Simple):
            yield node
        else:
            for branch in reversed(node.branches):
                rest += reversed((*branch.condition, *branch.body))


def assigned_names(words: Iterable[str]) -> set[str]:
    """The variables that are set by assignments among the words."""
    return {found[1] for word in words if (found := ASSIGNMENT.fullmatch(word))}


class _Parser:
    def __init__(self, text: str, line: int) -> None:
        self.scan = Scanner(text, line, self.items)

    # ------------------------------------------------------------ lists

    def items(self, *closers: str) -> tuple[Item, ...]:
        """Parse commands up to one of `closers`, which is not consumed, or the end."""
        found: list[Item] = []
        operator = ";"
        while True:
            self.scan.blanks()
            if self.scan.at >= len(self.scan.text) or any(self.scan.sees(closer) for closer in closers):
                return tuple(found)
            read = self._operator()
            if read == "\n":
                continue
            if read:
                operator = read
                continue
            while self.scan.takes("time"):
                self.scan.blanks()
            negated = self.scan.takes("!")
            self.scan.blanks()
            found.append(Item(operator, self._node(), negated))
            operator = ";"

    def _operator(self) -> str:
        """Consume an operator between commands, or a closer without an opener; "" if neither is at the cursor."""
        if self.scan.peek() == "\n":
            self.scan.newline()
            return "\n"
        found = _OPERATOR.match(self.scan.text, self.scan.at)
        self.scan.at = found.end() if found else self.scan.at
        return (found[1] or ";") if found else ""

    def _node(self) -> Simple | Block:
        line = self.scan.line()
        block = self._block(line)
        if block is None:
            return self._simple(line)
        self._redirections([])
        return block

    def _block(self, line: int) -> Simple | Block | None:
        if not _OPENER.match(self.scan.text, self.scan.at):
            return None
        if self.scan.takes("if"):
            return self._if(line)
        for kind in ("while", "until"):
            if self.scan.takes(kind):
                text, condition = self._condition("do")
                return Block(kind, line, (), (Branch(line, text, condition, self._closed("do", "done")),))
        if self.scan.takes("for") or self.scan.takes("select"):
            return self._for(line)
        if self.scan.takes("case"):
            return self._case(line)
        if self.scan.takes("function"):
            self.scan.blanks()
            return self._function(line, self.scan.word())
        if self.scan.takes("[["):
            start = self.scan.at
            while not self.scan.sees("]]") and self.scan.at < len(self.scan.text):
                self.scan.piece()
            inner, self.scan.at = self.scan.text[start : self.scan.at], self.scan.at + 2
            return Simple(line, ("[[", inner))
        if self.scan.sees("(("):
            start = self.scan.at + 2
            self.scan.parentheses()
            return Simple(line, ("((", self.scan.text[start : self.scan.at].removesuffix(")").removesuffix(")")))
        for kind, closer in (("{", "}"), ("(", ")")):
            if self.scan.takes(kind):
                return Block(kind, line, (), (Branch(line, "", (), self._closed("", closer)),))
        return None

    # ------------------------------------------------------------ compound commands

    def _if(self, line: int) -> Block:
        branches: list[Branch] = []
        while True:
            started = self.scan.line()
            text, condition = self._condition("then", "fi")
            self.scan.takes("then")
            branches.append(Branch(started, text, condition, self.items("elif", "else", "fi")))
            if not self.scan.takes("elif"):
                break
        if self.scan.takes("else"):
            branches.append(Branch(self.scan.line(), "else", (), self.items("fi")))
        self.scan.takes("fi")
        return Block("if", line, (), tuple(branches))

    def _condition(self, *closers: str) -> tuple[str, tuple[Item, ...]]:
        start = self.scan.at
        condition = self.items(*closers)
        return self.scan.text[start : self.scan.at].strip(" \t\n;"), condition

    def _for(self, line: int) -> Block:
        self.scan.blanks()
        if self.scan.sees("(("):
            start = self.scan.at + 2
            self.scan.parentheses()
            head: list[str] = ["((", self.scan.text[start : self.scan.at - 2]]
        else:
            head = [self.scan.word()]
            self.scan.space()
            if self.scan.takes("in"):
                head.append("in")
                self.scan.blanks()
                while self.scan.peek() not in (*"\n;&|", ""):
                    head.append(self.scan.some_word())
                    self.scan.blanks()
        while self.scan.peek() in (*" \t\n;",):
            self.scan.newline() if self.scan.peek() == "\n" else self.scan.step()
        opener, closer = ("{", "}") if self.scan.sees("{") else ("do", "done")
        return Block("for", line, tuple(head), (Branch(line, "", (), self._closed(opener, closer)),))

    def _case(self, line: int) -> Block:
        self.scan.blanks()
        subject = self.scan.word()
        self.scan.space()
        self.scan.takes("in")
        branches: list[Branch] = []
        while True:
            self.scan.space()
            if self.scan.takes("esac") or self.scan.at >= len(self.scan.text):
                return Block("case", line, (subject,), tuple(branches))
            started = self.scan.line()
            self.scan.takes("(")
            patterns = []
            while self.scan.peek() not in (*")\n", ""):
                patterns.append(self.scan.some_word())
                self.scan.blanks()
                if self.scan.text.startswith("|", self.scan.at):
                    self.scan.step()
                self.scan.blanks()
            self.scan.step()
            body = self.items(";;", ";&", "esac")
            while self.scan.peek() in (";", "&"):
                self.scan.step()
            branches.append(Branch(started, "|".join(patterns), (), body, tuple(patterns)))

    def _function(self, line: int, name: str) -> Block:
        self.scan.blanks()
        if self.scan.text.startswith("(", self.scan.at):
            self.scan.parentheses()
        self.scan.space()
        body = (Item(";", self._node(), False),) if self.scan.at < len(self.scan.text) else ()
        return Block("function", line, (name,), (Branch(line, name, (), body),))

    def _closed(self, opener: str, closer: str) -> tuple[Item, ...]:
        self.scan.blanks()
        self.scan.takes(opener)
        body = self.items(closer)
        self.scan.takes(closer)
        return body

    # ------------------------------------------------------------ simple commands

    def _simple(self, line: int) -> Simple | Block:
        words: list[str] = []
        bodies: list[Body] = []
        to_file = False
        while True:
            to_file = self._redirections(bodies) or to_file
            char = self.scan.peek()
            if char == "(" and len(words) == 1 and _NO_ARGUMENTS.match(self.scan.text, self.scan.at):
                return self._function(line, words[0])
            if char in (*"\n;|&()", ""):
                return Simple(line, tuple(words), bodies, to_file)
            words.append(self.scan.some_word())

    def _redirections(self, bodies: list[Body]) -> bool:
        """Consume blanks and redirections; returns whether one of them sends the output to a file."""
        to_file = False
        while True:
            self.scan.blanks()
            found = _REDIRECTION.match(self.scan.text, self.scan.at)
            if not found:
                return to_file
            self.scan.at = found.end()
            self.scan.blanks()
            target = self.scan.word()
            to_file = to_file or (found[2] in (">", ">>", ">|", "&>", "&>>") and found[1] in ("", "1"))
            if found[2] in ("<<", "<<-"):
                bodies.append(Body("", literal=bool(re.search(r"['\"\\]", target))))
                self.scan.awaited.append((re.sub(r"['\"\\]", "", target), bodies[-1]))
            elif found[2] == "<<<":
                quote = target[:1] if target[:1] in ("'", '"') else ""
                bodies.append(Body(target.removeprefix(quote).removesuffix(quote), literal=quote == "'"))
