"""Report dropped rows, and drop rows that exceed token limits or contain control tokens of the policy's tokenizer."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import PurePath
from typing import Any, TypeAlias

from rlhf_core.data.chat import UNLIMITED, ChatTemplate, Segments
from rlhf_core.data.chat_templates import is_content, structure
from rlhf_core.data.rows import selected
from rlhf_core.data.tables import Demonstration, Feedback, Preference, SteppedAnswer, Tables
from rlhf_core.data.token_bounds import TokenBounds
from rlhf_core.errors import DataError
from rlhf_core.types import Message, Prompt

# ---------------------------------------------------------------- report of dropped rows: file, line and reason


@dataclass(frozen=True, slots=True)
class Origin:
    """The file and line of a row. `line` (or the row of a table) counts from 1, and is 0 for generated rows.

    >>> Origin("faq.jsonl", 7).line
    7
    """

    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Drop:
    """One row that was left out. `reason` starts with a fixed phrase; details follow a colon."""

    source: str
    origin: Origin
    reason: str

    @property
    def kind(self) -> str:
        """The reason without its details."""
        return self.reason.partition(":")[0]

    @property
    def rule(self) -> str:
        """The reason without details of the row; for a malformed row, the kind of fault."""
        kind, colon, said = self.reason.partition(": ")
        return f"{kind}: {said.partition(':')[0]}" if kind == "malformed" and colon else kind


@dataclass(frozen=True, slots=True)
class Reason:
    """Why rows were left out: how many, where the first of them are, and the whole reason of the first."""

    rule: str
    rows: int
    first: tuple[Origin, ...]
    example: str

    def __str__(self) -> str:
        detail = self.example.removeprefix(self.rule).lstrip(": ")
        said = f" ({'first: ' if self.rows > 1 else ''}{detail})" if detail else ""
        lines = [f"{PurePath(one.file).name}:{one.line}" for one in self.first if one.line]
        more = ["..."] if lines and self.rows > PLACES else []
        return f"{self.rows:,} {self.rule}{said}{', at ' if lines else ''}{', '.join([*lines, *more])}"


PLACES = 3  # rows that a reason names


@dataclass(slots=True)
class DropReport:
    """The drops of a run, collected while rows are read, cleaned and limited."""

    drops: list[Drop] = field(default_factory=list)
    rows_read: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    """Number of valid rows per source that no table needed (shares below 1, weights, `max_rows`)."""

    functions: dict[str, str] = field(default_factory=dict)
    """Source -> the function to paste for the first of its rows that are in no known form."""

    not_read: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Number of rows per source and column, or key of turns, whose content is in no table."""

    masked: Counter[str] = field(default_factory=Counter)
    """Number of masked pieces of personal data per kind."""

    def add(self, source: str, origin: Origin, reason: str) -> None:
        """Record that a row is left out."""
        self.drops.append(Drop(source, origin, reason))

    def counts(self) -> dict[str, int]:
        """Count the drops per kind of reason, most frequent first."""
        return dict(Counter(drop.kind for drop in self.drops).most_common())

    def reasons(self, source: str = "") -> list[Reason]:
        """The reasons why rows of `source` (all sources if empty) were left out, the most frequent first."""
        found: dict[str, list[Drop]] = defaultdict(list)
        for drop in sorted(self.drops, key=lambda drop: (drop.origin.file, drop.origin.line)):
            if source in ("", drop.source):
                found[drop.rule].append(drop)
        return [
            Reason(rule, len(drops), tuple(one.origin for one in drops[:PLACES]), drops[0].reason)
            for rule, drops in sorted(found.items(), key=lambda item: -len(item[1]))
        ]

    def check_malformed(self, source: str, malformed: Iterable[Drop], *, max_bad_fraction: float) -> None:
        """Raise DataError, naming the first malformed row, if more than `max_bad_fraction` of a source is malformed."""
        bad, read = list(malformed), self.rows_read[source]
        if len(bad) > max_bad_fraction * read:
            place = f"{bad[0].origin.file}:{bad[0].origin.line}"
            rule = f"({len(bad)} of {read} rows are malformed, at most {max_bad_fraction:.1%} may be)"
            remedy = "fix the rows, set `format` and `columns` for this source, or raise data.max_bad_fraction"
            remedy = self.functions.get(source, remedy)
            raise DataError(f"data.sources[{source}]", place, f"{bad[0].reason} {rule}", remedy)

    def to_json(self) -> dict[str, Any]:
        """The content of `validation.json`."""
        some = {
            "not_read": {name: dict(one) for name, one in self.not_read.items() if one},
            "masked": dict(self.masked),
        }
        return {
            "rows_read": dict(self.rows_read),
            "unused": dict(self.unused),
            **{name: counts for name, counts in some.items() if counts},
            "dropped": len(self.drops),
            "reasons": self.counts(),
            "drops": [{"source": drop.source, **asdict(drop.origin), "reason": drop.reason} for drop in self.drops],
        }


