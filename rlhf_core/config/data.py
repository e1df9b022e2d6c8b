"""Configure the data: a synthetic world, or files and Hub datasets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from rlhf_core.schema.base import OPERATIONAL, Config, FunctionName, RenamedConfig, added_option

# ---------------------------------------------------------------- synthetic worlds

HELD_OUT_INSTRUCTIONS = ("new_topics", "new_combinations", "new_kinds")
"""Ends of the sources of held-out prompts of `InstructionsWorld`; training prompts have the source `instructions/seen`."""


class SupportWorld(Config):
    """Replies of a customer-support desk, with a program as gold reward (`rlhf_contrib.worlds.support`)."""

    module: ClassVar[str] = "rlhf_contrib.worlds.support"
    type: Literal["support"] = "support"
    demonstrations: int = Field(4000, ge=1)
    """Number of demonstrations for training."""
    preferences: int = Field(3000, ge=1)
    """Number of preference pairs for training."""
    prompts: int = Field(1000, ge=1)
    """Number of prompts for sampling."""
    eval_demonstrations: int = Field(256, ge=1)
    """Number of held-out demonstrations."""
    eval_preferences: int = Field(256, ge=1)
    """Number of held-out preference pairs."""
    eval_prompts: int = Field(256, ge=1)
    """Number of held-out prompts."""
    good_probability: float = Field(0.55, ge=0, le=1)
    """Probability that a writer does each of the five things that a good reply does."""
    bad_probability: float = Field(0.3, ge=0, le=1)
    """Probability that a writer blames the customer, adds filler, repeats a sentence, or greets without a name."""
    slip_probability: float = Field(0.1, ge=0, le=1)
    """Probability that a writer, instead of leaving a fact out, gets it wrong."""
    annotator_temperature: float = Field(0.75, gt=0)
    """Bradley-Terry temperature of the annotator: P(a preferred to b) = sigmoid((gold a - gold b) / temperature)."""
    minimum_gap: float = Field(1.0, gt=0)
    """Smallest difference between the gold rewards of a pair; annotators skip closer pairs."""


class ArithmeticWorld(Config):
    """Additions and subtractions, checked exactly; careless demonstrations (`rlhf_contrib.worlds.arithmetic`)."""

    module: ClassVar[str] = "rlhf_contrib.worlds.arithmetic"
    type: Literal["arithmetic"] = "arithmetic"
    demonstrations: int = Field(4000, ge=1)
    """Number of demonstrations for training."""
    preferences: int = Field(2000, ge=1)
    """Number of preference pairs for training."""
    prompts: int = Field(1000, ge=1)
    """Number of prompts for sampling."""
    eval_demonstrations: int = Field(256, ge=1)
    """Number of held-out demonstrations."""
    eval_preferences: int = Field(256, ge=1)
    """Number of held-out preference pairs."""
    eval_prompts: int = Field(256, ge=1)
    """Number of held-out prompts."""
    largest: int = Field(9, ge=2, le=999)
    """Largest operand; each digit is a token. Two digits make the task much harder for a model that starts from nothing."""
    error_probability: float = Field(0.4, ge=0, lt=1)
    """Share of demonstrations, and of judged answers, that contain a slip."""
    worked: bool = False
    """Whether every question is a sum of three or four numbers, worked out with one step per line."""
    steps: int = Field(0, ge=0)
    """Number of worked sums with every step judged, for a process reward model; 0 creates no such table."""
    eval_steps: int = Field(64, ge=1)
    """Number of held-out judged sums, if `steps` > 0."""


InstructionKind = Literal[
    "lowercase", "at_most_words", "first_word", "last_word", "keyword", "no_commas", "exclamation", "json"
]


class InstructionsWorld(Config):
    """Everyday questions with instructions that a program can check (`rlhf_contrib.worlds.instructions`)."""

    module: ClassVar[str] = "rlhf_contrib.worlds.instructions"
    type: Literal["instructions"] = "instructions"
    prompts: int = Field(400, ge=1)
    """Number of prompts for sampling, with one to `combined` instructions each."""
    eval_prompts: int = Field(96, ge=3)
    """Number of held-out prompts; a third each are about new topics only, combine instructions in a new way, and have
    a kind of instruction that no training prompt has."""
    min_words: int = Field(6, ge=1)
    """Minimum number of words of an answer, unless an instruction requests fewer."""
    demonstrations: int = added_option(0, ge=0)
    """Number of written answers to training prompts, each of which follows its instructions; 0 makes no such table."""
    eval_demonstrations: int = added_option(24, ge=1)
    """Number of held-out written answers, if `demonstrations` > 0."""
    singles: int = added_option(4, ge=1, le=100)
    """Ratio of training prompts with one instruction of a kind to training prompts with a combination."""
    combined: int = added_option(2, ge=1, le=3)
    """The most instructions of one training prompt."""
    kinds: tuple[InstructionKind, ...] = added_option(())
    """Kinds of instructions of the training prompts; all of them if empty. Where they allow no new combination, no
    held-out prompt has one."""


World = Annotated[SupportWorld | ArithmeticWorld | InstructionsWorld, Field(discriminator="type")]


class MixedWorlds(Config):
    """The rows of several worlds, shuffled; the source of a row is the type of its world (`rlhf_contrib.worlds.mixed`)."""

    module: ClassVar[str] = "rlhf_contrib.worlds.mixed"
    type: Literal["mixed"] = "mixed"
    worlds: tuple[World, ...] = Field(min_length=1)
    """The worlds, each type once."""

    @model_validator(mode="after")
    def _check_types(self) -> MixedWorlds:
        types = [world.type for world in self.worlds]
        for index, name in enumerate(types):
            if name in types[:index]:
                raise ValueError(
                    f"worlds[{index}].type = {name!r}: there is such a world already; raise its numbers of rows"
                )
        return self


# ---------------------------------------------------------------- real data

FileType = Literal["auto", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "saved_dataset", "hub"]
RowFormat = Literal[
    "auto",
    "messages",
    "text",
    "prompt_completion",
    "alpaca",
    "prompt",
    "preference",
    "implicit_preference",
    "unpaired_preference",
    "stepwise",
    "hh",
    "question_answer",
]
LabelCoding = Literal["auto", "verdict", "answer"]

FORMER_FORMATS = ("comparison", "ranking", "scored", "ratings", "label_studio", "argilla")
"""Formats that 0.2 read."""
FORMER_OPTIONS = {"preference_coding": "auto", "ranking_pairs": "max_min"}
"""Options of a source that 0.2 read, with the values that are still in the keys of results."""
FORMER_ADDED = ("rating_weights", "min_margin", "rating_questions", "bare_rankings")
FORMER_COLUMNS = ("margin", "question", "answer", "completions", "labels")
FORMER_COMPARED = ("response1", "response2", "preference", "answers", "reward")
FORMER_ADDED_COLUMNS = ("id", "annotator", "input", "history", "system")
FORMER_ADDED_COMPARED = ("ratings", "ranks", "scores", "thumbs")


class Columns(RenamedConfig):
    """The source's names of the columns that its format reads; an empty name means the format's default name."""

    prompt: str = ""
    completion: str = ""
    chosen: str = ""
    rejected: str = ""
    messages: str = ""
    text: str = ""
    label: str = ""

    def recorded(self, table: dict[str, Any]) -> dict[str, Any]:
        """Add the columns of 0.2 to the table, as the keys of results have them."""
        return table | dict.fromkeys((*FORMER_COLUMNS, *FORMER_COMPARED, "id"), "")


class Suite(Config):
    """A local file of chosen and rejected answers by subset, such as RewardBench."""

    path: Annotated[str, Field(min_length=1), OPERATIONAL]
    """A local file: JSONL, JSON, CSV, Parquet or Arrow. Its content belongs to the stage's key, its path does not."""
    file_type: FileType = "auto"
    """Type of the file; `auto` infers it from the name."""
    prompt: str = "prompt"
    """Column with the prompt, text or turns."""
    chosen: str = "chosen"
    """Column with the chosen answer."""
    rejected: str = "rejected"
    """Column with the rejected answer, or a list of several: the chosen one has to beat them all."""
    subset: str = "subset"
    """Column with the name of the row's subset; rows without one are the subset `all`."""


