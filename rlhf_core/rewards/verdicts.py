"""Read the score in a judge's reply: numbers as people write them, and fields of JSON objects.

A number is a score only if the text around it is understood: its scale, words that begin an explanation, and other
numbers, which must be counts or parts of the answer. A reply is ambiguous with two different scores, a score of
something else, another scale or an unexplained number after the score: then the judge is asked again.
"""

import json
import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from rlhf_core.config.rewards import JsonVerdict, PatternVerdict
from rlhf_core.text import fold

_pattern = partial(re.compile, flags=re.IGNORECASE)

_UNIT = r"(?:(?:points?|pts?|marks?|stars?|punkte?n?|puntos?|punti)(?![^\W_])|[分点점★⭐])"
_DIGITS = r"(?:(?<!\d)\d++(?:[.,]\d++)?(?:e[-+]?\d++)?)"
_RANGE = rf"(?:[-+]?{_DIGITS}\s*(?:-|to|[–—…,]|\.\.+|and)[\s+-]*)"
_NAMES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_WORDS = {word: number for number, word in enumerate(_NAMES, 1)} | {"twenty": 20, "fifty": 50, "hundred": 100}
_BEST = r"(?:best|max\w*|highest|top|perfect(?:ion)?)"
_TOP = rf"(?:{_DIGITS}|{'|'.join(_WORDS)})(?![.,]?\d|(?!{_UNIT})[^\W_])"
_ASPECTS = (
    r"style|clarity|accuracy|grammar|tone|format\w*|fluency|relevance|coherence|helpfulness|safety|harmlessness|honesty"
    r"|truthfulness|depth|creativity|conciseness|completeness|readability|originality"
)
_SPACES = re.compile(r"[^\S\n]+")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:[.,]\d+)?|[.,]\d+)(?:[eE][-+]?\d+)?")
_MARKUP = _pattern(r"\n?```(?:\w+\n)?|</?[a-z]+\s*/?>|&nbsp;|\\[a-z]*|[*_`$~{}\ufe0f\u20e3]")
_SCALE = _pattern(
    rf"(?:(?<![\w.,])(?P<again>{_DIGITS})\s*{_UNIT}?\s*)?(?:(?:/\s*\(?|(?<![^\W\d_])(?:(?:out[\s-]+)?(?:of|from)"
    r"|out|over|divided\s+by|on|von|van|aus|sur|sobre|de|su|из|in|auf)"
    r"\s*:?(?:\s+(?:an?|one|the|possible|max\w*|total|of)(?![^\W_])){0,4}\s+|[满滿]分|up\s+to"
    rf"|(?:scale|range|between|at\s+most|{_BEST})\.?(?:\s+(?:score|points?|rating|possible|of|from|is)){{0,4}}\s*[:=,]?"
    rf"|[\[(∈]\s*(?={_RANGE}))\s*(?:{_RANGE}(?![\s+-]*\d+\s*(?:%|per)))?[\s+-]*(?P<top>{_TOP})"
    r"|(?P<percent>%|(?<![^\W_])(?:per\s?cent(?:age|ile)?|pct|prozent)(?![^\W_])))"
    rf"(?:[\s-]*(?:{_UNIT}|possible|likert|scale))*"
    rf"|(?:{_RANGE})?(?P<last>{_TOP})[\s-]*(?:(?:{_UNIT}[\s-]*)?(?:scale|likert|[满満]点|[满滿]分)"
    rf"|{_UNIT}[\s-]*(?:score|rating)|(?:(?:is|=|:|being|as|means)\s+(?:an?\s+|the\s+)?)?{_BEST})"
)
"""A scale, named by its highest score, perhaps with the score `again`: `/10`, `(0-10)`, `10 is best`, `(8/10)`, `80%`."""
_NUMERAL = rf"(?:{_DIGITS}|{'|'.join(_WORDS)})"
_GAP = r"[\s:=_\"'|.-]*(?:[^\W\d_]+[\s:=_\"'|.-]+)"
_SPAN = rf"(?:[-+]?{_NUMERAL}\s*(?:-|to|through|[–—…]|\.\.+)\s*)"
_IDEAL = r"(?:excellent|flawless|ideal|outstanding)"
_STATED = _pattern(
    rf"(?<![^\W_])(?:(?:scale|likert|range|rubric|points){_GAP}{{0,3}}[\s:=(\[]*(?:{_RANGE}|{_SPAN})(?P<end>{_TOP})"
    rf"|(?:scor(?:es?|ing)|rat(?:ings?|e[ds]?)|grad(?:ing|e[ds]?)|marks?){_GAP}{{0,3}}"
    rf"(?:[(\[]\s*{_SPAN}|(?:from|of|in|are|go|on|run)\s+{_SPAN}|between\s+{_NUMERAL}\s+and\s+)(?P<span>{_TOP})"
    rf"|(?<![^\W_])(?:use|using|from|go(?:es)?|with|run|grades?|numbers?)\s+(?:[^\W\d_]+\s+){{0,2}}(?:[01]|zero|one)"
    rf"\s*(?:-|to|through|[–—…]|\.\.+)\s*(?P<used>{_TOP})(?!\s+[^\W\d_]+s(?![^\W_]))"
    rf"|(?:scale|{_BEST}|full|possible|out\s+of|up\s+to|at\s+most|more\s+than|ends?\s+at|ceiling|bound|limit|[满滿]分"
    rf"|total\s+(?:points|marks)){_GAP}{{0,4}}?(?P<most>{_TOP})\s*(?:{_UNIT}|$|[).,;:!])"
    rf"|(?:{_SPAN})?(?P<best>{_TOP})[\s-]*(?:{_UNIT}[\s-]*)?(?:scale|likert|=\s*(?:good|great|{_IDEAL})|(?:is|means|as\s+the)\s+{_IDEAL}|\(\s*{_BEST}\s*\)"
    r"|(?:is|=|:|being|as|means|would\s+be|the|(?:is\s+)?(?:reserved\s+)?for)\s*(?:an?\s+|the\s+|for\s+)?"
    rf"(?:{_BEST}|full)(?![^\W_]))|^\W*{_SPAN}(?P<alone>{_TOP})\W*$|^\W*(?P<legend>{_TOP})\s*\W\s*(?:{_BEST}|excellent)(?![^\W_]))"
)
"""A scale in any sentence of a reply: `Scores go from 1 to 5`, `Full marks: 5`, `5 is best`, `a 5-point scale`."""
_COUNT = _pattern(
    r"(?<![-+*×=/~±.,\d])(?<![-+*×=/~±]\s)"
    rf"(?:(?:top|best|first|last|between\s+{_DIGITS}\s+and)[\s-]+(?={_DIGITS}))?"
    rf"(?:{_DIGITS}\s*(?:=|:|is|being|means)\s*(?:the\s+)?(?:worst|bad|poor|lowest|min\w*|wrong)"
    r"|(?:step|line|part|criteri(?:on|a)|paragraph|question|section|item|example|fact|sentence|claim)s?"
    rf"\s+{_DIGITS}|{_DIGITS}(?:\s*%\s*(?:of\s+)?(?!{_BEST}|{_UNIT}|overall)[^\W\d_]{{3,}}"
    rf"|\s+{_UNIT}\s+(?:off|lost|deducted|missing)|(?:\s*(?:/|(?:out\s+)?of)\s*(?:the\s+|its\s+|all\s+)?{_DIGITS})?"
    rf"[\s-]+(?:(?!for\s)[^\W\d_]+\s+)?(?!{_UNIT}|(?:\w?[ai]s|this|plus|minus|less|means|flawless)\b)"
    r"(?:[^\W\d_]{2,}s|criteria|people|error|mistake|typo|flaw|issue|problem|list|accuracy)\b))"
)
"""A number in an explanation that is no score: `2 errors`, `3 of 4 facts`, `20% of the facts`, `step 2`, `1 point off`."""
_OTHER_NUMBER = _pattern(
    rf"(?:(?<![^\W_])(?:{_ASPECTS})(?:\s+score)?[\s:=(-]*{_DIGITS}(?:\s*/\s*{_DIGITS})?"
    rf"|(?<![^\W_])(?:sub|not|pass(?:ing)?|top|best|highest|perfect|full|max\w*|min\w*)[\s-]*score\W*{_DIGITS}"
    rf"|(?<![\d.,])(?:{_DIGITS}(?:\s*[+*×÷^=<>]\s*|\s+-\s+))+[-+]?{_DIGITS}(?:\s+(?:is|equals|gives|makes)\s+(?:not\s+)?{_DIGITS})?"
    rf"|(?<![^\W_])(?!i\b)[a-z]\s*[=<>^]\s*[-+]?{_DIGITS}|[$€£#]\s?{_DIGITS}|(?<=[^\W\d_])-?{_DIGITS}|{_DIGITS}[^\W\d_]\w*"
    rf"|(?:correct|right|true|expected|actual|real|reference)\s+(?:[^\W\d_]+\s+)?(?:is|was|should\s+be)\s+{_DIGITS}"
    rf"|(?:answer|response|reference|text)\s+(?:says|said|gives|gave|states|claims|has|names|lists|writes)\s+(?:that\s+)?{_DIGITS}"
    rf"|{_DIGITS}\s+(?:are|were|have|had|lack)(?![^\W_])"
    rf"|(?<![\d.,])1\s+(?!(?:{_UNIT}|because|since|instead|after|overall|total|seems|would|should|maybe|for|now|then|final"
    r"|given|due|with|and|but|fits|feels|rather|might|based|was|the|this|is)\b)[^\W\d_]{3,})"
)
"""A number after a score that is none: of an aspect, an equation, a price, a name, or of the answer's content."""
_GOOD = rf"(?:{_BEST}|full|(?:very\s+)?(?:excellent|great|outstanding|flawless|good|correct|right|ideal))"
_BAD = (
    r"(?:worst|lowest|minimum|(?:very\s+|really\s+)?(?:terrible|awful|horrible|poor|bad|wrong|incorrect|unacceptable"
    r"|useless|fail(?:ed|ure|s|ing)?|false|weak|low))"
)
_STATEMENT = _pattern(r"(?<!max)(?<!i\.e)(?<!e\.g)[.!?]++(?=\s|$)|(?<!:)\n")
_CLAUSE = _pattern(r"(?<!i\.e)(?<!e\.g)[.!?]++(?=\s)|[\n;|]")
_DOUBT = _pattern(
    r"(?<![^\W_])(?:not|never|cannot|\w+n['’]t|would|could|might|may|if|unless|were|had|ideal|perfect|best|flawless|reference"
    r"|previous|earlier|others?|another|examples?|e\.g|format|form|schema|sample|drafts?|hypothetical|tempted|instead|rather|instance|suppose|imagine"
    r"|(?:correct|good|right)\s+(?:answer|response|one)|(?:part|section|answer|question|criterion|item)\s+(?:[A-H]|\d+)\W*$"
    r"|(?:max(?:imum)?\.?|min(?:imum)?|pass(?:ing)?|top|highest|possible|full)[\s*_]+(?:possible[\s*_]+)?$)(?![^\W_])"
)
"""Before a score, in its clause: it may not be the score of the judged answer."""
_DECIDES = _pattern(
    r"(?<![^\W_])(?:final|overall|total|revised|updated|corrected|new|no|actually|correction|wait)(?:\W|(?:is|score|rating|then)\b)*$"
)
"""Before a score: it counts more than others before it."""
_REVERSED = _pattern(
    r"(?<![^\W_])(?:lower|smaller|fewer|less)(?:\s+\w+){0,2}\s+(?:(?:is|are|means?)\s+|=\s*)?(?:the\s+)?better"
    r"|(?<!step )(?<!part )(?<!line )(?<!claim )(?<!fact )(?<!item )(?<!test )(?<!case )(?<!point )(?<!answer )"
    rf"(?<!question )(?<!criterion )(?<!section )(?P<worst>{_DIGITS})\s*(?:=|:|means|being|\()\s*(?:the\s+)?{_BAD}(?![^\W_])"
)
"""Words that low scores are the good ones, perhaps with the `worst` score."""
_REORDERED = _pattern(
    r"(?:revers\w*|other|opposite|swapped)\s+order|last\s+to\s+first|(?:B|second|last)\s+(?:is\s+|comes\s+)?first"
    r"|(?:de|a)scending|sorted\s+by|(?:best|worst)\s+to\s+(?:best|worst)"
)
_ANSWER = re.compile(r"(?:(?:answer|response)\W*)?(?:[a-h]|\d|first|second|third|fourth|last)")
_ORDER = _pattern(r"order|rank|id|answer|label|name|index|position|sequence|permut")
_REVERSE = _pattern(r"revers|swap")
"""Other fields with the names of answers, such as the order in which their scores are given."""
_FIRST, _NUMBERS = (re.compile(rf"^\W*{number}[.)]\s", re.MULTILINE) for number in ("1", r"\d{1,2}"))
"""Numbers of a list that begins with 1."""
_BRIEF = 3  # words of a statement that is about its number, even if that is out of the range
_EXPLAINS = _pattern(
    rf"\s*{_UNIT}?[\s)\]]*(?:$|//|/\*|-+[\s>]"
    r"|[,;:.!|()\[\]<>='\"#—–→⇒\u2190-\u2604\u2607-\u2bff\U0001f000-\U0001ffff]"
    r"|(?:because|since|as|for|due|given|with|which|while|but|although|though|where|when"
    r"|overall|total|in|on|over|and|this|it|the|reason\w*|explanation|justification|comments?|feedback|rationale"
    r"|very|good|great|excellent|perfect|fair|poor|bad|correct|right)\b)"
)
"""Text that may follow a score: nothing, a mark, or a word that begins an explanation."""
_UNREAD = _pattern(r"\d|\b(?:half|hundred|thousand|million|tenths|hundredths)\b|[½¼¾‰°€£¥]")
_STARS = re.compile(r"[★⭐]*☆+")
_CHANGES = _pattern(rf"(?<!the )(?<!all )(?<!of )(?<![^\W_])(?:zero|{'|'.join(_NAMES[1:])})\W*$|minus|deduct")
_PRAISE = _pattern(
    rf"\W*(?:{_UNIT}\W*)?(?:the\s+)?(?:(?P<most>(?:{_BEST}|full)(?:\s+(?:score|marks?|rating|points?))?)|{_GOOD})"
    r"(?![^\W_])\s*(?:[).,;!]|$)"
)
_BLAME = _pattern(
    rf"\W*(?:{_UNIT}\W*)?(?:the\s+)?(?:(?P<most>(?:worst|lowest|minimum)(?:\s+(?:possible|score|marks?|rating))*)"
    rf"\s*(?:[).,;!]|$)|{_BAD}(?![^\W_]))"
)
"""After a score: words that it is good or bad, perhaps the `most` that there is."""
_STARS_OF = _pattern(r"\s*(?:stars?(?![^\W_])|[★⭐])")
_NAMED_SCORE = _pattern(
    r"(?<![^\W_])(?!(?:the|an?|my|your|its|this|is|give|final|overall|total|revised|updated|corrected|new"
    r"|so|thus|therefore|hence|and|with|answer|response)[\s*_]+$)[^\W\d_]+[\s*_]*$"
)
"""Before `score`, in its line: the score of something else, such as the style."""
_MAXIMUM = _pattern(
    r"(?:(?:score|rating|rubric|points?|total|marks?)[\W_]*)*(?:(?:out|of|max(?:imum)?|scale|range|possible|full|upper|bound"
    r"|top|best|high(?:est)?|ceiling|limit|denominator|perfect|percent(?:age)?|pct|units?)[\W_]*)+"
    r"(?:(?:score|rating|points?|total|marks?|value)[\W_]*)*"
)
"""Names of fields for the highest score: `max_score`, `outOf`, `points possible`."""
_REVISED = _pattern(
    r"(?=\w)(?:final|revised|adjusted|corrected|updated|overall|total)?[\W_]*(?:score|rating|grade|verdict)?"
)
_SCORE = _pattern(r"score|rating")
_SCALED_NAME = _pattern(
    rf"(score[\s*_]*)[(\[](?:out\s+of\s|max\w*\.?\s|{_SPAN})\s*{_TOP}\s*{_UNIT}?[)\]](?=[\s*_]*[:=])"
)
"""A scale between `score` and its colon, where the default pattern does not expect one."""
_BRACKETED = re.compile(
    rf"(?i:(?<=score)([\s*_]*[:=][\s*_]*))(?:\\boxed|[ \[(\"'“{{`]|<(?=[-+\d.,/ ]+>)|\$(?=[^$\n]+\$))++([-+]?{_DIGITS}(?:\s*/\s*{_DIGITS})?)"
    r"(?: *[\])\"'”>}$`])*"
)
"""A score in brackets or quotation marks, which the default pattern does not look for."""
_SEPARATOR = re.compile(r"[\n;|]|,\s|\s(?:and|und|et)\s")
_THOUGHT = r"(?:seed:)?\w*(?:think|thought|scratch|reflect|reason|analys|monolog|deliberat|draft|cot)\w*"
_THOUGHTS, _THOUGHTS_END = (_pattern(rf"(?:<{end}{_THOUGHT}>|\[{end}THINK\]|◁{end}think▷)") for end in ("", "/"))
_TAGGED = re.compile(
    r"<([a-z][\w:-]*)(?:\s[^<>]*)?>(?:(?!<\1[\s>]).)*?</\1>|\[THINK\].*?\[/THINK\]|◁think▷.*?◁/think▷",
    re.IGNORECASE | re.DOTALL,
)
_OPEN_TAG = _pattern(
    r"(?!.*(?:think|thought))(?:.*(?:score|rating|grade|mark|point|verdict|judg|evaluat|assess|answer|final|result|output"
    r"|respon|repl|conclu|decision|overall|total|json).*|[biusap]|em|strong|div|span|h\d|[uo]l|li|t[drt]|table|tbody|pre"
    r"|code|center|small|big|font|html|body|section|article|blockquote|kbd|su[bp]|details|summary)"
)
"""Names of tags around a judge's verdict; others are around thoughts, examples and quotations."""
_OF_ANSWER = re.compile(
    r"(?<![^\W_])(?:[B-H]|A(?=\W*$)|(?i:first|second|third|fourth|last|former|latter))(?![^\W_])|^\d+[.)]\s+\W*\d"
)
"""The name or number of an answer next to a score in a list, whose order may differ."""
_OPENING, _LIST = re.compile(r"[\[{]"), re.compile(r"\[\s*\{")
_FIELD = re.compile(r"""\{\s*(?:"[^"]*"|'[^']*'|\w+)\s*:""")


