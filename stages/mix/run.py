"""One table of several: all their rows, or rows drawn by shares of the tables or of their sources."""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_core.data.chat import put_settings
from rlhf_core.data.interleaving import interleave
from rlhf_core.data.tables import (
    Demonstration,
    Preference,
    SteppedAnswer,
    read_demonstrations,
    read_preferences,
    read_prompts,
    read_steps,
    write_demonstrations,
    write_preferences,
    write_prompts,
    write_steps,
)
from rlhf_core.errors import DataError
from rlhf_core.stage.context import StageContext
from rlhf_core.store.layout import write_json
from rlhf_core.types import ArtifactRef, DemonstrationsRef, PreferencesRef, Prompt, PromptsRef, StepsRef
from stages.mix import MixConfig

KINDS: Mapping[str, type[ArtifactRef]] = {
    "demonstrations": DemonstrationsRef,
    "preferences": PreferencesRef,
    "prompts": PromptsRef,
    "steps": StepsRef,
}
READ = {"demonstrations": read_demonstrations, "preferences": read_preferences, "steps": read_steps}
WRITE = {"demonstrations": write_demonstrations, "preferences": write_preferences, "steps": write_steps}
Row = Demonstration | Preference | SteppedAnswer | Prompt


@dataclass(frozen=True)
class MixRow:
    """A row and the table that it is from."""

    table: str
    row: Any

    @property
    def place(self) -> tuple[str, str]:
        """The table and the source, by which the report counts."""
        return self.table, self.row.source


def run(config: MixConfig, *, tables: dict[str, ArtifactRef], context: StageContext) -> ArtifactRef:
    """Write the mixed table, and a report of the rows by table and source.

    Prompts that are held out in any table are held out of the training rows. A row that is in two tables is kept once, unless both have
    a share.
    """
    rows: dict[str, list[MixRow]] = {"train": [], "eval": []}
    for name, ref in tables.items():
        for split in rows if config.kind != "prompts" else ("train",):
            rows[split] += [MixRow(name, row) for row in read_split(config.kind, context.path(ref), split)]
    wanted = set(config.sources or config.mixture)

    # A prompt that is held out in one table is held out in all: its training rows move to the evaluation.
    kept = {split: [one for one in found if not wanted or one.row.source in wanted] for split, found in rows.items()}
    held = {prompt_key(one.row) for one in rows["eval"]}
    evaluated = without_copies(one for one in [*kept["eval"], *kept["train"]] if prompt_key(one.row) in held)
    free = (one for one in kept["train"] if prompt_key(one.row) not in held)
    trained = without_copies(free, by_table=bool(config.shares))  # a table with a share has all its rows
    moved = sum(prompt_key(one.row) in held for one in kept["train"])
    taken = draw_rows(config, trained, seed=context.seed)
    if len(taken) < config.least_rows:
        rule = f"{len(taken)} of {len(rows['train'])} training rows are left"
        raise DataError("mix", ", ".join(tables), rule, "name other sources or shares, or more tables")

    taken = [with_settings(one, config) for one in taken]
    evaluated = [with_settings(one, config) for one in evaluated]
    if config.kind == "prompts":
        write_prompts(context.out, number_copies(taken))
    else:
        write: Any = WRITE[config.kind]
        write(context.out / "train.parquet", number_copies(taken))
        write(context.out / "eval.parquet", [one.row for one in evaluated])
    write_json(context.out / "report.json", rows_by_source(rows["train"], taken))

    # Every row is counted once, so no row is lost silently.
    repeated = len(taken) - len({id(one) for one in taken})
    counts = {"train": len(taken), "eval": len(evaluated), "repeated": repeated, "moved": moved}
    counts["left_out"] = len(rows["train"]) - moved - (len(taken) - repeated)
    metrics = {name: float(count) for name, count in counts.items()}
    return context.commit(KINDS[config.kind], metrics=metrics)


def read_split(kind: str, folder: Path, split: str) -> Sequence[Row]:
    """The rows of one split of a table; prompts have one split."""
    if kind == "prompts":
        return read_prompts(folder)
    found: Any = READ[kind](folder / f"{split}.parquet")
    return list(found)


def with_settings(one: MixRow, config: MixConfig) -> MixRow:
    """The row, whose first message has the chat template of its source and its variables."""
    settings = config.settings(one.row.source)
    if not settings:
        return one
    field = "messages" if isinstance(one.row, (Demonstration, Prompt)) else "prompt"
    first, *others = getattr(one.row, field)
    return replace(one, row=replace(one.row, **{field: (put_settings(first, settings), *others)}))


def prompt_key(row: Any) -> object:
    """The prompt of a row; for a demonstration, all messages before the last one.

    Settings of the chat template do not count: the same prompt may be rendered in another way for another source.
    """
    if isinstance(row, Demonstration):
        messages = row.messages[:-1]
    else:
        messages = row.messages if isinstance(row, Prompt) else row.prompt
    return (*(put_settings(one, {}) for one in messages[:1]), *messages[1:])


def row_content(row: Any) -> object:
    """The row without its id and source, by which two rows are the same."""
    return replace(row, id="", source="")


def without_copies(rows: Iterable[MixRow], *, by_table: bool = False) -> list[MixRow]:
    """The rows in order, each content once, or once in each table."""
    first: dict[object, MixRow] = {}
    for one in rows:
        first.setdefault((one.table if by_table else "", row_content(one.row)), one)
    return list(first.values())


def draw_rows(config: MixConfig, rows: Sequence[MixRow], *, seed: int) -> list[MixRow]:
    """The training rows: all of them, or rows drawn by shares, each table or source in an order of the seed."""
    shares = config.shares or config.mixture
    if not shares:
        return list(rows)
    of_name: dict[str, list[MixRow]] = {name: [] for name in shares}
    for one in rows:
        name = one.table if config.shares else one.row.source
        if name in of_name:
            of_name[name].append(one)
    missing = [name for name, found in of_name.items() if not found]
    if missing:
        raise DataError("mix", missing[0], "has a share and no training rows", "remove its share, or give it rows")
    for name, found in of_name.items():
        random.Random(f"{seed} {name}").shuffle(found)
    lengths = {name: len(found) for name, found in of_name.items()}
    sequence = interleave(lengths, shares, stopping_strategy=config.stopping_strategy, seed=seed)
    return [of_name[name][position] for name, position in sequence]


def number_copies(rows: Sequence[MixRow]) -> list[Any]:
    """The rows, where the id of a repeated one has the number of its copy."""
    counts: Counter[str] = Counter()
    found = []
    for one in rows:
        copies = counts[one.row.id]
        counts[one.row.id] += 1
        found.append(replace(one.row, id=f"{one.row.id}#{copies + 1}") if copies else one.row)
    return found


def rows_by_source(rows: Sequence[MixRow], taken: Sequence[MixRow]) -> dict[str, Any]:
    """Training rows taken, repeated and left out, by table and source."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    all_rows = Counter(one.place for one in rows)
    copies = Counter(one.place for one in taken)
    different = Counter(one.place for one in {id(one): one for one in taken}.values())
    for table, source in all_rows:
        place = (table, source)
        row = {
            "taken": copies[place],
            "repeated": copies[place] - different[place],
            "left_out": all_rows[place] - different[place],
        }
        found.setdefault(table, {})[source] = row
    return {"rows": len(taken), "tables": found}
