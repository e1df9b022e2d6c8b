from __future__ import annotations

from pathlib import Path

from rlhf_core.data.shards import RolloutLog, ScoredStep
from rlhf_core.types import Completion, Message, Prompt, Rollout

PROMPT = Prompt("p0", (Message("user", "How?"),), "so", "test")
# 0.1 + 0.2 needs all 17 digits: a rollout that comes back changed in the last bit would change the training
ROLLOUTS = [
    Rollout(
        PROMPT, (1, 2), Completion((3, 4), (-0.1 - 0.2, -1e-30), "so", "stop", 7, 2**63 - 1), 0.1 + 0.2, {"rm": 0.3}
    ),
    Rollout(PROMPT, (1, 2), Completion((5,), (-2.0,), "no", "length", 7, 5), -1.0, {"rm": -1.0}),
]
SCORER = {"count": 2, "mean": 0.1 + 0.2}


def test_what_a_policy_made_comes_back_bit_for_bit(tmp_path: Path) -> None:
    RolloutLog(tmp_path / "log").write(7, ROLLOUTS, SCORER, policy="abc")
    assert RolloutLog(tmp_path / "log").read(7, policy="abc") == ScoredStep(ROLLOUTS, SCORER)


def test_another_step_or_another_policy_finds_nothing(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "log")
    log.write(7, ROLLOUTS, SCORER, policy="abc")
    assert log.read(8, policy="abc") is None
    assert log.read(7, policy="abd") is None


def test_a_write_that_was_cut_short_is_nothing_and_is_written_over(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "log")
    half = tmp_path / "log" / ".step-000007"
    half.mkdir(parents=True)
    (half / "shard-00000.parquet").write_bytes(b"PAR1")
    assert log.read(7, policy="abc") is None
    log.write(7, ROLLOUTS, SCORER, policy="abc")
    assert log.read(7, policy="abc") is not None
    assert not half.exists()


def test_a_step_that_another_policy_made_is_replaced(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "log")
    log.write(7, ROLLOUTS, SCORER, policy="abc")
    log.write(7, ROLLOUTS[:1], SCORER, policy="new")
    assert log.read(7, policy="new") == ScoredStep(ROLLOUTS[:1], SCORER)


def test_steps_before_are_forgotten(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "log")
    for step in (8, 9, 10, 100):
        log.write(step, ROLLOUTS, SCORER, policy="abc")
    log.forget(before=10)
    assert [step for step in (8, 9, 10, 100) if log.read(step, policy="abc")] == [10, 100]