def read_score(text: str, verdict: PatternVerdict | JsonVerdict, *, low: float, high: float) -> float:
    """The score in a judge's reply. Raises ValueError if it has none between `low` and `high`, or more than one reading.

    >>> read_score("Clear and right. Score: 8/10", PatternVerdict(), low=0, high=10)
    8.0
    """
    found, after, spoken = _locate(text, verdict, whole=True)
    value = _checked(found, low, high)
    _refuse_others(after, value, low, high)
    _check_sentences(spoken, verdict, low, high, value)
    return value


def read_scores(
    text: str, verdict: PatternVerdict | JsonVerdict, *, count: int, low: float, high: float
) -> list[float]:
    """The scores of `count` answers, in the order shown. Raises ValueError for another number of them, or one out of range.

    >>> read_scores('The second is wrong. {"scores": [8, 1.5]}', JsonVerdict(field="scores"), count=2, low=0, high=10)
    [8.0, 1.5]
    """
    found, after, spoken = _locate(text, verdict)
    said = f"the judge's scores {str(found)[:80]!r}"
    _refuse_others(after, math.nan, low, high)
    _check_sentences(spoken, verdict, low, high)
    if isinstance(found, str):
        listed = fold(found).rstrip(" .").strip(" \t*_`[](){}")
        found = _SEPARATOR.split(listed) if _SEPARATOR.search(listed) else listed.split("," if "," in listed else None)
    if not isinstance(found, list) or len(found) != count:
        raise ValueError(f"{said} are not one for each of the {count} answers")
    if _REORDERED.search(spoken) or any(isinstance(one, str) and _OF_ANSWER.search(one.strip()) for one in found):
        raise ValueError(f"{said} name answers; give the scores alone, in the order shown")
    return [_checked(one, low, high) for one in found]


