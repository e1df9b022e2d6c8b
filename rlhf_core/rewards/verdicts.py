"""Read the score in a judge's reply: numbers as people write them, and fields of JSON objects.

A number is a score only if the text around it is understood: its scale, words that begin an explanation, and counts of
other things in it. If there is another scale or a second reading, the judge is asked again.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from rlhf_core.config.rewards import JsonVerdict, PatternVerdict
from rlhf_core.text import fold

_UNIT = r"(?:(?:points?|pts?|marks?|stars?|punkte?n?|puntos?|punti)(?![^\W_])|[分点점★⭐])"
_DIGITS = r"(?:(?<!\d)\d++(?:[.,]\d++)?(?:e[-+]?\d++)?)"
_RANGE = rf"(?:[-+]?{_DIGITS}\s*(?:-|to|[–—…,]|\.\.+|and)[\s+-]*)"
_NAMES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_WORDS = {word: number for number, word in enumerate(_NAMES, 1)} | {"twenty": 20, "fifty": 50, "hundred": 100}
_BEST = r"(?:best|max\w*|highest|top|perfect(?:ion)?)"
_TOP = rf"(?:{_DIGITS}|{'|'.join(_WORDS)})(?![.,]?\d|(?!{_UNIT})[^\W_])"
_SPACES = re.compile(r"[^\S\n]+")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:[.,]\d+)?|[.,]\d+)(?:[eE][-+]?\d+)?")
_MARKUP = re.compile(r"\n?```(?:\w+\n)?|</?[a-z]+\s*/?>|&nbsp;|\\[a-z]*|[*_`$~{}\ufe0f\u20e3]", re.IGNORECASE)
_SCALE = re.compile(
    rf"(?:(?<![\w.,])(?P<again>{_DIGITS})\s*{_UNIT}?\s*)?(?:(?:/\s*\(?|(?<![^\W\d_])(?:(?:out[\s-]+)?(?:of|from)"
    r"|out|over|divided\s+by|on|von|van|aus|sur|sobre|de|su|из|in|auf)"
    r"\s*:?(?:\s+(?:an?|one|the|possible|max\w*|total|of)(?![^\W_])){0,4}\s+|[满滿]分|up\s+to"
    rf"|(?:scale|range|between|at\s+most|{_BEST})\.?(?:\s+(?:score|points?|rating|possible|of|from|is)){{0,4}}\s*[:=,]?"
    rf"|[\[(∈]\s*(?={_RANGE}))\s*(?:{_RANGE}(?![\s+-]*\d+\s*(?:%|per)))?[\s+-]*(?P<top>{_TOP})"
    r"|(?P<percent>%|(?<![^\W_])(?:per\s?cent(?:age|ile)?|pct|prozent)(?![^\W_])))"
    rf"(?:[\s-]*(?:{_UNIT}|possible|likert|scale))*"
    rf"|(?:{_RANGE})?(?P<last>{_TOP})[\s-]*(?:(?:{_UNIT}[\s-]*)?(?:scale|likert|[满満]点|[满滿]分)"
    rf"|{_UNIT}[\s-]*(?:score|rating)|(?:(?:is|=|:|being|as|means)\s+(?:an?\s+|the\s+)?)?{_BEST})",
    re.IGNORECASE,
)
"""A scale, named by its highest score, perhaps with the score `again`: `/10`, `(0-10)`, `10 is best`, `(8/10)`, `80%`."""
_NUMERAL = rf"(?:{_DIGITS}|{'|'.join(_WORDS)})"
_GAP = r"[\s:=_\"'|.-]*(?:[^\W\d_]+[\s:=_\"'|.-]+)"
_SPAN = rf"(?:[-+]?{_NUMERAL}\s*(?:-|to|through|[–—…]|\.\.+)\s*)"
_IDEAL = r"(?:excellent|flawless|ideal|outstanding)"
_STATED = re.compile(
    rf"(?<![^\W_])(?:(?:scale|likert|range|rubric|points){_GAP}{{0,3}}[\s:=(\[]*(?:{_RANGE}|{_SPAN})(?P<end>{_TOP})"
    rf"|(?:scor(?:es?|ing)|rat(?:ings?|e[ds]?)|grad(?:ing|e[ds]?)|marks?){_GAP}{{0,3}}"
    rf"(?:[(\[]\s*{_SPAN}|(?:from|of|in|are|go|on|run)\s+{_SPAN}|between\s+{_NUMERAL}\s+and\s+)(?P<span>{_TOP})"
    rf"|(?:scale|{_BEST}|full|possible|out\s+of|up\s+to|at\s+most|more\s+than|ends?\s+at|ceiling|bound|limit|[满滿]分"
    rf"|total\s+(?:points|marks)){_GAP}{{0,4}}?(?P<most>{_TOP})\s*(?:{_UNIT}|$|[).,;:!])"
    rf"|(?:{_SPAN})?(?P<best>{_TOP})[\s-]*(?:{_UNIT}[\s-]*)?(?:scale|likert|=\s*(?:good|great|{_IDEAL})|(?:is|means|as\s+the)\s+{_IDEAL}|\(\s*{_BEST}\s*\)"
    r"|(?:is|=|:|being|as|means|would\s+be|the|(?:is\s+)?(?:reserved\s+)?for)\s*(?:an?\s+|the\s+|for\s+)?"
    rf"(?:{_BEST}|full)(?![^\W_]))|^\W*{_SPAN}(?P<alone>{_TOP})\W*$|^\W*(?P<legend>{_TOP})\s*\W\s*(?:{_BEST}|excellent)(?![^\W_]))",
    re.IGNORECASE,
)
"""A scale in any sentence of a reply: `Scores go from 1 to 5`, `Full marks: 5`, `5 is best`, `a 5-point scale`."""
_COUNT = re.compile(
    r"(?<![-+*×=/~±.,\d])(?<![-+*×=/~±]\s)"
    rf"(?:(?:top|best|first|last|between\s+{_DIGITS}\s+and)[\s-]+(?={_DIGITS}))?"
    rf"(?:{_DIGITS}\s*(?:=|:|is|being|means)\s*(?:the\s+)?(?:worst|bad|poor|lowest|min\w*|wrong)"
    r"|(?:step|line|part|criteri(?:on|a)|paragraph|question|section|item|example|fact|sentence|claim)s?"
    rf"\s+{_DIGITS}|{_DIGITS}(?:\s*%\s*(?:of\s+)?(?!{_BEST}|{_UNIT}|overall)[^\W\d_]{{3,}}"
    rf"|\s+{_UNIT}\s+(?:off|lost|deducted|missing)|(?:\s*(?:/|(?:out\s+)?of)\s*(?:the\s+|its\s+|all\s+)?{_DIGITS})?"
    rf"[\s-]+(?:(?!for\s)[^\W\d_]+\s+)?(?!{_UNIT}|(?:\w?[ai]s|this|plus|minus|less|means|flawless)\b)"
    r"(?:[^\W\d_]{2,}s|criteria|people|error|mistake|typo|flaw|issue|problem|list|accuracy)\b))",
    re.IGNORECASE,
)
"""A number in an explanation that is no score: `2 errors`, `3 of 4 facts`, `20% of the facts`, `step 2`, `1 point off`."""
_STATEMENT = re.compile(r"(?<!max)[.!?]++(?=\s|$)|(?<!:)\n", re.IGNORECASE)
_GOES_ON = re.compile(
    r"\W*(?:[/%]|(?:out\s+)?of\b(?!\s+(?:the\s+|its\s+|all\s+)?"
    rf"\d+\s+(?!{_UNIT}|{_BEST}|possible)[^\W\d_])|(?:(?:score|rating)\s+)?(?:on\s+an?"
    rf"|(?:(?:the|my|i\s+use)\s+)?(?:an?\s+)?scale|range|{_BEST}|per\s?cent\w*"
    r"|no|actually|rather|or|oops|wait|sorry|hmm|i\s+mean|make\s+(?:that|it)|so(?=\W+\d)|my\s+(?:\w+\s+)?(?:score|rating)"
    r"|i(?:(?:['’]d|\s+would)\s+(?:rather\s+)?(?:say|raise|lower|go\s+(?:with|for))|\s+(?:will|now)\s+(?:give|rate|score))|scratch\s+that|correction"
    r"|(?:well\W+)?(?:up)?on\s+(?:reflection|reconsideration|second\s+thoughts?)|edit|let\s+me\s+(?:revise|correct|adjust|change)"
    r"|i\s+(?:change|revise|adjust)|i\s+think(?=\W+\d)|(?:down|up)graded|(?:lowered|raised|reduced|adjusted|changed)\s+to|minus"
    r"|after\s+(?:\w+\s*:|(?:an?\s+|the\s+)?(?:penalty|deduction|adjust\w*))|(?:score|rating|grade)\s*[:=]"
    r"|(?:final|total|overall|adjusted|revised)(?:\s+\w+)?\s*[:=])(?![^\W_]))",
    re.IGNORECASE,
)
"""Begins a statement that belongs to the one before it or after it: `Out of 5`, `Scale: 1-5`, `No, 5`."""
_EXPLAINS = re.compile(
    rf"\s*{_UNIT}?[\s)\]]*(?:$|//|/\*|-+[\s>]"
    r"|[,;:.!?|()\[\]<>='\"#—–→⇒\u2190-\u2604\u2607-\u2bff\U0001f000-\U0001ffff]"
    r"|(?:because|since|as|for|due|given|with|which|while|but|although|though|where|when"
    r"|overall|total|in|on|over|and|this|it|the|reason\w*|explanation|justification|comments?|feedback|rationale"
    r"|very|good|great|excellent|perfect|fair|poor|bad|correct|right)\b)",
    re.IGNORECASE,
)
"""What may come after a score: nothing, a mark, or a word that begins an explanation."""
_UNREAD = re.compile(r"\d|\b(?:half|hundred|thousand|million|tenths|hundredths)\b|[½¼¾‰°€£¥]", re.IGNORECASE)
_STARS = re.compile(r"[★⭐]*☆+")
_SPELLED = re.compile(rf"\b(?:zero|{'|'.join(_WORDS)})\b", re.IGNORECASE)
_FULL = re.compile(
    rf"\W*(?:{_UNIT}\W*)?(?:the\s+)?(?:{_BEST}|full)(?:\s+(?:score|marks?|rating|points?))?\s*(?:[).,;!]|$)",
    re.IGNORECASE,
)
"""After a score: the word that it is the highest."""
_LEAST = re.compile(
    r"\W*(?:the\s+)?(?:worst|lowest|minimum)(?:\s+(?:possible|score|marks?|rating))*\s*(?:[).,;!]|$)", re.IGNORECASE
)
"""After a score: the word that it is the lowest."""
_OTHER_SCORE = re.compile(
    r"(?:max(?:imum)?\.?|min(?:imum)?|pass(?:ing)?|top|best|highest|possible|perfect|full)[\s*_]+(?:possible[\s*_]+)?$",
    re.IGNORECASE,
)
_ASPECT = re.compile(
    r"(?<![^\W_])(?:sub|not|style|clarity|accuracy|grammar|tone|format\w*|fluency|relevance|coherence|helpfulness|safety"
    r"|harmlessness|honesty|truthfulness|depth|creativity|conciseness|completeness|readability|originality)[\s*_]*$",
    re.IGNORECASE,
)
"""Before `score`: a part of what is judged. After the whole score it changes nothing, as a weighted score would."""
_NAMED_SCORE = re.compile(
    r"(?<![^\W_])(?!(?:the|an?|my|your|its|this|is|give|final|overall|total|revised|updated|corrected|new"
    r"|so|thus|therefore|hence|and|with|answer|response)[\s*_]+$)[^\W\d_]+[\s*_]*$",
    re.IGNORECASE,
)
"""Before `score`, in its line: the score of something else, such as the style."""
_MAXIMUM = re.compile(
    r"(?:(?:score|rating|rubric|points?|total|marks?)[\W_]*)*(?:(?:out|of|max(?:imum)?|scale|range|possible|full|upper|bound"
    r"|top|best|high(?:est)?|ceiling|limit|denominator|perfect|units?)[\W_]*)+"
    r"(?:(?:score|rating|points?|total|marks?|value)[\W_]*)*",
    re.IGNORECASE,
)
"""Names of fields for the highest score: `max_score`, `outOf`, `points possible`."""
_REVISED = re.compile(r"(?:final|revised|adjusted|corrected|updated)[\W_]*(?:score|rating)", re.IGNORECASE)
_SCORE = re.compile(r"score|rating", re.IGNORECASE)
_SCALED_NAME = re.compile(
    rf"(score[\s*_]*)[(\[](?:out\s+of\s|max\w*\.?\s|{_SPAN})\s*{_TOP}\s*{_UNIT}?[)\]](?=[\s*_]*[:=])", re.IGNORECASE
)
"""A scale between `score` and its colon, where the default pattern does not expect one."""
_BRACKETED = re.compile(
    rf"(?i:(?<=score)([\s*_]*[:=][\s*_]*))(?:\\boxed|[ \[(\"'“{{`]|<(?=[-+\d.,/ ]+>)|\$(?=[^$\n]+\$))++([-+]?{_DIGITS}(?:\s*/\s*{_DIGITS})?)"
    r"(?: *[\])\"'”>}$`])*"
)
"""A score in brackets or quotation marks, which the default pattern does not look for."""
_SEPARATOR = re.compile(r"[\n;|]|,\s|\s(?:and|und|et)\s")
_THOUGHTS, _THOUGHTS_END = (
    re.compile(rf"(?:<{end}(?:seed:)?(?:think(?:ing)?|thoughts?)>|\[{end}THINK\]|◁{end}think▷)", re.IGNORECASE)
    for end in ("", "/")
)
_OF_ANSWER = re.compile(r"(?<![^\W_])(?:[B-H]|A(?=\W*$)|(?i:first|second|third|fourth|last|former|latter))(?![^\W_])")
"""The name of an answer beside a score in a list, whose order may be another one."""
_NUMBERED = re.compile(r"\d+[.)]\s+\W*\d")
_BRACE = re.compile(r'"(?:\\.|[^"\\])*"|[{}]', re.DOTALL)
_OPENING, _LIST = re.compile(r"[\[{]"), re.compile(r"\[\s*\{")
_FIELD = re.compile(r"""\{\s*(?:"[^"]*"|'[^']*'|\w+)\s*:""")


