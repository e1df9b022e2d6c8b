"""Clean rows: duplicates, near-duplicates, overlap with evaluation prompts, quality, languages and personal data.

Personal data are emails, phone numbers, credit cards, IP addresses, keys and tokens. Patterns find candidates, and
rules confirm them: the checksum of cards (Luhn), `ipaddress`, and `phonenumbers` (Google's libphonenumber). Data
without a fixed form, such as names and addresses, are not found.
"""

import hashlib
import ipaddress
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rlhf_core.config.data import Filters
from rlhf_core.data.formats import Example
from rlhf_core.data.limits import DropReport, Origin
from rlhf_core.data.rows import StoredRows, changed
from rlhf_core.data.turns import Turns
from rlhf_core.errors import ConfigError
from rlhf_core.text import fold
from rlhf_core.types import Message

_WORD = re.compile(r"[^\W\d_]+")
_NOT_WORD = re.compile(r"[^\w]+")
_WITHOUT_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff"
"""Characters of Thai, Lao, Burmese and Khmer, of Japanese, and of Chinese: a whole sentence has no space."""
Examples = TypeVar("Examples", StoredRows[Example], list[Example])
_WORDS = re.compile(rf"[{_WITHOUT_SPACES}]|[^\s{_WITHOUT_SPACES}]+")


def normalize(turns: Turns) -> str:
    """Reduce `turns` with their roles to words and single spaces, NFKC-normalized and case-folded."""
    text = "\n".join(f"{message.role} {message.content}" for message in turns)
    return _NOT_WORD.sub(" ", unicodedata.normalize("NFKC", text).casefold()).strip()


def words_of(text: str) -> list[str]:
    """Split a normalized text into words; in scripts without spaces each character is a word.

    >>> words_of("the sum 你好")
    ['the', 'sum', '你', '好']
    """
    return text.split() if text.isascii() else _WORDS.findall(text)


def exact(turns: Turns) -> str:
    """The text of `turns` in the normal form NFC, with single spaces. Unlike `normalize` it keeps case and punctuation."""
    text = "\n".join(f"{message.role}: {' '.join(message.content.split())}{message.tool_fields}" for message in turns)
    return unicodedata.normalize("NFC", text)


