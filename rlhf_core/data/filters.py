"""Leave out rows by language, length and quality, and leave out or mask personal data; every row is counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from rlhf_core.config.data import Filters
from rlhf_core.data.cleaning import normalize
from rlhf_core.data.formats import Example, Turns
from rlhf_core.data.pii import find, mask, mask_json
from rlhf_core.data.validation import DropReport
from rlhf_core.errors import ConfigError, explain
from rlhf_core.types import Message

SHORTEST = 20
"""Fewest letters in a row by which its language is told; shorter rows are kept."""


class RowFilter:
    """The filters of a configuration; the language model is loaded once, before rows are read."""

    def __init__(self, config: Filters) -> None:
        """Load what the filters need. Raises ConfigError if a package is missing or a language unknown."""
        self._config = config
        self._language = _identifier(config.languages) if config.languages else None

    def kept(self, examples: Iterable[Example], report: DropReport) -> list[Example]:
        """Return the examples that pass, masked if so configured, and add the others to `report`."""
        if self._config == Filters():
            return list(examples)
        kept = []
        for example in examples:
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
            else:
                report.masked.update(counts)
                kept.append(found)
        return kept

    def _reason(self, example: Example) -> str:
        """Return why a row is left out, or the empty text."""
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
        """Return an example without personal data in its turns, steps and label; `counts` is increased."""
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


# ---------------------------------------------------------------- private


def _is_json(label: str) -> bool:
    """Return whether a label is a JSON object or list, which a reward reads as such."""
    try:
        return label.lstrip()[:1] in ("{", "[") and isinstance(json.loads(label), (dict, list))
    except ValueError:
        return False


def _poor(answer: Turns, config: Filters) -> str:
    """Return why an answer is of too low quality or of a wrong length, or the empty text."""
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
    """Return the share of an answer's word trigrams that occurred before in it."""
    words = normalize(answer).split()
    trigrams = [tuple(words[start : start + 3]) for start in range(len(words) - 2)]
    return 1 - len(set(trigrams)) / len(trigrams) if trigrams else 0.0


def _texts(example: Example) -> Iterable[str]:
    for message in (*example.prompt, *example.chosen, *example.rejected):
        yield from (message.content, message.tool_fields)
    yield from (example.label, *example.steps)


def _identifier(languages: tuple[str, ...]) -> Callable[[str], tuple[str, float]]:
    """Return a function from a text to its language and the probability of it."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ModuleNotFoundError:
        rule, remedy = "needs the package py3langid", "install it: pip install 'rlhf-lifecycle[language]'"
        raise ConfigError(explain("data.filters.languages", list(languages), rule, remedy)) from None
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    unknown = sorted(set(languages) - set(identifier.labels))
    if unknown:
        rule = f"{unknown[0]!r} is not a language that can be told"
        known = f"use codes of ISO 639-1: {', '.join(sorted(identifier.labels))}"
        raise ConfigError(explain("data.filters.languages", list(languages), rule, known))
    return identifier.classify  # type: ignore[no-any-return]