def find_verdict(text: str, verdict: PatternVerdict | JsonVerdict) -> Any:
    """The group of the last match of the pattern, or the field of the last outermost JSON object that has it, or None.

    Thoughts are left out.

    >>> find_verdict("<think>Score: 3?</think>Score: 4. No, Score: 5", PatternVerdict())
    '5'
    """
    try:
        return _locate(text, verdict)[0]
    except ValueError:
        return None


def read_number(text: str, *, low: float, high: float) -> float:
    """The number with which a text begins. Raises ValueError if it is on another scale, or can be read in two ways.

    >>> read_number("7,5 points of 10", low=0, high=10)
    7.5
    """
    text = _unmarked(text).lstrip()
    shown = f"the judge's score {text.partition(chr(10))[0][:40]!r}"
    number = _NUMBER.match(text)
    if number is None:
        raise ValueError(f"{shown} is not a number")
    value, after = _plain(number[0]), text[number.end() :]
    first = _STATEMENT.split(after)[0]
    left = _without_scales(_COUNT.sub("", first), value, high, strict=True)
    for words, end, other in ((_PRAISE, high, low), (_BLAME, low, high)):
        called = words.match(first)
        if called and (value == other or (value != end and called["most"])):
            raise ValueError(f"{shown} is on another scale by its words; scores go from {low:g} to {high:g}")
    if _STARS_OF.match(first) and value <= 5 != high and not _SCALE.search(first):
        raise ValueError(f"{shown} is on another scale: stars are of 5; scores go up to {high:g}")
    if re.fullmatch(r"[-+]?[1-9]\d{0,2},\d{3}", number[0]) or not _EXPLAINS.match(left) or _UNREAD.search(left):
        raise ValueError(f"{shown} can be read in several ways; give one number")
    _refuse_others(after[len(first) :], value, low, high)
    return value