def read_score(text: str, verdict: PatternVerdict | JsonVerdict, *, low: float, high: float) -> float:
    """The score in a judge's reply. Raises ValueError if it has none between `low` and `high`.

    >>> read_score("Clear and right. Score: 8/10", PatternVerdict(), low=0, high=10)
    8.0
    """
    value = _checked(_found(text, verdict, high, whole=True), low, high)
    _check_sentences(text, verdict, high, value)
    return value


def read_scores(
    text: str, verdict: PatternVerdict | JsonVerdict, *, count: int, low: float, high: float
) -> list[float]:
    """The scores of `count` answers, in the order shown. Raises ValueError for another number of them, or one out of range.

    >>> read_scores('The second is wrong. {"scores": [8, 1.5]}', JsonVerdict(field="scores"), count=2, low=0, high=10)
    [8.0, 1.5]
    """
    given = found = _found(text, verdict, high)
    _check_sentences(text, verdict, high)
    if isinstance(found, str):
        listed = fold(found).rstrip(" .").strip(" \t*_`[](){}")
        commas = "," if not _SEPARATOR.search(listed) else None
        given = listed.split(commas) if commas and "," in listed else _SEPARATOR.split(listed)
        given = listed.split() if len(given) == 1 else given
    if not isinstance(given, list) or len(given) != count:
        raise ValueError(f"the judge's scores {str(found)[:80]!r} are not one for each of the {count} answers")
    if any(isinstance(one, str) and _NUMBERED.match(one.strip()) for one in given):
        raise ValueError(f"the judge's scores {str(found)[:80]!r} are numbered; give the scores alone")
    if any(isinstance(one, str) and _OF_ANSWER.search(one) for one in given):
        raise ValueError(
            f"the judge's scores {str(found)[:80]!r} name answers; give the scores alone, in the order shown"
        )
    return [_checked(one, low, high) for one in given]