def caseless(turns: Turns) -> str:
    """The text of `turns` as `exact`, without differences of case, of compatible forms (NFKC) and of hidden marks."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", fold(exact(turns))).casefold())


def without_repeated_prompts(examples: Examples) -> tuple[Examples, int]:
    """Remove the prompt from answers that repeat it, and count the examples in which they did.

    This applies only if nearly all examples do, with prompts of words: the source then stores prompt and answer
    together as one text.
    """
    answered = repeating = worded = 0
    for example in examples:
        repeats = _repeats_prompt(example)
        answered += repeats is not None
        if repeats:
            repeating += 1
            worded += len(_WORD.findall(example.prompt[-1].content)) >= 2
        elif answered - repeating > 0.06 * len(examples):  # too many do not, so the others cannot matter
            break
    if repeating < 0.95 * answered or 2 * worded <= repeating:  # not nearly all, or mere sums
        return examples, 0
    return changed(examples, lambda one: _unrepeated(one) if _repeats_prompt(one) else one), repeating


def deduplicate(examples: Examples, report: DropReport) -> Examples:
    """Drop examples that repeat the prompt and answers of an earlier one, ignoring white space.

    Punctuation and signs count: 3 - 2 and 3 + 2 are different prompts.
    """
    return changed(examples, distinct(report))


def distinct(report: DropReport) -> Callable[[Example], Example | None]:
    """Make a function that returns an example, or None if its texts were seen before.

    Repeated examples go to `report`.
    """
    seen: dict[bytes, Origin] = {}

    def unseen(example: Example) -> Example | None:
        key = fingerprint(exact(example.prompt), exact(example.chosen), exact(example.rejected))
        if (first := seen.get(key)) is None:
            seen[key] = example.origin
            return example
        report.add(example.source, example.origin, f"duplicate: of {first.file}:{first.line}")
        return None

    return unseen


def fingerprint(*texts: str) -> bytes:
    """16 bytes that stand for texts, which may be long."""
    return hashlib.blake2b(repr(texts).encode(), digest_size=16).digest()


def decontaminate(
    training: Examples, evaluation: Sequence[Example], *, ngram: int | None, report: DropReport
) -> Examples:
    """Drop `training` rows that begin with a prompt of `evaluation`, ignoring white space and case.

    A text without a prompt is removed if it is one of `evaluation`.

    A longer conversation that begins with an evaluation prompt is removed too, because one of its turns is the answer.

    With `ngram`, a row is also removed if its prompt or an answer shares that many consecutive words with an evaluation
    prompt (the overlap test of GPT-3, arXiv 2005.14165, appendix C).
    """
    overlap = Overlap((example.prompt for example in evaluation), ngram=ngram)
    texts = {caseless(example.chosen) for example in evaluation if not example.prompt}

    def clean(example: Example) -> Example | None:
        if not example.prompt and caseless(example.chosen) in texts:
            report.add(example.source, example.origin, "contaminated: it is an evaluation text")
            return None
        found = overlap.found(example.prompt, (example.chosen, example.rejected))
        if found is None:
            return example
        how = f"shares {ngram} words in a row with" if found.words else "it begins with"
        report.add(example.source, example.origin, f"contaminated: {how} an evaluation prompt")
        return None

    return changed(training, clean)


@dataclass(frozen=True, slots=True)
class Shared:
    """The number of the prompt that a row contains, and whether the row only shares words with it."""

    prompt: int
    words: bool


class Overlap:
    """Prompts that no training row may contain: a whole one at its beginning, or `ngram` consecutive words anywhere."""

    def __init__(self, prompts: Iterable[Turns], *, ngram: int | None) -> None:
        """Compare rows with `prompts`. Words are compared only if `ngram` is set; white space and case are ignored."""
        self._ngram = ngram
        self._whole: dict[str, int] = {}
        self._grams: dict[tuple[str, ...], int] = {}
        for number, turns in enumerate(prompts):
            if turns:
                self._whole.setdefault(caseless(turns), number)
            for gram in _ngrams(turns, ngram):
                self._grams.setdefault(gram, number)

    def found(self, prompt: Turns, answers: Sequence[Turns]) -> Shared | None:
        """Find the first prompt that a row contains; a conversation that begins with a prompt has its answer, too."""
        for opening in _openings(prompt, answers):
            if (number := self._whole.get(caseless(opening))) is not None:
                return Shared(number, words=False)
        for turns in (prompt, *answers) if self._grams else ():
            for gram in _ngrams(turns, self._ngram):
                if gram in self._grams:
                    return Shared(self._grams[gram], words=True)
        return None


def _openings(prompt: Turns, answers: Sequence[Turns]) -> Iterator[Turns]:
    """Yield the prompt, and the turns before each assistant turn of the prompt and of each answer."""
    yield prompt
    for answer in answers or ((),):
        turns = prompt + answer
        for index, message in enumerate(turns):
            if message.role == "assistant" and index > 0:
                yield turns[:index]


def _ngrams(turns: Turns, size: int | None) -> Iterator[tuple[str, ...]]:
    """Yield the word n-grams of each turn, without its role."""
    for message in turns if size is not None else ():
        yield from _grams(words_of(normalize((message,)))[1:], size or 0)


def _grams(words: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]


def _repeats_prompt(example: Example) -> bool | None:
    """Whether every answer of an example repeats its prompt; None if it has no answer, or steps."""
    answers = [answer for answer in (example.chosen, example.rejected) if answer]
    return all(map(_repeats(example), answers)) if answers and not example.steps else None


def _repeats(example: Example) -> Callable[[Turns], bool]:
    asked = example.prompt[-1].content.strip() if example.prompt else ""

    def repeats(answer: Turns) -> bool:
        text = answer[0].content.lstrip()
        rest = text[len(asked) :]
        return bool(asked and rest.strip()) and text.startswith(asked) and not (asked[-1:] + rest[:1]).isalnum()

    return repeats


def _unrepeated(example: Example) -> Example:
    def rest(answer: Turns) -> Turns:
        text = answer[0].content.lstrip()[len(example.prompt[-1].content.strip()) :].lstrip()
        return (replace(answer[0], content=text), *answer[1:])

    chosen, rejected = (rest(answer) if answer else answer for answer in (example.chosen, example.rejected))
    return replace(example, chosen=chosen, rejected=rejected)


# ---------------------------------------------------------------- near duplicates

PERMUTATIONS = 128  # the standard error of an estimated similarity is at most 0.5 / sqrt(128) = 0.044
SHINGLE = 3  # number of words in a shingle; a shorter text is one shingle


def shingles(text: str) -> set[bytes]:
    """The word trigrams of a normalized text.

    >>> sorted(shingles("a b c d"))
    [b'a b c', b'b c d']
    """
    words = words_of(text)
    starts = range(max(1, len(words) - SHINGLE + 1))
    return {" ".join(words[start : start + SHINGLE]).encode() for start in starts}


class NearDuplicates:
    """The distinct rows of one table so far; rows from the same line of a file (pairs of a ranking) never count."""

    def __init__(self, threshold: float) -> None:
        """Start with no rows; rows whose estimated similarity is `threshold` or more are near-duplicates."""
        from datasketch import MinHashLSH  # three seconds: it imports scipy, which few runs need

        self._threshold = threshold
        self._index: Any = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)
        self._rows: list[tuple[Any, Origin]] = []

    def distinct(self, examples: Examples, report: DropReport) -> Examples:
        """Keep the examples that are not near-duplicates of earlier ones, and add the others to `report`."""

        def unlike(example: Example) -> Example | None:
            if (found := self._similar(example)) is None:
                return example
            place = f"{found[1].file}:{found[1].line}"
            report.add(example.source, example.origin, f"near-duplicate: {found[0]:.2f} similar to {place}")
            return None

        return changed(examples, unlike)

    def _similar(self, example: Example) -> tuple[float, Origin] | None:
        """Find the similarity and origin of the most similar earlier row.

        Without a similar one, add `example` and return None.
        """
        from datasketch import MinHash

        sketch = MinHash(num_perm=PERMUTATIONS, seed=1)
        sketch.update_batch(sorted(shingles(normalize(_compared(example)))))
        # The index finds candidates with some error on both sides of the threshold, so each is compared.
        close = [
            (similarity, origin)
            for other, origin in (self._rows[place] for place in self._index.query(sketch))
            if origin != example.origin and (similarity := float(sketch.jaccard(other))) >= self._threshold
        ]
        if close:
            return max(close, key=lambda found: (found[0], found[1].file, -found[1].line))
        self._index.insert(len(self._rows), sketch)
        self._rows.append((sketch, example.origin))
        return None


def _compared(example: Example) -> Turns:
    """The turns of a row with their tool calls as words, without the text that whole sources share.

    System turns and the schemas of tools are left out: a long one would make every two rows similar.
    """
    turns = (*example.prompt, *example.chosen, *example.rejected)
    own = tuple(message for message in turns if message.role != "system") or turns
    return tuple(Message(message.role, f"{message.content} {_calls(message)}") for message in own)


def _calls(message: Message) -> str:
    """The JSON of a turn's tool calls, or of the name of the tool if the turn is a result."""
    fields = json.loads(message.tool_fields) if message.tool_fields else {}
    return json.dumps({name: value for name, value in fields.items() if name != "tools"}, ensure_ascii=False)


