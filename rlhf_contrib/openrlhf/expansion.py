"""Expand the words of a shell script with the values that the script itself sets; nothing is run.

Expressions without a known value stay as written, including the `$`, and in one piece: `$(date +%m %d)` is one word.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain, product
from math import prod
from typing import TypeAlias

from rlhf_contrib.openrlhf.syntax import (
    ASSIGNMENT,
    Block,
    Item,
    Simple,
    array_words,
    parse,
    pieces,
)
from rlhf_core.errors import ConfigError

# ---------------------------------------------------------------- conditions

_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_WHOLE = re.compile(r"-?\d{1,18}")
"""A number within the 64 bits of shell arithmetic."""


def computed(text: str) -> int | None:
    """Evaluate an integer expression; comparisons are 1 or 0. None if it cannot be evaluated."""
    if not re.fullmatch(r"[\d\s+*/%()<>=!&|-]+", text) or re.search(r"\d{20}", text):
        return None
    try:
        value = _arithmetic(ast.parse(text.replace("&&", " and ").replace("||", " or ").strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, MemoryError, RecursionError):  # also if nested too deeply
        return None
    return value if -(2**63) <= value < 2**63 else None


def test(words: list[str], *, patterns: bool = False) -> bool | None:
    """Evaluate a shell test. None if it examines a file, or contains a word whose value the script does not set."""
    if any("$" in word for word in words):
        return None
    match words:
        case ["!", *rest]:
            value = test(rest, patterns=patterns)
            return None if value is None else not value
        case ["-z", text]:
            return text == ""
        case ["-n", text] | [text]:
            return text != ""
        case [left, "=" | "==" | "!=" as sign, right]:
            return (fnmatchcase(left, right) if patterns else left == right) == (sign != "!=")
        case [left, sign, right] if sign in _COMPARISONS and _WHOLE.fullmatch(left) and _WHOLE.fullmatch(right):
            return _COMPARISONS[sign](int(left), int(right))
        case _:
            return None


def double_test(items: Sequence[Item], text: Callable[[str], str]) -> bool | None:
    """Evaluate the condition in `[[ ]]`, with words expanded by `text`. None if unknown."""
    value: bool | None = True
    for item in items:
        if isinstance(item.node, Block):
            one = double_test(item.node.branches[0].body, text)
        else:
            one = test([text(word) for word in item.node.words], patterns=True)
        one = not one if item.negated and one is not None else one
        if item.operator == "||":
            value = True if True in (value, one) else None if None in (value, one) else False
        else:
            value = False if False in (value, one) else None if None in (value, one) else True
    return value


def _arithmetic(node: ast.expr) -> int:
    """Evaluate integers joined by + - * / %, comparisons, and, or."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_arithmetic(left), _arithmetic(right))
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _OPERATORS:
            return int(_OPERATORS[type(sign)](_arithmetic(left), _arithmetic(right)))
        case ast.BoolOp(op=sign, values=values):
            return int((all if isinstance(sign, ast.And) else any)([_arithmetic(value) for value in values]))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_arithmetic(inner)
        case _:
            raise SyntaxError("only + - * / %, comparisons, && and || of whole numbers")


# ---------------------------------------------------------------- expansion

