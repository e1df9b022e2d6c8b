"""Collect the result of a translation: the profile's values with their origin, and the outcome of every flag."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rlhf_contrib.openrlhf.flags import Arguments, Given
from rlhf_core.errors import ConfigError

LARGEST_WINS = {"prepare_data.max_prompt_tokens", "prepare_data.max_tokens", "runtime.sampler.max_model_len"}
"""Limits that must be large enough for every command of a script."""

Fate = Literal["translated", "ignored", "not translatable"]
_FATES: tuple[Fate, ...] = ("ignored", "translated", "not translatable")


class Value(NamedTuple):
    """A value of the profile, its origin, and whether the script set it (otherwise it is OpenRLHF's default)."""

    value: Any
    comment: str
    given: bool


@dataclass
class Outcome:
    """The outcome of one flag."""

    command: str
    flag: str
    text: str
    fate: Fate
    what: list[str]


@dataclass
class SheetSource:
    """A data set that is read, and the tables that use it."""

    fields: dict[str, Any]
    comment: str
    uses: list[str]


@dataclass
class Draft:
    """The profile so far."""

    values: dict[str, Value] = field(default_factory=dict)
    sources: list[SheetSource] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    made: dict[str, str] = field(default_factory=dict)
    """Path that an earlier command wrote -> the profile section that produces it."""
    template: str = ""
    """Chat template that the profile needs in a separate file; empty if it needs none."""
    template_file: str = "openrlhf.jinja"

    def note(self, text: str) -> None:
        """Add a note that the user must know or act on, once."""
        if text not in self.notes:
            self.notes.append(text)


class Sheet:
    """One command in translation: its flags, and methods with which rules record the outcome of each flag."""

    def __init__(self, arguments: Arguments, draft: Draft) -> None:
        self.arguments = arguments
        self.draft = draft
        self._outcomes: dict[str, Outcome] = {}

    # ------------------------------------------------------------ reading

    def has(self, name: str) -> bool:
        """Whether the script sets the flag."""
        return name in self.arguments.given

    def text(self, name: str) -> str:
        """The value of a flag as text, or else OpenRLHF's default."""
        if self.has(name):
            text = self.arguments.given[name].text
            if "$" in text and name not in ("input_template", "tokenizer_chat_template"):
                self.draft.note(
                    f"{self.flag(name)} {text}: the script does not define its value; set it in the profile"
                )
            return text
        default = self.arguments.default(name)
        return "" if default is None else default

    def number(self, name: str) -> float:
        """The value of a flag as a number; ConfigError if it is not one."""
        return self._numbers(name, [self.text(name)])[0]

    def integer(self, name: str) -> int:
        """The value of a flag as a whole number; ConfigError if it is not one."""
        number = self.number(name)
        if not number.is_integer():
            raise ConfigError(self.flag(name), self.text(name), "must be a whole number", "change it")
        return int(number)

    def count(self, name: str) -> int:
        """The value of a flag as a whole number of at least 1."""
        if self.integer(name) < 1:
            raise ConfigError(self.flag(name), self.text(name), "must be at least 1", "change it")
        return self.integer(name)

    def numbers(self, name: str, separator: str | None = None) -> list[float]:
        """All numbers of a flag that takes several words, or of a list with another separator."""
        return self._numbers(name, [part for part in self.text(name).split(separator) if part.strip()])

    def pair(self, name: str) -> tuple[float, float]:
        """Two numbers; ConfigError for any other count."""
        numbers = self.numbers(name)
        if len(numbers) != 2:
            raise ConfigError(self.flag(name), self.text(name), "takes two numbers", "give both")
        return numbers[0], numbers[1]

    def needed(self, name: str) -> str:
        """The value of a flag that the command requires; ConfigError if it is missing."""
        if not self.text(name):
            raise ConfigError(self.flag(name), "", f"{self.arguments.module} needs it", "add it")
        return self.text(name)

    def flag(self, name: str) -> str:
        """The flag as spelled in the script, or as its version of OpenRLHF would spell it."""
        return self.arguments.spelling(name)

    # ------------------------------------------------------------ writing

    def put(self, key: str, value: Any, *names: str, note: str = "") -> None:
        """Set a key of the profile from the flags `names`. Another command's value stays, and this is reported."""
        given = [name for name in names if self.has(name)]
        before = self.draft.values.get(key)
        if before and key in LARGEST_WINS and before.value > value:
            self._record(given, "translated", f"{key} is larger already")
            return
        if before and before.value != value and before.given and key not in LARGEST_WINS:
            what = f"{key} applies to the whole run and is already {before.value!r} ({before.comment}); import this command on its own"
            self._record(given, "not translatable", what)
            return
        if before is None or given or before.value != value:
            self.draft.values[key] = Value(value, self._comment(names, note), bool(given))
        self._record(given, "translated", f"{key} = {_shown(value)}" + (f" ({note})" if note else ""))

    def elsewhere(self, name: str, what: str) -> None:
        """Record that a flag is translated by a setting elsewhere in the profile."""
        self._record([name] if self.has(name) else [], "translated", what)

    def ignore(self, name: str, reason: str) -> None:
        """Record that a flag has no effect here."""
        self._record([name] if self.has(name) else [], "ignored", reason)

    def refuse(self, name: str, reason: str, nearest: str) -> None:
        """Record that a flag has no equivalent, and the nearest feature."""
        self._record([name] if self.has(name) else [], "not translatable", f"{reason}; nearest: {nearest}")

    def extra(self, given: Given, fate: Fate, what: str) -> None:
        """Record words that are not flags of the command: launcher flags, unknown flags and repeated flags."""
        self.draft.outcomes.append(Outcome(self.arguments.module, given.flag, given.shown, fate, [what]))

    def close(self) -> None:
        """Pass the outcomes to the draft. Flags that no rule has read are recorded as not translatable."""
        for name, given in self.arguments.given.items():
            if name not in self._outcomes:
                self.refuse(name, "this program does not use it", "none")
            outcome = self._outcomes[name]
            outcome.flag, outcome.text = given.flag, given.shown
            self.draft.outcomes.append(outcome)

    # ------------------------------------------------------------ private

    def _record(self, names: list[str], fate: Fate, what: str) -> None:
        """Record the fate of flags. If rules assign several fates to a flag, the last one in `_FATES` wins."""
        for name in names:
            old = self._outcomes.get(name)
            if old is None or _FATES.index(fate) > _FATES.index(old.fate):
                self._outcomes[name] = Outcome(self.arguments.module, "", "", fate, [what])
            elif old.fate == fate:
                old.what += [what] if what not in old.what else []

    def _comment(self, names: tuple[str, ...], note: str) -> str:
        given = [f"{self.flag(name)} {self.arguments.given[name].text}".strip() for name in names if self.has(name)]
        shown = given or [f"default of {self.flag(name)}" for name in names[:1]]
        return "; ".join([", ".join(shown)] * bool(shown) + [note] * bool(note))

    def _numbers(self, name: str, words: list[str]) -> list[float]:
        try:
            return [float(word) for word in words]
        except ValueError:
            remedy = "assign the variable at the top of the script" if "$" in self.text(name) else "change it"
            raise ConfigError(self.flag(name), self.text(name), "must be a number", remedy) from None


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
