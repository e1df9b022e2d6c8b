"""Move files in a worker while it computes."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rlhf_core.secrets.redaction import hide_in_logs
from rlhf_core.store.node_folders import NodeFolder


class FileMoves:
    """A worker process of Ray, which moves files in a thread, between and during its calls. Its log has no secrets."""

    def __init__(self) -> None:
        hide_in_logs()
        self._moving = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._moves: dict[str, Future[Any]] = {}
        """Name of a move -> its result."""

    def move(self, name: str, work: Callable[[], Any]) -> None:
        """Start to move files after earlier moves. `moved` returns the result of `work`."""
        self._moves[name] = self._moving.submit(work)

    def moved(self, name: str) -> tuple[Any] | None:
        """The result of a move, once, in a tuple. None while the move runs. Raises its error."""
        return (self._moves.pop(name).result(),) if self._moves[name].done() else None

    def fetch(self, place: NodeFolder) -> None:
        """Start to fetch the files of a place to this node."""
        self.move(f"fetch {place.inside}", place.folder)
