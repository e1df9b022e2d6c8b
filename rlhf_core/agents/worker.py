"""Run episodes in the child process of `rlhf_core.agents.process`: `python -m rlhf_core.agents.worker BEACON`.

Many episodes share one event loop. Reads pickled calls from standard input and answers each with a pickled message;
`BEACON` is the descriptor of a file that holds the ticket of the episode whose code is running.
"""

import asyncio
import mmap
import pickle
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from rlhf_core.agents.episode_rng import EPISODE_RNG, EpisodeRng, with_episode_rng
from rlhf_core.agents.sessions import Sessions, open_sessions
from rlhf_core.errors import ConfigError
from rlhf_core.processes.child import take_standard_streams
from rlhf_core.processes.guard import start_guard
from rlhf_core.processes.host import send_message
from rlhf_core.schema.secrets import with_secrets
from rlhf_core.secrets.redaction import hide_in_logs, without_secrets
from rlhf_core.user_code.dependencies import check_functions
from rlhf_core.user_code.watch import watch_process

TRACEBACK_LINES = 12  # the last frames name the fault; a failure is kept with each episode


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a method of an episode's session; `end` closes it and is not answered."""

    ticket: int
    verb: str
    arguments: tuple[Any, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """The result of a call: a kind of the session, or `raised` (with a traceback) or `late`."""

    ticket: int
    kind: str
    value: Any
    seconds: float


def main(beacon: int) -> None:
    """Serve until the input ends."""
    start_guard()
    hide_in_logs()
    answers, requests = take_standard_streams()
    config, tokenizer, functions, notes, key = pickle.load(requests)
    try:
        check_functions(functions, key=key)
        sessions = open_sessions(with_secrets(config, key), tokenizer=tokenizer, code=functions, notes=notes)
        watch_process()
        check_functions(functions, key=key)
    except ConfigError as error:
        send_message(answers, ("refused", str(error)))
        return
    send_message(answers, ("ready", (sessions.tools, sessions.programs)))
    mapped = mmap.mmap(beacon, 8)
    asyncio.run(_Host(sessions, answers, lambda ticket: struct.pack_into("q", mapped, 0, ticket)).serve(requests))


class _Host:
    def __init__(self, sessions: Sessions, answers: BinaryIO, mark: Callable[[int], None]) -> None:
        self._sessions = sessions
        self._answers = answers
        self._mark = mark
        self._playing: dict[int, tuple[Any, EpisodeRng]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, requests: BinaryIO) -> None:
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Call | None] = asyncio.Queue()

        def read() -> None:
            while True:
                try:
                    call = pickle.load(requests)
                except EOFError:
                    call = None
                loop.call_soon_threadsafe(inbox.put_nowait, call)
                if call is None:
                    return

        threading.Thread(target=read, daemon=True).start()
        while (call := await inbox.get()) is not None:
            if call.verb == "begin":
                rng = EpisodeRng(call.ticket, call.arguments[1], self._mark)
                self._playing[call.ticket] = (self._sessions.open(), rng)
            task = asyncio.create_task(self._answer(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, call: Call) -> None:
        ending = call.verb == "end"
        session, rng = self._playing.pop(call.ticket) if ending else self._playing[call.ticket]
        EPISODE_RNG.set(rng)
        started = time.monotonic()
        try:
            async with asyncio.timeout(call.timeout_s) as deadline:
                method = session.close if ending else getattr(session, call.verb)
                result = await with_episode_rng(method(*call.arguments))
            kind, value = result if not ending else ("", None)
            if time.monotonic() - started > call.timeout_s:  # code that never awaits is not interrupted
                kind, value = "late", ""
        except Exception:
            late = deadline.expired()
            kind = "late" if late else "raised"
            shown = without_secrets(traceback.format_exc()).splitlines()[-TRACEBACK_LINES:]
            value = "" if late else "\n".join(shown)
            if ending:
                traceback.print_exc()  # the episode is over: no call waits for this
        if not ending:
            send_message(self._answers, SessionEvent(call.ticket, kind, value, time.monotonic() - started))


if __name__ == "__main__":
    from rlhf_core.agents import worker

    worker.main(int(sys.argv[1]))  # not ours: the parent knows Call and SessionEvent by that module's name
