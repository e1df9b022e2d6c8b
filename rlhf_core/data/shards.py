"""Read and write tables: single ones, shards of generations and rollouts with an index, logs of PPO steps.

Tables are Parquet files. The log of a PPO run, which only a resumed run reads, has Arrow files, which have the layout
of arrays in memory: the driver writes them with a fifth of the CPU time.

Every write is atomic and flushed to disk before the file gets its name. An existing file is therefore complete, and a
killed stage can continue after its last shard.
"""

import json
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, islice, pairwise
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pyarrow.feather import read_table as read_feather  # type: ignore[import-untyped]
from pyarrow.feather import write_feather

from rlhf_core.errors import DataError
from rlhf_core.sequences import ROUTED_EXPERTS, join_rows, offsets_of
from rlhf_core.store.layout import fsync_path, remove_tree
from rlhf_core.types import (
    NO_EXPERTS,
    ActionSpan,
    Column,
    Completion,
    Generation,
    Message,
    Prompt,
    Rollout,
    chunks,
)

# ---------------------------------------------------------------- single files

R = TypeVar("R")
_PART = 10_000  # rows that are converted to Arrow at a time
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))  # the column type of a conversation


MESSAGES_WITH_TOOLS = pa.list_(pa.struct([*MESSAGES.value_type, ("tool_fields", pa.string())]))
"""The column type of a conversation with tool calls."""
CONVERSATIONAL = pa.field("conversational", pa.bool_())
"""Column of prompts, and of answers to them, that is written only if a prompt was a list of turns in the data."""


def plain_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Convert messages to values of a `MESSAGES` column. Raises DataError for tool calls, which it cannot hold."""
    if any(
        json.loads(message.tool_fields).keys() - {"chat_template_kwargs"} for message in messages if message.tool_fields
    ):
        rule = "this table holds no tool calls"
        raise DataError("messages", [message.role for message in messages], rule, "use them in demonstrations")
    return [{"role": message.role, "content": message.content} for message in messages]


def widened(schema: pa.Schema, columns: Mapping[str, Sequence[Sequence[Message]]]) -> pa.Schema:
    """The schema, where columns of conversations can hold arguments of their chat template if one has any.

    Raises DataError for tool calls.
    """
    for place, one in enumerate(schema):
        found = columns[one.name] if one.type == MESSAGES else ()
        if any(message.tool_fields for messages in found for message in messages):
            for messages in found:
                plain_messages(messages)
            schema = schema.set(place, pa.field(one.name, MESSAGES_WITH_TOOLS))
    return schema


def tool_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Convert messages to values of a `MESSAGES_WITH_TOOLS` column."""
    return [{"role": one.role, "content": one.content, "tool_fields": one.tool_fields} for one in messages]


def to_messages(rows: list[dict[str, str]]) -> tuple[Message, ...]:
    """Convert values of a `MESSAGES` or `MESSAGES_WITH_TOOLS` column to messages."""
    return tuple(Message(**row) for row in rows)


def write_rows(path: Path, schema: pa.Schema, rows: Iterable[Any], *, optional: pa.Field | None = None) -> None:
    """Write dataclasses, whose fields are the columns of `schema`, to `path` atomically.

    The column `optional` is written only if a row has a value there, so tables without any keep their bytes. So are tool
    fields of messages. Raises DataError for tool calls in a `MESSAGES` column.
    """
    fields = [*schema] if optional is None else [*schema, optional]
    columns = {one.name: _Turns(one.type) if one.type in _TURNS else _Cells(one.type) for one in fields}
    left = iter(rows)
    while part := list(islice(left, _PART)):
        for name, column in columns.items():
            column.add([getattr(row, name) for row in part])
    if optional is not None and not columns[optional.name].said:
        del columns[optional.name]
    arrays = {name: column.array() for name, column in columns.items()}
    write_table(path, pa.schema({name: found.type for name, found in arrays.items()}), arrays)


_TURNS = (MESSAGES, MESSAGES_WITH_TOOLS)
_LARGEST = (1 << 31) - 1  # bytes of texts in one piece, whose places are int32


