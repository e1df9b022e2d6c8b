"""Run programs on a SandboxFusion server (github.com/bytedance/SandboxFusion) in place of this machine's sandbox.

    POST /run_code {"code": "print(1)", "language": "python", "stdin": "", "run_timeout": 5.0, "memory_limit_MB": 512}
    -> {"status": "Success", "message": "", "run_result": {"status": "Finished", "return_code": 0, "stdout": "1\\n", ...}}

`Failed` is the program's doing; `SandboxError`, another answer or none is the server's, and no result.
"""

import json
import signal
from collections.abc import Mapping
from typing import Any, Self

import httpx

from rlhf_contrib.sandbox.local import HALF_PAIR, Execution, Limits
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.http.client import TooLarge, post, shown_body
from rlhf_core.http.retries import retried
from rlhf_core.secrets.redaction import shown, without_secrets
from rlhf_core.types import encodable

QUEUE_S = 30.0
"""Time for the connection and the server's queue, in addition to the program's time limit."""
RETRIES = 2  # a server that is restarted or overloaded for a moment
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 0.5
"""Pauses before the first and the second retry."""
KEPT_BYTES = 2**20
"""Bytes of each stream that the server keeps; it silently drops the rest."""
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit status of a killed process, as reported by its parent and by a shell; here the cause is the memory limit."""
REFUSED_FOR_GOOD = (401, 403, 404, 405, 422)  # the key, the address or the protocol is wrong: no retry helps


class SandboxFusion:
    """Runs Python programs as `run_program` does, on the server at `url`. Use it in a `with` block.

    Up to three requests are sent, none after a timeout. RewardError if it returns no result, ConfigError if
    the address is invalid or rejected.

    >>> with SandboxFusion("http://sandbox:8080", {}) as run:                     # doctest: +SKIP
    ...     run("print(input())", "4", limits=Limits()).stdout
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        if not url.startswith(("http://", "https://")):
            rule = "must begin with http:// or https://"
            raise ConfigError("sandbox_url", shown(url), rule, "give the address of the server")
        self._url = f"{url.rstrip('/').removesuffix('/run_code')}/run_code"
        self._client = httpx.Client(headers=dict(headers))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def __call__(self, program: str, stdin: str, *, limits: Limits) -> Execution:
        """Run the program on the server; a limit that it exceeds counts as the program's failure."""
        if encodable(program) != program:
            return HALF_PAIR
        body = {
            "code": program,
            "language": "python",
            "stdin": encodable(stdin),
            "run_timeout": limits.timeout_s,
            "memory_limit_MB": limits.memory_mb,
        }
        try:
            return retried(
                lambda: _execution(self._ask(body, limits.timeout_s + QUEUE_S), limits),
                retries=RETRIES,
                again=lambda error: isinstance(error, _NoResult) and not error.final,
                first_s=FIRST_PAUSE_S,
                longest_s=LONGEST_PAUSE_S,
                least=lambda error: error.after_s if isinstance(error, _NoResult) else 0.0,
            )
        except _NoResult as none:
            remedy = "see the server's log, or start it"
            raise RewardError("sandbox_url", shown(self._url), str(none), remedy) from None

    def _ask(self, body: Mapping[str, Any], timeout_s: float) -> Any:
        try:
            answer = post(self._client, self._url, body, timeout_s=timeout_s)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.RemoteProtocolError) as error:
            raise _NoResult(f"cannot be reached: {error!r}") from None
        except httpx.TimeoutException:
            raise _NoResult(f"took longer than {timeout_s:g} s", final=True) from None
        except TooLarge as error:
            raise _NoResult(str(error), final=True) from None
        except httpx.HTTPError as error:
            raise _NoResult(f"cannot be reached: {error!r}") from None
        if answer.status == 200:
            return _read(answer.content)
        rule = f"returned status {answer.status}: {shown_body(answer.content, 200)}"
        if answer.status in REFUSED_FOR_GOOD:
            remedy = "give the address of a SandboxFusion server, and sandbox_headers if it requires a key"
            raise ConfigError("sandbox_url", shown(self._url), rule, remedy)
        raise _NoResult(rule, after_s=answer.after_s)


class _NoResult(Exception):
    """The server did not report how the program ended. `final`: a retry would not help."""

    def __init__(self, reason: str, *, final: bool = False, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.final = final or after_s > QUEUE_S
        self.after_s = after_s


def _read(answer: bytes) -> Any:
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        raise _NoResult(f"returned invalid JSON: {shown_body(answer, 200)!r}") from None


def _execution(answer: Any, limits: Limits) -> Execution:
    """Parse the program's result from the server's response; _NoResult if it contains none."""
    match answer:
        case {"status": "Success" | "Failed", "run_result": {"status": "TimeLimitExceeded"} as ran}:
            return Execution("timeout", -signal.SIGKILL, _text(ran, "stdout"), _text(ran, "stderr"))
        case {"status": "Success" | "Failed", "run_result": {"status": "Finished", "return_code": int(status)} as ran}:
            stdout, stderr = _text(ran, "stdout"), _text(ran, "stderr")
            most = min(limits.output_kb * 1024, KEPT_BYTES - 1)
            if max(len(stdout.encode(errors="replace")), len(stderr.encode(errors="replace"))) > most:
                return Execution("output", status, stdout, stderr)
            if status == 0:
                return Execution("finished", 0, stdout, stderr)
            out_of_memory = status in KILLED or stderr.rstrip().rpartition("\n")[2].startswith("MemoryError")
            return Execution("memory" if out_of_memory else "error", status, stdout, stderr)
        case {"status": "SandboxError"}:
            raise _NoResult(f"reported an internal error: {without_secrets(str(answer.get('message')))[:200]}")
    raise _NoResult(f"returned no result of a run: {without_secrets(str(answer))[:200]}")


def _text(ran: Mapping[str, Any], name: str) -> str:
    """The text of a stream; null or missing means empty."""
    text = ran.get(name)
    return text if isinstance(text, str) else ""
