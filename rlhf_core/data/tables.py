"""The parquet layouts that flow between stages, and the values that one row of each becomes.

Every write is atomic and on the disk before it has its name, so a shard that is there is whole and a killed stage can
go on after the last one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from rlhf_core.errors import DataError, explain
from rlhf_core.store_layout import fsync_path
from rlhf_core.types import Completion, Generation, Message, Prompt, Rollout

PROMPTS_FILE = "prompts.parquet"
INDEX_FILE = "index.json"


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation to imitate; every assistant turn is trained on.

    >>> Demonstration("d1", (Message("user", "Hi"), Message("assistant", "Hello.")), "world").messages[-1].content
    'Hello.'
    """

    id: str
    messages: tuple[Message, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to one prompt. `chosen` and `rejected` hold the answer's turns only; `margin` is 0.0 when unknown.

    >>> Preference("p1", (Message("user", "Hi"),), (Message("assistant", "Hello."),), (Message("assistant", "No."),),
    ...            0.0, "world").margin
    0.0
    """

    id: str
    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    margin: float
    source: str


@dataclass(frozen=True, slots=True)
class SteppedAnswer:
    """An answer in steps, each with the probability that it is right: 0.0 or 1.0 where a person judged it."""

    id: str
    prompt: tuple[Message, ...]
    steps: tuple[str, ...]
    labels: tuple[float, ...]
    source: str

    def answer(self, separator: str) -> tuple[Message, ...]:
        """Return the steps, joined by `separator`, as the assistant's turn."""
        return (Message("assistant", separator.join(self.steps)),)


@dataclass(frozen=True, slots=True)
class Tables:
    """All rows that `prepare_data` writes; an empty tuple means that the data have no such table."""

    demonstrations: tuple[Demonstration, ...]
    eval_demonstrations: tuple[Demonstration, ...]
    preferences: tuple[Preference, ...]
    eval_preferences: tuple[Preference, ...]
    prompts: tuple[Prompt, ...]
    eval_prompts: tuple[Prompt, ...]
    steps: tuple[SteppedAnswer, ...] = ()
    eval_steps: tuple[SteppedAnswer, ...] = ()

    def named(self) -> dict[str, tuple[Demonstration | Preference | Prompt | SteppedAnswer, ...]]:
        """Return the tables by name, in order of their fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def training_texts(self) -> Iterator[str]:
        """Yield the texts to train a tokenizer on: of the demonstrations, or without any of pairs and prompts, and of steps."""
        if self.demonstrations:
            turns: Iterable[Message] = (message for row in self.demonstrations for message in row.messages)
        else:
            pairs = (message for row in self.preferences for message in (*row.prompt, *row.chosen, *row.rejected))
            turns = (*pairs, *(message for prompt in self.prompts for message in prompt.messages))
        yield from (message.content for message in turns)
        yield from (message.content for row in self.steps for message in (*row.prompt, *row.answer("\n")))


def content_id(*parts: object) -> str:
    """Return a stable id from content: the first 16 hex digits of the sha256 over the JSON of `parts`.

    >>> content_id("a", 1)
    '4a62413ce9ac5a29'
    """
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False, default=asdict).encode()).hexdigest()[:16]


_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))

DEMONSTRATIONS_SCHEMA = pa.schema([("id", pa.string()), ("messages", _MESSAGES), ("source", pa.string())])
PREFERENCES_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt", _MESSAGES),
        ("chosen", _MESSAGES),
        ("rejected", _MESSAGES),
        ("margin", pa.float64()),
        ("source", pa.string()),
    ]
)
STEPS_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt", _MESSAGES),
        ("steps", pa.list_(pa.string())),
        ("labels", pa.list_(pa.float64())),
        ("source", pa.string()),
    ]
)
PROMPTS_SCHEMA = pa.schema(
    [("id", pa.string()), ("messages", _MESSAGES), ("label", pa.string()), ("source", pa.string())]
)
GENERATIONS_SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("messages", _MESSAGES),
        ("label", pa.string()),
        ("source", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float64())),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("policy_version", pa.int64()),
        ("seed", pa.int64()),
    ]
)
ROLLOUTS_SCHEMA = pa.schema(
    [*GENERATIONS_SCHEMA, ("reward", pa.float64()), ("reward_components", pa.map_(pa.string(), pa.float64()))]
)


# ---------------------------------------------------------------- demonstrations, preferences, steps, prompts


def write_demonstrations(path: Path, rows: Iterable[Demonstration]) -> None:
    """Write `rows` to the parquet file `path`."""
    _write(
        path,
        DEMONSTRATIONS_SCHEMA,
        [{"id": row.id, "messages": _plain(row.messages), "source": row.source} for row in rows],
    )


def read_demonstrations(path: Path) -> list[Demonstration]:
    """Return the rows of the parquet file `path` (`train.parquet` or `eval.parquet`), in order."""
    return [
        Demonstration(row["id"], _messages(row["messages"]), row["source"])
        for row in _read(path, DEMONSTRATIONS_SCHEMA)
    ]


def write_preferences(path: Path, rows: Iterable[Preference]) -> None:
    """Write `rows` to the parquet file `path`."""
    _write(
        path,
        PREFERENCES_SCHEMA,
        [
            {
                "id": row.id,
                "prompt": _plain(row.prompt),
                "chosen": _plain(row.chosen),
                "rejected": _plain(row.rejected),
                "margin": row.margin,
                "source": row.source,
            }
            for row in rows
        ],
    )


def read_preferences(path: Path) -> list[Preference]:
    """Return the rows of the parquet file `path` (`train.parquet` or `eval.parquet`), in order."""
    return [
        Preference(
            row["id"],
            _messages(row["prompt"]),
            _messages(row["chosen"]),
            _messages(row["rejected"]),
            row["margin"],
            row["source"],
        )
        for row in _read(path, PREFERENCES_SCHEMA)
    ]


def write_steps(path: Path, rows: Iterable[SteppedAnswer]) -> None:
    """Write `rows` to the parquet file `path`."""
    _write(path, STEPS_SCHEMA, [asdict(row) for row in rows])


def read_steps(path: Path) -> list[SteppedAnswer]:
    """Return the rows of the parquet file `path` (`train.parquet` or `eval.parquet`), in order."""
    return [
        SteppedAnswer(row["id"], _messages(row["prompt"]), tuple(row["steps"]), tuple(row["labels"]), row["source"])
        for row in _read(path, STEPS_SCHEMA)
    ]


def write_prompts(folder: Path, rows: Iterable[Prompt]) -> None:
    """Write `rows` to `folder/prompts.parquet`."""
    _write(
        folder / PROMPTS_FILE,
        PROMPTS_SCHEMA,
        [{"id": row.id, "messages": _plain(row.messages), "label": row.label, "source": row.source} for row in rows],
    )


def read_prompts(folder: Path) -> list[Prompt]:
    """Return the rows of `folder/prompts.parquet`, in order."""
    return [
        Prompt(row["id"], _messages(row["messages"]), row["label"], row["source"])
        for row in _read(folder / PROMPTS_FILE, PROMPTS_SCHEMA)
    ]


# ---------------------------------------------------------------- generations and rollouts: shards with an index


def shard_path(folder: Path, shard: int) -> Path:
    """Return the file of shard number `shard`.

    >>> shard_path(Path("g"), 3).name
    'shard-00003.parquet'
    """
    return folder / f"shard-{shard:05d}.parquet"


def shards(folder: Path) -> list[Path]:
    """Return the shard files of `folder`, in order; all of them are whole."""
    return sorted(folder.glob("shard-*.parquet"))


def write_index(folder: Path, facts: dict[str, Any]) -> None:
    """Write `index.json`: count of rows, policy digest, sampling parameters and whatever else describes the shards."""
    _replace(folder / INDEX_FILE, json.dumps(facts, indent=1, sort_keys=True).encode())


def read_index(folder: Path) -> dict[str, Any]:
    """Return what `write_index` wrote; DataError if it is not there."""
    path = folder / INDEX_FILE
    if not path.is_file():
        raise DataError(explain("index", str(path), "must exist beside the shards", "generate or score again"))
    facts: dict[str, Any] = json.loads(path.read_text())
    return facts


def write_generations(folder: Path, shard: int, rows: Sequence[Generation]) -> None:
    """Write one shard of unscored generations."""
    _write(shard_path(folder, shard), GENERATIONS_SCHEMA, [_generation_row(row) for row in rows])


def read_generations(folder: Path) -> list[Generation]:
    """Return the generations of all shards of `folder`, in order; DataError if it has none."""
    return [_generation(row) for path in _some_shards(folder) for row in _read(path, GENERATIONS_SCHEMA)]


def write_rollouts(folder: Path, shard: int, rows: Sequence[Rollout]) -> None:
    """Write one shard of scored rollouts."""
    _write(
        shard_path(folder, shard),
        ROLLOUTS_SCHEMA,
        [
            _generation_row(row) | {"reward": row.reward, "reward_components": sorted(row.reward_components.items())}
            for row in rows
        ],
    )


def read_rollouts(folder: Path) -> list[Rollout]:
    """Return the rollouts of all shards of `folder`, in order; DataError if it has none."""
    found = []
    for path in _some_shards(folder):
        for row in _read(path, ROLLOUTS_SCHEMA):
            generation = _generation(row)
            found.append(
                Rollout(
                    generation.prompt,
                    generation.prompt_ids,
                    generation.completion,
                    row["reward"],
                    dict(row["reward_components"]),
                )
            )
    return found


# ---------------------------------------------------------------- private


def _some_shards(folder: Path) -> list[Path]:
    found = shards(folder)
    if not found:
        raise DataError(explain("shards", str(folder), "has no shard-*.parquet", "generate or score again"))
    return found


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _messages(rows: list[dict[str, str]]) -> tuple[Message, ...]:
    return tuple(Message(row["role"], row["content"]) for row in rows)


def _generation_row(row: Generation | Rollout) -> dict[str, Any]:
    completion = row.completion
    return {
        "prompt_id": row.prompt.id,
        "messages": _plain(row.prompt.messages),
        "label": row.prompt.label,
        "source": row.prompt.source,
        "prompt_ids": list(row.prompt_ids),
        "token_ids": list(completion.token_ids),
        "logprobs": list(completion.logprobs),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "policy_version": completion.policy_version,
        "seed": completion.seed,
    }


def _generation(row: dict[str, Any]) -> Generation:
    return Generation(
        Prompt(row["prompt_id"], _messages(row["messages"]), row["label"], row["source"]),
        tuple(row["prompt_ids"]),
        Completion(
            tuple(row["token_ids"]),
            tuple(row["logprobs"]),
            row["text"],
            row["finish_reason"],
            row["policy_version"],
            row["seed"],
        ),
    )


def _write(path: Path, schema: pa.Schema, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), temporary)
    _put(temporary, path)


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    _put(temporary, path)


def _put(temporary: Path, path: Path) -> None:
    """Give a written file its name once its content is on the disk: a shard that is there is whole, power cut or not."""
    fsync_path(temporary)
    temporary.replace(path)
    fsync_path(path.parent)


def _read(path: Path, schema: pa.Schema) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DataError(explain("table", str(path), "must exist", "prepare the data again"))
    missing = sorted(set(schema.names) - set(pq.read_schema(path).names))
    if missing:
        raise DataError(explain("table", str(path), f"misses the columns {missing}", "prepare the data again"))
    rows: list[dict[str, Any]] = pq.read_table(path, columns=schema.names).to_pylist()
    return rows
