"""Files of the store: there as a whole or not at all, and what is written is what is read."""

import math
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.data import shards as files
from rlhf_core.data.shards import (
    MESSAGES,
    RolloutLog,
    ScoredStep,
    plain_messages,
    read_generations,
    read_index,
    read_rollouts,
    read_table,
    replace_file,
    shard_path,
    shards,
    to_messages,
    write_generations,
    write_index,
    write_rollouts,
    write_table,
)
from rlhf_core.errors import DataError
from rlhf_core.types import ActionSpan, Completion, Generation, Message, Prompt, Rollout

# ---------------------------------------------------------------- shards

PROMPT = Prompt("p1", (Message("user", "Hi"),), '{"answer": 3}', "world")
COMPLETION = Completion((5, 6, 2), (-0.1, -0.2, -1 / 3), "Hello.", "stop", 4, 2**31 - 1)
EPISODE = Completion(
    (5, 6, 2), (-0.1, 0.0, -1 / 3), "a", "length", 5, 1, (ActionSpan(0, 1, 4), ActionSpan(2, 3, 5, 0.5)), "", {"x": 0.5}
)
BROKEN = Completion((), (), "", "stop", 4, 2, (), "the environment crashed")


def test_generations_of_all_shards_come_back_in_order(tmp_path):
    rows = [Generation(PROMPT, (1, number), COMPLETION) for number in range(3)]
    write_generations(tmp_path, 1, rows[2:])
    write_generations(tmp_path, 0, rows[:2])
    assert [path.name for path in shards(tmp_path)] == ["shard-00000.parquet", "shard-00001.parquet"]
    assert read_generations(tmp_path) == rows


def test_rollouts_come_back_with_exact_logprobs_and_components(tmp_path):
    turns = replace(PROMPT, conversational=True)
    rows = [Rollout(turns, (1, 2), COMPLETION, 1 / 7, {"b": 2.0, "a": -1.0}), Rollout(PROMPT, (), EPISODE, 0.0, {})]
    write_rollouts(tmp_path, 0, rows)
    assert read_rollouts(tmp_path) == rows


def test_scores_come_back_and_are_none_in_shards_from_before_there_were_any(tmp_path):
    graded = replace(EPISODE, score=0.5)
    write_rollouts(tmp_path / "new", 0, [Rollout(PROMPT, (), graded, 0.0, {}, score=1.0)])
    assert read_rollouts(tmp_path / "new") == [Rollout(PROMPT, (), graded, 0.0, {}, score=1.0)]
    old = pq.read_table(shard_path(tmp_path / "new", 0)).drop_columns(["episode_score", "score"])
    (tmp_path / "old").mkdir()
    pq.write_table(old, shard_path(tmp_path / "old", 0))
    assert read_rollouts(tmp_path / "old") == [Rollout(PROMPT, (), EPISODE, 0.0, {})]


def test_a_column_that_arrow_keeps_in_parts_is_written_whole(tmp_path):
    """One with more than 2 GiB of text."""
    schema = pa.schema([pa.field("text", pa.string())])
    write_table(tmp_path / "texts.parquet", schema, {"text": pa.chunked_array([["a", "b"], ["c"]])})
    assert [row["text"] for row in read_table(tmp_path / "texts.parquet", schema)] == ["a", "b", "c"]


def test_an_interrupted_write_leaves_no_shard(tmp_path):
    unwritable = Generation(PROMPT, (1,), replace(COMPLETION, seed="not a number"))
    with pytest.raises(Exception, match="not a number"):
        write_generations(tmp_path, 0, [unwritable])
    assert not shard_path(tmp_path, 0).exists()
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_rollout_keeps_its_reason_and_has_no_reward(tmp_path):
    write_rollouts(tmp_path, 0, [Rollout(PROMPT, (1,), BROKEN, math.nan, {}, "no reward: the environment crashed")])
    (row,) = read_rollouts(tmp_path)
    assert math.isnan(row.reward)
    assert row.invalid == "no reward: the environment crashed"
    assert row.completion == BROKEN