def _refuse_others(after: str, value: float, low: float, high: float) -> None:
    """Raise ValueError for an unexplained number after the score `value`: it may be another score."""
    text = _unmarked(f"{value:g} {after}")
    for statement in _STATEMENT.split(_NUMBERS.sub(" ", text) if _FIRST.search(text) else text):
        rest = _OTHER_NUMBER.sub(" ", _COUNT.sub(" ", statement))
        rest = _without_scales(rest, value, high, strict=False)
        known = (value, high) if _DOUBT.search(statement) else (value,)
        numbers = [number for one in _NUMBER.findall(rest) if (number := _plain(one)) not in known]
        brief = len(rest.split()) <= _BRIEF
        changed = _CHANGES.search(rest) or re.search(rf"(?<![\d.,]){value:g}\s*[-+]\s*\d", statement)
        if changed or after.lstrip().startswith("?") or any(brief or low <= one <= high for one in numbers):
            said = f"it goes on with {statement.strip()[:80]!r}"
            raise ValueError(f"the judge's score can be read in several ways, {said}; give one number")


def _without_scales(text: str, value: float, high: float, *, strict: bool) -> str:
    """A text without namings of the scale up to `high`. Raises ValueError for the score `value` on another scale; where
    it is `strict`, for any naming of another scale.
    """

    def blank(found: re.Match[str]) -> str:
        again, highest = found["again"], _plain(found["top"] or found["last"] or "100")
        if highest == high if again is None else math.isclose(_plain(again) * high, value * highest):
            return " "
        if again is None and not strict:
            return found[0]
        raise ValueError(f"the judge's score is on another scale, {found[0].strip()!r}; scores go up to {high:g}")

    return _SCALE.sub(blank, text)


