"""Run vLLM's server at a socket that is already bound: `python -m rlhf_core.sampling.vllm_front DESCRIPTOR OPTIONS`.

vLLM itself binds `--port` after seconds of imports, and checks its token below `/v1`, `/v2` and `/inference` only;
`PolicyDoor` protects all its routes. You can also add it to your `vllm serve`:
`--middleware rlhf_core.sampling.vllm_front.PolicyDoor`.
"""

import os
import socket
import sys

from starlette.types import ASGIApp

from rlhf_core.errors import ConfigError
from rlhf_core.http.door import Door, health_alone
from rlhf_core.secrets.redaction import hide_in_logs

TOKEN = "VLLM_API_KEY"
"""Environment variable from which vLLM reads the token: options of a command are visible to every user."""


class PolicyDoor(Door):
    """Middleware that requires the token in the environment for all routes of vLLM's server except `/health`."""

    def __init__(self, app: ASGIApp) -> None:
        token = os.environ[TOKEN] if TOKEN in os.environ else ""
        if not token:
            raise ConfigError(TOKEN, token, "the server requires a token", "set it to a long random text")
        super().__init__(app, authorization=f"Bearer {token}", open_to=health_alone, key=token)


def main() -> None:
    """Serve at the socket of the first argument, with vLLM's options in the others."""
    from vllm.entrypoints.launchers import launcher
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    hide_in_logs()
    os.umask(0o077)  # the sockets of its processes lie in the temporary folder, and data sent there is unpickled
    listener = socket.socket(fileno=int(sys.argv.pop(1)))
    listener.set_inheritable(False)
    launcher.create_server_socket = lambda *_, **__: listener
    serve()


if __name__ == "__main__":
    main()
