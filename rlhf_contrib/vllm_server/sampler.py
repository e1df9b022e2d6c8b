"""Sample with `vllm serve` processes that were started by someone else, perhaps on other machines.

    VLLM_SERVER_DEV_MODE=1 vllm serve <policy> --enable-scale-out --logprobs-mode processed_logprobs --dtype float32
        --max-model-len 256 --worker-extension-cls rlhf_core.sampling.vllm_worker.WeightReload

`--dtype` and `--max-model-len` must match `runtime.sampler`; `fp32_lm_head` is `--hf-overrides '{"head_dtype":
"float32"}'`. The CPU build starts only with `python -m
vllm.entrypoints.openai.api_server --model <policy>` and the same options. This package must be installed there too: its
worker extension loads and verifies weights. Weights travel through a folder that the servers and this process
see under one path. In this mode anyone who reaches a server can load weights into it, even with an `--api-key`: keep it
in a private network, or start it with `--middleware rlhf_core.sampling.vllm_front.PolicyDoor` and a VLLM_API_KEY.

Completions come from `/inference/v1/generate` (tokens in, tokens out), which reports for each token the version of the
weights that sampled it: a server that was restarted, or loaded by another run, never counts as current. Requests are
distributed over the servers, and sent to another one if one fails. The same seeds give the same answers up to
rounding: requests may be batched differently.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import shutil
import threading
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from safetensors.torch import save_file

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.runtime import VllmServerSamplerConfig
from rlhf_core.errors import ConfigError, SamplerLostError, SamplingError, explain
from rlhf_core.http.retries import pause_before
from rlhf_core.interfaces import SamplerEngine, Weights
from rlhf_core.models.lora import weights_digest
from rlhf_core.sampling.requests import PolicyFolder, architecture, further_options, most_tokens, tensors_of
from rlhf_core.sampling.vllm_worker import read_tensors
from rlhf_core.schema.secrets import bearer, resolved
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.types import Completion, SamplingRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")
Sampled = concurrent.futures.Future[tuple[list[int], list[float]]]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 4.0
"""Pause before retrying a server that failed the same request: the first, and the longest. It doubles each time."""
KEY = "runtime.sampler.urls"
PROBE_TIMEOUT_S = 30.0  # of requests that a server answers without computing
CONNECT_S = 10.0  # answers have no deadline, connections do
RELOADING = "reloading"
"""Version of weights that may have been loaded only in part."""
LEAST_LOGPROB = -9999.0
"""Value that a server writes for a log-probability that JSON cannot hold."""
SHOWN_CHARACTERS = 300
"""Number of characters shown of an error response."""


class VllmServerSampler:
    """A `Sampler` over several servers of one policy. Close it: it has a thread, connections and a folder.

    A server that cannot be reached is left out with a warning until the next weights. If none is left, SamplerLostError
    is raised. A server with other weights than the ones sent raises an error at once.

    >>> VllmServerSampler(Path("policy"), config).generate(requests, SamplingConfig())   # doctest: +SKIP
    """

    def __init__(self, policy: Path, config: VllmServerSamplerConfig) -> None:
        self.config = config
        self.version = 0
        self._policy = PolicyFolder.read(policy, max_model_len=config.max_model_len)
        self._architecture = architecture(policy)
        self._folder = Path(config.weights_folder) / f"rlhf-{uuid.uuid4().hex[:12]}"
        self._label = ""
        self._loads = 0
        self._sampled: dict[Sampled, tuple[int, SamplingRequest]] = {}
        headers = bearer("runtime.sampler.token_env", config.token_env)
        urls = resolved(config.urls, KEY)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-servers", daemon=True)
        self._thread.start()
        most = config.max_in_flight * len(config.urls)
        self._client = open_http_client(headers, connections=most + len(config.urls))
        self._slots = asyncio.Semaphore(most)
        self._servers = [Server(url, self._client) for url in urls]
        try:
            self.served_version = "; ".join(sorted(set(self._of_all("check", lambda server: server.check(config)))))
            self.load_policy(policy)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ Sampler

    def generate(self, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> list[Completion]:
        self._policy.check(requests, sampling)
        self._abandon()
        asked = [self._start(self._answered(request, sampling)) for request in requests]
        try:
            return [
                self._completion(request, future, sampling) for request, future in zip(requests, asked, strict=True)
            ]
        finally:
            self._cancel(asked)  # cancels requests that still wait if another one failed

    def advance(
        self, new: Sequence[tuple[int, SamplingRequest]], sampling: SamplingConfig
    ) -> list[tuple[int, Completion]]:
        self._policy.check([request for _, request in new], sampling)
        for number, request in new:
            self._sampled[self._start(self._answered(request, sampling))] = (number, request)
        finished, _ = concurrent.futures.wait(self._sampled, return_when=concurrent.futures.FIRST_COMPLETED)
        try:
            done = [(self._sampled[future], future) for future in list(self._sampled) if future in finished]
            for future in finished:
                del self._sampled[future]
            return [(number, self._completion(request, future, sampling)) for (number, request), future in done]
        except BaseException:
            self._abandon()
            raise

    def load_weights(self, weights: Weights, *, version: int) -> None:
        """Write `weights` (payload: name -> CPU tensor) to the folder; every server loads and verifies them."""
        sent = tensors_of(weights)
        folder = self._next_folder()
        folder.mkdir(parents=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in sent.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        self._load(folder, weights.digest)
        self.version = version

    # ------------------------------------------------------------ warm servers

    def accepts(self, policy: Path) -> bool:
        """Whether the servers can load the weights of `policy`: it must have the same architecture."""
        return architecture(policy) == self._architecture

    def load_policy(self, policy: Path) -> None:
        """Load the weights of a policy's folder; completions carry version 0."""
        folder = self._next_folder()
        folder.mkdir(parents=True)
        for file in sorted(policy.glob("*.safetensors*")):
            shutil.copyfile(file, folder / file.name)
        self._load(folder, weights_digest(read_tensors(policy)))
        self._policy = PolicyFolder.read(policy, max_model_len=self.config.max_model_len)
        self.version = 0

    def versions(self) -> dict[str, str]:
        """The vLLM versions that the servers report."""
        return {"vllm": self.served_version}

    def close(self) -> None:
        """Drop pending requests and remove the folder. The servers keep their weights."""
        self._abandon()
        self._run(self._client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------ weights

    def _next_folder(self) -> Path:
        self._loads += 1
        return self._folder / f"{self._loads:06d}"

    def _load(self, folder: Path, digest: str) -> None:
        self._abandon()
        self._label = (
            f"{self._folder.name}-{folder.name}"  # set before the servers have it, so that old answers are refused
        )
        for server in self._servers:
            server.stale = True
        self._of_all("load", lambda server: server.load(str(folder), digest, self._label))
        for old in self._folder.iterdir():
            if old != folder:
                shutil.rmtree(old)

    def _of_all(self, verb: str, call: Callable[[Server], Awaitable[T]]) -> list[T]:
        """Call every server within the deadline; the results are from servers that can be reached."""
        return self._run(self._all(verb, call))

    async def _all(self, verb: str, call: Callable[[Server], Awaitable[T]]) -> list[T]:
        async def called(server: Server) -> T:
            try:
                async with asyncio.timeout(self.config.load_timeout_s):
                    return await call(server)
            except TimeoutError:
                raise ServerFailed(server.url, f"took longer than {self.config.load_timeout_s:g} s to {verb}") from None

        results = await asyncio.gather(*map(called, self._servers), return_exceptions=True)
        lost = [result for result in results if isinstance(result, ServerFailed)]
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ServerFailed):
                raise result
        if len(lost) == len(results):
            rule = _reasons(lost)
            raise SamplerLostError(KEY, list(self.config.urls), rule, "start the servers, and run again")
        for failure in lost:
            logger.warning("%s: a server is not used until the next weights are loaded: %s", KEY, failure)
        return [result for result in results if not isinstance(result, BaseException)]

    # ------------------------------------------------------------ requests

    async def _answered(self, request: SamplingRequest, sampling: SamplingConfig) -> tuple[list[int], list[float]]:
        body = generate_body(request, sampling, stops=self._policy.stops, salt=self._label)
        failed: list[ServerFailed] = []
        asked: set[str] = set()
        async with self._slots:
            for attempt in range(self.config.retries + 1):
                server = self._next_server(asked)
                if server is None:
                    break
                if server.url in asked:
                    await asyncio.sleep(pause_before(attempt, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S))
                asked.add(server.url)
                server.in_flight += 1
                try:
                    return await server.generate(body, self._label, timeout_s=self.config.request_timeout_s)
                except ServerFailed as failure:
                    if failure.refused:
                        where = (f"request (seed {request.seed})", "refused")
                        raise SamplingError(explain(*where, str(failure), "see the server's log")) from None
                    failed.append(failure)
                    server.failures += 1
                    if server.failures == 1:
                        logger.warning(
                            "%s: a server gets requests only if all others have failed, until the next weights are loaded: %s",
                            KEY,
                            failure,
                        )
                finally:
                    server.in_flight -= 1
        remedy = "find the cause in the servers' logs, and run again"
        raise SamplerLostError(f"request (seed {request.seed})", "unanswered", _reasons(failed), remedy)

    def _next_server(self, asked: set[str]) -> Server | None:
        """The server with the fewest requests, preferring servers without failures; None if all are stale."""
        usable = [server for server in self._servers if not server.stale]
        return min(usable, key=lambda one: (one.url in asked, one.failures > 0, one.in_flight), default=None)

    def _completion(self, request: SamplingRequest, sampled: Sampled, sampling: SamplingConfig) -> Completion:
        token_ids, logprobs = sampled.result()
        return self._policy.completion(
            request, tuple(token_ids), tuple(logprobs), version=self.version, stop=sampling.stop
        )

    def _abandon(self) -> None:
        """Drop the requests of `advance` that were not collected; a server stops requests whose client disconnects."""
        self._cancel(self._sampled)
        self._sampled.clear()

    def _cancel(self, asked: Iterable[Sampled]) -> None:
        """Cancel unfinished requests, and wait until the connections are closed, so that the servers notice."""
        cancelled = [future for future in asked if future.cancel()]
        if cancelled:
            self._run(_others_ended())

    def _start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._start(work).result()


