"""Damage bytes and values in the ways of real files and user input. One random generator determines all damage."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

DIGITS = "9" * 5000
"""Number with more digits than Python converts to an int by default."""
DEPTH = 3000
"""Nesting of brackets that exceeds Python's stack."""
RAW = {
    "@digits@": DIGITS,
    "@deep@": "[" * DEPTH + "]" * DEPTH,
    "@open@": "[" * DEPTH,
    "@nan@": "NaN",
    "@inf@": "-Infinity",
}
"""Marks in a tree -> text in the file that replaces them, which no JSON or TOML writer would produce."""

SNIPPETS = (
    *(b"", b"\0", b"\r\n", b"\r", b"\xef\xbb\xbf", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\x1b[31m", b"\xe2\x80\xa8"),
    *(
        b"NaN",
        b"Infinity",
        b"-0",
        b"1e999",
        b"0x10",
        b"null",
        b"true",
        b"{}",
        b"[]",
        b'""',
        b'"',
        b"'",
        b"\\",
        b"\\ud83d",
    ),
    *(
        b"${X}",
        b"$((1/0))",
        b"$(",
        b"`",
        b"#",
        b"[/red]",
        b"[bold]",
        b"%s",
        b"{0}",
        b"../../..",
        b"/",
        b"~nobody/x",
        b"none",
    ),
    DIGITS.encode(),
    b"[" * DEPTH,
    b"{" * DEPTH,
    b"(" * DEPTH,
    b"a.b." * 500 + b"c",
    b"x" * 20_000,
)

ODD_TEXTS = (
    *(
        "",
        " ",
        "none",
        "nan",
        "\0",
        "\ud83d",
        "caf\u00e9",
        "\u202e",
        "[/red]",
        "{0}",
        "$X",
        "../x",
        "~nobody/x",
        "store://",
    ),
    *(
        "file:///",
        "a" * 300,
        "x" * 5000,
        "null",
        "1e999",
        "\n",
        "\r\n",
        "'",
        '"',
        "\\",
        "@digits@",
        "@deep@",
        "@nan@",
        "@inf@",
    ),
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 10**400, 0.0, -0.5, 1e308, [], {}, [[]], {"": {}}, [None]),
    *({"type": "x"}, {"type": []}, {"a": {"b": {"c": 1}}}, [1, "a", None, {}]),
)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """`data` with one to three kinds of damage."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = rng.choice(_DAMAGES)(data, rng)
    return data


def odd(rng: random.Random) -> Any:
    """A value that programs rarely expect."""
    return copy.deepcopy(rng.choice(ODD_TEXTS) if rng.random() < 0.5 else rng.choice(ODD_VALUES))


def changed(tree: Any, rng: random.Random) -> Any:
    """A copy of `tree` (tables, lists and plain values) with one to three of its values changed."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return odd(rng)
        holder, key = rng.choice(places)
        _change(holder, key, rng)
    return tree


def written(text: str) -> str:
    """JSON or TOML text in which marks are replaced by text that no writer would produce."""
    for mark, raw in RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return text


# ---------------------------------------------------------------- private


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Each table or list with each of its keys."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        found += [(holder, key) for key in keys]
        waiting += [holder[key] for key in keys]
    return found


def _change(holder: Any, key: Any, rng: random.Random) -> None:
    kind = rng.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice((*ODD_TEXTS, *(str(other) for other in holder)))] = holder.pop(key)
    elif kind == 2:
        holder[key] = [holder[key]]
    elif kind == 3 and isinstance(holder, dict):
        holder[rng.choice(ODD_TEXTS)] = odd(rng)
    elif kind == 4 and isinstance(holder[key], (int, float)) and abs(holder[key]) < 10**18:
        holder[key] = rng.choice((str(holder[key]), -holder[key], holder[key] * 10**9, holder[key] + 0.5))
    else:
        holder[key] = odd(rng)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _flip(data: bytes, rng: random.Random) -> bytes:
    flipped = bytearray(data)
    for _ in range(rng.choice((1, 4, 32)) if data else 0):
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(SNIPPETS) + data[at:]


def _replace(data: bytes, rng: random.Random) -> bytes:
    start, end = _span(data, rng)
    return data[:start] + rng.choice(SNIPPETS) + data[end:]


def _delete(data: bytes, rng: random.Random) -> bytes:
    start, end = _span(data, rng)
    return data[:start] + data[end:]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    start, end = _span(data, rng)
    return data[:end] + data[start:]


def _line_ends(data: bytes, rng: random.Random) -> bytes:
    return data.replace(b"\n", rng.choice((b"\r\n", b"\r", b"\n\n", b"")))


def _marked(data: bytes, rng: random.Random) -> bytes:
    return rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\0")) + data


def _recoded(data: bytes, rng: random.Random) -> bytes:
    return data.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "latin-1", "utf-7")), "replace")


def _span(data: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + rng.choice((1, 1, 4, 16, 64, 1024)))


_DAMAGES: Sequence[Callable[[bytes, random.Random], bytes]] = (
    *(
        _cut,
        _flip,
        _flip,
        _insert,
        _insert,
        _insert,
        _replace,
        _replace,
        _delete,
        _repeat,
        _line_ends,
        _marked,
        _recoded,
    ),
)