def find_verdict(text: str, verdict: PatternVerdict | JsonVerdict, *, whole: bool = False) -> Any:
    """The group of the last match of the pattern, or the field of the last outermost JSON object that has it, or None.

    Thoughts are left out. With `whole`, the group is returned with the text after it, which may belong to a number.

    >>> find_verdict("<think>Score: 3?</think>Score: 4. No, Score: 5", PatternVerdict())
    '5'
    """
    return _locate(text, verdict, whole=whole)[0]


def read_number(text: str, *, low: float, high: float) -> float:
    """The number with which a text begins. Raises ValueError if it is on another scale, or can be read in two ways.

    >>> read_number("7,5 points of 10", low=0, high=10)
    7.5
    """
    text = _unmarked(text).lstrip()
    shown = text.partition("\n")[0][:40]
    number = _NUMBER.match(text)
    if number is None:
        raise ValueError(f"the judge's score {shown!r} is not a number")
    value = _plain(number[0])
    first, *later = _STATEMENT.split(text[number.end() :])
    more = [one for one in later if _GOES_ON.match(one)]
    left = _without_scales(" ; ".join([first, *more]), high, value)
    if value != high and _FULL.match(first):
        raise ValueError(f"the judge's score {shown!r} is its highest; scores go up to {high:g}")
    if value != low and _LEAST.match(first):
        raise ValueError(f"the judge's score {shown!r} is its lowest; scores begin with {low:g}")
    if (
        any(map(_SPELLED.search, more))
        or re.fullmatch(r"[-+]?[1-9]\d{0,2},\d{3}", number[0])
        or not _EXPLAINS.match(left)
        or _UNREAD.search(left)
    ):
        raise ValueError(f"the judge's score {shown!r} can be read in several ways; give one number")
    return value