_PARAMETER = re.compile(r"([A-Za-z_]\w*|\d{1,18}|[@*])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_DEFAULT = re.compile(r"(:?[-=+?])(.*)", re.DOTALL)
_CUT = re.compile(r"(%%|%|##|#|//|/)(.*)", re.DOTALL)
_BRACE = re.compile(r"(?<!\$)\{")
_SEQUENCE = re.compile(r"\{(?:(-?\d{1,18})\.\.(-?\d{1,18})|([a-z]\.\.[a-z]|[A-Z]\.\.[A-Z]))(?:\.\.(-?\d{1,18}))?\}")
_SEQ = re.compile(r"\$\(seq (-?\d{1,18})(?: (-?\d{1,18}))?\)")
_MOST_VALUES = 1000
"""Maximum number of loop values that are read."""
_MOST_WORK = 5_000_000
"""Half a second, at about 0.1 microseconds per unit. Without a limit, thirty times `A=$A$A` would fill the memory."""
_WORD, _PIECE, _EXPANSION, _PATTERN = 20, 15, 100, 1000
"""Units of work for a word, a quoted part, an expansion and a pattern, on top of the units for their characters."""
_MOST_WORDS = _MOST_WORK // _WORD
PARSED, COMMANDS = 8, 24
"""Units for a parsed character of a word, and for a parsed character of commands."""
_PLAIN = re.compile(r"[^\\'\"$` \t\n]+")
_ANSI = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_HOLD = str.maketrans(" \t\n", "\ue000\ue001\ue002")
_LET_GO = str.maketrans("\ue000\ue001\ue002", " \t\n")


def released(text: str) -> str:
    """A word in which the blanks of unexpanded parts are ordinary blanks again."""
    return text.translate(_LET_GO)


_Parts: TypeAlias = list[list[str]]
"""The parts of a word; each part is a list of alternatives."""


class Values:
    """The variables and parameters of a script at some point, and the expansion of words with them.

    `arguments` are the arguments of the current function or of `set --`; None at the top level, where the script's
    arguments are unknown. `used` collects the names that expansions have read, `doubts` the notes for the user.
    """

    def __init__(self) -> None:
        self.variables: dict[str, list[str]] = {}
        self.arguments: list[str] | None = None
        self.used: set[str] = set()
        self.doubts: list[str] = []
        self._spent = 0

    def spend(self, work: int) -> None:
        """Count work, about one unit per character; ConfigError for a script whose values or calls grow without end."""
        self._spent += work
        if self._spent > _MOST_WORK:
            raise ConfigError("script: its values or calls grow beyond what is read; give the commands alone")

    # ------------------------------------------------------------ words

    def fields(self, raw: str, *, split: bool = True) -> list[str]:
        """Expand a word as written to words; with `split=False`, as in an assignment, to at most one."""
        words = self._braces(raw) if split and _BRACE.search(raw) else [raw]
        return [field for word in words for field in self._fields(word, split=split)]

    def _fields(self, raw: str, *, split: bool) -> list[str]:
        """Expand the parameters and quotes of a word without braces."""
        self.spend(_WORD + PARSED * len(raw))
        if _PLAIN.fullmatch(raw):
            return [raw]
        found: list[list[str]] = [[]]
        for one in pieces(raw):
            values, splits = self._piece(one)
            if splits and split:
                values = [part for value in values for part in re.split(r"[ \t\n]+", value)]
            elif not split:
                values = [" ".join(values)] if values else values
            for number, value in enumerate(values):
                if number:
                    found.append([])
                if value or not splits:
                    found[-1].append(value)
        self.spend(_WORD * len(found))
        return ["".join(parts) for parts in found if parts]

    def _braces(self, raw: str) -> list[str]:
        """Expand `{a,b}` and `{1..3}` in a word as written; other braces stay unchanged."""
        self.spend(_EXPANSION + COMMANDS * len(raw))
        made: _Parts = []
        outside: list[tuple[_Parts, _Parts]] = []  # of each open brace: the parts before it, its alternatives so far
        for part in pieces(raw):
            if part == "{":
                outside.append((made, []))
                made = []
            elif part == "," and outside:
                outside[-1][1].append(self._joined(made))
                made = []
            elif part == "}" and outside:
                inside = self._joined(made)
                made, options = outside.pop()
                literal = [f"{{{one}}}" for one in inside]
                made.append(
                    list(chain(*options, inside)) if options else _sequence("".join(literal), _MOST_WORDS) or literal
                )
                self.spend(_WORD * len(made[-1]))
            else:
                made.append([part])
        return [raw] if outside else self._joined(made)

    def _joined(self, parts: _Parts) -> list[str]:
        """All words that combine one alternative of each part."""
        self.spend(prod(map(len, parts)) * (_PIECE + sum(max(map(len, part)) for part in parts)))
        return ["".join(word) for word in product(*parts)]

    def text(self, raw: str) -> str:
        """Expand a word as written, in one piece."""
        return " ".join(self.fields(raw, split=False))

    def pattern(self, raw: str) -> str:
        """Expand a word that is compared as a pattern; counts the work of compiling it as a Python pattern."""
        text = self.text(raw)
        self.spend(_PATTERN + _WORD * len(text))
        return text

    def body(self, text: str) -> str:
        """Expand the text of a here-document, in which quotes are ordinary characters."""
        return self._quoted(text, quotes=False)

    def _piece(self, raw: str) -> tuple[list[str], bool]:
        """Expand one piece of a word; the second result is whether blanks in its values end the word."""
        self.spend(_PIECE)
        mark, inner = raw[0], raw[1:-1]
        if mark == "\\":
            return [raw[1:]] if raw[1:] != "\n" else [], False
        if mark == "'":
            return [inner], False
        if raw.startswith("$'"):
            return [re.sub(r"\\(.)", lambda found: _ANSI.get(found[1], found[0]), inner[1:])], False
        if mark == '"' or raw.startswith('$"'):
            return self._quoted_words(inner.removeprefix('"')), False
        if mark in "$`":
            return self.parameter(raw, quoted=False), True
        return [raw], mark in " \t\n"  # blanks are in the default of an expansion alone

    def _quoted_words(self, inner: str) -> list[str]:
        """Expand the content of double quotes: one word, or several for `"${a[@]}"` and `"$@"`."""
        if (inner == "$@" or re.fullmatch(r"\$\{(@|\w+\[@\])[^{}]*\}", inner)) and inner.count("$") == 1:
            return self.parameter(inner, quoted=True)
        return [self._quoted(inner)]

    def _quoted(self, inner: str, *, quotes: bool = True) -> str:
        self.spend(_PIECE + PARSED * len(inner))
        made = ""
        for one in pieces(inner, quoted=True):
            self.spend(_PIECE)
            if one[0] in "$`":
                made += " ".join(self.parameter(one, quoted=True))
            elif one[0] == "\\" and one[1:] in (*'"\\$`\n',):
                made += one[1:].strip("\n")
            elif one != '"' or not quotes:
                made += one
        return made

    # ------------------------------------------------------------ parameters

    def parameter(self, text: str, *, quoted: bool) -> list[str]:
        """Expand `$x`, `${x...}`, `$(...)`, `$((...))` or backticks to words."""
        self.spend(_EXPANSION)
        if text.startswith("$(("):
            number = self.number(text[3:-2])
            return [_held(text) if number is None else str(number)]
        if text.startswith(("$(", "`")):
            return self._substituted(text)
        found = _PARAMETER.fullmatch(text[2:-1] if text.startswith("${") else text[1:])
        if text == "$#" and self.arguments is not None:
            return [str(len(self.arguments))]
        if not found:
            return self._length(text) if text.startswith("${#") else [_held(text)]
        name, subscript, rest = found[1], found[2], found[3]
        words = self._words(name, subscript)
        self.spend(sum(map(len, words or ())) + _PIECE * len(words or ()))
        if default := _DEFAULT.fullmatch(rest):
            return self._default(text, name, words, default[1], default[2], quoted=quoted)
        if words is None:
            return [] if name in ("@", "*") else [_held(text)]
        if not rest:
            return words
        if name in ("@", "*") and (start := re.fullmatch(r":(\d+)", rest)):
            return words[int(start[1]) - 1 :]
        if (cut := _CUT.fullmatch(rest)) and not (cut[1] in ("/", "//") and re.match(r"[^/]*[*?\[]", cut[2])):
            return [self._cut(word, cut[1], cut[2]) for word in words]
        return [_held(text)]

    def _words(self, name: str, subscript: str | None) -> list[str] | None:
        """Look up the value of a name; None if the script does not set it."""
        self.used.add(name)
        if name in ("@", "*"):
            if self.arguments is None:
                self.doubts.append("$@ stands for the arguments of the script, which are not in it")
            return self.arguments
        if name.isdigit():
            if self.arguments is None or name == "0":
                return None
            return self.arguments[int(name) - 1 : int(name)] or [""]
        if subscript is None:
            return self.variables.get(name)
        if subscript in ("@", "*"):
            self.spend(len(self.variables))
            first = f"{name}["
            elements = [word for key, words in self.variables.items() if key.startswith(first) for word in words]
            return [*self.variables.get(name, []), *elements] if elements else self.variables.get(name)
        key = self.text(subscript or "")
        if f"{name}[{key}]" in self.variables:
            return self.variables[f"{name}[{key}]"]
        words = self.variables.get(name)
        return words[int(key) : int(key) + 1] if words and _WHOLE.fullmatch(key) else None

    def _default(
        self, text: str, name: str, words: list[str] | None, sign: str, other: str, *, quoted: bool
    ) -> list[str]:
        unset = words is None or (":" in sign and words in ([], [""]))
        if sign.endswith("+"):
            if unset:
                self.doubts.append(f"{text} is read as empty: the script sets no {name}")
                return []
        elif not unset:
            return words or []
        elif sign.endswith("?"):
            return [_held(text)]
        made = [self._quoted(other)] if quoted else [_held(word) for word in self._fields(other, split=True)]
        if sign.endswith("="):
            self.variables[name] = [" ".join(made)]
        return made

    def _length(self, text: str) -> list[str]:
        """The number of words or characters that `${#x}` counts."""
        name, all_words = text[3:-1].removesuffix("[@]").removesuffix("[*]"), text.endswith(("[@]}", "[*]}"))
        words = self._words(name, "@" if all_words else None)
        return [_held(text)] if words is None else [str(len(words) if all_words else len(" ".join(words)))]

    def _cut(self, word: str, sign: str, rest: str) -> str:
        """Strip the longest or shortest prefix or suffix from a value, or replace a text in it."""
        if sign in ("/", "//"):
            anchor, rest = (rest[0], rest[1:]) if rest.startswith(("#", "%")) else ("", rest)
            old, new = (self.text(part) for part in re.findall(r"((?:\\.|[^\\/])*)/?(.*)", rest, re.DOTALL)[0])
            if anchor == "#":
                return new + word.removeprefix(old) if word.startswith(old) else word
            if anchor == "%":
                return word.removesuffix(old) + new if word.endswith(old) else word
            self.spend(word.count(old) * len(new) if old else 0)
            return word.replace(old, new, -1 if sign == "//" else 1) if old else word
        pattern = self.pattern(rest)
        ends = range(len(word) + 1)
        for end in ends if sign in ("#", "%%") else reversed(ends):
            self.spend(_PIECE + len(word) // 10)
            if sign.startswith("#") and fnmatchcase(word[:end], pattern):
                return word[end:]
            if sign.startswith("%") and fnmatchcase(word[end:], pattern):
                return word[:end]
        return word

    def _substituted(self, text: str) -> list[str]:
        """The output of `$(echo x)` and `$(cat <<END ...)`; other commands stay as written."""
        inner = text[1:-1] if text.startswith("`") else text[2:-1]
        self.spend(_EXPANSION + COMMANDS * len(inner))
        items = parse(inner)
        if not items:  # a comment between continued lines
            return []
        if len(items) == 1 and isinstance(items[0].node, Simple) and items[0].node.words:
            node = items[0].node
            if node.words == ("cat",) and node.bodies:
                return [self.read(node)]
            words = [word for raw in node.words for word in self.fields(raw)]
            if words[0] == "echo" and len(words) > 1 and not words[1].startswith("-"):
                return [" ".join(words[1:])]
        if "openrlhf" in inner:
            self.doubts.append(f"$({inner}) is not read")
        return [_held(f"$({inner})")]

    def read(self, node: Simple) -> str:
        """The text that a command reads from its here-document or here-string, without comment lines."""
        body = node.bodies[-1]
        text = body.text if body.literal else self.body(body.text)
        self.spend(_EXPANSION + len(text))
        return re.sub(r"(?m)^[ \t]*#.*\n?", "", re.sub(r"\\[ \t]*\n", " ", text)).rstrip("\n")

    def read_into(self, node: Simple, words: list[str]) -> None:
        """Store the input of `read`, `mapfile` or `readarray`, whose words are already expanded, in its variables."""
        text, name = self.read(node), words[-1]
        if words[0] != "read":
            self.variables[name] = text.split("\n")
            return
        names = [word for word in words[1:] if re.fullmatch(r"[A-Za-z_]\w*", word)]
        to_array = any(re.fullmatch(r"-[a-z]*a", word) for word in words)
        if to_array or len(names) < 2:
            self.variables[name] = text.split() if to_array else [text]
            return
        parts = text.partition("\n")[0].split(None, len(names) - 1)
        self.variables |= {one: [*parts[at : at + 1], ""][:1] for at, one in enumerate(names)}

    def listed(self, raw: str) -> Sequence[str]:
        """The values of a loop, including `$(seq 5)` and `{1..$N}`."""
        text = released(self.text(raw))
        if found := _SEQ.fullmatch(text):
            first, last = (found[1], found[2]) if found[2] else ("1", found[1])
            return [str(number) for number in range(int(first), int(last) + 1)[:_MOST_VALUES]]
        return _sequence(text, _MOST_VALUES) or self.fields(raw)

    # ------------------------------------------------------------ assignments and numbers

    def restore(self, before: Mapping[str, list[str] | None]) -> None:
        """Reset variables to their earlier values; None removes a variable."""
        for name, value in before.items():
            self.variables.pop(name, None)
            self.variables |= {} if value is None else {name: value}

    def assign(self, raw: str) -> None:
        """Apply an assignment as written to a variable, an element or an array; skip any other word."""
        found = ASSIGNMENT.fullmatch(raw)
        if not found:
            if found := ASSIGNMENT.fullmatch(self.text(raw)):  # export "A=b"
                self.variables[found[1]] = [found[4]]
            return
        name, subscript, added, value = found.groups()
        if name == "IFS" and value.strip("'\""):
            self.doubts.append("IFS is not read: values are split at blanks")
        if subscript is not None:
            key, words = self.text(subscript), self.variables.get(name, [])
            self.spend(len(words))
            if _WHOLE.fullmatch(key) and int(key) <= len(words) and not added:
                self.variables[name] = [*words[: int(key)], self.text(value), *words[int(key) + 1 :]]
                return
            name = f"{name}[{key}]"
        before = self.variables.get(name, []) if added else []
        self.spend(len(before) + sum(map(len, before[:1])) // 100)
        if not value.startswith("("):
            self.variables[name] = [("".join(before[:1])) + self.text(value), *before[1:]]
            return
        words = []
        self.spend(PARSED * len(value))
        for one in array_words(value):
            if element := re.fullmatch(r"\[([^\]]*)\]=(.*)", one, re.DOTALL):
                self.variables[f"{name}[{self.text(element[1])}]"] = [self.text(element[2])]
            else:
                words += self.fields(one)
        self.variables[name] = [*before, *words]

    def number(self, text: str) -> int | None:
        """Evaluate an integer expression that may begin with `x = ` or `x += `; None if it has no value.

        Comparisons are 1 or 0. A quotient is rounded down.
        """
        self.spend(_EXPANSION + 2 * len(text))
        text = re.sub(r"^\s*(?:(\w+)(\+\+|--)|(\+\+|--)(\w+))\s*$", r"\1\4 \2\3", text)
        if step := re.fullmatch(r"(\w+) (\+|-)[+-]", text):
            text = f"{step[1]} {step[2]}= 1"
        target = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)", text, re.DOTALL)
        if target:
            text = f"{target[1]} {target[2]} ({target[3]})" if target[2] else target[3]
        plain = re.sub(r"\$?\{?([A-Za-z_]\w*|(?<=[${])\d+)\}?", lambda name: self._digits(name[1]), text)
        self.spend(PARSED * len(plain))
        value = computed(plain)
        if target:
            self.variables[target[1]] = [_held(f"$(({text.strip()}))") if value is None else str(value)]
        return value

    def _digits(self, name: str) -> str:
        text = " ".join(self._words(name, None) or [name])
        self.spend(_PIECE + len(text))
        return text


def _sequence(text: str, most: int) -> list[str]:
    """The numbers or letters of `{1..3}`, `{01..10..3}` or `{c..a}`, at most `most`; empty for any other text."""
    if not (found := _SEQUENCE.fullmatch(text)):
        return []
    first, last, letters, step = found.groups()
    start, end = (ord(letters[0]), ord(letters[-1])) if letters else (int(first), int(last))
    sign = 1 if start <= end else -1
    numbers = range(start, end + sign, sign * (abs(int(step or 1)) or 1))[:most]
    width = max(len(first), len(last)) if re.search(r"(?<!\d)0\d", f"{first} {last}") else 0
    return [chr(number) if letters else f"{number:0{width}}" for number in numbers]


def _held(text: str) -> str:
    """A text in which blanks are replaced by placeholders, so that they do not end a word."""
    return text.translate(_HOLD)