class Use(Config):
    """The share of a source's prompts for each table. A prompt is in one share only, by the hash of its content."""

    demonstrations: float = Field(0.0, ge=0, le=1)
    """Share of the source's prompts that become demonstrations."""
    preferences: float = Field(0.0, ge=0, le=1)
    """Share of the source's prompts that become preference pairs."""
    prompts: float = Field(0.0, ge=0, le=1)
    """Share of the source's prompts that become prompts for sampling."""
    eval_prompts: float = Field(0.0, ge=0, le=1)
    """Share of the source's prompts that become held-out prompts."""
    steps: float = Field(0.0, ge=0, le=1)
    """Share of the source's prompts that become judged steps; only stepwise rows have steps and their labels."""
    eval_demonstrations: float = added_option(0.0, ge=0, le=1)
    """Share of the source's prompts that become held-out demonstrations, in place of a part of the training rows."""
    eval_preferences: float = added_option(0.0, ge=0, le=1)
    """Share of the source's prompts that become held-out pairs, in place of a part of the training rows."""
    eval_steps: float = added_option(0.0, ge=0, le=1)
    """Share of the source's prompts that become held-out judged steps, in place of a part of the training rows."""

    @model_validator(mode="after")
    def _check_shares(self) -> Use:
        total = sum(getattr(self, table) for table in Use.model_fields)
        if not 0 < total <= 1 + 1e-9:
            raise ValueError(f"the shares add to {total:g}; they must add to more than 0 and at most 1")
        return self