class _Cells:
    """A column that is built in parts: Python's objects take more memory than the numbers and texts in them."""

    def __init__(self, kind: pa.DataType) -> None:
        self._kind = kind
        self._parts: list[pa.Array] = []
        self.said = False

    def add(self, cells: Sequence[Any]) -> None:
        self.said = self.said or any(cells)
        self._parts.append(pa.array(cells, type=self._kind))

    def array(self) -> pa.Array:
        """The column in one piece, so that its bytes in a file do not depend on parts."""
        return pa.chunked_array(self._parts, type=self._kind).combine_chunks()


class _Turns:
    """A column of conversations, most of the bytes of a table. Building it in parts would need them in memory twice."""

    def __init__(self, kind: pa.DataType) -> None:
        self._plain = kind == MESSAGES
        self._pieces: list[tuple[array[int], dict[str, tuple[array[int], bytearray]]]] = []
        self.said = False
        self._begin()

    def _begin(self) -> None:
        texts = {one.name: (array("i", (0,)), bytearray()) for one in MESSAGES_WITH_TOOLS.value_type}
        self._pieces.append((array("i", (0,)), texts))

    def add(self, cells: Sequence[Sequence[Message]]) -> None:
        found = {
            one.name: [getattr(message, one.name).encode() for turns in cells for message in turns]
            for one in MESSAGES_WITH_TOOLS.value_type
        }
        if any(found["tool_fields"]):
            self.said = True
            for turns in cells if self._plain else ():
                plain_messages(turns)
        if any(len(data) + sum(map(len, found[name])) > _LARGEST for name, (_, data) in self._pieces[-1][1].items()):
            self._begin()
        ends, texts = self._pieces[-1]
        ends.extend(accumulate(map(len, cells), initial=ends.pop()))
        for name, (places, data) in texts.items():
            places.extend(accumulate(map(len, found[name]), initial=places.pop()))
            data += b"".join(found[name])

    def array(self) -> pa.ChunkedArray:
        """The column, which shares the memory of this object.

        It is in one piece unless it has more than 2 GiB of text.
        """
        kind = MESSAGES_WITH_TOOLS if self.said else MESSAGES
        made = []
        for ends, texts in self._pieces:
            children = [_arrow(one.type, *texts[one.name]) for one in kind.value_type]
            turns = pa.StructArray.from_arrays(children, fields=list(kind.value_type))
            made.append(_arrow(kind, ends, children=[turns]))
        return pa.chunked_array(made)


def _arrow(kind: pa.DataType, *buffers: Any, children: Sequence[pa.Array] = ()) -> pa.Array:
    """Build an array without nulls from the buffers of its kind, the first of which holds the end of each value."""
    data = [None, *map(pa.py_buffer, buffers)]
    return pa.Array.from_buffers(kind, len(buffers[0]) - 1, data, children=list(children) or None)


def read_rows(path: Path, schema: pa.Schema, kind: type[R], *, optional: pa.Field | None = None) -> list[R]:
    """Read the rows that `write_rows` wrote, as dataclasses of the type `kind`.

    Raises the same errors as `read_table`.
    """
    if optional is not None:
        schema = schema.append(optional)
    turns = {one.name for one in schema if one.type == MESSAGES}
    since = [] if optional is None else [optional.name]
    return [
        kind(
            **{
                name: to_messages(value) if name in turns else tuple(value) if isinstance(value, list) else value
                for name, value in row.items()
                if value is not None or name not in since
            }
        )
        for row in read_table(path, schema, since=since)
    ]


LOG_SUFFIX = ".arrow"
"""File suffix of the shards of a log."""


def write_table(path: Path, schema: pa.Schema, columns: Mapping[str, list[Any] | pa.Array]) -> None:
    """Write the columns of `schema` to `path` atomically, as Parquet, or as Arrow if that is its suffix."""
    arrays = [_array(columns[field.name], field.type) for field in schema]
    write = partial(write_feather, compression="uncompressed") if path.suffix == LOG_SUFFIX else pq.write_table
    _put(path, partial(write, pa.Table.from_arrays(arrays, schema=schema)))


