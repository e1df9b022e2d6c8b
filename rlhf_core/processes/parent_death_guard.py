"""Run a command that does not outlive its starter: `python -I -S parent_death_guard.py DESCRIPTOR COMMAND ...`.

Start it as the first process of a new session. DESCRIPTOR is the reading end of a pipe whose other end the starter holds.
A watcher in the command's process group kills the whole group when that end closes, however the starter came to its end.
It needs the standard library alone, so it starts in a few milliseconds and under any interpreter.
"""

import os
import select
import signal
import sys


def main(descriptor: int, command: list[str]) -> None:
    """Become `command`, watched; ends with status 1 and names it if it cannot be started."""
    leader = os.getpid()
    if os.fork() == 0:
        watch(descriptor, leader)
    os.close(descriptor)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def watch(descriptor: int, leader: int) -> None:
    """Kill the group when nobody holds the other end of `descriptor`."""
    for stream in (0, 1, 2):  # or a reader would wait for us to end
        os.close(stream)
    poll = select.poll()
    poll.register(descriptor, 0)
    poll.poll()
    os.killpg(leader, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
