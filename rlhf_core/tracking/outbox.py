"""Queue records for a tracking server: they are written to a spool file first and delivered by a background thread.

A server that is slow, down or gone costs the caller one line in a file. Records that are undelivered when the process
ends, killed or not, are delivered by the next process that opens the same folder. A record may be delivered twice
(after a kill between its delivery and its removal from the spool), so delivery must be idempotent.
"""

import fcntl
import json
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

logger = logging.getLogger(__name__)

Record: TypeAlias = dict[str, Any]

FLUSH_SECONDS = 2.0  # charts follow within seconds, at one request for many points
FLUSH_POINTS = 500  # half of METRICS_PER_REQUEST
FIRST_RETRY_SECONDS = 2.0  # a restart of the server takes a few seconds
LONGEST_RETRY_SECONDS = 60.0  # so that records arrive within a minute of its return


class ServerUnreachable(Exception):
    """The server could not be reached; the same records are retried later."""


class Refused(ServerUnreachable):
    """The server cannot be used with these settings (credentials, a driver that is missing) until they are changed."""


class Outbox:
    """An ordered queue of records, backed by a file.

    `deliver(records)` gets the oldest records, delivers some of them and returns how many are finished (delivered or
    given up, at least one). It raises `ServerUnreachable` if it cannot continue now. It runs in the outbox's own thread.
    """

    def __init__(self, folder: Path, deliver: Callable[[Sequence[Record]], int]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._deliver = deliver
        self._path = folder / f"{uuid.uuid4().hex}.jsonl"
        self._file = self._path.open("a", encoding="utf-8")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._queue: deque[Record] = deque()
        self._points = 0
        self._appended = 0
        self._done = 0
        self._tries = 0
        self._offline = False
        self._refused: Refused | None = None
        self._hurry = False
        self._closing = False
        self._condition = threading.Condition()
        self._adopt()
        self._thread = threading.Thread(target=self._work, name="tracking-outbox", daemon=True)
        self._thread.start()

    @property
    def offline(self) -> bool:
        """Whether the last delivery found no server."""
        return self._offline

    @property
    def refused(self) -> Refused | None:
        """The reason why the last delivery was refused, until the server accepts one."""
        return self._refused

    def append(self, record: Record) -> None:
        """Queue `record` (JSON-able); returns at once."""
        line = json.dumps(record, default=str) + "\n"
        with self._condition:
            if self._closing:
                logger.warning("tracking: a record of %s arrived after the end of the run and is dropped", record["op"])
                return
            try:
                self._file.write(line)
                self._file.flush()
            except OSError as error:  # a full disk costs the spool its durability, but must not stop the training
                logger.warning("tracking: %s: %s; the record is kept in memory only", self._path, error)
            self._queue.append(record)
            self._appended += 1
            self._points += _points(record)
            if self._points >= FLUSH_POINTS:
                self._condition.notify_all()

    def flush(self, timeout_s: float, *, retry: bool) -> bool:
        """Wait until everything queued so far is delivered; return False if the server is away or time is up.

        A server that is known to be down is contacted again only with `retry`.
        """
        with self._condition:
            if self._closing or (self._offline and not retry):
                return self._done >= self._appended
            target, tries = self._appended, self._tries
            self._hurry = True
            self._condition.notify_all()
            self._condition.wait_for(
                lambda: self._done >= target or (self._offline and self._tries > tries), timeout=timeout_s
            )
            return self._done >= target

    def close(self, timeout_s: float) -> bool:
        """Deliver as many records as possible, stop, and leave the rest in the spool for the next process."""
        self.flush(timeout_s, retry=True)
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(timeout=timeout_s)
        with self._condition:
            left = len(self._queue)  # records in flight when the time was up may have arrived since
            if not left:
                self._path.unlink(missing_ok=True)
            self._file.close()
        if left:
            logger.warning("tracking: %d records are kept in %s, and the next run sends them", left, self._path)
        return not left

    def _adopt(self) -> None:
        """Take over the records of processes that are gone: those whose spool file is not locked."""
        for path in sorted(self.folder.glob("*.jsonl"), key=_modified):
            if path == self._path:
                continue
            try:
                with path.open("r+", encoding="utf-8") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    for record in _read(file):
                        self.append(record)
                    path.unlink()
            except (BlockingIOError, FileNotFoundError):
                continue

    def _work(self) -> None:
        """Deliver records until the outbox is closed. While the server is away, pauses double up to the longest one."""
        retry_s = FIRST_RETRY_SECONDS
        while self._wait(retry_s if self._offline else FLUSH_SECONDS):
            try:
                self._drain()
            except ServerUnreachable as error:
                retry_s = min(2 * retry_s, LONGEST_RETRY_SECONDS) if self._offline else FIRST_RETRY_SECONDS
                self._went_offline(error)
            except Exception:  # a bug in the delivery must not end the thread, and with it the records
                logger.exception("tracking: delivery failed")
                self._went_offline(None)

    def _wait(self, seconds: float) -> bool:
        """Sleep until there is a reason to deliver; return False when it is time to stop."""
        deadline = time.monotonic() + seconds
        with self._condition:
            while not self._closing and not self._hurry:
                left = deadline - time.monotonic()
                if left <= 0 or (self._points >= FLUSH_POINTS and not self._offline):
                    break
                self._condition.wait(left)
            self._hurry = False
            return not self._closing

    def _drain(self) -> None:
        """Deliver all records. Delivered records leave the spool file once none is left."""
        while True:
            with self._condition:
                records = [self._queue[index] for index in range(min(len(self._queue), FLUSH_POINTS))]
                if not records:
                    self._tries += 1
                    self._condition.notify_all()
                    return
            done = self._deliver(records)
            with self._condition:
                for _ in range(done):
                    self._points -= _points(self._queue.popleft())
                self._done += done
                if self._offline:
                    logger.info("tracking: the server answers again")
                    self._offline, self._refused = False, None
                if not self._queue:
                    self._file.truncate(0)
                self._condition.notify_all()
            if self._closing:
                return

    def _went_offline(self, error: ServerUnreachable | None) -> None:
        """Note that a delivery failed, and warn once for each time that the server is away."""
        with self._condition:
            if not self._offline and error is not None:
                logger.warning("tracking: %s; records are kept in %s and sent later", error, self._path)
            self._offline = True
            self._refused = error if isinstance(error, Refused) else None
            self._tries += 1
            self._condition.notify_all()


def _modified(path: Path) -> float:
    """The time of the last change of a spool file: older records are delivered first."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has just adopted it
        return 0.0


def _points(record: Record) -> int:
    """The number of values of a record, by which requests are limited."""
    return len(record["values"]) if record["op"] == "metrics" else 1


def _read(file: IO[str]) -> list[Record]:
    """Load the complete records of a spool file; a line cut short by a kill or a full disk is left out."""
    records = []
    for line in file:
        try:
            records.append(json.loads(line))
        except ValueError:
            logger.warning("tracking: %s: skipping an incomplete record", file.name)
    return records
