"""Report dropped rows, and drop those that exceed a limit in tokens or spell control tokens of the policy's tokenizer."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any, TypeAlias

from rlhf_core.data.chat import UNLIMITED, ChatTemplate
from rlhf_core.data.chat_templates import is_content, structure
from rlhf_core.data.tables import Demonstration, Feedback, Preference, SteppedAnswer, Tables
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
        """The reason without details of the row; of a malformed row, what is wrong with it."""
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

    tied_pairs: Counter[str] = field(default_factory=Counter)
    """Number of pairs of equally good answers per source, in rows that have other pairs."""

    not_read: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Number of rows per source and column, or key of turns, whose content is in no table."""

    masked: Counter[str] = field(default_factory=Counter)
    """Number of masked pieces of personal data per kind."""

    def add(self, source: str, origin: Origin, reason: str) -> None:
        """Record that a row is left out."""
        self.drops.append(Drop(source, origin, reason))

    def counts(self) -> dict[str, int]:
        """Return the number of drops per kind of reason, most frequent first."""
        return dict(Counter(drop.kind for drop in self.drops).most_common())

    def reasons(self, source: str = "") -> list[Reason]:
        """Return why rows of `source` (all sources if empty) were left out, the most frequent reason first."""
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
            raise DataError(f"data.sources[{source}]", place, f"{bad[0].reason} {rule}", remedy)

    def to_json(self) -> dict[str, Any]:
        """Return the content of `validation.json`."""
        some = {
            "tied_pairs": dict(self.tied_pairs),
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


def limit(
    tables: Tables,
    chat: ChatTemplate,
    *,
    max_prompt_tokens: int,
    max_tokens: int,
    min_answer_tokens: int,
    origins: Mapping[str, Origin],
    report: DropReport,
) -> Tables:
    """Return `tables` without the rows that exceed a limit, and add each dropped row to `report`.

    The length of a prompt includes its generation prompt, and the length of a row is that with its longest answer. An
    answer is counted by its trained tokens, including the end-of-turn token. Rows whose content spells a control token
    of the tokenizer are dropped, because it would forge turns.
    """
    control = control_tokens(chat)

    def kept(rows: Sequence[Row]) -> tuple[Any, ...]:
        good: list[Row] = []
        for row in rows:
            reason = _broken(row, chat, control, max_prompt_tokens, max_tokens, min_answer_tokens)
            if reason is None:
                good.append(row)
            else:
                report.add(row.source, origins[row.id], reason)
        return tuple(good)

    return Tables(**{name: kept(rows) for name, rows in tables.named().items()})


def control_tokens(chat: ChatTemplate) -> list[str]:
    """Return the texts of the tokens that only a chat template may write: special ones, ends, and those around turns.

    Most tokenizers give names to a few of their special tokens (`all_special_tokens`). Those of Llama 3 and Gemma 3 leave
    out tokens around turns, and DeepSeek's around turns are not special. Line breaks are tokens of Gemma's vocabulary.
    Tokens around reasoning and tool calls are an answer's own, whether they are special or not.
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
    """Return (prompt, answers) of a row.

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


def _broken(
    row: Row,
    chat: ChatTemplate,
    control: Sequence[str],
    max_prompt_tokens: int,
    max_tokens: int,
    min_answer_tokens: int,
) -> str | None:
    """Return the reason to drop `row`, or None to keep it."""
    prompt, answers = parts(row)
    for message in (*prompt, *(message for answer in answers for message in answer)):
        for token in control:
            if token in message.content or token in message.tool_fields:
                return f"content holds a control token: {token}"
    try:
        samples = [chat.continuation(prompt, answer, max_length=UNLIMITED) for answer in answers]
        length = 0 if answers else len(chat.prompt_ids(prompt))
        if isinstance(row, Demonstration) and any(message.role == "assistant" for message in prompt):
            chat.examples(row.messages, max_length=UNLIMITED)  # SFT trains earlier answers, too, so each needs a mask
    except DataError as error:
        return f"chat template: {error}"
    for sample in samples:
        if sample is None or sample.loss_mask.count(1) < min_answer_tokens:
            return f"answer too short: fewer than {min_answer_tokens} trained tokens"
        length = sample.loss_mask.index(1)  # the answer begins where its prompt ends
    if length > max_prompt_tokens:
        return f"prompt too long: {length} tokens, at most {max_prompt_tokens}"
    for sample in samples:
        if sample is not None and len(sample.token_ids) > max_tokens:
            return f"conversation too long: {len(sample.token_ids)} tokens, at most {max_tokens}"
    return None
