"""Convert real data to tables: read -> adapt -> deduplicate -> pair -> split -> decontaminate -> mix."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rlhf_core.config.data import HELD_OUT, Files, Source
from rlhf_core.data.cleaning import (
    NearDuplicates,
    RowFilter,
    decontaminate,
    deduplicate,
    distinct,
    exact,
    fingerprint,
    without_repeated_prompts,
)
from rlhf_core.data.columns import (
    JUDGED_FORMATS,
    MORE_THAN_ONE_ANSWER,
    LabelReading,
    Reading,
    detect,
    has_integers_with_gaps,
    is_gap,
    label_reading,
    refuse_hidden_answers,
    refuse_judgment,
    refuse_left_out,
    refuse_verdict,
)
from rlhf_core.data.formats import Example, Tie, convert
from rlhf_core.data.interleaving import interleave
from rlhf_core.data.limits import Drop, DropReport, Origin
from rlhf_core.data.mixing import is_evaluation, misfit, mix, shuffled, table_of, trained
from rlhf_core.data.row_functions import Row, UnknownForm
from rlhf_core.data.rows import RowFile, RowProgress, StoredRows
from rlhf_core.data.sources import LEFT_OUT, Record, read
from rlhf_core.data.tables import Demonstration, Feedback, Preference, SteppedAnswer, Tables, content_id, pseudonym
from rlhf_core.errors import DataError
from rlhf_core.types import Message, Prompt, derive_seed

TRAINING = ("demonstrations", "preferences", "prompts", "steps", "feedback")
EVALUATION = ("eval_demonstrations", "eval_preferences", "eval_prompts", "eval_steps", "eval_feedback")
_SAMPLE = 1000  # rows by which the format of a source is found
_MALFORMED = (DataError, RecursionError)
"""Errors of a malformed row. Brackets that a reader accepts may be too deep for the code that inspects the value."""
_LONGEST_REASON = 500  # characters of a reason, which may quote a long value of its row


def make_tables(
    config: Files, *, seed: int, report: DropReport, folder: Path | None = None, progress: RowProgress | None = None
) -> tuple[Tables, dict[str, Origin]]:
    """Build the tables and map each row's ID to its origin. Rows that are left out go to `report`.

    Rows are in temporary files in `folder`, and `progress` shows the loops over them. Raises DataError, naming the
    first malformed row, if more than `max_bad_fraction` of a source is malformed.
    """
    file = RowFile(Example, Origin, Message, folder=folder, progress=progress)
    steps = file.progress
    assigned: Assigned = defaultdict(lambda: defaultdict(lambda: StoredRows(file)))
    row_filter = RowFilter(config.filters)
    for source in config.sources:
        found = read_examples(source, max_bad_fraction=config.max_bad_fraction, report=report, file=file)
        steps.message = f"cleaning {source.name}"
        examples = row_filter.kept(found, report)
        if config.deduplicate:
            examples = deduplicate(examples, report)
        steps.message = f"splitting {source.name}"
        _assign(_paired(examples, source), source, config, assigned, report)
    steps.message = "cleaning all sources"
    if config.deduplicate:
        _deduplicate_across(assigned, report)
    if config.decontaminate != "off":
        _decontaminate(assigned, config, report, file)
    if config.filters.near_duplicates:
        _drop_near_duplicates(assigned, config.filters.near_duplicates, report)
    rows = {
        table: StoredRows[Example](
            file,
            _mixed(assigned[table], config, trains=table in TRAINING, seed=derive_seed(seed, table), report=report),
        )
        for table in (*TRAINING, *EVALUATION)
    }
    steps.message = "mixing the sources"
    kinds = (Demonstration, Preference, Prompt, SteppedAnswer, Feedback, Message)
    return _tables(rows, RowFile(*kinds, folder=folder, progress=steps))


def read_examples(
    source: Source,
    *,
    max_bad_fraction: float,
    report: DropReport,
    file: RowFile | None = None,
) -> StoredRows[Example]:
    """Read the rows of `source` as examples and report malformed rows. Raises DataError if there are too many.

    With format `auto`, the most frequent format is used for all rows. Ties are reported, but do not count as malformed.
    """
    examples = StoredRows[Example](file or RowFile(Example, Origin, Message))
    malformed: list[Drop] = []
    ties: list[Drop] = []
    examples.file.progress.message = f"reading {source.name}"
    rows = _readable(source, report, malformed, examples.file)
    format_name = rows.format
    examples.file.progress.message = f"converting {source.name}"
    labels = label_reading(source, format_name, rows.having("label", "kto_tag"))  # over all rows
    gaps = [name for name in ("label", "answer") if has_integers_with_gaps(rows.having(name), name)]
    for origin, row in rows.located():
        for name in gaps:
            row = row.changed(name, "" if is_gap(row.get(name)) else row[name].removesuffix(".0"))
        try:
            example = _example(row, format_name, source, labels)
        except _MALFORMED as error:
            malformed.append(_malformed(source, origin, error, report))
            continue
        except Tie as tie:
            ties.append(Drop(source.name, origin, str(tie)))
            continue
        report.not_read[source.name].update(example.unread)
        name = pseudonym(example.annotator, source.name)
        examples.append(replace(example, source=source.name, origin=origin, annotator=name))
    if source.repeated_prompts == "remove":
        examples, repeated = without_repeated_prompts(examples)
        report.not_read[source.name].update({"prompts repeated in answers": repeated} if repeated else {})
    malformed.sort(key=lambda drop: (drop.origin.file, drop.origin.line))
    report.drops += malformed + ties
    report.check_malformed(source.name, malformed, max_bad_fraction=max_bad_fraction)
    return examples


def pair_unpaired(examples: StoredRows[Example]) -> StoredRows[Example]:
    """Join good and bad answers to the same prompt into pairs (KTO and stepwise rows).

    Answers without a partner stay unchanged: a good one can still be imitated, and any labeled one can be trained on
    alone. An answer that is labeled both good and bad is not paired with itself.
    """
    bad: dict[bytes, list[int]] = defaultdict(list)
    for number, example in examples.numbered():
        if example.rejected and not example.chosen:
            bad[fingerprint(exact(example.prompt))].append(number)
    if not bad:
        return examples

    def joined(example: Example) -> Example | None:
        if example.rejected:
            return example if example.chosen else None
        partners = bad[fingerprint(exact(example.prompt))] if example.chosen else []
        for place, number in enumerate(partners):
            partner: Example = examples.file.read(number)
            if partner.rejected != example.chosen:
                del partners[place]
                return replace(example, rejected=partner.rejected, annotator=_both(example, partner))
        return example

    pairs = examples.changed(joined)
    return StoredRows(examples.file, chain(pairs.numbers, *bad.values()))


def _both(good: Example, bad: Example) -> str:
    """The annotator of both answers of a pair, or the empty text if two people judged them."""
    return good.annotator if good.annotator == bad.annotator else ""


@dataclass(frozen=True, slots=True)
class _Readable:
    """The readable rows of a source, stored in a file. Each iteration reads them again."""

    records: StoredRows[Record]
    source: Source
    format: str
    columns: set[str]
    """Names of all columns that occur in these rows."""

    def having(self, *names: str) -> Iterable[Row]:
        """The rows, or none if no row has one of the columns."""
        theirs = (getattr(self.source.columns, name, "") for name in names)
        return () if self.columns.isdisjoint((*names, *theirs)) else self

    def __iter__(self) -> Iterator[Row]:
        return (row for _, row in self.located())

    def located(self) -> Iterator[tuple[Origin, Reading]]:
        """Yield each row with its origin."""
        return ((one.origin, row_format(one, self.source, self.format)[1]) for one in self.records)


def _readable(source: Source, report: DropReport, malformed: list[Drop], file: RowFile) -> _Readable:
    """Find the format and columns of the readable rows, and add the others to `malformed`."""
    records = StoredRows[Record](RowFile(Record, Origin, folder=file.folder, progress=file.progress))
    for record in file.progress.walk(read(source)):
        records.append(record)
    format_name = usual_format(records, source)
    good, columns = array("q"), set[str]()
    for number, record in records.numbered():
        report.rows_read[source.name] += 1
        if record.problem == LEFT_OUT:
            report.add(source.name, record.origin, LEFT_OUT)
            continue
        try:
            format_name, row = row_format(record, source, format_name)
            if source.format == "auto":
                _refuse_others(row, format_name)
        except _MALFORMED as error:
            malformed.append(_malformed(source, record.origin, error, report))
            continue
        good.append(number)
        columns.update(record.row)
    return _Readable(StoredRows(records.file, good), source, format_name if good else "", columns)


def usual_format(records: Sequence[Record], source: Source) -> str:
    """The format of a source.

    For `auto`, the most frequent format in a sample of rows, empty if no row has a known one.
    """
    if source.format != "auto":
        return source.format
    found: Counter[str] = Counter()
    for at in range(0, len(records), max(1, len(records) // _SAMPLE)):
        with suppress(*_MALFORMED):
            found[row_format(records[at], source)[0]] += 1
    return max(found, key=found.__getitem__, default="")


def row_format(record: Record, source: Source, known: str = "") -> tuple[str, Reading]:
    """Detect the format of a record (`known`, if its source has one) and its columns.

    Raises DataError if it has none.
    """
    if record.problem:
        raise DataError(record.problem)
    row = Reading(record.row, source.columns)
    return known or detect(row), row


def _refuse_others(row: Reading, format_name: str) -> None:
    """Raise DataError for a row with answers or verdicts that `format_name`, the format of most rows, leaves out."""
    if format_name == "prompt":
        refuse_hidden_answers(row)
    refuse_judgment(row, {name for name, value in row.items() if value is not None})
    if format_name == "implicit_preference" or (
        format_name in JUDGED_FORMATS and any(name in row for name in MORE_THAN_ONE_ANSWER)
    ):
        try:
            own = detect(row)
        except DataError:
            if format_name == "implicit_preference":  # the common beginning of two texts is no prompt here
                raise
            return  # the adapter reports the missing columns
        if own not in (format_name, *JUDGED_FORMATS, "prompt"):
            rule = f"its columns are those of {own!r}, and most rows are {format_name!r}"
            raise DataError(f"mixed formats: {rule}; set `format`, or make it two sources")


def _example(row: Reading, format_name: str, source: Source, labels: LabelReading) -> Example:
    """Convert a row to an example. Raises DataError for a malformed row, and Tie if it prefers no answer."""
    example = convert(row, format_name, labels=labels)
    if source.format == "auto":
        refuse_left_out(example.unread, row)
    if labels == "answer" and format_name in JUDGED_FORMATS and example.chosen:
        refuse_verdict(row, source)
    return example


def _malformed(source: Source, origin: Origin, error: DataError | RecursionError, report: DropReport) -> Drop:
    if isinstance(error, UnknownForm):
        remedy = error.function
        if source.function is not None:
            remedy = f"let {source.function} change each row that it returns as these lines do:\n{error.lines}"
        report.functions.setdefault(source.name, remedy)
    said = "brackets too deep" if isinstance(error, RecursionError) else str(error)
    return Drop(
        source.name, origin, f"malformed: {said if len(said) <= _LONGEST_REASON else said[:_LONGEST_REASON] + ' ...'}"
    )


def _paired(examples: StoredRows[Example], source: Source) -> StoredRows[Example]:
    """Join the examples to pairs, except the ones for the `steps` table, which are judged one by one."""
    use = source.use
    if not (use.steps or use.eval_steps or any(one.rejected and not one.chosen for one in examples)):
        return examples
    judged, others = StoredRows[Example](examples.file), StoredRows[Example](examples.file)
    for number, example in examples.numbered():
        (judged if _goes_to("steps", example, source) else others).numbers.append(number)
    paired = pair_unpaired(others)
    return StoredRows(examples.file, chain(paired.numbers, judged.numbers))


def _goes_to(kind: str, example: Example, source: Source) -> bool:
    """Whether the example belongs to the table `kind`, to train on or held out."""
    table = table_of(example, source.use)
    return table is not None and trained(table) == kind


Assigned = dict[str, dict[str, StoredRows[Example]]]
"""Table -> name of a source -> its rows there."""


def _assign(
    examples: StoredRows[Example], source: Source, config: Files, assigned: Assigned, report: DropReport
) -> None:
    """Add each example to the table of its prompt, `assigned[table][source name]`.

    A table holds out a part of its prompts unless a source has its held-out rows.
    """
    filled = config.filled()
    splits = {trained(table) for table in HELD_OUT if table not in filled}
    for number, example in examples.numbered():
        table = table_of(example, source.use)
        if table is None:
            report.unused[source.name] += 1
            continue
        reason = misfit(example, table)
        if reason is not None:
            report.add(source.name, example.origin, reason)
            continue
        name = trained(table)
        held_out = name != table or (table in splits and is_evaluation(example, config.eval_fraction))
        if name == "preferences" and not (example.chosen and example.rejected):
            name = "feedback"
        assigned[f"eval_{name}" if held_out else name][source.name].numbers.append(number)


def _deduplicate_across(assigned: Assigned, report: DropReport) -> None:
    """Drop rows that an earlier source has already added to the same table. Tables of prompts keep each prompt once."""
    for table, by_source in assigned.items():
        unseen = distinct(report)
        for name, found in by_source.items():
            bare = found.changed(_asked) if trained(table) == "prompts" else found
            by_source[name] = bare.changed(unseen)


def _asked(example: Example) -> Example:
    """Remove the answers of an example."""
    return replace(example, chosen=(), rejected=()) if example.chosen or example.rejected else example


def _decontaminate(assigned: Assigned, config: Files, report: DropReport, file: RowFile) -> None:
    held_out = StoredRows[Example](
        file, (n for table in EVALUATION for found in assigned[table].values() for n in found.numbers)
    )
    ngram = config.ngram if config.decontaminate == "ngram" else None
    for table in TRAINING:
        for name, found in assigned[table].items():
            assigned[table][name] = decontaminate(found, held_out, ngram=ngram, report=report)


def _drop_near_duplicates(assigned: Assigned, threshold: float, report: DropReport) -> None:
    """Drop rows that are near-duplicates of an earlier row of their table or of its held-out rows."""
    for table in TRAINING:
        pool = NearDuplicates(threshold)
        for name in (f"eval_{table}", table):  # held-out rows first: their duplicates are not trained on
            for source, found in (assigned[name] if name in assigned else {}).items():
                assigned[name][source] = pool.distinct(found, report)


def _mixed(
    by_source: dict[str, StoredRows[Example]], config: Files, *, trains: bool, seed: int, report: DropReport
) -> Sequence[int]:
    """The numbers of the rows of one table in their final order. Only rows that a stage `trains` on may be repeated."""
    weights = {source.name: source.weight for source in config.sources}
    numbers = {name: rows.numbers for name, rows in by_source.items()}
    if config.stopping_strategy and trains:
        orders = {
            name: shuffled(numbers[name], seed=derive_seed(seed, "source", name))
            for name in weights
            if numbers.get(name)
        }
        lengths = {name: len(rows) for name, rows in orders.items()}
        shares = {name: weights[name] for name in orders}
        drawn = interleave(lengths, shares, stopping_strategy=config.stopping_strategy, seed=seed) if shares else ()
        rows = [orders[name][position] for name, position in drawn]
    elif config.mixture == "weights":
        rows = mix(numbers, weights, seed=seed)
    else:
        rows = shuffled(array("q", chain.from_iterable(numbers.values())), seed=seed)
    if config.max_rows:
        rows = rows[: config.max_rows]
    taken = set(rows)
    for name, found in numbers.items():
        left = sum(number not in taken for number in found)
        if left:
            report.unused[name] += left
    return rows


CONTENT = {
    "demonstrations": ("prompt", "chosen"),
    "preferences": ("prompt", "chosen", "rejected"),
    "prompts": ("prompt",),
    "steps": ("prompt", "steps"),
    "feedback": ("prompt", "chosen", "rejected"),
}
"""Fields of an example from which its ID is computed, by table."""


def _tables(rows: dict[str, StoredRows[Example]], file: RowFile) -> tuple[Tables, dict[str, Origin]]:
    """Build typed tables, whose rows are in `file`, and map each row's ID to its origin."""
    origins: dict[str, Origin] = {}

    def identify(example: Example, *parts: object) -> str:
        # Without deduplication, equal rows remain, and their IDs must still differ.
        name, copies = content_id(*parts), 0
        while name in origins:
            copies += 1
            name = content_id(*parts, copies)
        origins[name] = example.origin
        return name

    tables: dict[str, Any] = {}
    for name in (field.name for field in fields(Tables)):  # in this order, which decides the IDs of equal rows
        kind = name.removeprefix("eval_")
        tables[name] = StoredRows(
            file,
            (
                file.add(_typed(kind, identify(row, name, *(getattr(row, part) for part in CONTENT[kind])), row))
                for row in rows[name]
            ),
        )
    return Tables(**tables), origins


def _typed(kind: str, name: str, row: Example) -> Demonstration | Preference | Prompt | SteppedAnswer | Feedback:
    """Convert the example with the ID `name` to a row of the tables `kind` and `eval_{kind}`."""
    match kind:
        case "demonstrations":
            return Demonstration(name, (*row.prompt, *row.chosen), row.source)
        case "preferences":
            return Preference(name, row.prompt, row.chosen, row.rejected, row.margin, row.source, row.annotator)
        case "prompts":
            return Prompt(name, row.prompt, row.label, row.source, row.conversational)
        case "steps":
            return SteppedAnswer(name, row.prompt, row.steps, row.step_labels, row.source)
        case _:
            answer, desirable = row.chosen or row.rejected, bool(row.chosen)
            return Feedback(name, row.prompt, answer, desirable, row.source, row.annotator)