# ---------------------------------------------------------------- pii

_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{36,}|\bgithub_pat_[A-Za-z0-9_]{40,}|\bglpat-[A-Za-z0-9_-]{20,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}|\bhf_[A-Za-z0-9]{30,}|\bAIza[A-Za-z0-9_-]{35}|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",
    re.DOTALL,
)
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b")
_CARD = re.compile(r"(?<![\d.-])[2-6]\d{3}(?:[ -]?\d){9,15}(?![\d-])")
_IP4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?!\.?\d)")
_IP6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])")


@dataclass(frozen=True, slots=True)
class Found:
    """Personal data at `start` to `end` (exclusive) of a text. `kind` is key, email, card, ip or phone."""

    kind: str
    start: int
    end: int


def find(text: str, *, phone_region: str) -> list[Found]:
    """Find the personal data in `text`, in order and without overlaps.

    >>> find("Write to jo@example.com.", phone_region="")
    [Found(kind='email', start=9, end=23)]
    """
    found: list[Found] = []
    for one in _candidates(text, phone_region):
        if all(one.end <= other.start or one.start >= other.end for other in found):
            found.append(one)
    return sorted(found, key=lambda one: one.start)


def mask(text: str, *, phone_region: str) -> tuple[str, Counter[str]]:
    """Replace personal data in `text` by `[EMAIL]` and the like, and count the pieces of each kind.

    >>> mask("Write to jo@example.com.", phone_region="")[0]
    'Write to [EMAIL].'
    """
    found = find(text, phone_region=phone_region)
    for one in reversed(found):
        text = f"{text[: one.start]}[{one.kind.upper()}]{text[one.end :]}"
    return text, Counter(one.kind for one in found)