def test_a_folder_without_shards_or_index_is_named(tmp_path):
    with pytest.raises(DataError, match="has no shard"):
        read_generations(tmp_path)
    with pytest.raises(DataError, match="index"):
        read_index(tmp_path)
    write_index(tmp_path, {"count": 3, "sampling": {"temperature": 1.0}})
    assert read_index(tmp_path) == {"count": 3, "sampling": {"temperature": 1.0}}


# ---------------------------------------------------------------- parquet

SCHEMA = pa.schema([("id", pa.string()), ("messages", MESSAGES)])
TALK = (Message("user", "Hi"), Message("assistant", "Hello."))


def talks(*ids: str) -> list[dict[str, object]]:
    return [{"id": one, "messages": plain_messages(TALK)} for one in ids]


def columns(rows: list[dict[str, object]]) -> dict[str, list[object]]:
    return {name: [row[name] for row in rows] for name in SCHEMA.names}


def test_the_columns_that_were_asked_for_come_back(tmp_path):
    path = tmp_path / "new" / "a.parquet"
    for rows in ([], talks("1", "2")):
        write_table(path, SCHEMA, columns(rows))
        assert read_table(path, SCHEMA) == rows
    assert to_messages(read_table(path, SCHEMA)[0]["messages"]) == TALK
    assert read_table(path, pa.schema([("id", pa.string())])) == [{"id": "1"}, {"id": "2"}]


def test_a_missing_table_and_a_foreign_table_are_named(tmp_path):
    with pytest.raises(DataError, match=r"a\.parquet.*must exist"):
        read_table(tmp_path / "a.parquet", SCHEMA)
    write_table(tmp_path / "a.parquet", pa.schema([("id", pa.string())]), {"id": ["1"]})
    with pytest.raises(DataError, match=r"a\.parquet.*lacks the columns \['messages'\]"):
        read_table(tmp_path / "a.parquet", SCHEMA)


def test_a_write_that_is_interrupted_leaves_what_was_there(tmp_path, monkeypatch):
    write_table(tmp_path / "a.parquet", SCHEMA, columns(talks("old")))
    replace_file(tmp_path / "b.json", b"old")

    def power_cut(path: Path) -> None:
        raise OSError("no space left on the disk")

    monkeypatch.setattr(files, "fsync_path", power_cut)
    with pytest.raises(OSError, match="no space"):
        write_table(tmp_path / "a.parquet", SCHEMA, columns(talks("new")))
    with pytest.raises(OSError, match="no space"):
        replace_file(tmp_path / "b.json", b"new")
    assert read_table(tmp_path / "a.parquet", SCHEMA) == talks("old")
    assert (tmp_path / "b.json").read_bytes() == b"old"
    assert [path.name for path in tmp_path.glob("*.parquet")] == ["a.parquet"]  # half a file is not taken for a table


def test_a_file_has_its_name_only_once_it_is_on_the_disk(tmp_path, monkeypatch):
    synced: list[tuple[str, bool]] = []
    target = tmp_path / "b.json"
    monkeypatch.setattr(files, "fsync_path", lambda path: synced.append((path.name, target.exists())))
    replace_file(target, b"new")
    assert [there for _, there in synced] == [False, True] and synced[1][0] == tmp_path.name
    assert target.read_bytes() == b"new" and [path.name for path in tmp_path.iterdir()] == ["b.json"]


# ---------------------------------------------------------------- rollout log

# 0.1 + 0.2 needs all 17 digits: a rollout that comes back changed in the last bit would change the training
ROLLOUTS = [
    Rollout(
        PROMPT, (1, 2), Completion((3, 4), (-0.1 - 0.2, -1e-30), "so", "stop", 7, 2**63 - 1), 0.1 + 0.2, {"rm": 0.3}
    ),
    Rollout(PROMPT, (1, 2), Completion((5,), (-2.0,), "no", "length", 7, 5), -1.0, {"rm": -1.0}),
]
SCORER = {"count": 2, "mean": 0.1 + 0.2}


