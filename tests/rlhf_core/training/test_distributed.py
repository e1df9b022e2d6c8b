from __future__ import annotations

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.training.distributed import LAUNCHER, rank_and_world


def test_a_process_without_a_launcher_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    assert rank_and_world() == (0, 1)


def test_a_launcher_says_rank_and_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(LAUNCHER, ("3", "4", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert rank_and_world() == (3, 4)


def test_half_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=r"'MASTER_ADDR', 'MASTER_PORT', 'WORLD_SIZE'.* must be set too"):
        rank_and_world()
