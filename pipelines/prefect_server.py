"""A Prefect server that lives no longer than its parent: `python -m pipelines.prefect_server PORT`.

The parent holds the other end of standard input; when the parent ends, however it ends, that end closes and the
server stops. So a killed `rlhf run` leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from pipelines.home import LOOPBACK


def serve(port: int) -> None:
    """Serve Prefect's API and pages on the loopback interface until stopped or orphaned."""
    threading.Thread(target=_stop_when_orphaned, daemon=True).start()
    import uvicorn
    from prefect.server.api.server import create_app

    uvicorn.run(create_app(final=True), host=LOOPBACK, port=port, timeout_keep_alive=5, log_level="warning")


def _stop_when_orphaned() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
    # A server that waits for an open connection would outlive its parent after all.
    threading.Timer(10.0, os._exit, args=(1,)).start()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