def _without_scales(text: str, high: float, value: float = math.nan) -> str:
    """A text without counts and without namings of the scale up to `high`. Raises ValueError if it names another scale."""
    for found in _SCALE.finditer(text := _COUNT.sub("", text)):
        again, highest = found["again"], _plain(found["top"] or found["last"] or "100")
        if highest != high if again is None else not math.isclose(_plain(again) * high, value * highest):
            raise ValueError(f"the judge's score is on another scale, {found[0].strip()!r}; scores go up to {high:g}")
    return _SCALE.sub("", text)


def _unmarked(text: str) -> str:
    """A text without marks of Markdown, HTML and LaTeX, and with single spaces, so that the patterns need linear time."""
    return _SPACES.sub(" ", _MARKUP.sub(" ", fold(text)))


def _check_sentences(text: str, verdict: PatternVerdict | JsonVerdict, high: float, value: float = math.nan) -> None:
    """Raise ValueError if a sentence or a field anywhere in a reply names another scale, or repeats the score on one."""
    rest = _spoken(text)
    for fields, start, end in reversed([*_objects(rest)]) if isinstance(verdict, JsonVerdict) else ():
        for name, said in fields.items():
            tops = re.findall(_TOP, f"{said}".replace("percent", "100").replace("%", "100"), re.IGNORECASE)
            if tops and _MAXIMUM.fullmatch(name) and _plain(tops[-1]) != high:
                raise ValueError(f"the judge's score is on another scale: {name} is {said!r}, not {high:g}")
            if _REVISED.fullmatch(name) and isinstance(said, (int, float)) and not math.isnan(value) and said != value:
                raise ValueError(f"the judge's reply has two scores: {value:g}, and {name} is {said!r}")
        texts = "\n".join(said for said in fields.values() if isinstance(said, str))
        rest = f"{rest[:start]} {value:g} {rest[end:]}\n{texts}"
    for sentence in _STATEMENT.split(_unmarked(_STARS.sub(lambda stars: f" out of {len(stars[0])}. ", rest))):
        sentence = _COUNT.sub("", sentence)
        tops = [(found[0], found[found.lastgroup or 0]) for found in _STATED.finditer(sentence)]
        tops += [
            (found[0], found["top"] or found["last"] or "100")
            for found in _SCALE.finditer(sentence)
            if found["again"] and _plain(found["again"]) == value
        ]
        for said, top in tops:
            if _plain(top) != high:
                raise ValueError(f"the judge's score is on another scale, {said.strip()!r}; scores go up to {high:g}")


