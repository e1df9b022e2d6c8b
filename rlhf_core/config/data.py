"""Configure the data: a synthetic world, or files and Hub datasets."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from rlhf_core.schema.base import OPERATIONAL, Config, added_option

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
    """Number of held-out ones, if `demonstrations` > 0."""
    singles: int = added_option(4, ge=1, le=100)
    """Ratio of training prompts with one instruction of a kind to those with a combination."""
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
    "comparison",
    "ranking",
    "scored",
    "ratings",
    "label_studio",
    "argilla",
]
LabelCoding = Literal["auto", "verdict", "answer"]
PreferenceCoding = Literal["auto", "zero_based", "one_based", "first_is_one", "signed"]
RankingPairs = Literal["max_min", "adjacent", "all"]


class Columns(Config):
    """The source's names of the columns that its format reads; an empty name means the format's own."""

    prompt: str = ""
    completion: str = ""
    chosen: str = ""
    rejected: str = ""
    messages: str = ""
    text: str = ""
    label: str = ""
    margin: str = ""
    question: str = ""
    answer: str = ""
    completions: str = ""
    labels: str = ""
    response1: str = ""
    response2: str = ""
    preference: str = ""
    answers: str = ""
    reward: str = ""
    id: str = ""
    ratings: str = added_option("")
    ranks: str = added_option("")
    scores: str = added_option("")
    thumbs: str = added_option("")
    annotator: str = added_option("")
    input: str = added_option("")
    history: str = added_option("")
    system: str = added_option("")


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
    """Share of the source's prompts that become held-out demonstrations, in place of a part of those to train on."""
    eval_preferences: float = added_option(0.0, ge=0, le=1)
    """Share of the source's prompts that become held-out pairs, in place of a part of those to train on."""
    eval_steps: float = added_option(0.0, ge=0, le=1)
    """Share of the source's prompts that become held-out judged steps, in place of a part of those to train on."""

    @model_validator(mode="after")
    def _check_shares(self) -> Use:
        total = sum(getattr(self, table) for table in Use.model_fields)
        if not 0 < total <= 1 + 1e-9:
            raise ValueError(f"the shares add to {total:g}; they must add to more than 0 and at most 1")
        return self


HELD_OUT = ("eval_demonstrations", "eval_preferences", "eval_steps")
"""Tables that are a part of those to train on unless a source has their rows."""
KINDS = tuple(table for table in Use.model_fields if table not in HELD_OUT)
"""The other tables."""


class Source(Config):
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
    preference_coding: PreferenceCoding = "auto"
    """Meaning of a number in `preference`: the better response's place from 0 (`zero_based`) or from 1 (`one_based`),
    whether the first is better (`first_is_one`: 1 or 0), or how much better the second is (`signed`: negative for the
    first, 0 for a tie). `auto` infers it from the numbers of the whole source and refuses ambiguous ones."""
    label_coding: LabelCoding = added_option("auto")
    """Whether `label` beside one answer is a verdict on it (`verdict`: bad answers are not imitated) or the expected
    answer (`answer`). `auto` infers it from the labels of the whole source and refuses ambiguous ones."""
    repeated_prompts: Literal["remove", "keep"] = added_option("remove")
    """Treatment of prompts that nearly all answers of the source begin with."""
    ranking_pairs: RankingPairs = "max_min"
    """Pairs made from a ranking: the best answer against the worst, each against the next one, or each against each."""
    rating_weights: dict[str, float] = added_option({})
    """Weight of each aspect in an answer's rating: `{helpfulness = 0.65, correctness = 0.35}`. Without weights, answers
    need an overall rating."""
    min_margin: float = added_option(0.0, ge=0)
    """Smallest difference between two ratings that counts as a preference; answers that are closer are a tie."""
    rating_questions: dict[str, str] = added_option({})
    """Label Studio and Argilla: the field that each rating question is about, `{quality_a = "response_a"}`."""
    bare_rankings: bool = added_option(False)
    """Argilla: whether a ranking that lists names without ranks is read as best first. Argilla 2 exports rankings so,
    and ties cannot be seen in them."""
    weight: float = Field(1.0, gt=0)
    """Relative share of each table, if `data.mixture` is `weights`."""
    use: Use
    """Shares of the source's prompts for each table; the parts are disjoint."""


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
    """Country (ISO 3166-1, `US`) whose national phone numbers are found too; without it only those with a `+`."""


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
    """Training rows to drop: `prompt` drops those that begin with a prompt of an evaluation table, `ngram` also those
    that share an n-gram with one."""
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
        """Return the tables, such as `eval_steps`, of which some source has a share."""
        return tuple(table for table in Use.model_fields if any(getattr(one.use, table) for one in self.sources))


DataConfig = Annotated[
    SupportWorld | ArithmeticWorld | InstructionsWorld | MixedWorlds | Files, Field(discriminator="type")
]
