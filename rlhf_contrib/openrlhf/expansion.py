"""Expand the words of a shell script with the values that the script itself sets; nothing is run.

What has no value in the script stays as written, `$` and all, and in one piece: `$(date +%m %d)` is one word.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from rlhf_contrib.openrlhf.syntax import (
    ASSIGNMENT,
    PLAIN_IN_QUOTES,
    Block,
    Item,
    Simple,
    array_words,
    dollar_end,
    parse,
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
"""A number that a shell can compute with, in 64 bits."""


def computed(text: str) -> int | None:
    """Return the value of an expression of whole numbers, 1 or 0 for a comparison; None if it has none."""
    if not re.fullmatch(r"[\d\s+*/%()<>=!&|-]+", text):
        return None
    try:
        value = _arithmetic(ast.parse(text.replace("&&", " and ").replace("||", " or ").strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, MemoryError, RecursionError):  # also for an expression that is too deep
        return None
    return value if -(2**63) <= value < 2**63 else None


def test(words: list[str], *, patterns: bool = False) -> bool | None:
    """Return the value of a test, None if it is of a file or has a word without a value in the script."""
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
    """Return the value of the condition in `[[ ]]`, None if unknown; `text` expands a word."""
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
    """Return the value of whole numbers joined by + - * / %, comparisons, and, or."""
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
_RANGE = re.compile(r"\{(-?\d{1,18})\.\.(-?\d{1,18})\}|\$\(seq (-?\d{1,18})(?: (-?\d{1,18}))?\)")
_MOST_VALUES = 1000
"""Values of a loop that are read."""
_MOST_WORK = 10_000_000
"""About a second. One unit is roughly the cost of copying one character. `A=$A$A`, thirty times, would fill the memory."""
_WORD, _PIECE, _EXPANSION = 20, 10, 100
"""Units for a word, a quoted part and an expansion, in addition to those of their characters."""
PARSED = 8
"""Units for a character that is parsed."""
_PLAIN = re.compile(r"[^\\'\"$` \t\n]+")
_ANSI = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_HOLD = str.maketrans(" \t\n", "\ue000\ue001\ue002")
_LET_GO = str.maketrans("\ue000\ue001\ue002", " \t\n")


def released(text: str) -> str:
    """Return a word with the blanks of the parts left as written."""
    return text.translate(_LET_GO)


class Values:
    """The variables and parameters of a script at a point, and the expansion of words with them.

    `arguments` are those of the function that runs, or of `set --`; None for those of the script, which are not known.
    `used` are the names that an expansion has read, `doubts` notes for a reader of the result.
    """

    def __init__(self) -> None:
        self.variables: dict[str, list[str]] = {}
        self.arguments: list[str] | None = None
        self.used: set[str] = set()
        self.doubts: list[str] = []
        self._spent = 0

    def spend(self, work: int) -> None:
        """Count work, about a character each; ConfigError for a script whose values or calls grow without end."""
        self._spent += work
        if self._spent > _MOST_WORK:
            raise ConfigError("script: its values or calls grow beyond what is read; give the commands alone")

    # ------------------------------------------------------------ words

    def fields(self, raw: str, *, split: bool = True) -> list[str]:
        """Return the words that a word as written expands to; without `split`, as in an assignment, one at most."""
        self.spend(_WORD + len(raw))
        found: list[list[str]] = [[]]
        at = 0
        while at < len(raw):
            if plain := _PLAIN.match(raw, at):
                found[-1].append(plain[0])
                at = plain.end()
                continue
            at, pieces, splits = self._piece(raw, at)
            if splits and split:
                pieces = [part for piece in pieces for part in _apart(piece)]
            elif not split:
                pieces = [" ".join(pieces)] if pieces else pieces
            for number, piece in enumerate(pieces):
                if number:
                    found.append([])
                if piece or not splits:
                    found[-1].append(piece)
        return ["".join(parts) for parts in found if parts]

    def text(self, raw: str) -> str:
        """Return a word as written with all expansions, in one piece."""
        return " ".join(self.fields(raw, split=False))

    def body(self, text: str) -> str:
        """Return the text of a here-document with all expansions: quotes are characters there."""
        return self._quoted(text, quotes=False)

    def _piece(self, raw: str, at: int) -> tuple[int, list[str], bool]:
        """Return the end of the piece at `at`, its values, and whether blanks in them end a word."""
        char = raw[at]
        self.spend(_PIECE)
        if char == "\\":
            return at + 2, [raw[at + 1 : at + 2]] if raw[at + 1 : at + 2] != "\n" else [], False
        if char == "'":
            end = raw.index("'", at + 1)
            return end + 1, [raw[at + 1 : end]], False
        if raw.startswith("$'", at):
            end = self._end(raw, at, quoted=False)
            return end, [re.sub(r"\\(.)", lambda found: _ANSI.get(found[1], found[0]), raw[at + 2 : end - 1])], False
        if char == '"' or raw.startswith('$"', at):
            start = at + 1 + (char == "$")
            end = start
            while raw[end : end + 1] not in ('"', ""):
                if plain := PLAIN_IN_QUOTES.match(raw, end):
                    end = plain.end()
                else:
                    end = end + 2 if raw[end] == "\\" else self._end(raw, end, quoted=True)
            return end + 1, self._quoted_words(raw[start:end]), False
        if char in "$`":
            end = self._end(raw, at, quoted=False)
            return end, self.parameter(raw[at:end], quoted=False), True
        return at + 1, [char], char in " \t\n"  # blanks are in the default of an expansion alone

    def _quoted_words(self, inner: str) -> list[str]:
        """Return the content of double quotes: one word, or those of `"${a[@]}"` and `"$@"`."""
        if (inner == "$@" or re.fullmatch(r"\$\{(@|\w+\[@\])[^{}]*\}", inner)) and inner.count("$") == 1:
            return self.parameter(inner, quoted=True)
        return [self._quoted(inner)]

    def _quoted(self, inner: str, *, quotes: bool = True) -> str:
        made, at = "", 0
        while at < len(inner):
            if plain := PLAIN_IN_QUOTES.match(inner, at):
                made, at = made + plain[0], plain.end()
            elif inner[at] in "$`":
                end = self._end(inner, at, quoted=True)
                made += " ".join(self.parameter(inner[at:end], quoted=True))
                at = end
            elif inner[at] == "\\" and inner[at + 1 : at + 2] in (*'"\\$`\n',):
                self.spend(_PIECE)
                made += inner[at + 1].strip("\n")
                at += 2
            else:
                made += "" if quotes and inner[at] == '"' else inner[at]
                at += 1
        return made

    def _end(self, raw: str, at: int, *, quoted: bool) -> int:
        """Return where the expansion at `at` ends. The scanner copies the whole text; 200 characters of it are one unit."""
        end = dollar_end(raw, at, quoted=quoted)
        self.spend(_EXPANSION + len(raw) // 200 + PARSED * (end - at))
        return end

    # ------------------------------------------------------------ parameters

    def parameter(self, text: str, *, quoted: bool) -> list[str]:
        """Return the words of an expansion `$x`, `${x...}`, `$(...)`, `$((...))` or backticks."""
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
        """Return the value of a name, None if the script gives it none."""
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
            elements = [word for key, words in self.variables.items() if key.startswith(f"{name}[") for word in words]
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
        made = [self._quoted(other)] if quoted else [_held(word) for word in self.fields(other)]
        if sign.endswith("="):
            self.variables[name] = [" ".join(made)]
        return made

    def _length(self, text: str) -> list[str]:
        """Return the number of words or characters that `${#x}` counts."""
        name, all_words = text[3:-1].removesuffix("[@]").removesuffix("[*]"), text.endswith(("[@]}", "[*]}"))
        words = self._words(name, "@" if all_words else None)
        return [_held(text)] if words is None else [str(len(words) if all_words else len(" ".join(words)))]

    def _cut(self, word: str, sign: str, rest: str) -> str:
        """Return a value without its longest or shortest beginning or end, or with a text replaced."""
        if sign in ("/", "//"):
            anchor, rest = (rest[0], rest[1:]) if rest.startswith(("#", "%")) else ("", rest)
            old, new = (self.text(part) for part in re.findall(r"((?:\\.|[^\\/])*)/?(.*)", rest, re.DOTALL)[0])
            if anchor == "#":
                return new + word.removeprefix(old) if word.startswith(old) else word
            if anchor == "%":
                return word.removesuffix(old) + new if word.endswith(old) else word
            self.spend(word.count(old) * len(new) if old else 0)
            return word.replace(old, new, -1 if sign == "//" else 1) if old else word
        self.spend(len(word) ** 2 // 100)  # each end is compared with the pattern
        pattern = self.text(rest)
        ends = range(len(word) + 1)
        for end in ends if sign in ("#", "%%") else reversed(ends):
            if sign.startswith("#") and fnmatchcase(word[:end], pattern):
                return word[end:]
            if sign.startswith("%") and fnmatchcase(word[end:], pattern):
                return word[:end]
        return word

    def _substituted(self, text: str) -> list[str]:
        """Return the output of `$(echo x)` and `$(cat <<END ...)`; any other command stays as written."""
        inner = text[1:-1] if text.startswith("`") else text[2:-1]
        self.spend(PARSED * len(inner))
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
        """Return the text that a command reads from its here-document or here-string, without comment lines."""
        body = node.bodies[-1]
        text = body.text if body.literal else self.body(body.text)
        return re.sub(r"(?m)^[ \t]*#.*\n?", "", re.sub(r"\\[ \t]*\n", " ", text)).rstrip("\n")

    def read_into(self, node: Simple, words: list[str]) -> None:
        """Read the text of `read`, `mapfile` or `readarray`, whose words are expanded, into its variables."""
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
        """Return the words of a loop: those of `{1..5}` and `$(seq 5)`, too."""
        if not (found := _RANGE.fullmatch(released(self.text(raw)))):
            return self.fields(raw)
        first, last = (found[1], found[2]) if found[1] else (found[3], found[4]) if found[4] else ("1", found[3])
        return [str(number) for number in range(int(first), int(last) + 1)[:_MOST_VALUES]]

    # ------------------------------------------------------------ assignments and numbers

    def restore(self, before: Mapping[str, list[str] | None]) -> None:
        """Give variables the values that they had, None for none."""
        for name, value in before.items():
            self.variables.pop(name, None)
            self.variables |= {} if value is None else {name: value}

    def assign(self, raw: str) -> None:
        """Set a variable, an element or an array, or add to one, from an assignment as written; skip another word."""
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
            if _WHOLE.fullmatch(key) and int(key) <= len(words) and not added:
                self.variables[name] = [*words[: int(key)], self.text(value), *words[int(key) + 1 :]]
                return
            name = f"{name}[{key}]"
        before = self.variables.get(name, []) if added else []
        if not value.startswith("("):
            self.variables[name] = [("".join(before[:1])) + self.text(value), *before[1:]]
            return
        words = []
        for one in array_words(value):
            if element := re.fullmatch(r"\[([^\]]*)\]=(.*)", one, re.DOTALL):
                self.variables[f"{name}[{self.text(element[1])}]"] = [self.text(element[2])]
            else:
                words += self.fields(one)
        self.variables[name] = [*before, *words]

    def number(self, text: str) -> int | None:
        """Return the value of an expression of whole numbers, with `x = ` and `x += ` before it; None if it has none.

        Comparisons give 1 or 0. A quotient is rounded down.
        """
        self.spend(_EXPANSION + 2 * len(text))
        text = re.sub(r"^\s*(?:(\w+)(\+\+|--)|(\+\+|--)(\w+))\s*$", r"\1\4 \2\3", text)
        if step := re.fullmatch(r"(\w+) (\+|-)[+-]", text):
            text = f"{step[1]} {step[2]}= 1"
        target = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)", text, re.DOTALL)
        if target:
            text = f"{target[1]} {target[2]} ({target[3]})" if target[2] else target[3]
        plain = re.sub(r"\$?\{?([A-Za-z_]\w*|(?<=[${])\d+)\}?", lambda name: self._digits(name[1]), text)
        value = computed(plain)
        if target:
            self.variables[target[1]] = [_held(f"$(({text.strip()}))") if value is None else str(value)]
        return value

    def _digits(self, name: str) -> str:
        words = self._words(name, None)
        return " ".join(words) if words else name


def _apart(text: str) -> list[str]:
    """Return the parts of an unquoted value; an empty first or last one stands for a blank at that end."""
    return re.split(r"[ \t\n]+", text)


def _held(text: str) -> str:
    """Return a text as written whose blanks end no word."""
    return text.translate(_HOLD)