def mask_json(value: Any, *, phone_region: str, counts: Counter[str]) -> Any:
    """Mask the keys, texts and numbers of a JSON value, and add the pieces of each kind to `counts`.

    Keys that masks would make equal are numbered, so that no value is lost.
    """
    if isinstance(value, dict):
        masked: dict[str, Any] = {}
        for number, (key, item) in enumerate(value.items(), start=1):
            name = mask_json(key, phone_region=phone_region, counts=counts)
            name = f"{name} {number}" if name in masked else name
            masked[name] = mask_json(item, phone_region=phone_region, counts=counts)
        return masked
    if isinstance(value, list):
        return [mask_json(item, phone_region=phone_region, counts=counts) for item in value]
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return value
    text, found = mask(str(value), phone_region=phone_region)
    counts.update(found)
    return text if found else value


def luhn(digits: str) -> bool:
    """Whether the checksum of a card number is right (ISO/IEC 7812-1).

    >>> luhn("4111111111111111"), luhn("4111111111111112")
    (True, False)
    """
    doubled = [int(digit) * 2 if place % 2 else int(digit) for place, digit in enumerate(reversed(digits))]
    return sum(value - 9 if value > 9 else value for value in doubled) % 10 == 0


def _candidates(text: str, phone_region: str) -> Iterator[Found]:
    """Yield the findings, the most certain kinds first."""
    yield from _matches("key", _KEY, text, lambda _: True)
    yield from _matches("email", _EMAIL, text, lambda _: True)
    yield from _matches("card", _CARD, text, lambda number: luhn(re.sub(r"\D", "", number)))
    yield from _matches("ip", _IP4, text, _is_address)
    yield from _matches("ip", _IP6, text, _is_address)
    if sum(map(str.isdigit, text)) >= 6:  # the shortest that libphonenumber finds
        import phonenumbers

        numbers = phonenumbers.PhoneNumberMatcher(text, phone_region or None)
        yield from (Found("phone", match.start, match.end) for match in numbers)


def _matches(kind: str, pattern: re.Pattern[str], text: str, confirmed: Callable[[str], bool]) -> Iterator[Found]:
    return (Found(kind, match.start(), match.end()) for match in pattern.finditer(text) if confirmed(match.group()))


