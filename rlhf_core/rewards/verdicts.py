"""Read the score in a judge's reply: numbers as people write them, and fields of JSON objects.

A number that can be read in two ways, or on another scale, is no score: the judge is asked again.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from rlhf_core.config.rewards import JsonVerdict, PatternVerdict
from rlhf_core.text import fold

_GAP = r"[^\S\n]*[*_`$]*[^\S\n]*"
_UNIT = r"(?:(?:points?|pts?|marks?|stars?|punkte?n?|puntos?|punti)(?![^\W_])|[分点점])"
_RANGE = r"(?:\d+\s*(?:-|to)\s*)"
_NAMES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_WORDS = {word: number for number, word in enumerate(_NAMES, 1)}
_TOP = rf"(?:(?P<top>\d+(?:[.,]\d+)?|{'|'.join(_WORDS)})(?!(?!{_UNIT})[^\W_]))"
_SCALE_WORDS = (
    r"/|(?:out[\s-]+)?of(?:\s+(?:an?|the|possible|max\w*|total|of)){0,4}|out|von|van|aus|sur|sobre|de|su|из|in|over|auf"
    rf"|{_UNIT}?[满滿]分|on\s+(?:an?|the)\s+{_RANGE}?"
    rf"|(?:(?:on|using|with|in)\s+)?(?:(?:an?|the)\s+)?(?:scale|max(?:imum)?\.?|at\s+most)(?:\s+(?:of|from|is))?\s*:?\s*{_RANGE}?"
)
_NUMBER = re.compile(r"[-+]?(?:\d+(?:[.,]\d+)?|[.,]\d+)(?:[eE][-+]?\d+)?")
_CONTINUES = re.compile(
    rf"[.,·'’]\d|\s*[:=]\s*\d|(?!{_UNIT})[^\W_]|[^\S\n]*‰|[^\S\n]*(?:[+×x=^÷→⇒]|[-=~]+>)\s*\d|[^\S\n]+(?:\*[^\S\n]*)?\d"
    rf"|{_GAP}(?:(?:-+|—|~|±|\+/-)\s*|(?:to|or|and|plus|minus|bis|oder|à|ou)\s+(?:maybe\s+)?)\d"
    r"|[^\S\n]*[,;|][^\S\n]*\d+(?:[.,]\d+)?[^\S\n]*(?:$|[\n.,;|)\]]|(?:and|or)\b)",
    re.IGNORECASE,
)
"""What makes a number longer, or one of several: `1,000.5`, `7th`, `7-8`, `7 -> 8`, `7 or 8`, `1 000`, `7, 8`."""
_SCALE = re.compile(
    rf"(?:\n(?=[^\S\n]*(?:/|out\b)))?{_GAP}{_UNIT}?{_GAP}(?:[,;:—-]+(?=\D))?{_GAP}[\[(（]?{_GAP}"
    rf"(?:(?:i\.?\s?e\.?|that\s+is|meaning|which\s+is)[,:]?\s*)?(?:(?P<again>\d+(?:[.,]\d+)?)\s*{_UNIT}?{_GAP})?"
    rf"(?:(?:{_SCALE_WORDS}){_GAP}{_TOP}|(?P<percent>%|per\s?cent|pct|prozent))",
    re.IGNORECASE,
)
_RANGED = re.compile(
    rf"{_GAP}(?:[\[(（]\s*(?:where\s+)?|,?\s+(?:where|with)\s+)(?:(?:from|between)\s+)?(?:{_RANGE}{_TOP}\s*[)\]）]|(?:{_RANGE})?{_TOP.replace('top', 'last')}"
    r"[\s-]*(?:points?\s+scale|scale|(?:is|=|being)\s+(?:the\s+)?(?:best|max\w*|highest|perfect)))",
    re.IGNORECASE,
)
_OTHER_SCORE = re.compile(r"(?:max(?:imum)?\.?|possible|perfect|full)[\s*_]+(?:possible[\s*_]+)?$", re.IGNORECASE)
_MAXIMUM = re.compile(
    r"max\w*|(?:(?:score|rating)_?)?(?:out_?of|max\w*|scale|range)|scale_max|possible\w*", re.IGNORECASE
)
_SEPARATOR = re.compile(r"[\n;|]|,\s|\s(?:and|und|et)\s")
_THOUGHTS, _THOUGHTS_END = (
    re.compile(rf"(?:<{end}(?:seed:)?(?:think(?:ing)?|thoughts?)>|\[{end}THINK\]|◁{end}think▷)", re.IGNORECASE)
    for end in ("", "/")
)
_NUMBERED = re.compile(r"\d+[.)]\s+\W*\d")
_BRACE = re.compile(r'"(?:\\.|[^"\\])*"|[{}]', re.DOTALL)
_OPENING, _LIST = re.compile(r"[\[{]"), re.compile(r"\[\s*\{")
_FIELD = re.compile(r"""\{\s*(?:"[^"]*"|'[^']*'|\w+)\s*:""")


def read_score(text: str, verdict: PatternVerdict | JsonVerdict, *, low: float, high: float) -> float:
    """The score in a judge's reply. Raises ValueError if it has none between `low` and `high`.

    >>> read_score("Clear and right. Score: 8/10", PatternVerdict(), low=0, high=10)
    8.0
    """
    return _checked(_found(text, verdict, high, whole=True), low, high)


