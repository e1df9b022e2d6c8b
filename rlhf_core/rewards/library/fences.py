"""Find code fences in an answer, line by line as in CommonMark: a program and its output may be in separate fences."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_MARKER = re.compile(r"[ \t>]*(?:[-*+]|\d+[.)])[ \t]+")
_OPENING = re.compile(r"(?P<before>[ \t>]*(?:[^\n]*?[^`\n](?=`))?)(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)$")
_REOPENS = re.compile(r"[ \t>]*[`~]{3,}[ \t]*[.{]?[A-Za-z][\w+#.:-]*\}?[ \t]*$")
"""A language after the fence begins the next one: the first was not closed."""
_LANGUAGE = re.compile(r"\W*(?:lang(?:uage)?-)?(?:[\w./-]+\.(?=\w+\s*$))?([\w+#]*)")


@dataclass(frozen=True, slots=True)
class Fence:
    """A code fence. `language` is the first word after its opening in lower case, or empty."""

    language: str
    content: str


def fences(text: str) -> list[Fence]:
    r"""All code fences of a text, with `\n` between lines and without common indentation.

    >>> fences("So:\r\n```Python3\r\nprint(1)\r\n```")
    [Fence(language='python3', content='print(1)\n')]
    """
    return list(_fences(re.split(r"\r\n|\r|\n", text)))


def last_fence(found: Sequence[Fence], accepts: Callable[[Fence], bool]) -> str | None:
    """The content of the last fence that `accepts` accepts, or None."""
    return next((one.content for one in reversed(found) if accepts(one)), None)


def _fences(lines: list[str]) -> Iterator[Fence]:
    at = 0
    while at < len(lines):
        opening = _OPENING.match(lines[at])
        at += 1
        if opening is None:
            continue
        marker = _MARKER.match(opening["before"])
        indent = re.sub(r"[^ \t>]", " ", marker[0] if marker else re.match(r"[ \t>]*", opening["before"])[0])  # type: ignore[index]
        end, last = _end(lines, at, opening["fence"], len(indent) + 3)
        body = [*lines[at:end], *last]
        content = "".join(f"{line.removeprefix(indent)}\n" for line in body).removeprefix("\ufeff")  # a byte order mark
        yield Fence(_LANGUAGE.match(opening["info"])[1].lower(), textwrap.dedent(content))  # type: ignore[index]
        at = end if end < len(lines) and not last and _REOPENS.match(lines[end]) else end + 1


def _end(lines: list[str], start: int, fence: str, deepest: int) -> tuple[int, list[str]]:
    """The number of the line that closes a fence, and the last line of its content if both are one line.

    The same fence or a longer one closes it, with any text after it, or after the last line. If none does, a shorter or
    deeper one; else the text ends. A deeper one is usually content, such as an example in a docstring.
    """
    for width, depth in ((len(fence), deepest), (3, None)):
        mark = rf"{fence[0]}{{{width},}}"
        alone = re.compile(rf"[ \t>]{{0,{'' if depth is None else depth}}}{mark}(?!.*{fence[0]})")
        after = re.compile(rf"([^{fence[0]}]*[^\s>{fence[0]}]){mark}[ \t]*$")
        for at in range(start, len(lines)):
            if alone.match(lines[at]):
                return at, []
            if ended := after.match(lines[at]):
                return at, [ended[1]]
    return len(lines), []
