"""Read and write generations and rollouts as Parquet shards with an index.

Every write is atomic, so an existing shard is complete and a killed stage can continue after the last one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from rlhf_core.data.parquet import (
    CONVERSATIONAL,
    MESSAGES,
    plain_messages,
    read_table,
    replace_file,
    to_messages,
    with_conversational,
    write_table,
)
from rlhf_core.errors import DataError, explain
from rlhf_core.types import ActionSpan, Completion, Generation, Prompt, Rollout

INDEX_FILE = "index.json"

GENERATIONS_SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("messages", MESSAGES),
        ("label", pa.string()),
        ("source", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float64())),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("policy_version", pa.int64()),
        ("seed", pa.int64()),
        (
            "spans",
            pa.list_(
                pa.struct(
                    [
                        ("start", pa.int32()),
                        ("end", pa.int32()),
                        ("policy_version", pa.int64()),
                        ("reward", pa.float64()),
                    ]
                )
            ),
        ),
        ("failure", pa.string()),
        ("extras", pa.map_(pa.string(), pa.float64())),
        ("episode_score", pa.float64()),
    ]
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
SINCE = ("episode_score", "score", CONVERSATIONAL.name)
"""Columns that the earliest shards lack, or all whose prompts were text."""


def shard_path(folder: Path, shard: int) -> Path:
    """Return the file of shard number `shard`.

    >>> shard_path(Path("g"), 3).name
    'shard-00003.parquet'
    """
    return folder / f"shard-{shard:05d}.parquet"


def shards(folder: Path) -> list[Path]:
    """Return the shard files of `folder`, in order. All of them are complete."""
    return sorted(folder.glob("shard-*.parquet"))


def finished_shards(folder: Path) -> list[Path]:
    """Return the shards to continue after, and remove those behind a gap because their missing rows are unknown."""
    found = shards(folder)
    kept = [path for number, path in enumerate(found) if path == shard_path(folder, number)]
    for path in found[len(kept) :]:
        path.unlink()
    return kept


def count_rows(path: Path) -> int:
    """Return the number of rows of a shard, read from its footer."""
    return int(pq.read_metadata(path).num_rows)


def write_index(folder: Path, facts: dict[str, Any]) -> None:
    """Write `index.json`: row count, policy digest, sampling parameters and other facts about the shards."""
    replace_file(folder / INDEX_FILE, json.dumps(facts, indent=1, sort_keys=True).encode())


def read_index(folder: Path) -> dict[str, Any]:
    """Return what `write_index` wrote. Raises DataError if the index is missing."""
    path = folder / INDEX_FILE
    if not path.is_file():
        raise DataError(explain("index", str(path), "must exist beside the shards", "generate or score again"))
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return facts


def write_generations(folder: Path, shard: int, rows: Sequence[Generation]) -> None:
    """Write one shard of unscored generations."""
    schema = with_conversational(GENERATIONS_SCHEMA, (row.prompt for row in rows))
    write_table(shard_path(folder, shard), schema, [_generation_row(row) for row in rows])


def read_generations(folder: Path) -> list[Generation]:
    """Return the generations of all shards of `folder`, in order. Raises DataError if there are no shards."""
    return [
        _generation(row)
        for path in _some_shards(folder)
        for row in read_table(path, GENERATIONS_SCHEMA.append(CONVERSATIONAL), since=SINCE)
    ]


def write_rollouts(folder: Path, shard: int, rows: Sequence[Rollout]) -> None:
    """Write one shard of scored rollouts."""
    write_table(
        shard_path(folder, shard),
        with_conversational(ROLLOUTS_SCHEMA, (row.prompt for row in rows)),
        [
            _generation_row(row)
            | {
                "reward": row.reward,
                "reward_components": sorted(row.reward_components.items()),
                "invalid": row.invalid,
                "score": row.score,
            }
            for row in rows
        ],
    )


def read_rollouts(folder: Path) -> list[Rollout]:
    """Return the rollouts of all shards of `folder`, in order. Raises DataError if there are no shards."""
    found = []
    for path in _some_shards(folder):
        for row in read_table(path, ROLLOUTS_SCHEMA.append(CONVERSATIONAL), since=SINCE):
            generation = _generation(row)
            found.append(
                Rollout(
                    generation.prompt,
                    generation.prompt_ids,
                    generation.completion,
                    row["reward"],
                    dict(row["reward_components"]),
                    row["invalid"],
                    row["score"],
                )
            )
    return found


def _some_shards(folder: Path) -> list[Path]:
    found = shards(folder)
    if not found:
        raise DataError(explain("shards", str(folder), "has no shard-*.parquet", "generate or score again"))
    return found


def _generation_row(row: Generation | Rollout) -> dict[str, Any]:
    completion = row.completion
    return {
        "prompt_id": row.prompt.id,
        "messages": plain_messages(row.prompt.messages),
        "label": row.prompt.label,
        "source": row.prompt.source,
        "conversational": row.prompt.conversational,
        "prompt_ids": list(row.prompt_ids),
        "token_ids": list(completion.token_ids),
        "logprobs": list(completion.logprobs),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "policy_version": completion.policy_version,
        "seed": completion.seed,
        "spans": [asdict(span) for span in completion.spans],
        "failure": completion.failure,
        "extras": sorted(completion.extras.items()),
        "episode_score": completion.score,
    }


def _generation(row: dict[str, Any]) -> Generation:
    return Generation(
        Prompt(
            row["prompt_id"], to_messages(row["messages"]), row["label"], row["source"], bool(row["conversational"])
        ),
        tuple(row["prompt_ids"]),
        Completion(
            tuple(row["token_ids"]),
            tuple(row["logprobs"]),
            row["text"],
            row["finish_reason"],
            row["policy_version"],
            row["seed"],
            tuple(ActionSpan(**span) for span in row["spans"]),
            row["failure"],
            dict(row["extras"]),
            row["episode_score"],
        ),
    )