def _unmarked(text: str) -> str:
    """A text without marks of Markdown, HTML and LaTeX, and with single spaces, so that the patterns need linear time."""
    return _SPACES.sub(" ", _MARKUP.sub(" ", fold(text)))


def _check_sentences(
    rest: str, verdict: PatternVerdict | JsonVerdict, low: float, high: float, value: float = math.nan
) -> None:
    """Raise ValueError if a sentence or a field anywhere in a reply names another scale, or repeats the score on one."""
    field = verdict.field if isinstance(verdict, JsonVerdict) else None
    for fields, start, end in reversed([*_objects(rest)]) if field is not None else ():
        _check_fields({name: said for name, said in fields.items() if name != field}, low, high, value)
        texts = "\n".join(said for said in fields.values() if isinstance(said, str))
        rest = f"{rest[:start]} {value:g} {rest[end:]}\n{texts}"
    for sentence in _STATEMENT.split(_unmarked(_STARS.sub(lambda stars: f" out of {len(stars[0])}. ", rest))):
        turned = _REVERSED.search(sentence)
        if turned and high == _plain(turned["worst"] or f"{high}"):
            raise ValueError(f"the judge's score is on another scale, where low is good: {sentence.strip()[:80]!r}")
        sentence = _COUNT.sub("", sentence)
        for found in _STATED.finditer(sentence):
            if _plain(found[found.lastgroup or 0]) != high:
                rule = f"is on another scale, {found[0].strip()!r}; scores go up to {high:g}"
                raise ValueError(f"the judge's score {rule}")