def test_what_a_policy_made_comes_back_bit_for_bit_for_its_step_and_policy_alone(tmp_path):
    log = RolloutLog(tmp_path / "log")
    log.write(7, ROLLOUTS, SCORER, policy="abc")
    log.wait()
    assert RolloutLog(tmp_path / "log").read(7, policy="abc") == ScoredStep(ROLLOUTS, SCORER)
    assert log.read(8, policy="abc") is log.read(7, policy="abd") is None
    log.write(7, ROLLOUTS[:1], SCORER, policy="new")  # replaces the step of another policy
    assert log.read(7, policy="new") == ScoredStep(ROLLOUTS[:1], SCORER)


def test_a_logged_step_keeps_episodes_turns_and_components(tmp_path):
    turns = replace(PROMPT, conversational=True)
    episode = Rollout(turns, (1, 2), replace(EPISODE, score=0.5), 1 / 7, {"b": 2.0, "a": -1.0}, score=1.0)
    rollouts = [episode, Rollout(PROMPT, (), BROKEN, 0.0, {}, invalid="no answer")]
    log = RolloutLog(tmp_path)
    log.write(0, rollouts, {}, policy="abc")
    assert log.read(0, policy="abc").rollouts == rollouts


def test_experts_are_logged_and_kept_for_later_steps_where_they_were_recorded(tmp_path):
    routed = replace(ROLLOUTS[1], completion=replace(ROLLOUTS[1].completion, routed_experts=(3, 0, 1, 300, -1, -1)))
    log = RolloutLog(tmp_path / "log")
    log.write(0, [ROLLOUTS[0], routed], SCORER, policy="abc")
    assert log.read(0, policy="abc").rollouts == [ROLLOUTS[0], routed]
    rows = [Generation(one.prompt, one.prompt_ids, one.completion) for one in (ROLLOUTS[0], routed)]
    for number, generations in enumerate((rows, rows[:1])):
        write_generations(tmp_path / str(number), 0, generations)
        assert read_generations(tmp_path / str(number)) == generations
        names = pq.read_schema(tmp_path / str(number) / "shard-00000.parquet").names
        assert ("routed_experts" in names) == (number == 0)


def test_a_step_that_an_earlier_release_logged_as_parquet_is_read(tmp_path):
    write_rollouts(tmp_path / "step-000007", 0, ROLLOUTS)
    write_index(tmp_path / "step-000007", {"policy": "abc", "scorer": SCORER})
    assert RolloutLog(tmp_path).read(7, policy="abc") == ScoredStep(ROLLOUTS, SCORER)


def test_a_large_step_is_written_in_shards_and_comes_back_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf_core.data.shards.SHARD_TOKENS", 10)
    log, shards = RolloutLog(tmp_path / "log"), []
    for step, rollouts in ((1, ROLLOUTS * 5), (2, ROLLOUTS * 2), (3, [])):
        log.write(step, rollouts, SCORER, policy="abc")
        assert log.read(step, policy="abc").rollouts == rollouts
        shards.append(len(list((tmp_path / "log").glob(f"step-{step:06d}/shard-*.arrow"))))
    assert shards == [3, 1, 1]  # 1 + 10 // (1 + 2) = 4 answers of up to 2 tokens in each


def test_a_write_that_was_cut_short_is_nothing_and_is_written_over(tmp_path):
    log = RolloutLog(tmp_path / "log")
    half = tmp_path / "log" / ".step-000007"
    half.mkdir(parents=True)
    (half / "shard-00000.arrow").write_bytes(b"ARROW1")
    assert log.read(7, policy="abc") is None
    log.write(7, ROLLOUTS, SCORER, policy="abc")
    assert log.read(7, policy="abc") is not None
    assert not half.exists()


def test_steps_before_are_forgotten(tmp_path):
    log = RolloutLog(tmp_path / "log")
    for step in (8, 9, 10, 100):
        log.write(step, ROLLOUTS, SCORER, policy="abc")
    log.forget(before=10)
    assert [step for step in (8, 9, 10, 100) if log.read(step, policy="abc")] == [10, 100]


def test_waiting_for_a_step_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "log").write_text("a file where the folder would be")
    log = RolloutLog(tmp_path / "log")
    log.write(7, ROLLOUTS, SCORER, policy="abc")
    with pytest.raises(OSError, match="log"):
        log.wait()