HELD_OUT = ("eval_demonstrations", "eval_preferences", "eval_steps")
"""Tables that are split off the training rows unless a source has rows for them."""
KINDS = tuple(table for table in Use.model_fields if table not in HELD_OUT)
"""The other tables."""


class Source(RenamedConfig):
    """One file, folder or Hub dataset with one row format."""

    name: str = Field(min_length=1)
    """Name of the source, written to the column `source` of every row."""
    path: str
    """A local file (JSONL, JSON, CSV, TSV, Parquet, Arrow; `.gz` and `.zst` too), a folder of such files, a pattern
    (`shards/*.jsonl`), a `save_to_disk` folder, or a Hub name."""
    file_type: FileType = "auto"
    """Type of the file; `auto` infers it from the name."""
    revision: str = ""
    """Full commit (40 hex digits) of a Hub dataset; required there so that the key means one dataset."""
    split: str = "train"
    """Split of a Hub dataset or of a saved dataset dictionary."""
    subset: str = ""
    """Configuration name of a Hub dataset."""
    format: RowFormat = "auto"
    """Format of the rows; `auto` infers it from the columns."""
    columns: Columns = Columns()
    """Names of the columns that differ from the usual ones."""
    function: FunctionName | None = added_option(None)
    """Your function, `rows.py:to_row`, for rows in any other form. It gets a row of the file as a dictionary and returns one
    in a known form, a list of several, or None to leave the row out. Its code is part of the key."""
    label_coding: LabelCoding = added_option("auto")
    """Whether `label` in a row with one answer is a verdict on it (`verdict`: bad answers are not imitated) or the
    expected answer (`answer`). `auto` infers it from the labels of the whole source and refuses ambiguous ones."""
    repeated_prompts: Literal["remove", "keep"] = added_option("remove")
    """Treatment of prompts that nearly all answers of the source begin with."""
    weight: float = Field(1.0, gt=0)
    """Relative share of each table, if `data.mixture` is `weights`."""
    use: Use
    """Shares of the source's prompts for each table; the parts are disjoint."""

    def recorded(self, table: dict[str, Any]) -> dict[str, Any]:
        """Add the options of 0.2 to the table, at the places where the JSON of results has them."""
        found: dict[str, Any] = {}
        for name, value in table.items():
            found |= {"ranking_pairs": "max_min"} if name == "weight" else {}
            found[name] = value
            found |= {"preference_coding": "auto"} if name == "columns" else {}
        return found

    @model_validator(mode="before")
    @classmethod
    def _refuse_former(cls, table: Any) -> Any:
        """Raise ValueError for a format, an option or a name of a column that only 0.2 read."""
        if not isinstance(table, Mapping):
            return table
        columns = table.get("columns")
        columns = dict(columns) if isinstance(columns, Mapping) else {}
        told = {f"columns.{name}": columns.pop(name) for name in _FORMER_NAMES if name in columns}
        told |= {name: table[name] for name in (*FORMER_OPTIONS, *FORMER_ADDED) if name in table}
        told = {key: value for key, value in told.items() if value and value != FORMER_OPTIONS.get(key)}
        if table.get("format") in FORMER_FORMATS:
            told["format"] = table["format"]
        if told:
            key, value = next(iter(told.items()))
            raise ValueError(f"{key} = {value!r}: is not read any more; {_instead(table, list(told))}")
        kept = {name: value for name, value in table.items() if name not in (*FORMER_OPTIONS, *FORMER_ADDED)}
        return kept | {"columns": columns} if isinstance(table.get("columns"), Mapping) else kept


_FORMER_NAMES = (*FORMER_COLUMNS, *FORMER_COMPARED, *FORMER_ADDED_COLUMNS, *FORMER_ADDED_COMPARED)


def _instead(table: Mapping[str, Any], told: list[str]) -> str:
    """The remedy for keys that are not read any more."""
    plain = [f"columns.{name}" for name in (*FORMER_COLUMNS, *FORMER_ADDED_COLUMNS)]
    if not set(told) <= set(plain):
        return f"remove it; `rlhf data {table.get('path', 'FILE')}` prints the function to paste that reads such rows"
    quoted = [
        [json.dumps(name, ensure_ascii=False) for name in names] for names in table["columns"].items() if names[1]
    ]
    made = ", ".join(f"{ours}: row.pop({theirs})" for ours, theirs in quoted)
    return f'give the source function = "rows.py:to_row" and no `columns`, with rows.py beside the profile:\n\ndef to_row(row):\n    return row | {{{made}}}\n'


