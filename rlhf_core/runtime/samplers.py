"""Open samplers from their configuration, and reuse a warm one if only the weights differ."""

from importlib import import_module
from pathlib import Path

from rlhf_core.config.runtime import AnySamplerConfig
from rlhf_core.interfaces import EngineSampler, SamplerEngine, Transfer


def sampler_engine(config: AnySamplerConfig) -> SamplerEngine[AnySamplerConfig]:
    """Import the engine of the module that `config` names. The only cost is importing that module."""
    engine: SamplerEngine[AnySamplerConfig] = import_module(config.module).ENGINE
    return engine


def open_sampler(policy: Path, config: AnySamplerConfig, *, threads: int, transfer: Transfer) -> EngineSampler:
    """Open a sampler of `policy`, version 0, in this process (see `interfaces.OpenSampler`)."""
    return sampler_engine(config).open(policy, config, threads=threads, transfer=transfer)


def reopen_sampler(
    warm: EngineSampler | None, policy: Path, config: AnySamplerConfig, *, threads: int, transfer: Transfer
) -> EngineSampler:
    """Load the weights of `policy` into `warm` if it accepts them, else open a new sampler in its place."""
    if warm is not None and warm.accepts(policy):
        warm.load_policy(policy)
        return warm
    if warm is not None:
        warm.close()
    return open_sampler(policy, config, threads=threads, transfer=transfer)
