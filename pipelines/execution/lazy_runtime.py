"""Open a runtime at its first use, so that a fully cached pipeline neither imports nor starts an engine."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from pathlib import Path

from rlhf_core.config.engines import OptimizerConfig, RuntimeConfig
from rlhf_core.interfaces import ModelSpec, Role, Runtime, Sampler, Trainer
from rlhf_core.runtime.local_runtime import open_runtime


class LazyRuntime:
    """A `Runtime` that opens the runtime of `config` at the first call and forwards all calls to it."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._runtime: Runtime | None = None

    def trainer(
        self, role: Role, model: ModelSpec, optimizer: OptimizerConfig | None
    ) -> AbstractContextManager[Trainer]:
        return self._open().trainer(role, model, optimizer)

    def sampler(self, policy: Path) -> AbstractContextManager[Sampler]:
        return self._open().sampler(policy)

    def prewarm(self, *, trainer: bool, sampler: bool) -> None:
        """Open the runtime and start its workers now."""
        self._open().prewarm(trainer=trainer, sampler=sampler)

    def engines(self) -> dict[str, str]:
        """Return the engines that were used; none before the first use."""
        return {} if self._runtime is None else self._runtime.engines()

    def close(self) -> None:
        with self._lock:
            if self._runtime is not None:
                self._runtime.close()

    def _open(self) -> Runtime:
        with self._lock:
            if self._runtime is None:
                self._runtime = open_runtime(self._config)
            return self._runtime


class KeptRuntime:
    """Engines that several runs use one after the other, as long as these configure them alike."""

    def __init__(self) -> None:
        self._config: RuntimeConfig | None = None
        self._runtime: LazyRuntime | None = None

    def of(self, config: RuntimeConfig) -> LazyRuntime:
        """Return the engines for a run with this configuration; those of another one are closed."""
        if self._runtime is None or config != self._config:
            self.close()
            self._config, self._runtime = config, LazyRuntime(config)
        return self._runtime

    def close(self) -> None:
        """Close the engines, for instance after a failure that may have left them in any state."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.close()