ENGINE = SamplerEngine[VllmServerSamplerConfig](
    open=lambda policy, config, *, threads, transfer: VllmServerSampler(policy, config)
)


async def _others_ended() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


def _reasons(failures: Sequence[ServerFailed]) -> str:
    return "; ".join(dict.fromkeys(map(str, failures))) or "no server has the weights"


# ---------------------------------------------------------------- one server


class ServerFailed(Exception):
    """A server did not fulfill a request. `refused`: neither a retry nor another server would help."""

    def __init__(self, url: str, reason: str, *, status: int = 0) -> None:
        super().__init__(without_secrets(f"{url} {reason}"))
        self.status = status

    @property
    def refused(self) -> bool:
        return 400 <= self.status < 500 and self.status not in (408, 429)


@dataclass
class Server:
    """A server and its state. `failures` counts its failures since it last loaded weights."""

    url: str
    client: httpx.AsyncClient
    in_flight: int = 0
    failures: int = 0
    stale: bool = False
    """Whether the server missed the current weights. It must load weights before it receives requests again."""

    async def check(self, config: VllmServerSamplerConfig) -> str:
        """Check that the server was started as `config` requires, or raise ConfigError; returns its vLLM version."""
        try:
            answer = await self._call_workers("settings", timeout_s=PROBE_TIMEOUT_S)
        except ServerFailed as failure:
            if failure.status == 0:
                raise
            options = "VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls rlhf_core.sampling.vllm_worker.WeightReload"
            rule = f"it cannot take weights ({failure})"
            raise ConfigError(KEY, self.url, rule, f"start it with {options}") from None
        for found in answer:
            self._check_settings(found, config)
        await self._check_route()
        version = (await self.ask("GET", "/version", timeout_s=PROBE_TIMEOUT_S)).get("version", "")
        return str(version)

    def _check_settings(self, found: Mapping[str, Any], config: VllmServerSamplerConfig) -> None:
        head = "float32" if config.fp32_lm_head else config.dtype
        wanted = {
            "logprobs_mode": ("processed_logprobs", "--logprobs-mode processed_logprobs"),
            "dtype": (config.dtype, f"--dtype {config.dtype}"),
            "head_dtype": (head, f"""--hf-overrides '{{"head_dtype": "{head}"}}'"""),
        }
        wrong = {name: option for name, (value, option) in wanted.items() if found[name] != value}
        if found["max_model_len"] < config.max_model_len:
            wrong["max_model_len"] = f"--max-model-len {config.max_model_len}"
        if wrong:
            rule = ", ".join(f"its {name} is {found[name]}" for name in wrong)
            options = " ".join(wrong.values())
            raise ConfigError(KEY, self.url, rule, f"start it with {options}")

    async def _check_route(self) -> None:
        """Check that the route exists: its status for an empty request differs from the status of a missing route."""
        try:
            await self.ask("POST", "/inference/v1/generate", body={}, timeout_s=PROBE_TIMEOUT_S)
        except ServerFailed as failure:
            if failure.status in (401, 403, 404):
                remedy = "start it with --enable-scale-out, and set runtime.sampler.token_env if it has an --api-key"
                raise ConfigError(KEY, self.url, str(failure), remedy) from None
            if not failure.refused:
                raise

    async def load(self, folder: str, digest: str, label: str) -> None:
        """Load the safetensors of `folder`; the server then responds under the version `label`.

        Raises SamplingError if the weights do not have `digest`. After any failure, the server keeps a version that
        matches no run.
        """
        await self._post("/pause", params={"mode": "wait"})
        try:
            await self._post("/update_weight_version", {"new_version": RELOADING})
            wrong = await self._load_on_workers(folder, digest)
            if wrong:
                remedy = "give it access to runtime.sampler.weights_folder, serve the same architecture, and restart it"
                raise SamplingError("weights", self.url, "; ".join(wrong[:3]), remedy)
            await self._post("/update_weight_version", {"new_version": label})
        except BaseException:
            with contextlib.suppress(ServerFailed):
                await self._resume()
            raise
        await self._resume()
        self.failures, self.stale = 0, False

    async def _load_on_workers(self, folder: str, digest: str) -> list[str]:
        try:
            return [one for wrong in await self._call_workers("load_folder", folder, digest) for one in wrong]
        except ServerFailed as failure:
            if failure.status == 0:
                raise
            return [str(failure)]

    async def _resume(self) -> None:
        await self.ask("POST", "/resume", timeout_s=PROBE_TIMEOUT_S)  # also after the deadline of the load

    async def generate(self, body: Mapping[str, Any], label: str, *, timeout_s: float) -> tuple[list[int], list[float]]:
        """Sample tokens from the weights `label`; returns the tokens and their log-probabilities."""
        answer = await self.ask("POST", "/inference/v1/generate", body=body, timeout_s=timeout_s)
        try:
            choice = answer["choices"][0]
            versions = {span["version"] for span in choice["weight_versions"]}
            tokens = [int(token) for token in choice["token_ids"]]
            entries = choice["logprobs"]["content"]
            aligned = [entry["token_id"] for entry in entries] == tokens
            logprobs = [float(entry["logprob"]) for entry in entries]
        except (LookupError, TypeError, ValueError) as error:
            raise ServerFailed(self.url, f"returned something other than a completion: {error!r}", status=422) from None
        if versions != {label}:
            self.stale = True
            raise ServerFailed(self.url, f"sampled with the weights {sorted(versions)} instead of {label}")
        if not aligned or choice["finish_reason"] not in ("stop", "length"):
            raise ServerFailed(self.url, f"aborted a completion ({choice['finish_reason']})")
        return tokens, [math.nan if one <= LEAST_LOGPROB else one for one in logprobs]

    async def ask(
        self,
        method: str,
        route: str,
        *,
        timeout_s: float | None,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> Any:
        """Send a request and parse the JSON response. Raises ServerFailed if it does not arrive within the deadline."""
        try:
            async with asyncio.timeout(timeout_s):
                response = await self.client.request(method, f"{self.url}{route}", json=body, params=params)
        except TimeoutError:
            raise ServerFailed(self.url, f"took longer than {timeout_s:g} s for {route}") from None
        except httpx.HTTPError as error:
            raise ServerFailed(self.url, f"cannot be reached for {route}: {error!r}") from None
        if response.is_error:
            said = without_secrets(response.text)[:SHOWN_CHARACTERS]
            raise ServerFailed(
                self.url, f"answered {route} with {response.status_code}: {said}", status=response.status_code
            )
        try:
            return response.json() if response.content else None
        except ValueError:
            said = without_secrets(response.text)[:SHOWN_CHARACTERS]
            raise ServerFailed(self.url, f"answered {route} with invalid JSON: {said}") from None

    async def _post(
        self, route: str, body: Mapping[str, Any] | None = None, *, params: Mapping[str, str] | None = None
    ) -> Any:
        return await self.ask("POST", route, body=body, params=params, timeout_s=None)

    async def _call_workers(self, method: str, *arguments: str, timeout_s: float | None = None) -> list[Any]:
        """Call a method of `vllm_worker.WeightReload` on each worker process; returns the results."""
        body = {"method": method, "args": list(arguments)}
        results: list[Any] = (await self.ask("POST", "/collective_rpc", body=body, timeout_s=timeout_s))["results"]
        return results


def generate_body(
    request: SamplingRequest, sampling: SamplingConfig, *, stops: tuple[int, ...], salt: str
) -> dict[str, Any]:
    """The request body of one completion; `salt` separates the cached prefixes of different weights."""
    greedy = sampling.temperature == 0
    return {
        "token_ids": list(request.prompt_ids),
        "cache_salt": salt,
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": 1.0 if greedy else sampling.top_p,
            "top_k": 0 if greedy else sampling.top_k,
            "max_tokens": most_tokens(request, sampling.max_tokens),
            "seed": None if greedy else request.seed,
            "logprobs": 0,
            "stop_token_ids": list(stops),
            "detokenize": False,
            **further_options(sampling),
        },
    }


def open_http_client(headers: Mapping[str, str], *, connections: int) -> httpx.AsyncClient:
    """Open an HTTP client with a connect timeout but no read timeout, because each call has its own deadline."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(None, connect=CONNECT_S), limits=limits)
