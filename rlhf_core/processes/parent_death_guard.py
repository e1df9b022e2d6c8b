"""Run a command that does not outlive its parent: `python -I -S parent_death_guard.py DESCRIPTOR COMMAND ...`.

Start it as the first process of a new session. DESCRIPTOR is the read end of a pipe whose other end the parent holds.
A watcher in the command's process group kills the whole group when that end closes, however the parent ended.
It needs only the standard library, so it starts in a few milliseconds and under any interpreter.
"""

import os
import select
import signal
import sys


def main(descriptor: int, command: list[str]) -> None:
    """Start the watcher and become `command`; exit with status 1 and an error if it cannot be started."""
    leader = os.getpid()
    if os.fork() == 0:
        watch(descriptor, leader)
    os.close(descriptor)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def watch(descriptor: int, leader: int) -> None:
    """Kill the group when the other end of `descriptor` is closed."""
    for stream in (0, 1, 2):  # otherwise a reader of the command's streams would wait for this process too
        os.close(stream)
    poll = select.poll()
    poll.register(descriptor, 0)
    poll.poll()
    os.killpg(leader, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