def _check_fields(others: dict[str, Any], low: float, high: float, value: float) -> None:
    """Raise ValueError if a field next to the score names another scale, another score or order of the answers."""
    several = math.isnan(value)
    for name, said in others.items():
        tops = re.findall(_TOP, re.sub("percent|%", "100", str(said)).replace("stars", "5"), re.IGNORECASE)
        number = float(said) if type(said) in (int, float) and not several else value
        highest = tops and _MAXIMUM.fullmatch(name) and not (several and name == "best")
        if highest and _plain(tops[-1]) != high:
            raise ValueError(f"the judge's score is on another scale: {name} is {said!r}, not {high:g}")
        if _REVISED.fullmatch(name) and number != value and low <= number <= high:
            raise ValueError(f"the judge's reply has two scores: {value:g}, and {name} is {said!r}")
        items = [str(one).lower() for one in (said if isinstance(said, list) else re.split(r"[\s,;>]+", str(said)))]
        answers = all(map(_ANSWER.fullmatch, items)) and (_ORDER.search(name) or not "".join(items).isdigit())
        if several and ((answers and items != sorted(items)) or (said and _REVERSE.match(name))):
            raise ValueError(f"the judge's scores name answers: {name} is {said!r}; give them in the order shown")


def _plain(number: str) -> float:
    return float(_WORDS.get(number.lower()) or number.replace(",", "."))