# ---------------------------------------------------------------- limits

Row: TypeAlias = Demonstration | Preference | Prompt | SteppedAnswer | Feedback

_PROBE = (Message("user", "Hi"),)
BATCH = 1 << 20
"""Characters of the rows that are checked together. The tokenizer takes a few hundred bytes for each of their
tokens."""


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """The limits of `prepare_data` in tokens.

    A prompt is counted with its generation prompt, a row with its longest answer, and an answer by its trained tokens, the
    end-of-turn token among them.
    """

    max_prompt_tokens: int
    max_tokens: int
    min_answer_tokens: int


def limit(
    tables: Tables,
    chat: ChatTemplate,
    limits: TokenLimits,
    *,
    origins: Mapping[str, Origin],
    report: DropReport,
) -> Tables:
    """Drop the rows of `tables` that exceed a limit, and add each dropped row to `report`.

    Rows whose content spells a control token of the tokenizer are dropped, because it would forge turns.
    """
    reasons = _Reasons(chat, limits, chat.token_bounds(), control_tokens(chat))
    kept: dict[str, Any] = {}
    for name, rows in tables.named().items():
        good, done = array("q"), 0
        for batch in _batches(rows):
            for place, (row, reason) in enumerate(zip(batch, reasons(batch), strict=True), start=done):
                if reason is None:
                    good.append(place)
                else:
                    report.add(row.source, origins[row.id], reason)
            done += len(batch)
        kept[name] = selected(rows, good)
    return Tables(**kept)


def control_tokens(chat: ChatTemplate) -> list[str]:
    """The texts of the tokens that only a chat template may write: special tokens, ends, and tokens around turns.

    Most tokenizers name a few of their special tokens (`all_special_tokens`). The lists of Llama 3 and Gemma 3 lack
    tokens around turns, and DeepSeek's tokens around turns are not special. Line breaks are tokens of Gemma's
    vocabulary. Tokens around reasoning and tool calls belong to the answer, whether they are special or not.
    """
    written = chat.ends.union(chat.prompt_ids(_PROBE))
    never = structure(chat.tokenizer, chat.ends)
    added = chat.tokenizer.added_tokens_decoder.items()
    found = {number: token.content for number, token in added if token.special or number in written}
    found |= zip(chat.tokenizer.all_special_ids, chat.tokenizer.all_special_tokens, strict=True)
    return sorted(
        {text for number, text in found.items() if text.strip() and (number in never or not is_content(text))}
    )


def parts(row: Row) -> tuple[tuple[Message, ...], tuple[tuple[Message, ...], ...]]:
    """Split a row into (prompt, answers).

    The prompt of a demonstration is everything before its last turn. Steps are joined with one per line.
    """
    if isinstance(row, SteppedAnswer):
        return row.prompt, (row.answer("\n"),)
    if isinstance(row, Feedback):
        return row.prompt, (row.answer,)
    if isinstance(row, Preference):
        return row.prompt, (row.chosen, row.rejected)
    if isinstance(row, Demonstration):
        return row.messages[:-1], (row.messages[-1:],)
    return row.messages, ()