def _is_address(text: str) -> bool:
    """Whether `text` is the IP address of another machine, and not `::` or a loopback address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    # Names in C++ (`a::b`) are addresses too.
    named = address.version == 6 and sum(map(bool, text.split(":"))) < 3
    return not (address.is_loopback or address.is_unspecified or named)


# ---------------------------------------------------------------- filters

SHORTEST = 20  # minimum letters of a row for language detection; shorter rows are kept


class RowFilter:
    """The filters of a configuration; the language model is loaded once, before rows are read."""

    def __init__(self, config: Filters) -> None:
        """Load the models of the filters. Raises ConfigError if a package is missing or a language unknown."""
        self._config = config
        self._language = _identifier(config.languages) if config.languages else None

    def kept(self, examples: Examples, report: DropReport) -> Examples:
        """Keep the examples that pass, masked if so configured, and add the others to `report`."""
        if self._config == Filters():
            return examples

        def passing(example: Example) -> Example | None:
            reason, found = self._reason(example), example
            counts: Counter[str] = Counter()
            if not reason and self._config.pii == "mask":
                try:
                    found = self._masked(example, counts)
                except RecursionError:
                    reason = "malformed: brackets too deep to look for personal data"
                if example.chosen and example.rejected and found.chosen == found.rejected:
                    reason = "no preference left: chosen and rejected differ in personal data alone"
            if reason:
                report.add(example.source, example.origin, reason)
                return None
            report.masked.update(counts)
            return found

        return changed(examples, passing)

    def _reason(self, example: Example) -> str:
        """The reason to leave out a row, or the empty text."""
        config = self._config
        for answer in (example.chosen, example.rejected):
            if answer and (problem := _poor(answer, config)):
                return problem
        if self._language and (problem := self._foreign(example)):
            return problem
        if config.pii == "drop":
            found = {one.kind for text in _texts(example) for one in find(text, phone_region=config.phone_region)}
            if found:
                return f"personal data: {', '.join(sorted(found))}"
        return ""

    def _foreign(self, example: Example) -> str:
        text = "\n".join(message.content for message in (*example.prompt, *example.chosen, *example.rejected))
        if self._language is None or sum(map(str.isalpha, text)) < SHORTEST:
            return ""
        language, probability = self._language(text)
        if language not in self._config.languages:
            return f"language: {language} ({probability:.2f})"
        if probability < self._config.min_language_probability:
            return f"language unsure: {language} ({probability:.2f})"
        return ""

    def _masked(self, example: Example, counts: Counter[str]) -> Example:
        """Mask personal data in the turns, steps and label of an example, and add the pieces to `counts`."""
        region = self._config.phone_region

        def text(value: str) -> str:
            masked, found = mask(value, phone_region=region)
            counts.update(found)
            return masked

        def fields(value: str) -> str:
            found: Counter[str] = Counter()
            masked = mask_json(json.loads(value), phone_region=region, counts=found)
            counts.update(found)
            return json.dumps(masked, ensure_ascii=False) if found else value

        def turns(messages: Turns) -> Turns:
            return tuple(
                Message(one.role, text(one.content), fields(one.tool_fields) if one.tool_fields else "")
                for one in messages
            )

        return replace(
            example,
            prompt=turns(example.prompt),
            chosen=turns(example.chosen),
            rejected=turns(example.rejected),
            label=fields(example.label) if _is_json(example.label) else text(example.label),
            steps=tuple(text(step) for step in example.steps),
        )


def _is_json(label: str) -> bool:
    """Whether a label is a JSON object or list, which a reward parses as such."""
    try:
        return label.lstrip()[:1] in ("{", "[") and isinstance(json.loads(label), (dict, list))
    except ValueError:
        return False


def _poor(answer: Turns, config: Filters) -> str:
    """The reason why an answer is of too low quality or of a wrong length, or the empty text."""
    said = [message.content for message in answer if message.role == "assistant"]
    words = " ".join(said).split()
    if len(words) < config.min_answer_words:
        return f"answer has too few words: {len(words)}, at least {config.min_answer_words}"
    if config.max_answer_words and len(words) > config.max_answer_words:
        return f"answer has too many words: {len(words)}, at most {config.max_answer_words}"
    if (share := _repeated(answer)) > config.max_repetition:
        return f"answer repeats itself: {share:.2f} of its trigrams, at most {config.max_repetition}"
    alphabetic = sum(any(map(str.isalpha, word)) for word in words) / len(words) if words else 1.0
    if alphabetic < config.min_alphabetic:
        return f"answer has few letters: {alphabetic:.2f} of its words, at least {config.min_alphabetic}"
    return ""


def _repeated(answer: Turns) -> float:
    """The share of an answer's word trigrams that occurred before in it."""
    trigrams = _grams(words_of(normalize(answer)), 3)
    return 1 - len(set(trigrams)) / len(trigrams) if trigrams else 0.0


def _texts(example: Example) -> Iterable[str]:
    for message in (*example.prompt, *example.chosen, *example.rejected):
        yield from (message.content, message.tool_fields)
    yield from (example.label, *example.steps)


def _identifier(languages: tuple[str, ...]) -> Callable[[str], tuple[str, float]]:
    """Make a function that maps a text to its language and the probability of that language."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ModuleNotFoundError:
        rule, remedy = "needs the package py3langid", "install it: pip install 'rlhf-lifecycle[language]'"
        raise ConfigError("data.filters.languages", list(languages), rule, remedy) from None
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    unknown = sorted(set(languages) - set(identifier.labels))
    if unknown:
        rule = f"{unknown[0]!r} is not a language that can be detected"
        known = f"use codes of ISO 639-1: {', '.join(sorted(identifier.labels))}"
        raise ConfigError("data.filters.languages", list(languages), rule, known)
    return identifier.classify  # type: ignore[no-any-return]