def _locate(text: str, verdict: PatternVerdict | JsonVerdict, *, whole: bool = False) -> tuple[Any, str, str]:
    """The verdict, the text after it, and the reply without thoughts. Raises ValueError if there are none or several.

    With `whole`, the group is returned with the text after it, which may belong to a number.
    """
    reply = spoken = fold(_spoken(text, verdict))
    found: list[tuple[Any, str, str, str]]
    if isinstance(verdict, JsonVerdict):
        field = verdict.field
        objects = [one for one in _objects(reply) if one[0].get(field) is not None]
        found = [(fields[field], reply[:at], reply[end:], "") for fields, at, end in objects]
    else:
        if verdict == PatternVerdict():
            spoken = _BRACKETED.sub(r"\1\2 ", _SCALED_NAME.sub(r"\1", reply))
        matches = [one for one in re.finditer(verdict.pattern, spoken) if one[1] is not None]
        found = [(one[1], spoken[: one.start()], spoken[one.end(1) :], one[0]) for one in matches]
    clauses = [(one, _CLAUSE.split(one[1])[-1]) for one in found]
    clauses = [(one, said) for one, said in clauses if not _DOUBT.search(said)]
    named = [one for one in clauses if _SCORE.match(one[0][3]) and _NAMED_SCORE.search(one[1])]
    clauses = [one for one in clauses if one not in named] or named
    if not clauses or (len({str(one[0]) for one, _ in clauses}) > 1 and not _DECIDES.search(clauses[-1][0][1])):
        raise ValueError(f"the judge's answer holds {'several scores' if clauses else 'no score'}: {text[-80:]!r}")
    said, _, after, matched = clauses[-1][0]
    if not whole or not matched:
        return said, after, reply
    start = len(spoken) - len(after) - len(said)
    if re.search(r"\d[.,]?$", spoken[:start]) and spoken[start].isdigit():
        raise ValueError(f"the pattern matches a part of a number: {spoken[max(0, start - 20) : start + 20]!r}")
    return spoken[start:], "", reply


def _checked(found: Any, low: float, high: float) -> float:
    if isinstance(found, str):
        found = read_number(found, low=low, high=high)
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise ValueError(f"the judge's score {found!r} is not a number")
    if not low <= found <= high:  # NaN too
        raise ValueError(f"the judge's score {found:g} is not between {low:g} and {high:g}")
    return float(found)


def _spoken(text: str, verdict: PatternVerdict | JsonVerdict) -> str:
    """A reply without thoughts, and without other parts in tags that are neither of a verdict nor in its pattern."""
    pattern = verdict.pattern if isinstance(verdict, PatternVerdict) else ""

    def shown(part: re.Match[str]) -> str:
        tag = part[1] or ""
        return part[0] if tag and (_OPEN_TAG.fullmatch(tag) or f"<{tag}" in pattern) else " "

    return _THOUGHTS.split(_THOUGHTS_END.split(_TAGGED.sub(shown, text))[-1])[0]


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
            at = start + 1
            if _FIELD.match(text, start):  # an object that is broken: the next one begins after it
                at = text.find("}", at) + 1
                if not at or "{" in text[start + 1 : at]:
                    return
        else:
            if isinstance(value, dict):
                yield value, start, at


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)