def read_scores(
    text: str, verdict: PatternVerdict | JsonVerdict, *, count: int, low: float, high: float
) -> list[float]:
    """The scores of `count` answers, in the order shown. Raises ValueError for another number of them, or one out of range.

    >>> read_scores('The second is wrong. {"scores": [8, 1.5]}', JsonVerdict(field="scores"), count=2, low=0, high=10)
    [8.0, 1.5]
    """
    found = given = _found(text, verdict, high)
    if isinstance(found, str):
        listed = fold(found).strip(" \t*_`[](){}.")
        commas = "," if not _SEPARATOR.search(listed) else None
        given = listed.split(commas) if commas and "," in listed else _SEPARATOR.split(listed)
        given = listed.split() if len(given) == 1 else given
    if not isinstance(given, list) or len(given) != count:
        raise ValueError(f"the judge's scores {str(found)[:80]!r} are not one for each of the {count} answers")
    if any(isinstance(one, str) and _NUMBERED.match(one.strip()) for one in given):
        raise ValueError(f"the judge's scores {str(found)[:80]!r} are numbered; give the scores alone")
    return [_checked(one, low, high) for one in given]


def find_verdict(text: str, verdict: PatternVerdict | JsonVerdict, *, whole: bool = False) -> Any:
    """The group of the last match of the pattern, or the field of the last outermost JSON object that has it, or None.

    Thoughts are left out. With `whole`, the group is returned with the text after it, which may belong to a number.

    >>> find_verdict("<think>Score: 3?</think>Score: 4. No, Score: 5", PatternVerdict())
    '5'
    """
    if isinstance(verdict, JsonVerdict):
        return _object_with(text, verdict.field).get(verdict.field)
    spoken = fold(_spoken(text))
    found = [
        one for one in re.finditer(verdict.pattern, spoken) if not _OTHER_SCORE.search(spoken[: one.start()][-30:])
    ]
    if not found or found[-1][1] is None:
        return None
    start = found[-1].start(1)
    if whole and re.search(r"\d[.,]?$", spoken[:start]) and spoken[start].isdigit():
        raise ValueError(f"the pattern matches a part of a number: {spoken[max(0, start - 20) : start + 20]!r}")
    return spoken[start:] if whole else found[-1][1]


def read_number(text: str, *, low: float, high: float) -> float:
    """The number with which a text begins. Raises ValueError if it is on another scale, or can be read in two ways.

    >>> read_number("7,5 points of 10", low=0, high=10)
    7.5
    """
    text = fold(text).lstrip(" \t*_`")
    shown = text.partition("\n")[0][:40]
    number = _NUMBER.match(text)
    if number is None:
        raise ValueError(f"the judge's score {shown!r} is not a number")
    rest, value = text[number.end() :], _plain(number[0])
    if re.fullmatch(r"[-+]?[1-9]\d{0,2},\d{3}", number[0]) or _CONTINUES.match(rest):
        raise ValueError(f"the judge's score {shown!r} can be read in several ways; give one number")
    if not all(_is_top(top, high) for top in _tops(rest, value, high)):
        raise ValueError(f"the judge's score {shown!r} is on another scale; scores go from {low:g} to {high:g}")
    return value


def _tops(rest: str, value: float, high: float) -> Iterator[str]:
    """Yield the highest scores that the text after a number names: `/10 (80%)` names 10 and, of a score of 8, 10 again."""
    while found := _SCALE.match(rest):
        again, rest = found["again"], rest[found.end() :]
        if not found["percent"]:
            if again is None or _plain(again) == value:
                yield found["top"]
        elif again is None:
            yield "100"
        elif re.match(r"\s*[)\]）]", rest) and not math.isclose(_plain(again) / 100 * high, value):
            yield "nan"
    if ranged := _RANGED.match(rest):
        yield ranged["top"] or ranged["last"]


def _is_top(said: str, high: float) -> bool:
    return (_WORDS[said.lower()] if said.lower() in _WORDS else _plain(said)) == high


def _plain(number: str) -> float:
    return float(number.replace(",", "."))


def _found(text: str, verdict: PatternVerdict | JsonVerdict, high: float, *, whole: bool = False) -> Any:
    found = find_verdict(text, verdict, whole=whole)
    if found is None:
        raise ValueError(f"the judge's answer holds no score: {text[-80:]!r}")
    for name, value in _object_with(text, verdict.field).items() if isinstance(verdict, JsonVerdict) else ():
        tops = re.findall(r"\d+(?:\.\d+)?", f"{value}") if _MAXIMUM.fullmatch(name) else []
        if tops and float(tops[-1]) != high:
            raise ValueError(f"the judge's score is on another scale: {name} is {value!r}, not {high:g}")
    return found


def _checked(found: Any, low: float, high: float) -> float:
    if isinstance(found, str):
        found = read_number(found, low=low, high=high)
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise ValueError(f"the judge's score {found!r} is not a number")
    if not low <= found <= high:  # NaN too
        raise ValueError(f"the judge's score {found:g} is not between {low:g} and {high:g}")
    return float(found)


def _spoken(text: str) -> str:
    return _THOUGHTS.split(_THOUGHTS_END.split(text)[-1])[0]


def _object_with(text: str, field: str) -> dict[str, Any]:
    return next((one for one in reversed([*_objects(_spoken(text))]) if field in one), {})


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the outermost JSON objects of a text. Objects inside of lists and of broken objects are not outermost."""
    decoder, at = json.JSONDecoder(object_pairs_hook=_unique), 0
    while match := _OPENING.search(text, at):
        start = match.start()
        try:
            value, at = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            if _LIST.match(text, start):
                return  # its objects are not outermost
            at = _closed(text, start) if _FIELD.match(text, start) else start + 1
        else:
            if isinstance(value, dict):
                yield value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


def _closed(text: str, start: int) -> int:
    """The place after the brace that closes the one at `start`, or the end of the text if it stays open."""
    depth = 0
    for token in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if not depth:
            return token.end()
    return len(text)
