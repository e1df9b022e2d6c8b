"""Send requests to one `vllm serve` process over HTTP, and check its answers and settings.

Completions come from `/inference/v1/generate` (tokens in, tokens out), which reports for each token the version of the
weights that sampled it. A server that was restarted, or loaded by another run, is therefore never taken for current.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from rlhf_core.config.engines import SamplingConfig, VllmServerSamplerConfig
from rlhf_core.errors import ConfigError, SamplingError, explain
from rlhf_core.sampling.requests import most_tokens
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.types import SamplingRequest

PROBE_TIMEOUT_S = 30.0
CONNECT_S = 10.0
RELOADING = "reloading"
"""Version of weights that may have been loaded only in part."""
LEAST_LOGPROB = -9999.0
"""Value that a server writes for a log-probability that JSON cannot hold."""
SHOWN_CHARACTERS = 300
"""Number of characters shown of an error response."""


class ServerFailed(Exception):
    """Raised if a server did not fulfil a request. `refused`: no retry and no other server would."""

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
    """Whether the server missed the current weights. It must load weights before it gets requests again."""

    async def check(self, config: VllmServerSamplerConfig) -> str:
        """Return the server's vLLM version. Raises ConfigError if it was not started as `config` requires."""
        try:
            answer = await self._call_workers("settings", timeout_s=PROBE_TIMEOUT_S)
        except ServerFailed as failure:
            if failure.status == 0:
                raise
            options = "VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls rlhf_core.sampling.vllm_worker.WeightReload"
            raise ConfigError(
                explain(
                    "runtime.sampler.urls", self.url, f"it cannot take weights ({failure})", f"start it with {options}"
                )
            ) from None
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
            raise ConfigError(explain("runtime.sampler.urls", self.url, rule, f"start it with {options}"))

    async def _check_route(self) -> None:
        """Check that the route exists: it refuses an empty request with another status than a missing route."""
        try:
            await self.ask("POST", "/inference/v1/generate", body={}, timeout_s=PROBE_TIMEOUT_S)
        except ServerFailed as failure:
            if failure.status in (401, 403, 404):
                remedy = "start it with --enable-scale-out, and set runtime.sampler.token_env if it has an --api-key"
                raise ConfigError(explain("runtime.sampler.urls", self.url, str(failure), remedy)) from None
            if not failure.refused:
                raise

    async def load(self, folder: str, digest: str, label: str) -> None:
        """Load the safetensors of `folder`; the server then answers under the version `label`.

        Raises SamplingError if the weights do not have `digest`. After any failure the server keeps a version that
        matches no run.
        """
        await self._post("/pause", params={"mode": "wait"})
        try:
            await self._post("/update_weight_version", {"new_version": RELOADING})
            wrong = await self._load_on_workers(folder, digest)
            if wrong:
                remedy = "give it access to runtime.sampler.weights_folder, serve the same architecture, and restart it"
                raise SamplingError(explain("weights", self.url, "; ".join(wrong[:3]), remedy))
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
        """Return the tokens that the weights `label` sampled, and their log-probabilities."""
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
        """Return the server's JSON response. Raises ServerFailed if it does not come within the deadline."""
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
        """Call a method of `vllm_worker.WeightReload` on each worker process; return the results."""
        body = {"method": method, "args": list(arguments)}
        results: list[Any] = (await self.ask("POST", "/collective_rpc", body=body, timeout_s=timeout_s))["results"]
        return results


def generate_body(
    request: SamplingRequest, sampling: SamplingConfig, *, stops: tuple[int, ...], salt: str
) -> dict[str, Any]:
    """Return the request body for one completion; `salt` separates the cached prefixes of different weights."""
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
        },
    }


def open_client(headers: Mapping[str, str], *, connections: int) -> httpx.AsyncClient:
    """Return a client without a read time-out (each call has its own deadline); connecting has one."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(None, connect=CONNECT_S), limits=limits)