def _plain(number: str) -> float:
    return float(_WORDS.get(number.lower()) or number.replace(",", "."))


def _locate(text: str, verdict: PatternVerdict | JsonVerdict, *, whole: bool) -> tuple[Any, str]:
    """The verdict, and the text after it."""
    if isinstance(verdict, JsonVerdict):
        spoken = _spoken(text)
        for found, _, end in reversed([*_objects(spoken)]):
            if verdict.field in found:
                return found[verdict.field], spoken[end:]
        return None, ""
    spoken = fold(_spoken(text))
    if verdict == PatternVerdict():
        spoken = _BRACKETED.sub(r"\1\2 ", _SCALED_NAME.sub(r"\1", spoken))
    lines = [(one, spoken[: one.start()].rpartition("\n")[2]) for one in re.finditer(verdict.pattern, spoken)]
    lines = [(one, before) for one, before in lines if not _OTHER_SCORE.search(before)]
    named = [one for one, before in lines if _SCORE.match(one[0]) and _NAMED_SCORE.search(before)]
    found = [one for one, _ in lines if one not in named] or named
    late = [one for one, before in lines if found and one.start() >= found[-1].start() and not _ASPECT.search(before)]
    after = named if found == named else late  # an average, or a correction
    if not found or found[-1][1] is None or len({one[1] for one in [found[-1], *after]}) > 1:
        return None, ""
    start, end = found[-1].span(1)
    if whole and re.search(r"\d[.,]?$", spoken[:start]) and spoken[start].isdigit():
        raise ValueError(f"the pattern matches a part of a number: {spoken[max(0, start - 20) : start + 20]!r}")
    return (spoken[start:], "") if whole else (found[-1][1], spoken[end:])


def _found(text: str, verdict: PatternVerdict | JsonVerdict, high: float, *, whole: bool = False) -> Any:
    """The verdict. Raises ValueError if what follows it may be another one."""
    found, after = _locate(text, verdict, whole=whole)
    if found is None:
        raise ValueError(f"the judge's answer holds no score: {text[-80:]!r}")
    later = filter(_GOES_ON.match, _STATEMENT.split(_unmarked(after)))
    if any(_UNREAD.search(_without_scales(one, high)) for one in later):
        raise ValueError(f"the judge's answer goes on with another score: {after[:80]!r}")
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


def _objects(text: str) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield the outermost JSON objects of a text, with their start and end. Those in lists and in broken objects are not."""
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
                yield value, start, at


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
