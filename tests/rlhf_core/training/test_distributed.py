from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.training.state import LAUNCHER, rank_and_world


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


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_loopback_address_is_refused_where_other_machines_have_ranks(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    for name, value in zip(LAUNCHER, ("0", "4", host, "29500"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=rf"^MASTER_ADDR = '{host}': 2 of 4 ranks are on this machine, and the other ranks"
    ):
        rank_and_world()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert rank_and_world() == (0, 4)


RANK = """
import json, sys
from tests.support.hostname import listening, reachable_address, rename
renamed = rename(reachable_address())
import torch, torch.distributed as dist
from rlhf_core.training.state import join
join()
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
seen = listening()
dist.barrier()
print(json.dumps([renamed, total.item(), seen]))
"""
ROOT = Path(__file__).parents[3]


def group(ranks: int, **environment: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=os.environ | place | {"RANK": str(rank), "PYTHONPATH": str(ROOT)} | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]


def test_the_ranks_meet_at_the_address_that_is_used_and_nobody_else_can_come() -> None:
    said = [process.communicate(timeout=120) for process in group(2)]
    assert all(out for out, _ in said), [error[-2000:] for _, error in said]
    (renamed, *seen), (_, *other) = (json.loads(out) for out, _ in said)
    assert seen == other == [3.0, ["127.0.0.1"]]
    if not renamed:
        pytest.skip("the machine's own name may lead to its loopback: nothing is shown of gloo")


def test_an_address_of_another_machine_is_an_error_and_not_all_addresses() -> None:
    (process,) = group(1, MASTER_ADDR="192.0.2.1")  # TEST-NET-1 of RFC 5737: nobody has it
    assert "MASTER_ADDR = '192.0.2.1': rank 0 cannot listen on port" in process.communicate(timeout=120)[1]
