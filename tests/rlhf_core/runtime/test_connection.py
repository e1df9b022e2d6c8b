from __future__ import annotations

import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_core.errors import ConfigError, WorkerLostError
from rlhf_core.runtime import connection
from rlhf_core.runtime.connection import connect_again, in_lasting_thread, keep_token_private


def heads(*answers: ConfigError | bool) -> Callable[[int], bool]:
    """Return a `connect` that raises or returns one answer a call."""
    left = iter(answers)

    def connect(cores: int) -> bool:
        answer = next(left)
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    return connect


def test_a_head_that_went_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RECONNECT_EVERY_S", 0.01)
    monkeypatch.setattr(connection, "connect", heads(ConfigError("no head"), ConfigError("no head"), False))
    assert connect_again(2) is False


def test_a_head_that_stays_away_is_one_error_after_the_stated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RECONNECT_TIMEOUT_S", 0.0)
    monkeypatch.setattr(connection, "connect", heads(ConfigError("no head"), ConfigError("no head")))
    with pytest.raises(ConfigError, match="no head"):
        connect_again(2)


def test_a_call_into_a_ray_that_hangs_ends_at_its_deadline() -> None:
    forever = threading.Event()
    with pytest.raises(WorkerLostError, match=r"Ray = 'starting Ray': not finished within 0\.1 s"):
        in_lasting_thread(forever.wait, what="starting Ray", timeout_s=0.1)
    forever.set()


def test_an_error_of_the_call_itself_is_passed_on() -> None:
    def refuse() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        in_lasting_thread(refuse, what="starting Ray", timeout_s=60)


def test_rays_token_is_for_this_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    keep_token_private()
    token = tmp_path / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    assert re.fullmatch("[0-9a-f]{64}", token.read_text()) and list(token.parent.iterdir()) == [token]
    token.write_text("as Ray made it")
    token.chmod(0o644)
    keep_token_private()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and token.read_text() == "as Ray made it"
