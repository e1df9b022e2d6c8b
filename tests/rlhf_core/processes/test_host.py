"""Messages to a child and back, and what is left when it ends."""

import os
import queue
import sys
from typing import Any

import pytest

from rlhf_core.processes.host import Ended, Host, JsonLines, start_command

ECHO = "import sys\nfor line in sys.stdin:\n    print(line.strip(), flush=True)\n"


@pytest.mark.parametrize(
    ("program", "sent", "received", "status"),
    [
        (ECHO, [{"n": 1}, "x"], [{"n": 1}, "x"], -9),
        ("print(1, flush=True)\nraise SystemExit(3)", [], [1, Ended()], 3),
        ("print('no', flush=True)", [], [Ended("JSONDecodeError('Expecting value: line 1 column 1 (char 0)')")], 0),
        ("print('half', end='', flush=True)", [], [Ended()], 0),
        ("import time\ntime.sleep(60)", ["y" * 2**20], [], -9),  # more than a pipe holds, for one who reads nothing
    ],
)
def test_messages_pass_and_the_end_is_the_last_of_them(program, sent, received, status):
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    command = [sys.executable, "-I", "-S", "-c", program]
    host = Host(start_command(command, environment=dict(os.environ)), received=found.put, codec=JsonLines())
    for message in sent:
        host.send(message)
    assert [found.get(timeout=60) for _ in received] == received
    if received and isinstance(received[-1], Ended):
        host.process.wait(60)
    assert host.close() == status == host.close()
    host.send("too late")