def _batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield the rows in order, in batches of about `BATCH` characters."""
    batch: list[Row] = []
    size = 0
    for row in rows:
        prompt, answers = parts(row)
        batch.append(row)
        size += sum(len(message.content) for turns in (prompt, *answers) for message in turns)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class _Texts:
    """The rendered text of a row in pieces, one text with each of its answers, or the text of a prompt alone.

    SFT trains earlier answers of a demonstration, too: `examples` are the pieces of its samples, if it has such
    answers.
    """

    answered: list[Segments]
    bare: Segments
    examples: list[Segments]

    def map(self, change: Callable[[Segments], Segments]) -> "_Texts":
        """The texts with each list of segments changed."""
        return _Texts(
            answered=[change(one) for one in self.answered],
            bare=change(self.bare),
            examples=[change(one) for one in self.examples],
        )


@dataclass(frozen=True, slots=True)
class _Reasons:
    """Find the reasons why rows are dropped.

    Only rows that may not fit, by the length of their texts, are tokenized.
    """

    chat: ChatTemplate
    limits: TokenLimits
    bounds: TokenBounds | None
    control: Sequence[str]

    def __call__(self, rows: Sequence[Row]) -> list[str | None]:
        """The reason to drop each row, or None to keep it."""
        reasons: list[str | None] = [None] * len(rows)
        # First the rows that need no tokens: content is searched, and lengths are bounded.
        undecided: dict[int, _Texts] = {}
        for at, row in enumerate(rows):
            try:
                reasons[at] = self._find_control_token(row)
                if reasons[at] is None and not self._must_fit(texts := self._texts(row)):
                    undecided[at] = texts
            except DataError as error:
                reasons[at] = f"chat template: {error}"

        # Then the others, tokenized in one call.
        shown = {at: texts.map(self._shorten) for at, texts in undecided.items()}
        self.chat.encode_ahead(
            segments for texts in shown.values() for segments in (*texts.answered, texts.bare, *texts.examples)
        )
        for at, texts in undecided.items():
            try:
                reasons[at] = self._misfit(shown[at], texts)
            except DataError as error:
                reasons[at] = f"chat template: {error}"
        return reasons

    def _find_control_token(self, row: Row) -> str | None:
        """The reason to drop a row whose messages or tool fields spell a control token, which would forge a turn."""
        prompt, answers = parts(row)
        said = [message for answer in answers for message in answer]
        for message in (*prompt, *said):
            for token in self.control:
                if token in message.content or token in message.tool_fields:
                    return f"content holds a control token: {token}"
        return None

    def _texts(self, row: Row) -> _Texts:
        """The rendered text of a row. Raises DataError if the chat template rejects it."""
        prompt, answers = parts(row)
        answered = [self.chat.segments((*prompt, *answer), answers_from=len(prompt)) for answer in answers]
        bare = [] if answers else self.chat.prompt_segments(prompt)
        if isinstance(row, Demonstration) and any(message.role == "assistant" for message in prompt):
            return _Texts(answered, bare, self.chat.example_segments(row.messages))
        return _Texts(answered, bare, [])

    def _must_fit(self, texts: _Texts) -> bool:
        """True if, by their lengths, no text is too long, and an answer has its end-of-turn token and needs no more."""
        bounds, limits = self.bounds, self.limits
        if bounds is None or not bounds.growth or limits.min_answer_tokens > 1:
            return False
        for segments in texts.answered:
            asked = _prompt_of(segments)
            if not asked or not all(bounds.end in text for text, trained in segments if trained):
                return False
            if _sum(bounds.most, asked) > limits.max_prompt_tokens:
                return False
            if _sum(bounds.most, segments) > limits.max_tokens:
                return False
        return _sum(bounds.most, texts.bare) <= limits.max_prompt_tokens

    def _shorten(self, segments: Segments) -> Segments:
        """Cut segments that cannot fit to a beginning that cannot fit either."""
        if (bounds := self.bounds) is None:
            return segments
        most, ends = max(asdict(self.limits).values()), self.chat.end_texts
        # An answer keeps its end: without one it would have no trained token, and the reason would be a wrong one.
        return [(bounds.shorten(text, tokens=most, ends=ends if answer else ()), answer) for text, answer in segments]

    def _misfit(self, shown: _Texts, texts: _Texts) -> str | None:
        """Why a row is dropped by the tokens of `shown`, the shortened `texts`."""
        limits, chat = self.limits, self.chat
        samples = [chat.sample(segments, max_length=UNLIMITED) for segments in shown.answered]
        for segments in shown.examples:  # each needs a mask
            chat.sample(segments, max_length=UNLIMITED)

        # The order of the checks is the order of the reasons in the report: an answer, its prompt, the whole.
        length = sum(map(len, chat.pieces(shown.bare)))
        for sample in samples:
            if sample is None or sample.loss_mask.count(1) < limits.min_answer_tokens:
                return f"answer too short: fewer than {limits.min_answer_tokens} trained tokens"
            length = sample.loss_mask.index(1)  # the answer begins where its prompt ends
        if length > limits.max_prompt_tokens:
            pair = (shown.answered, texts.answered) if samples else ([shown.bare], [texts.bare])
            size = self._size(length, *(_prompt_of(found[-1]) for found in pair))
            return f"prompt too long: {size}, at most {limits.max_prompt_tokens}"
        for sample, short, whole in zip(samples, shown.answered, texts.answered, strict=True):
            if sample is not None and len(sample.token_ids) > limits.max_tokens:
                size = self._size(len(sample.token_ids), short, whole)
                return f"conversation too long: {size}, at most {limits.max_tokens}"
        return None

    def _size(self, tokens: int, shown: Segments, whole: Segments) -> str:
        """The size in a reason: the number of tokens, or a lower bound if only a part of the text was tokenized."""
        if shown == whole or self.bounds is None:
            return f"{tokens} tokens"
        return f"at least {_sum(self.bounds.least, whole)} tokens"


def _prompt_of(segments: Segments) -> Segments:
    """The segments before the first answer to train on."""
    return list(takewhile(lambda one: not one[1], segments))


def _sum(bound: Callable[[str], int], segments: Segments) -> int:
    """A bound on the tokens of all segments, which are tokenized one by one."""
    return sum(bound(text) for text, _ in segments)