class Filters(Config):
    """Rows that are left out, or changed, before the tables are made. Every filter is off by default."""

    near_duplicates: float = Field(0.0, ge=0, le=1)
    """Similarity from which a row is dropped as a near-duplicate of an earlier one, 0.8 is common; 0 is off. It is the
    Jaccard similarity of the word trigrams of the whole rows, prompt and answers, but for system turns and schemas of
    tools; estimated by MinHash (Broder 1997) with 128 permutations."""
    languages: tuple[str, ...] = ()
    """ISO 639-1 codes of the languages to keep (`["en", "de"]`); empty keeps all. Needs the extra `language`."""
    min_language_probability: float = Field(0.0, ge=0, le=1)
    """Smallest probability of the detected language for a row to be kept."""
    min_answer_words: int = Field(0, ge=0)
    """Minimum number of words of an answer."""
    max_answer_words: int = Field(0, ge=0)
    """Maximum number of words of an answer; 0 is no limit."""
    max_repetition: float = Field(1.0, ge=0, le=1)
    """Largest share of an answer's word trigrams that repeat an earlier one (compare arXiv 2112.11446, table A1)."""
    min_alphabetic: float = Field(0.0, ge=0, le=1)
    """Smallest share of an answer's words that contain a letter (arXiv 2112.11446, appendix A1.1: 0.8)."""
    pii: Literal["off", "drop", "mask"] = "off"
    """Treatment of rows with personal data (emails, phone numbers, credit cards, IP addresses, keys and tokens): `drop`
    leaves them out, `mask` writes `[EMAIL]`, `[PHONE]`, `[CARD]`, `[IP]` and `[KEY]` in their place."""
    phone_region: str = Field("", pattern="^([A-Z]{2})?$")
    """Country (ISO 3166-1, `US`) whose national phone numbers are found too; without it, only numbers with a `+` are
    found."""


class Files(Config):
    """A mixture of real sources."""

    type: Literal["files"] = "files"
    sources: tuple[Source, ...] = Field(min_length=1)
    """Datasets from which the tables are made."""
    mixture: Literal["all", "weights"] = "all"
    """`all` takes every row; `weights` takes each source's share, until the first source is used up; none is repeated
    unless `stopping_strategy` says so."""
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] | None = added_option(None)
    """With `mixture = "weights"`: draws the training rows in the sequence of `datasets.interleave_datasets`, with `weight` as
    probability. `first_exhausted` ends when the first source has no more rows, `all_exhausted` repeats small sources until
    every row was taken. Held-out rows are never repeated. Without it, each source gives its exact share once."""
    eval_fraction: float = Field(0.05, gt=0, lt=1)
    """Share of the prompts of demonstrations, of preferences and of steps held out as their `eval.parquet`; none of a
    table whose held-out rows are a source's."""
    max_rows: int = Field(0, ge=0)
    """Maximum number of rows per table after mixing; 0 keeps all."""
    deduplicate: bool = True
    """Whether repeated rows are dropped."""
    decontaminate: Literal["off", "prompt", "ngram"] = "prompt"
    """Training rows to drop: `prompt` drops rows that begin with a prompt of an evaluation table, `ngram` also drops
    rows that share an n-gram with one."""
    ngram: int = Field(13, ge=2)
    """Number of words in an n-gram."""
    min_tokens: int = Field(1, ge=0)
    """Minimum number of trained tokens in an answer."""
    max_bad_fraction: float = Field(0.05, ge=0, le=1)
    """Largest share of malformed rows per source; a larger share is an error."""
    filters: Filters = added_option(Filters())
    """Filters by similarity, language, length, quality and personal data."""

    @model_validator(mode="after")
    def _check_stopping(self) -> Files:
        if self.stopping_strategy and self.mixture != "weights":
            rule = 'only sources with shares are drawn until they are exhausted; set mixture = "weights"'
            raise ValueError(f"stopping_strategy = {self.stopping_strategy!r}: {rule}")
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Files:
        names = [source.name for source in self.sources]
        if len(set(names)) != len(names):
            raise ValueError(f"source names {names}: each source needs its own name")
        return self

    @model_validator(mode="after")
    def _check_held_out(self) -> Files:
        filled = self.filled()
        for table in HELD_OUT:
            kind = table.removeprefix("eval_")
            if table in filled and kind not in filled:
                name = next(one.name for one in self.sources if getattr(one.use, table))
                rule = f"no source has {kind} to train on, and so no stage would read them"
                raise ValueError(f"use.{table} of the source {name}: {rule}; give {kind} a source")
        return self

    def filled(self) -> tuple[str, ...]:
        """The tables, such as `eval_steps`, of which some source has a share."""
        return tuple(table for table in Use.model_fields if any(getattr(one.use, table) for one in self.sources))


DataConfig = Annotated[
    SupportWorld | ArithmeticWorld | InstructionsWorld | MixedWorlds | Files, Field(discriminator="type")
]