def _array(cells: list[Any] | pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    """Convert the cells of a table's column; cells that are columns themselves need no Python object per number."""
    if isinstance(cells, (pa.Array, pa.ChunkedArray)):
        return cells
    if not cells or not isinstance(cells[0], Column):
        return pa.array(cells, type=kind)
    numbers, lengths = join_rows(cells[0].kind, cells)
    lists, places = (pa.LargeListArray, np.int64) if pa.types.is_large_list(kind) else (pa.ListArray, np.int32)
    return lists.from_arrays(offsets_of(lengths).astype(places), pa.array(numbers).cast(kind.value_type))


def _per_token(name: str, lists: pa.ListArray) -> list[Column[Any]]:
    """The numbers per token of each row."""
    kind = PER_TOKEN[name]
    numbers, ends = lists.values.to_numpy().astype(kind), lists.offsets.to_numpy()
    return [Column(kind, numbers[start:end]) for start, end in pairwise(ends)]


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically."""
    _put(path, lambda temporary: temporary.write_bytes(content))


def _put(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file, flush it to disk and then rename it, so that an existing file is complete even after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write(temporary)
    fsync_path(temporary)  # the content before the name
    temporary.replace(path)
    fsync_path(path.parent)  # and the name, an entry of its folder


def read_table(path: Path, schema: pa.Schema, *, since: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Read the rows of `path`. Raises DataError if the file or a column of `schema` is missing.

    Columns named in `since` were added after the first files were written; if missing, their values are None.
    """
    if not path.is_file():
        raise DataError("table", str(path), "must exist", "prepare the data again")
    table = read_feather(path) if path.suffix == LOG_SUFFIX else pq.read_table(path)
    there = set(table.column_names)
    missing = sorted(set(schema.names) - there - set(since))
    if missing:
        raise DataError("table", str(path), f"lacks the columns {missing}", "prepare the data again")
    columns = [name for name in schema.names if name in there]
    plain = table.select([name for name in columns if name not in PER_TOKEN])
    absent = dict.fromkeys(set(schema.names) - there)
    rows = [row | absent for row in plain.to_pylist()]
    for name in PER_TOKEN.keys() & columns:
        for row, numbers in zip(rows, _per_token(name, table[name].combine_chunks()), strict=True):
            row[name] = numbers
    return rows


# ---------------------------------------------------------------- shards

INDEX_FILE = "index.json"
PER_TOKEN = {"prompt_ids": "i", "token_ids": "i", "logprobs": "f", ROUTED_EXPERTS: "h"}
"""Lists of numbers per token and the kind of `Column` that they are read as: engines compute log-probs in float32."""

_SPAN = pa.struct({"start": pa.int32(), "end": pa.int32(), "policy_version": pa.int64(), "reward": pa.float64()})
GENERATIONS_SCHEMA = pa.schema(
    {
        "prompt_id": pa.string(),
        "messages": MESSAGES,
        "label": pa.string(),
        "source": pa.string(),
        "prompt_ids": pa.list_(pa.int32()),
        "token_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float64()),
        "text": pa.string(),
        "finish_reason": pa.string(),
        "policy_version": pa.int64(),
        "seed": pa.int64(),
        "spans": pa.list_(_SPAN),
        "failure": pa.string(),
        "extras": pa.map_(pa.string(), pa.float64()),
        "episode_score": pa.float64(),
    }
)
ROLLOUTS_SCHEMA = pa.schema(
    [
        *GENERATIONS_SCHEMA,
        ("reward", pa.float64()),
        ("reward_components", pa.map_(pa.string(), pa.float64())),
        ("invalid", pa.string()),
        ("score", pa.float64()),
    ]
)
_ATTRIBUTES = {
    "prompt_id": "prompt.id",
    "messages": "prompt.messages",
    "label": "prompt.label",
    "source": "prompt.source",
    "conversational": "prompt.conversational",
    "token_ids": "completion.token_ids",
    "logprobs": "completion.logprobs",
    "text": "completion.text",
    "finish_reason": "completion.finish_reason",
    "policy_version": "completion.policy_version",
    "seed": "completion.seed",
    "spans": "completion.spans",
    "failure": "completion.failure",
    "extras": "completion.extras",
    "episode_score": "completion.score",
    ROUTED_EXPERTS: "completion.routed_experts",
}
"""Attribute of a generation or rollout that a column holds, if it has another name than the column."""
SINCE = ("episode_score", "score", CONVERSATIONAL.name, ROUTED_EXPERTS)
"""Columns that the earliest shards lack, or all whose prompts were text."""
EXPERTS = pa.field(ROUTED_EXPERTS, pa.large_list(pa.int16()))
"""Column that is written only if experts were recorded. A step may have more than 2^31 of them."""


def shard_path(folder: Path, shard: int) -> Path:
    """The file of shard number `shard`.

    >>> shard_path(Path("g"), 3).name
    'shard-00003.parquet'
    """
    return folder / f"shard-{shard:05d}.parquet"


def shards(folder: Path) -> list[Path]:
    """List the shard files of `folder`, in order. All of them are complete."""
    return sorted(folder.glob("shard-*"))


def finished_shards(folder: Path) -> list[Path]:
    """List the shards to continue after, and remove shards behind a gap, because the missing rows are unknown."""
    found = shards(folder)
    kept = [path for number, path in enumerate(found) if path == shard_path(folder, number)]
    for path in found[len(kept) :]:
        path.unlink()
    return kept


def count_rows(path: Path) -> int:
    """Count the rows of a shard by reading its footer."""
    return int(pq.read_metadata(path).num_rows)


def write_index(folder: Path, facts: dict[str, Any]) -> None:
    """Write `index.json`: row count, policy digest, sampling parameters and other facts about the shards."""
    replace_file(folder / INDEX_FILE, json.dumps(facts, indent=1, sort_keys=True).encode())


def read_index(folder: Path) -> dict[str, Any]:
    """Read the index of `write_index`. Raises DataError if the index is missing."""
    path = folder / INDEX_FILE
    if not path.is_file():
        raise DataError("index", str(path), "must exist beside the shards", "generate or score again")
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return facts


def write_generations(folder: Path, shard: int, rows: Sequence[Generation]) -> None:
    """Write one shard of unscored generations."""
    _write_shard(shard_path(folder, shard), GENERATIONS_SCHEMA, rows)


def read_generations(folder: Path) -> list[Generation]:
    """Read the generations of all shards of `folder`, in order. Raises DataError if the folder has no shards."""
    return [Generation(*_sampled(row)) for row in _read_shards(folder, GENERATIONS_SCHEMA)]


def write_rollouts(folder: Path, shard: int, rows: Sequence[Rollout]) -> None:
    """Write one shard of scored rollouts."""
    _write_shard(shard_path(folder, shard), ROLLOUTS_SCHEMA, rows)


def read_rollouts(folder: Path) -> list[Rollout]:
    """Read the rollouts of all shards of `folder`, in order. Raises DataError if the folder has no shards."""
    return [
        Rollout(*_sampled(row), row["reward"], dict(row["reward_components"]), row["invalid"], row["score"])
        for row in _read_shards(folder, ROLLOUTS_SCHEMA)
    ]


def _write_shard(path: Path, schema: pa.Schema, rows: Sequence[Any]) -> None:
    if any(row.prompt.conversational for row in rows):
        schema = schema.append(CONVERSATIONAL)
    if any(row.completion.routed_experts for row in rows):
        schema = schema.append(EXPERTS)
    columns = {name: list(map(attrgetter(_ATTRIBUTES.get(name, name)), rows)) for name in schema.names}
    schema = widened(schema, columns)
    conversations = {id(one): one for one in columns["messages"]}  # the samples of a prompt share one
    cell = plain_messages if schema.field("messages").type == MESSAGES else tool_messages
    plain = {number: cell(one) for number, one in conversations.items()}
    columns["messages"] = [plain[id(one)] for one in columns["messages"]]
    # Empty tuples are one object: thousands of empty lists would make Python look for garbage.
    columns["spans"] = [tuple(map(asdict, spans)) for spans in columns["spans"]]
    for name in {"extras", "reward_components"} & columns.keys():
        columns[name] = [tuple(sorted(figures.items())) if figures else () for figures in columns[name]]
    write_table(path, schema, columns)


def _read_shards(folder: Path, schema: pa.Schema) -> Iterator[dict[str, Any]]:
    found = shards(folder)
    if not found:
        raise DataError("shards", str(folder), "has no shards", "generate or score again")
    for path in found:
        yield from read_table(path, schema.append(CONVERSATIONAL).append(EXPERTS), since=SINCE)


_of_tokens = itemgetter("token_ids", "logprobs", "text", "finish_reason", "policy_version", "seed")


def _sampled(row: dict[str, Any]) -> tuple[Prompt, Column[int], Completion]:
    """The fields of a generation."""
    turns, spans = to_messages(row["messages"]), tuple(ActionSpan(**span) for span in row["spans"])
    experts = row[ROUTED_EXPERTS] or NO_EXPERTS
    rest: Any = spans, row["failure"], dict(row["extras"]), row["episode_score"], experts
    prompt = Prompt(row["prompt_id"], turns, row["label"], row["source"], bool(row["conversational"]))
    return prompt, row["prompt_ids"], Completion(*_of_tokens(row), *rest)


# ---------------------------------------------------------------- rollout log

POOL = "pool"


@dataclass(frozen=True)
class Pool:
    """The partial rollouts of groups that were started but not used for a step yet, by group, oldest group first.

    `begun` is the number of all groups that were ever started.
    """

    begun: int = 0
    samples: tuple[Generation, ...] = ()


@dataclass(frozen=True)
class Drawn:
    """The unscored generations that the policy with this digest sampled for a step, and the pool after it."""

    policy: str
    generations: list[Generation]
    pool: Pool = Pool()


@dataclass(frozen=True)
class ScoredStep:
    """The rollouts of one step, the scorer's state (running statistics) after it, and the pool after its sampling."""

    rollouts: list[Rollout]
    scorer: dict[str, Any]
    pool: Pool = Pool()


SHARD_TOKENS = 2**18
"""Tokens in a shard of the log. Writing a shard takes about 5 MiB of memory, and writing a step as one file 17 bytes per
token of the step."""


class RolloutLog:
    """A log with one folder per step below `folder`. A step is valid only for the policy digest that made it.

    Steps are written in a thread, one at a time. `wait` for it before anything is done that a resumed run must not repeat.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._writing: Future[None] | None = None

    def read(self, step: int, *, policy: str) -> ScoredStep | None:
        """Read the shard of the policy with this digest for `step`, None if it has not been written."""
        self.wait()
        folder = _folder_of(self._folder, step)
        if not folder.is_dir():
            return None
        index = read_index(folder)
        if index["policy"] != policy:
            return None
        return ScoredStep(read_rollouts(folder), index["scorer"], read_pool(folder / POOL))

    def write(
        self, step: int, rollouts: Sequence[Rollout], scorer: dict[str, Any], *, policy: str, pool: Pool = Pool()
    ) -> None:
        """Begin to write a step, once the one before is written."""
        self.wait()

        def work() -> None:
            final = _folder_of(self._folder, step)
            temporary = final.with_name(f".{final.name}")
            for stale in (temporary, final):
                remove_tree(stale)
            longest = max((len(one.completion.token_ids) for one in rollouts), default=0)
            size = 1 + SHARD_TOKENS // (1 + longest)
            for number, part in enumerate(chunks(rollouts, size) or [[]]):
                _write_shard(shard_path(temporary, number).with_suffix(LOG_SUFFIX), ROLLOUTS_SCHEMA, part)
            pa.default_memory_pool().release_unused()
            write_pool(temporary / POOL, pool)
            write_index(temporary, {"policy": policy, "scorer": scorer})
            temporary.rename(final)

        self._writing = self._thread.submit(work)

    def wait(self) -> None:
        """Wait until the last step is on disk. Raises the error of writing it."""
        if self._writing is not None:
            self._writing.result()

    def forget(self, *, before: int) -> None:
        """Remove the steps below `before`."""
        self.wait()
        for folder in self._folder.glob("step-*"):
            if _step(folder) < before:
                remove_tree(folder)


def write_drawn(folder: Path, drawn: dict[int, Drawn]) -> None:
    """Write the generations sampled for several steps to `folder`, as a part of a checkpoint."""
    for step, one in drawn.items():
        place = _folder_of(folder, step)
        write_generations(place, 0, one.generations)
        write_pool(place / POOL, one.pool)
        write_index(place, {"policy": one.policy})


def read_drawn(folder: Path) -> dict[int, Drawn]:
    """Read the draws of `write_drawn`, by step, in ascending order."""
    return {
        _step(one): Drawn(read_index(one)["policy"], read_generations(one), read_pool(one / POOL))
        for one in sorted(folder.glob("step-*"))
    }


def write_pool(folder: Path, pool: Pool) -> None:
    """Write a pool. A pool in which no group was ever started writes no folder."""
    if pool.begun:
        write_generations(folder, 0, pool.samples)
        write_index(folder, {"begun": pool.begun})


def read_pool(folder: Path) -> Pool:
    """Read the pool of `write_pool`."""
    return Pool(read_index(folder)["begun"], tuple(read_generations(folder))) if folder.is_dir() else Pool()


def _folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def _step(folder: Path) -> int:
    return int(re.sub(r"\D", "", folder.name))
