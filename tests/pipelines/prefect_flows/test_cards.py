import json
import math

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, get_current_settings, temporary_settings

from pipelines.prefect_flows import cards
from pipelines.prefect_flows.cards import artifact_key
from rlhf_core.store.attempts import AttemptFolder
from rlhf_core.store.disk import DiskStore


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        (("stage", "iterative_dpo/round_1/dpo"), "stage-iterative-dpo-round-1-dpo"),
        (("stage", "PPO"), "stage-ppo"),
    ],
)
def test_keys_hold_only_what_prefect_accepts(parts, key):
    assert artifact_key(*parts) == key


def test_a_server_that_is_away_is_asked_once_and_not_at_every_step(monkeypatch, tmp_path):
    asked: list[str] = []

    def away(**arguments: object) -> None:
        asked.append("again")
        raise ConnectionError("nobody there")

    monkeypatch.setattr(cards, "create_progress_artifact", away)
    monkeypatch.setattr(cards, "PROGRESS_EVERY_S", 0.0)
    monkeypatch.setattr(cards._Away, "until", 0.0)
    card = cards.ProgressCard("sft", cards.Curves(lambda: AttemptFolder(DiskStore(tmp_path), "key", tmp_path)))
    for step in range(5):
        card.show(step, 10, "loss 1.0")
    assert asked == ["again"]


def test_curves_grow_with_the_file_of_metrics_and_begin_again_with_a_new_attempt(tmp_path):
    def log(attempt: int, step: int, reward: float) -> None:
        file = tmp_path / f"work-{attempt}" / "metrics.jsonl"
        file.parent.mkdir(exist_ok=True)
        values = {"ppo/reward/mean": reward, "ppo/kl/per_sequence": math.nan, "ppo/seconds": 1.0}
        with file.open("a") as stream:
            stream.write(json.dumps({"step": step, "values": values}) + "\n")

    curves = cards.Curves(lambda: AttemptFolder(DiskStore(tmp_path), "key", tmp_path))
    assert curves.markdown() == ""
    log(1, 1, 0.0)
    assert curves.markdown() == ""  # one point is no curve
    log(1, 2, 1.0)
    with (tmp_path / "work-1" / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3, "val')  # being written
    assert curves.markdown().splitlines()[2:] == ["| reward | 0 | **1** | ▁█ |"]
    log(2, 1, 5.0)
    log(2, 2, 4.0)
    assert curves.markdown().splitlines()[2:] == ["| reward | 5 | **4** | █▁ |"]


def test_the_card_of_a_running_stage_is_made_once_and_then_rewritten(monkeypatch, tmp_path):
    (tmp_path / "work-1").mkdir()
    file, shown = tmp_path / "work-1" / "metrics.jsonl", []
    monkeypatch.setattr(cards, "CURVES_EVERY_S", 0.0)
    monkeypatch.setattr(cards, "PROGRESS_EVERY_S", 0.0)
    monkeypatch.setattr(cards._Away, "until", 0.0)
    for name in ("create_progress_artifact", "update_progress_artifact", "_delete_artifact"):
        monkeypatch.setattr(cards, name, lambda **_: None)
    monkeypatch.setattr(cards, "create_markdown_artifact", lambda key, markdown: shown.append((key, markdown)) or 7)
    monkeypatch.setattr(cards, "_rewrite_artifact", lambda artifact, text: shown.append((artifact, text)))
    card = cards.ProgressCard("ppo", cards.Curves(lambda: AttemptFolder(DiskStore(tmp_path), "key", tmp_path)))
    for step in (1, 2, 3):
        with file.open("a") as stream:
            values = {"ppo/source/a/b/reward": 2.0, "ppo/reward/mean": float(step), "ppo/source/a/b/length": 1.0}
            stream.write(json.dumps({"step": step, "values": values}) + "\n")
        card.show(step, 9, "")
    assert [place for place, _ in shown] == ["live-ppo", 7]
    assert shown[1][1].startswith("# ppo: 3 of 9\n") and "| reward | 1 | **3** | ▁" in shown[1][1]
    assert "| reward, a/b | 2 | **2** |" in shown[1][1] and "length" not in shown[1][1]


def test_a_card_asks_as_often_as_said_with_the_other_settings_as_they_are():
    before = get_current_settings()
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:4999/api", PREFECT_CLIENT_MAX_RETRIES: 5}):

        def seen() -> tuple[int, str | None]:
            return PREFECT_CLIENT_MAX_RETRIES.value(), PREFECT_API_URL.value()

        assert [cards._quietly(seen), cards._quietly(seen, 1)] == [
            (retries, "http://127.0.0.1:4999/api") for retries in (0, 1)
        ]
        assert seen() == (5, "http://127.0.0.1:4999/api")
    assert get_current_settings() == before
